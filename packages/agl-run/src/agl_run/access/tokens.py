"""Attempt tokens: signed, expiring proofs of the caller's identity that clients send as an API key.

A token is ``agl_<payload>.<signature>``: base64url of a small JSON array and of its HMAC-SHA256. It is signed, not
encrypted: it holds ids, a scope and a time, and nothing secret. It cannot be revoked before it expires; the gateway
also checks that the attempt still runs. A worker's token has the same form and is valid for all attempts of an
experiment.
"""

import binascii
import hmac
import os
import socket
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Literal

import msgspec

from agl.errors import ConfigError, TokenError
from agl.schemas import Attempt, Claim, Rollout
from agl_inspect.keys import LEAST, Keys

PREFIX = "agl_"
TokenScope = Literal["attempt", "admin", "client", "worker"]
"""Kinds of tokens; see :class:`AttemptToken`."""
Secret = bytes | Keys
"""A fixed signing key, or a function that returns the current signing keys, one per line."""

TOKEN_HOURS = 24.0
"""Lifetime in hours of an attempt's token if the attempt has no time limit."""

TOKEN_SLACK_S = 60.0
"""Seconds for which an attempt's token stays valid after the attempt's time limit, for calls in flight."""

_MAX_LENGTH = 2048
_ADMIN_S = 3600.0
"""Lifetime in seconds of the tokens that :class:`AdminKey` issues; an hour, because machines' clocks differ."""

_NEXT = (
    "Use the token that the runner or `agl serve` gave for this attempt, or for a conversation the gateway's "
    "AGL_CLIENT_TOKEN; set it as the client's API key."
)


def check_secret(secret: bytes, *, source: str) -> bytes:
    """Return ``secret``; raises :class:`ConfigError` if it is too short to sign with."""
    if len(secret) < LEAST:
        raise ConfigError(
            f"{source} has {len(secret)} bytes, at least {LEAST} are needed. "
            'Make one with: python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return secret


class AttemptToken(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The claims of a verified token.

    Attributes:
        rollout_id: The rollout of an ``attempt`` token, which may touch only one attempt of this rollout; ``""`` in
            tokens of other scopes.
        attempt_id: The only attempt that an ``attempt`` token may touch; ``""`` in tokens of other scopes.
        expires_at: Unix seconds after which the token is refused.
        scope: ``attempt`` may call models and append to its own attempt; ``admin`` may use the store API;
            ``client`` may call models in conversations of its own, and end them; ``worker`` may run the attempts of
            one experiment.
        experiment: The only experiment that a ``worker`` token may touch.
        name: The holder's name, as audit lines show it.
    """

    rollout_id: str
    attempt_id: str
    expires_at: float
    scope: TokenScope = "attempt"
    experiment: str = ""
    name: str = ""


_DECODER = msgspec.json.Decoder(AttemptToken)


class AttemptTokens:
    """Issues tokens with a secret's first key and verifies them with all keys.

    Processes that share the secret accept each other's tokens.

    Args:
        secret: A key of at least 16 bytes, or a function that returns the current keys, one per line.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._found: bytes | None = None
        # Keyed once per change of the secret, and copied for each signature.
        self._keyed: list[hmac.HMAC] = []
        self._changes = 0
        self._current()

    def changes(self) -> int:
        """Read the signing keys again if their file has changed, and return how often they have changed so far."""
        self._current()
        return self._changes

    def issue(
        self, rollout_id: str, attempt_id: str, *, expires_at: float, scope: TokenScope = "attempt", name: str = ""
    ) -> str:
        """Issue a token that is valid until ``expires_at`` (Unix seconds).

        For the scope ``admin``, ``rollout_id`` and ``attempt_id`` are ``""``.
        """
        return self._signed(
            AttemptToken(rollout_id=rollout_id, attempt_id=attempt_id, expires_at=expires_at, scope=scope, name=name)
        )

    def issue_for_worker(self, experiment: str, *, expires_at: float, name: str = "") -> str:
        """Return a token that may run the attempts of one experiment until ``expires_at``.

        Raises:
            ConfigError: ``experiment`` is empty, or the names make the token longer than :meth:`verify` accepts.
        """
        if not experiment:
            raise ConfigError("a worker's token is for one experiment; name it")
        token = self._signed(
            AttemptToken(
                rollout_id="", attempt_id="", expires_at=expires_at, scope="worker", experiment=experiment, name=name
            )
        )
        # ``verify`` refuses longer tokens, so such a token is never issued.
        if len(token) > _MAX_LENGTH:
            raise ConfigError(
                f"the token would have {len(token)} characters, {_MAX_LENGTH} are allowed; take a shorter name"
            )
        return token

    def verify(self, token: str, *, now: float) -> AttemptToken:
        """Check a token's signature and its expiry against ``now`` (Unix seconds), and return its claims.

        Raises:
            TokenError: The token is not an agl token, was altered or signed with another secret, or has expired. The
                message never holds the token.
        """
        # Nothing of the payload is trusted, or even parsed, before its signature fits.
        payload, signature = _split(token)
        # All keys are tried, so that tokens of the previous key stay good while keys rotate.
        if not any(
            # Constant time: a comparison that stops early reveals how much of a forgery is right.
            hmac.compare_digest(_signature(keyed, payload).encode(), signature.encode())
            for keyed in self._current()
        ):
            raise TokenError(f"the token's signature does not match: it was forged, or signed by another run. {_NEXT}")
        # Signed by us, so what cannot be read is another release's.
        claim = _read(payload)
        if now >= claim.expires_at:
            raise TokenError(_expired(claim, late_s=now - claim.expires_at))
        return claim

    def _signed(self, claim: AttemptToken) -> str:
        payload = _encode(msgspec.json.encode(claim))
        return f"{PREFIX}{payload}.{_signature(self._current()[0], payload)}"

    def _current(self) -> list[hmac.HMAC]:
        secret = self._secret
        found = secret if isinstance(secret, bytes) else secret()
        if found != self._found:
            # The first line signs, and every line verifies.
            keys = [found] if isinstance(secret, bytes) else found.splitlines() or [b""]
            source = "the secret given to AttemptTokens"
            self._keyed = [hmac.new(check_secret(key, source=source), digestmod="sha256") for key in keys]
            self._found = found
            self._changes += 1
        return self._keyed


class AdminKey:
    """Returns an admin token and renews it at half of its lifetime; gateways with the same secret accept it.

    The token is also renewed when the secret's keys change. ``clock`` returns Unix seconds.
    """

    def __init__(self, secret: Secret, *, clock: Callable[[], float] = time.time) -> None:
        self._tokens = AttemptTokens(secret)
        self._clock = clock
        self._key = ""
        self._until = 0.0
        self._changes = 0

    def __call__(self) -> str:
        """Return the token to send now."""
        now, changes = self._clock(), self._tokens.changes()
        # Renewed at half of its life: clocks of two machines may differ by minutes.
        if changes != self._changes or now >= self._until - _ADMIN_S / 2:
            self._until, self._changes = now + _ADMIN_S, changes
            name = f"{socket.gethostname()}:{os.getpid()}"
            self._key = self._tokens.issue("", "", expires_at=self._until, scope="admin", name=name)
        return self._key


class IssuedClaim(Claim, frozen=True, kw_only=True):
    """A claim of a rollout, with the attempt's token for a worker that has no signing key."""

    token: str

    def __repr__(self) -> str:
        return f"IssuedClaim(rollout={self.rollout!r}, attempt={self.attempt!r})"


def issue_token(tokens: AttemptTokens, rollout: Rollout, attempt: Attempt) -> str:
    """Issue a token for the attempt; the token expires shortly after the attempt's time limit."""
    # An attempt has ended by then, so a leaked token is of little use.
    limit = rollout.retry.timeout_s
    seconds = TOKEN_HOURS * 3600 if limit is None else limit + TOKEN_SLACK_S
    return tokens.issue(rollout.rollout_id, attempt.attempt_id, expires_at=time.time() + seconds)


def _expired(claim: AttemptToken, *, late_s: float) -> str:
    if claim.scope == "worker":
        return (
            f"the worker's token of experiment {claim.experiment!r} expired {late_s:.0f} s ago; make another with: "
            f"agl worker-token {claim.experiment}"
        )
    return f"the token of attempt {claim.attempt_id!r} expired {late_s:.0f} s ago. {_NEXT}"


def _signature(keyed: hmac.HMAC, payload: str) -> str:
    signing = keyed.copy()  # hmac.digest releases the interpreter's lock and waits to get it back
    signing.update(payload.encode())
    return _encode(signing.digest())


def _split(token: str) -> tuple[str, str]:
    payload, dot, signature = token.removeprefix(PREFIX).partition(".")
    is_shaped = token.startswith(PREFIX) and token.isascii() and len(token) <= _MAX_LENGTH
    if not (is_shaped and dot and payload and signature):
        raise TokenError(f"the API key is not an agl token (agl_..., {len(token)} characters found). {_NEXT}")
    return payload, signature


def _read(payload: str) -> AttemptToken:
    try:
        return _DECODER.decode(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (binascii.Error, msgspec.DecodeError, ValueError) as error:
        raise TokenError(f"the token's payload cannot be read: it was made by another release. {_NEXT}") from error


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


PLACEHOLDER_KEY = "agl-no-key-needed"
"""Value of ``OPENAI_API_KEY`` in a process whose wire hook adds the real token to each call; gateways refuse it."""

REFUSED = "refused"
"""Value of the attribute ``agl.unrecorded`` on the span of a call whose API key the gateway refused."""
