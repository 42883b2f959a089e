"""The capture proxy and the remote store: what agents call, and what other machines write to.

It relays first and records afterwards. Token ids, log-probabilities and versions come from the backend and are
never computed here. Nothing is kept that another gateway could not read from the store.
"""
