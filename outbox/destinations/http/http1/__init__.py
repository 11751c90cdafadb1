"""HTTP/1.1 client on asyncio protocols and the httptools parser."""
