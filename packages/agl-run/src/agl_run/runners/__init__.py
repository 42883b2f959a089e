"""Agents, the runners that execute attempts, and the worker that feeds them."""
