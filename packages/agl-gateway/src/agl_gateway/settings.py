"""The settings of a gateway, each described once: the options of ``agl serve`` take their help from here."""

import inspect
import re
from dataclasses import dataclass, field, fields
from hashlib import blake2b

from agl.errors import ConfigError

_POSITIVE = ("timeout_s", "max_answer", "max_calls", "max_spans")
_HOST = re.compile(r"(?!-)([a-z0-9-]+\.)+[a-z][a-z0-9-]*")  # no IP address, which no resolver would check


@dataclass(kw_only=True)
class EmbeddedSettings:
    """The settings of every gateway: of ``agl serve``, and of an experiment, where they are its ``params``.

    Attributes:
        host: Address to listen on; keep it local unless the network is trusted.
        port: Port to listen on; 0 takes any free one.
        spool: Folder for calls that the store does not accept at once, or ``off``. By default, the spool is off for a
            SQLite file or memory. For any other store, it is in this user's state folder.
        tls_cert: Certificate chain in PEM. With it, the gateway accepts only TLS connections. The file is read again
            when it changes.
        tls_key: Private key of the certificate in PEM, unless it is in the same file.
        redact: Name of the redactor through which every text passes before it is recorded, such as ``patterns``. By
            default, texts are recorded as they are.
        audit_log: Append a line of JSON to this file for each privileged action.
        timeout_s: Seconds that a backend may be silent.
        max_answer: Largest answer of a backend in bytes, which the gateway holds in memory until it is recorded.
        max_calls: Most model calls that one attempt may make; conversations have no limit.
        max_spans: Most spans that one attempt may append, using its access token.
        helpers: Whether calls of coding agents for titles, summaries and the like are marked as helper calls, which
            train only where ``agents`` selects them.
        helper_match: If this regular expression matches the start of a conversation, its first call is a helper call
            and does not train.
        spool_after_s: Seconds that the store may take for a call before the call goes to the spool, if there is one.
        native_apis: Pass calls of this API unchanged to policies in training; use it if their server returns token ids
            in this API. Otherwise such calls are translated to chat completions. Repeatable.
        fetch_media: Host such as ``example.com``, from which, as from those below it, the gateway fetches the pictures
            that requests name by URL. The URLs of other hosts go to the model's server as they are, and such calls do
            not train. Repeatable.
    """

    host: str = "127.0.0.1"
    port: int = 0
    spool: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    redact: str = ""
    audit_log: str = ""
    timeout_s: float = 600.0
    max_answer: int = 40 * 1024 * 1024
    max_calls: int = 100_000
    max_spans: int = 1_000_000
    helpers: bool = True
    helper_match: str = ""
    spool_after_s: float = 0.05
    native_apis: tuple[str, ...] = ()
    fetch_media: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of the conversations that is recorded.

    Attributes:
        base_rate: Share of conversations to record, from 0 to 1, chosen by their ids.
        reward_threshold: If the reward of a conversation outside the base rate reaches this value, keep it too.
        reward_wait_s: How long to wait for that reward after a conversation has ended.
        max_spans_per_minute: After this many recorded calls within a minute, record no new conversation; 0 for no
            limit.
    """

    base_rate: float = 1.0
    reward_threshold: float | None = None
    reward_wait_s: float = 3600.0
    max_spans_per_minute: int = 0

    @property
    def is_all(self) -> bool:
        """True if every conversation is recorded."""
        return self.base_rate == 1.0 and not self.max_spans_per_minute

    def holds(self, rollout_id: str) -> bool:
        """Return true if the conversation is among the recorded ones by its id; every process gives the same answer."""
        drawn = blake2b(rollout_id.encode(), digest_size=8, person=b"agl-share").digest()
        return int.from_bytes(drawn) < self.base_rate * 2**64


@dataclass(kw_only=True)
class Settings(EmbeddedSettings):
    """All settings of a gateway.

    Attributes:
        advertise: Name under which other gateways of the same store reach this one. By default, it is the host; if
            the host is 0.0.0.0 or ::, it is this machine's address.
        conversation_idle_s: Time without a call after which a conversation ends.
        is_status_protected: Require the admin token for ``/metrics`` and ``/openapi.json``.
        known_hosts: Host name for which ``/metrics`` and ``/openapi.json`` also answer without a token. Repeatable.
        max_body: Largest request body in bytes.
        max_bodies: Bytes of all request bodies above 1 MiB that are held at once.
        bodies_wait_s: Seconds that a further large body waits for the others.
        headers_s: Seconds that the headers of a request may take to arrive.
        body_s: Seconds that a body may take to arrive, and one more for every 64 KiB.
        is_shared: Whether other gateways may answer calls of the same attempts.
        share: The part of the conversations that is recorded.
    """

    advertise: str = ""
    conversation_idle_s: float = 1800.0
    is_status_protected: bool = False
    known_hosts: tuple[str, ...] = ()
    max_body: int = 64 * 1024 * 1024
    max_bodies: int = 128 * 1024 * 1024
    bodies_wait_s: float = 30.0
    headers_s: float = 10.0
    body_s: float = 20.0
    is_shared: bool = False
    share: Share = field(default_factory=Share)

    def __post_init__(self) -> None:
        for one in fields(EmbeddedSettings):
            if one.name in _POSITIVE and not (found := getattr(self, one.name)) > 0:  # NaN is not
                raise ConfigError(f"the gateway's {one.name} is {found}; give a number above 0, such as {one.default}")
        for host in self.fetch_media:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"fetch_media names {host!r}; give a host such as example.com, without scheme or *")


def descriptions() -> dict[str, str]:
    """Return the description of each setting, by name, read from the docstrings above."""
    docs = "\n".join(inspect.getdoc(kind) or "" for kind in (EmbeddedSettings, Share, Settings))
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", docs, re.MULTILINE)
    return {name: " ".join(text.replace("``", "").split()) for name, text in found}
