"""Sandboxes: their contract, those of this machine, and the backends that make them elsewhere."""
