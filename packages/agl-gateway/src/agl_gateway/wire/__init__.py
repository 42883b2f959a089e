"""Translates calls in the clients' APIs into chat completions, where a policy's server needs that."""
