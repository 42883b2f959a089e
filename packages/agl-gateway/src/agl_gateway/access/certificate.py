"""The certificate of a gateway that listens with TLS, read again when its files change.

Clients of agl trust the system's authorities, or those in the file that ``AGL_CA_FILE`` names; see
:func:`agl_run.client_context`.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from pathlib import Path

from agl.errors import ConfigError
from agl_gateway.settings import EmbeddedSettings

_log = logging.getLogger(__name__)

LOOK_S = 10.0
"""Seconds between two checks whether the certificate's files have changed."""


class Certificate:
    """A certificate with its key. A changed certificate serves the connections that begin after it was read.

    Args:
        cert: The certificate chain, a PEM file.
        key: The private key, a PEM file; ``None`` if the key is in the certificate's file.

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
                "key with --tls-key, or with tls_cert and tls_key in the params of [gateway]"
            ) from error

    async def watch(self) -> None:
        """Reload the certificate's files whenever they change, until the task is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Reload the certificate's files if they have changed; if the new ones cannot be used, the old ones stay."""
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
        found = list[tuple[int, int, int]]()
        for file in filter(None, (self._cert, self._key)):
            with suppress(OSError):  # it is being exchanged
                seen = file.stat()
                found.append((seen.st_ino, seen.st_mtime_ns, seen.st_size))
        return tuple(found)


def certificate_of(settings: EmbeddedSettings) -> Certificate | None:
    """Return the TLS certificate that the settings name; ``None`` if they name none.

    Raises:
        ConfigError: The files cannot be used, or the settings name a key without a certificate.
    """
    cert, key = settings.tls_cert, settings.tls_key
    if key and not cert:
        raise ConfigError(
            f"the private key {key} needs the certificate that it belongs to; name it with --tls-cert, or as tls_cert "
            "in the params of [gateway]"
        )
    return Certificate(Path(cert), Path(key) if key else None) if cert else None
