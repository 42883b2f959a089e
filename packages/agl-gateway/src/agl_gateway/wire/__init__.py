"""Speaks the clients' APIs: translates their calls into chat completions where a policy's server needs it."""
