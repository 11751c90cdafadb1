"""The relay compared with other queues, each in the best mode that its documentation gives.

Only installed queues can be measured: an unavailable one is left out, and the table gives the
reason.
"""
