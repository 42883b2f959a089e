"""Lets people with the admin token act: sign-in with limited tries, sessions, and proofs for forms.

All state lives as long as the process; a restart signs everybody out and makes every open form worthless.
"""

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from agl.errors import ConfigError
from agl.schemas import to_json
from agl_inspect.keys import KeyFile, Keys, state_dir

TOKEN_ENV = "AGL_TOKEN"
TOKEN_FILE_ENV = "AGL_TOKEN_FILE"

TRIES = 10
"""After this many wrong tokens within ``TRIES_S`` seconds, nobody can sign in until the oldest is past that time."""

TRIES_S = 60.0

SESSIONS = 32
"""Largest number of open sessions; a sign-in beyond it ends the oldest session."""

SESSION_S = 12 * 3600.0

_LEAST = 16
"""Smallest number of characters of an admin token."""


def admin_token_of(path: Path | None) -> tuple[str | Keys, str]:
    """Return the admin token and its source's name: ``AGL_TOKEN``, else a file, created with mode 0600 on first use.

    The file may hold several tokens, one per line, and is read again when it changes.

    Args:
        path: The file; by default the one in ``AGL_TOKEN_FILE``, else ``console-token`` in this user's state folder.

    Raises:
        ConfigError: The token is too short, other users can read the file, or it cannot be created or read.
    """
    given = os.environ.get(TOKEN_ENV, "").strip()
    if not given:
        named = os.environ.get(TOKEN_FILE_ENV, "")
        path = path or (Path(named) if named else state_dir() / "console-token")
        return _kept(path, is_own=not named), str(path)
    source = f"the environment variable {TOKEN_ENV}"
    if len(given) < _LEAST:
        raise ConfigError(f"the admin token in {source} has fewer than {_LEAST} characters; set it to more random ones")
    return given, source


def _kept(path: Path, *, is_own: bool) -> Keys:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"agl_console_{secrets.token_urlsafe(32)}\n")
        return KeyFile(path, purpose="admin token", is_own=is_own)
    except OSError as error:
        raise ConfigError(
            f"the admin token's file {path} cannot be made or read ({error}); choose another with --token-file, "
            f"or set {TOKEN_ENV}"
        ) from error


def is_own(request: web.Request) -> bool:
    """Return true if a page of this console sent the request, judged by headers that scripts cannot set.

    A request without any of these headers does not count, so forms sent by programs are refused too.
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site not in (None, "same-origin"):
        return False
    if origin is None:
        return site is not None
    try:
        found = urlsplit(origin)
    except ValueError:
        return False
    return found.scheme in ("http", "https") and found.netloc.lower() == request.headers.get("Host", "").lower()


class Session:
    """A signed-in browser.

    Attributes:
        ends_at: The time at which the session ends, by the clock of :class:`Access`.
        token: The admin token that opened the session; the session ends when that token is no longer valid.
        name: A short name for the log, which gives no access.
    """

    def __init__(self, ends_at: float, token: bytes) -> None:
        self.ends_at = ends_at
        self.token = token
        self.name = secrets.token_hex(4)
        self._key = secrets.token_bytes(32)

    def proof(self, action: str, fields: Mapping[str, str]) -> str:
        """Return the proof that a page of this session offered ``action`` with exactly these fields."""
        return hmac.digest(self._key, to_json([action, sorted(fields.items())]), hashlib.sha256).hex()

    def is_proven(self, action: str, fields: Mapping[str, str], proof: str) -> bool:
        """Return true if ``proof`` is this session's proof for these fields."""
        return hmac.compare_digest(self.proof(action, fields).encode(), proof.encode("utf-8", "replace"))


class Access:
    """Signs browsers in with an admin token, and holds their sessions.

    Args:
        token: The admin token, or a function that returns the valid admin tokens, one per line.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, token: str | Keys, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.cookie = f"agl-console-{secrets.token_hex(4)}"  # cookies of one host's ports share a jar
        self._token = token
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._wrong: list[float] = []

    def sign_in(self, token: str) -> str | None:
        """Open a session and return its cookie's value; ``None`` if the token is wrong."""
        given = token.strip().encode("utf-8", "replace")
        if not any([hmac.compare_digest(given, known) for known in self._tokens()]):
            self._wrong.append(self._clock())
            return None
        while len(self._sessions) >= SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        secret = secrets.token_urlsafe(32)
        self._sessions[secret] = Session(self._clock() + SESSION_S, given)
        return secret

    def sign_out(self, request: web.Request) -> None:
        """End the session of a request, if it has one."""
        self._sessions.pop(request.cookies.get(self.cookie, ""), None)

    def wait_s(self) -> float:
        """Return the seconds until a token may be tried again; 0.0 if it may be tried now."""
        now = self._clock()
        self._wrong = [at for at in self._wrong if at > now - TRIES_S]
        return self._wrong[-TRIES] + TRIES_S - now if len(self._wrong) >= TRIES else 0.0

    def session(self, request: web.Request) -> Session | None:
        """Return the session of a request; ``None`` if nobody is signed in."""
        session = self._sessions.get(request.cookies.get(self.cookie, ""))
        is_open = session is not None and session.ends_at > self._clock() and session.token in self._tokens()
        return session if is_open else None

    def _tokens(self) -> list[bytes]:
        token = self._token
        return token().splitlines() if callable(token) else [token.encode()]
