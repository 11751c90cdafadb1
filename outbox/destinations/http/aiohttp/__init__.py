"""The transport on aiohttp's connections and parser."""
