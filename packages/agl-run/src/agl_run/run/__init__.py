"""One run of an experiment, from its plan to its end."""
