"""Verifies callers and bounds what each of them may do."""
