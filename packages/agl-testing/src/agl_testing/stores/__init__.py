"""Sample records and child processes for tests of stores; imports no test framework, so child processes start fast."""
