"""HTTP/1.1 for calls of models and of the store; aiohttp serves and asks in all other cases."""
