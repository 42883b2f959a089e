"""Reward emitters for agl, named in ``[[reward]] use = "..."``; importing this imports none of them."""

__all__: list[str] = []
