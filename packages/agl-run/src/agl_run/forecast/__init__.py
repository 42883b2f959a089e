"""``agl check --forecast``: forecasts a run from rollouts of an earlier run or of a trial."""
