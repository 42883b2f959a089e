"""Runs gateways in separate processes, and lets several processes and gateways serve one store."""
