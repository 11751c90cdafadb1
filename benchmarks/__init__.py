"""Benchmark the relay against its own building blocks and against other queues, in one run.

    python3 run.py bench

Every figure is compared with one measured on the same machine within the same minute,
alternating, because only their ratio is valid on another machine.
"""
