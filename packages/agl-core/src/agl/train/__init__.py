"""From recorded spans to what algorithms train on: the call forest, transitions, rows and credit."""
