"""agl_environments: runners for environments of the libraries verifiers and OpenEnv."""
