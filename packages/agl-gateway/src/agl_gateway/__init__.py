"""The capture proxy that agents call, and the remote store that other machines use.

The proxy relays first and records afterwards. Token ids, log-probabilities and versions come from the backend and are
never computed here. All lasting state is in the store, so any gateway can replace another.
"""
