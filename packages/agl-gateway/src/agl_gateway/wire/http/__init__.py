"""HTTP/1.1 for model calls, on both sides of the gateway; aiohttp serves and asks in all other cases."""
