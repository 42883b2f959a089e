"""Relays model calls to the servers of the policies and the answers back."""
