"""The key in the environment of agents that share a process, where none can be an attempt's own."""

PLACEHOLDER_KEY = "agl-no-key-needed"
"""Value of ``OPENAI_API_KEY`` in a process whose calls get their token from the wire hook; gateways refuse it."""

REFUSED = "refused"
"""Value of ``agl.unrecorded`` on the span of a call whose key was refused."""
