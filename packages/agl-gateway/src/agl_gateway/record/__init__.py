"""Turns relayed calls and received traces into spans, and writes them to the store."""
