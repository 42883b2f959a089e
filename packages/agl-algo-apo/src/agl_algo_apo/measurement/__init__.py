"""Rewards of candidates: paid for, remembered and estimated."""
