"""Attempt tokens: signed, expiring proofs of the caller's identity, in the shape of an API key.

A token is ``agl_<payload>.<signature>``: base64url of a small JSON array and of its HMAC-SHA256. It is signed, not
encrypted: it holds ids, a scope and a time, and nothing secret. It cannot be revoked before it expires; the gateway
also checks that the attempt still runs.
"""

import binascii
import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Literal

import msgspec

from agl.errors import ConfigError, TokenError

__all__ = ["AdminKey", "AttemptToken", "AttemptTokens", "check_secret"]

PREFIX = "agl_"
TokenScope = Literal["attempt", "admin", "client"]

_MIN_SECRET_BYTES = 16

_MAX_LENGTH = 1024
_ADMIN_S = 3600.0
"""Seconds for which an own admin key is valid: long, because the clocks of machines differ."""

_NEXT = "Use the token that the runner or `agl serve` gave for this attempt; set it as the client's API key."


def check_secret(secret: bytes, *, source: str) -> bytes:
    """``secret`` itself; raises :class:`ConfigError` when it is too short to sign with."""
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"{source} has {len(secret)} bytes, at least {_MIN_SECRET_BYTES} are needed. "
            'Make one with: python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return secret


class AttemptToken(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The claims of a verified token.

    Attributes:
        rollout_id: With ``attempt_id`` the only attempt that an ``attempt`` token may touch; ``""`` for the others.
        expires_at: Unix seconds after which it is refused.
        scope: ``attempt`` may call models and append to its own attempt; ``admin`` may use the store API;
            ``client`` may call models in conversations of its own, and end them.
    """

    rollout_id: str
    attempt_id: str
    expires_at: float
    scope: TokenScope = "attempt"


_DECODER = msgspec.json.Decoder(AttemptToken)


class AttemptTokens:
    """Issues and verifies tokens with one secret of at least 16 bytes; processes that share it trust each other."""

    def __init__(self, secret: bytes) -> None:
        checked = check_secret(secret, source="the secret given to AttemptTokens")
        self._keyed = hmac.new(checked, digestmod="sha256")

    def issue(self, rollout_id: str, attempt_id: str, *, expires_at: float, scope: TokenScope = "attempt") -> str:
        """A token valid until ``expires_at`` (Unix seconds); one of scope ``admin`` names no attempt (``""``)."""
        claim = AttemptToken(rollout_id=rollout_id, attempt_id=attempt_id, expires_at=expires_at, scope=scope)
        payload = _encode(msgspec.json.encode(claim))
        return f"{PREFIX}{payload}.{self._sign(payload)}"

    def verify(self, token: str, *, now: float) -> AttemptToken:
        """Check a token's signature and time against ``now`` (Unix seconds), and return its claims.

        Raises:
            TokenError: It is not an agl token, was signed with another secret or changed, or has expired. The message
                never holds the token.
        """
        payload, signature = _split(token)
        if not hmac.compare_digest(self._sign(payload).encode(), signature.encode()):
            raise TokenError(f"the token's signature does not match: it was forged, or signed by another run. {_NEXT}")
        claim = _read(payload)
        if now >= claim.expires_at:
            late = now - claim.expires_at
            raise TokenError(f"the token of attempt {claim.attempt_id!r} expired {late:.0f} s ago. {_NEXT}")
        return claim

    def _sign(self, payload: str) -> str:
        signing = self._keyed.copy()  # hmac.digest releases the interpreter's lock and waits to get it back
        signing.update(payload.encode())
        return _encode(signing.digest())


class AdminKey:
    """An admin token that is renewed when half of its time is over; every gateway with the same secret accepts it.

    ``clock`` returns Unix seconds.
    """

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.time) -> None:
        self._tokens = AttemptTokens(secret)
        self._clock = clock
        self._key = ""
        self._until = 0.0

    def __call__(self) -> str:
        """The key to send now."""
        now = self._clock()
        if now >= self._until - _ADMIN_S / 2:
            self._until = now + _ADMIN_S
            self._key = self._tokens.issue("", "", expires_at=self._until, scope="admin")
        return self._key


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
