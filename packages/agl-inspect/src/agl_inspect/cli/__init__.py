"""The commands that read a store."""
