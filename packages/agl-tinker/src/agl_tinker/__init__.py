"""Trains on servers that speak Tinker's API, and serves a subset of that API on this machine."""

__version__ = "0.1.0"
