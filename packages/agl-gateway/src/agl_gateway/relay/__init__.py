"""Relays model calls to the policies' servers, and the answers back to the agents."""
