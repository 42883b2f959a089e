"""A web console over a store of any kind: runs, learning curves, rollouts, traces and tokens, for reading only."""

__all__: list[str] = []
