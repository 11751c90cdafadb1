"""The relay beside what others would use in its place, each in the best mode it documents.

Only what is installed can be measured: whatever cannot be had here is left out, and the
table says why.
"""
