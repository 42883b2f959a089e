"""The token of a worker that runs the attempts of one experiment and has no signing key, from the environment.

A file is read again when it changes, so that a new token takes the place of one that expires without a restart.
"""

import os
from pathlib import Path

from agl.errors import ConfigError
from agl_inspect.keys import KeyFile, Keys, joined_keys

WORKER_TOKEN_ENV = "AGL_WORKER_TOKEN"
"""The environment variable that holds a worker's token."""

WORKER_TOKEN_FILE_ENV = "AGL_WORKER_TOKEN_FILE"
"""The environment variable that names a file with a worker's token in its first line."""

_PURPOSE = "worker's token"


class WorkerKey:
    """A worker's token; a call returns the one to send now."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def __call__(self) -> str:
        """The token to send now."""
        return self._keys().splitlines()[0].decode("utf-8", "replace")


def worker_key() -> WorkerKey | None:
    """Return the environment's worker token; ``None`` if it has none.

    Raises:
        ConfigError: Both variables are set, the file cannot be read, or what is given is too short for a token.
    """
    given, named = os.environ.get(WORKER_TOKEN_ENV, ""), os.environ.get(WORKER_TOKEN_FILE_ENV, "")
    if given and named:
        raise ConfigError(
            f"{WORKER_TOKEN_ENV} and {WORKER_TOKEN_FILE_ENV} are both set; unset one: the first holds the token "
            "and stays as it is, the second names a file that is read again when it changes"
        )
    if given:
        keys = joined_keys(given.encode(), source=f"the environment variable {WORKER_TOKEN_ENV}")
        return WorkerKey(lambda: keys)
    if not named:
        return None
    try:
        return WorkerKey(KeyFile(Path(named), purpose=_PURPOSE))
    except OSError as error:
        raise ConfigError(
            f"the {_PURPOSE} in {named}, which {WORKER_TOKEN_FILE_ENV} names, cannot be read ({error}); write what "
            "`agl worker-token EXPERIMENT` prints into it, or correct the variable"
        ) from error
