"""``agl check --forecast``: the forecast of a run from recorded or tried rollouts."""
