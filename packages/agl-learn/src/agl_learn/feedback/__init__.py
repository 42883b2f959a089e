"""Turns what users do and say into rewards from 0 to 1."""
