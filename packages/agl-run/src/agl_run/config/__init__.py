"""The experiment file: its records, its reading, and the checks before anything runs."""
