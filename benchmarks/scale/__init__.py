"""What grows with what there is, and whom a flood slows down."""
