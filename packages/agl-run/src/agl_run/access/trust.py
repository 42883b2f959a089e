"""The certificate authorities that are trusted for a gateway or a served store: the system's, or those of a file.

The file is named by ``AGL_CA_FILE``, by ``[gateway] ca`` or in the store's URL. For connections to the gateway and the
store, only the file's authorities count. The HTTP clients of agents also call other servers, so for them the file is
added to the authorities that they trust already.
"""

import hashlib
import os
import secrets
import ssl
from importlib.util import find_spec
from pathlib import Path

from agl.errors import ConfigError
from agl_inspect.keys import state_dir

CA_ENV = "AGL_CA_FILE"
"""The environment variable that names a file of certificate authorities in PEM."""

_BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables by which Python and httpx, requests, and curl take the only file of authorities that they trust."""

_ADDED = "NODE_EXTRA_CA_CERTS"
"""The variable that names a file of authorities for Node to trust in addition to its built-in ones."""


def ca_file(given: str | Path | None = None) -> Path | None:
    """Return ``given``, else the file that ``AGL_CA_FILE`` names; ``None`` if neither names a file."""
    found = given or os.environ.get(CA_ENV, "")
    return Path(found) if found else None


def client_context(given: str | Path | None = None) -> ssl.SSLContext:
    """Return a TLS context that verifies a gateway's certificate.

    If a file of authorities is named, only its authorities are trusted, else the system's.

    Args:
        given: A file of authorities in PEM; by default the result of :func:`ca_file`.
    Raises:
        ConfigError: The file cannot be read, or holds no certificate.
    """
    path = ca_file(given)
    if path is None:
        return ssl.create_default_context()
    try:
        # Only the file counts: whoever names an authority of their own wants no other to be trusted
        # here.
        return ssl.create_default_context(cafile=str(path))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the authorities in {path} cannot be used ({error}); name a file with certificates in PEM as {CA_ENV}, "
            "[gateway] ca or ca in the store's URL, or leave it away to trust the system's authorities"
        ) from error


def refusal_of(error: BaseException, given: str | Path | None = None) -> str:
    """Explain why a TLS connection failed and what to do; return ``""`` if the error is not a TLS error.

    Args:
        error: The error that the connection raised.
        given: The file of authorities that was used, as for :func:`client_context`.
    """
    # Clients wrap the error of the TLS layer in errors of their own, each under another name.
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(inner, ssl.SSLCertVerificationError):
        named = ca_file(given)
        trusted = f"the authorities in {named}" if named else "the system's authorities"
        return (
            f"its certificate is not trusted here by {trusted}: {inner.verify_message}. Name the file of its authority "
            f"as {CA_ENV}, as [gateway] ca, or in the store's URL as ?ca=FILE, or use a host name that it carries"
        )
    if isinstance(inner, ssl.SSLError):
        return f"it does not speak TLS as https:// needs it ({inner.reason or inner}); write http:// for one without"
    return ""


def trust_variables(given: str | Path | None = None) -> dict[str, str]:
    """Return the variables that make agents' clients trust the file as well as the system's authorities.

    Variables that are already set are left out, so that a person's own setting counts.

    Raises:
        ConfigError: The file cannot be read, or the combined authorities cannot be written to the state folder.
    """
    path = ca_file(given)
    if path is None:
        return {}
    wanted = dict.fromkeys(_BUNDLES, str(_bundle(path))) | {_ADDED: str(path.absolute())}
    # A variable that is set is a person's decision about all servers.
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _bundle(path: Path) -> Path:
    """Write the system's authorities and those in ``path`` to one file, and return the path of that file.

    The file's name is a digest of its content.
    """
    try:
        # Most clients trust exactly one file, so the system's authorities have to be in it too.
        content = b"\n".join([*(one.read_bytes() for one in _usual()), path.read_bytes()])
        folder = state_dir() / "trust"
        # Named by its content, so that processes with other authorities never overwrite each
        # other's.
        bundle = folder / f"{hashlib.sha256(content).hexdigest()[:24]}.pem"
        if not bundle.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = bundle.with_suffix(f".{secrets.token_hex(8)}")
            draft.write_bytes(content)
            # Atomic: a client that starts at this moment reads the old file or the new one, never
            # half of one.
            draft.replace(bundle)
    except OSError as error:
        raise ConfigError(
            f"the authorities in {path} cannot be put together with the system's for the agents' clients ({error}); "
            "make the file readable and the state folder writable, or set SSL_CERT_FILE yourself"
        ) from error
    return bundle


def _usual() -> list[Path]:
    """Return the file with the system's authorities, else certifi's file; an empty list if neither exists."""
    system = ssl.get_default_verify_paths().cafile
    if system:
        return [Path(system)]
    if find_spec("certifi") is None:
        return []
    import certifi

    return [Path(certifi.where())]
