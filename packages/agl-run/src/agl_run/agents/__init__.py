"""Agents: how they are named, imported and called."""
