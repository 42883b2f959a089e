"""Builds the images of ``agl deploy compose`` without a daemon, and trains the calculator in them.

Not covered: registries, Docker's own runtime, the image for CUDA, and ``postgres:17``, in whose place stands a
PostgreSQL of the system's packages with the same variables, volume and health check.
"""
