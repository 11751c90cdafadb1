"""The decisions of the relay, without IO: no clock, no randomness, no await.

Time and randomness are arguments; what happened comes in, what to do comes
out.  So every rule here can be tested step by step, and a crash is nothing
but not calling the next step.
"""
