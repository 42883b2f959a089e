"""Serves the store contract over HTTP to runners and trainers on other machines."""
