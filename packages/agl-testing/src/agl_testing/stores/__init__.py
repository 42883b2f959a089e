"""Rollouts, spans and child processes for tests of stores. Imports no test framework, so child processes start fast."""
