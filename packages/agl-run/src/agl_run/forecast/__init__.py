"""``agl plan``: the forecast of a run from recorded or tried rollouts."""
