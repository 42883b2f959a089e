"""The display of runs and their results in a terminal or a notebook."""
