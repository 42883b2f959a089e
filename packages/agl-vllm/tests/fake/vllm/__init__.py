"""A stand-in for vLLM in tests: vLLM's command line, routes and fields, for weights that are one number."""
