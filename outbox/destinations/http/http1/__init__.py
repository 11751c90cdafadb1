"""The transport on protocols of asyncio's own and httptools' parser."""
