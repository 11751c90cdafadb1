"""SQL of the sequencer: reads of events, routing, and the message that writes a batch."""
