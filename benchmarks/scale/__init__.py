"""How costs grow with the amount of data, and which endpoints a flood delays."""
