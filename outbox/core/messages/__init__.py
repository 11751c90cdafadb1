"""Messages that receivers get: formats, batches, metadata, signatures."""
