"""agl_environments: environments of other libraries for agents of agl."""
