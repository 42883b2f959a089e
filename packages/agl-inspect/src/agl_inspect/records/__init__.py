"""Records that an experiment keeps in the store: states, labels, validations, trials, metrics."""
