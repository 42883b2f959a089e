"""The verbs that the gateway adds to `agl`."""
