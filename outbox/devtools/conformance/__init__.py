"""Is a receiver, in whatever language, one that a relay can rely on?

cases      what is sent, and which answers are good: without any I/O
vectors    the same with fixed times, as JSON for other languages' own tests
grading    sends it, and tells what was good
"""
