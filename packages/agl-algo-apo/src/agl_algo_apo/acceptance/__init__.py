"""Decides which prompt candidates may be tried, which are accepted, and which one wins."""
