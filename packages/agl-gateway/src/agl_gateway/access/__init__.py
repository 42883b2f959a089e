"""Verifies the callers of the gateway and limits what each of them may do."""
