"""Readers of the streams that a relay writes to brokers.

entries         messages of any broker, parsed
generations     which lanes may be read now: sans-IO
source          what a reader needs of a broker, and how its plug-in is found
lane_reader     reads one lane, in order
receiver        `StreamReceiver`: finds the lanes and reads them
"""
