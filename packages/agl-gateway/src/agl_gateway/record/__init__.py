"""Turns relayed calls and received traces into spans, and brings them to the store."""
