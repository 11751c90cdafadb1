"""What the relay costs and yields, beside what it is built on and beside others, in one run.

    python3 run.py bench

Every figure stands beside one measured on the same machine in the same minute,
in turns, because only their ratio says something about another machine.
"""
