"""Reads the token of a worker without a signing key from the environment.

The token may run the attempts of one experiment. A token file is read again when it changes, so that a new token can
replace an expiring one without a restart.
"""

from agl_inspect.keys import Keys
from agl_run.access.secret import environment_keys

WORKER_TOKEN_ENV = "AGL_WORKER_TOKEN"
"""The environment variable that holds a worker's token."""

WORKER_TOKEN_FILE_ENV = "AGL_WORKER_TOKEN_FILE"
"""The environment variable that names a file with a worker's token in its first line."""


class WorkerKey:
    """Returns a worker's current token when called."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def __call__(self) -> str:
        """Return the token to send now."""
        # A file may end with a newline, and a token never has one.
        return self._keys().splitlines()[0].decode("utf-8", "replace")


def worker_key() -> WorkerKey | None:
    """Return the worker's token from the environment; ``None`` if neither variable is set.

    Raises:
        ConfigError: Both variables are set, the file cannot be read, or the value is too short for a token.
    """
    remedy = "write what `agl worker-token EXPERIMENT` prints into it"
    keys = environment_keys(WORKER_TOKEN_ENV, WORKER_TOKEN_FILE_ENV, purpose="worker's token", remedy=remedy)
    return None if keys is None else WorkerKey(keys)
