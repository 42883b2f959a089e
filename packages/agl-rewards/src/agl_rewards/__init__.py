"""Reward emitters for agl, named in ``[[reward]] use = "..."``; importing this module imports none of them."""

__all__: list[str] = []
