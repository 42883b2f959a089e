"""Stands in for vLLM in the tests: its command line, routes and fields, over weights that are one number."""
