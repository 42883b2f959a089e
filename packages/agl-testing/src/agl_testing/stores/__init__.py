"""Rollouts, spans and child processes for tests of stores; imports no test framework, so that children start fast."""
