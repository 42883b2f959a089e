"""The search around the algorithms: settings, budget, state, report."""
