"""Runs gateways in processes of their own, and lets several answer for one store."""
