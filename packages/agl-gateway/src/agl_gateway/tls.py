"""The certificate of a gateway that listens with TLS, read again when its files change.

Clients trust the system's authorities, or those in the file that ``SSL_CERT_FILE`` names, which Python's ``ssl`` reads.
"""

import asyncio
import logging
import ssl
from pathlib import Path

from agl.errors import ConfigError

_log = logging.getLogger(__name__)

LOOK_S = 10.0
"""Seconds between two looks at the files."""


class Certificate:
    """A certificate with its key; a new one serves the connections that begin after it was read.

    Args:
        cert: The certificate's chain in PEM.
        key: Its private key in PEM; ``None`` where it is in the same file.

    Raises:
        ConfigError: The files cannot be read, or do not belong together.
    """

    def __init__(self, cert: Path, key: Path | None = None) -> None:
        self._cert, self._key = cert, key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._seen = self._state()
        try:
            self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"the certificate {cert} cannot be used ({error}); name a chain in PEM with --tls-cert and its private "
                "key with --tls-key"
            ) from error

    async def watch(self) -> None:
        """Read the files again when they have changed, until this is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Read the files again if they have changed; a pair that does not fit leaves the old one in use."""
        state = self._state()
        if state == self._seen:
            return
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self._cert, self._key)
            self._load()
        except (OSError, ssl.SSLError) as error:
            _log.warning("the changed certificate %s is not used yet: %s", self._cert, error)
            return
        self._seen = state
        _log.info("the certificate %s was read again", self._cert)

    def _load(self) -> None:
        self.context.load_cert_chain(self._cert, self._key)

    def _state(self) -> tuple[tuple[int, int, int], ...]:
        files = [file for file in (self._cert, self._key) if file is not None and file.exists()]
        return tuple((found.st_ino, found.st_mtime_ns, found.st_size) for found in (file.stat() for file in files))
