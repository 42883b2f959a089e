"""A server of a subset of Tinker's API over the engine of agl-algo-torch. Needs the extra ``server``."""
