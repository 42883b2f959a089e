"""The sink that sends a run's events to a web address: suggestions, a collapse, a failure, and the end.

Each event is one POST request with JSON. Messages show only the address's host, because the address may be a secret, as
for chat services. Metrics of steps are not sent.
"""

import hashlib
import hmac
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agl.contracts import SinkOutcome, SinkRow, SinkRun, SinkTable, shortened
from agl.errors import ConfigError, ExportError
from agl.hints import did_you_mean
from agl.urls import web_parts
from agl_sinks.sending import post

if TYPE_CHECKING:
    from agl.schemas import Json

EVENTS = ("suggestion", "collapse", "failure", "finished")
"""The kinds of events."""

_PAUSES_S = (0.5, 2.0)
"""Seconds to wait before each repetition of a failed request; if all fail, the experiment tries again later."""

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_TEXT = 3000
"""Largest length of the text for people, in characters; Slack allows 40,000, which nobody would read."""


class WebhookSink:
    """Sends each event of a run to a web address at least once; a repeated event has the same ``id``.

    Args:
        url: The address, with the scheme ``http`` or ``https``.
        url_env: The environment variable that holds the address, instead of ``url``.
        events: Kinds of events to send: ``suggestion``, ``collapse``, ``failure`` and ``finished``.
        secret_env: The environment variable with the secret that signs each body; ``""`` for no signature.
        timeout_s: Timeout of one request in seconds.

    Raises:
        ConfigError: The address is not a web address, a kind of event does not exist, or a variable is not set.
    """

    def __init__(
        self,
        *,
        url: str = "",
        url_env: str = "",
        events: Sequence[str] = EVENTS,
        secret_env: str = "",
        timeout_s: float = 5.0,
    ) -> None:
        self._url = _checked_url(url, url_env)
        self._events = _checked_events(events)
        self._secret = _variable("secret_env", secret_env).encode() if secret_env else b""
        if not timeout_s > 0:
            raise ConfigError(f"webhook: timeout_s is {timeout_s!r}; give the seconds that a request may take")
        self._timeout_s = timeout_s
        self._run: SinkRun | None = None
        self._sent: set[str] = set()
        self._count = 0
        self._step = 0

    @property
    def destination(self) -> str:
        """The address without its path, because the path may be a secret."""
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.netloc}"

    def begin(self, run: SinkRun) -> None:
        """Load the ids of the run's events that were sent before."""
        self._run = run
        file = _file(run)
        self._sent |= set(file.read_text("utf-8").splitlines()) if file.exists() else set()

    def log(self, rows: list[SinkRow]) -> None:
        """Remember the run's latest step, which the event at the end of the run reports."""
        self._step = max([self._step, *(row.experiment_step for row in rows)])

    def show(self, tables: list[SinkTable]) -> None:
        """Send the alerts in the table ``alerts``; if one is refused, the others are still sent.

        Raises:
            ExportError: The first refusal, after all alerts were tried.
        """
        errors: list[ExportError] = []
        for table in (table for table in tables if table.name == "alerts"):
            for row in table.rows:
                found = dict(zip(table.columns, row, strict=True))
                try:
                    self._send(str(found.pop("kind")), _place(found), _sentence(found), dict(found))
                except ExportError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def end(self, end: SinkOutcome) -> str:
        """Send the run's outcome, unless a person stopped the run; returns the number of sent events as text."""
        kind = {"finished": "finished", "failed": "failure"}.get(end.status, "")
        if kind:
            words = f"failed after step {self._step}: {end.error}" if kind == "failure" else _result(end, self._step)
            more: dict[str, Json] = {"step": self._step, "time": end.time, "summary": end.summary, "error": end.error}
            self._send(kind, f"{self._step}/{end.time:.0f}", words, more)
        return f"{self._count} event{'' if self._count == 1 else 's'}"

    def _send(self, kind: str, place: str, words: str, more: dict[str, Any]) -> None:
        """Send an event, if the kind is wanted and the event was not sent before, and record the id as sent."""
        run = self._run
        if run is None:
            raise ExportError("the run has not begun")
        event_id = f"{run.id}/{kind}/{place}"
        if kind not in self._events or event_id in self._sent:
            return
        head = {"event": kind, "id": event_id, "experiment": run.experiment, "run": run.run, "agent": run.agent}
        text = shortened(f"{run.name}: {words}", _LONGEST_TEXT)
        self._post(kind, event_id, json.dumps({"text": _as_mrkdwn(text), **head, **more}).encode())
        self._sent.add(event_id)
        self._count += 1
        file = _file(run)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{event_id}\n")

    def _post(self, kind: str, event_id: str, body: bytes) -> None:
        headers = {
            "Content-Type": "application/json",
            "X-Agl-Event": kind,
            "X-Agl-Delivery": hashlib.sha256(event_id.encode()).hexdigest()[:32],
        }
        if self._secret:
            headers["X-Agl-Signature"] = f"sha256={hmac.new(self._secret, body, hashlib.sha256).hexdigest()}"
        for pause in (*_PAUSES_S, None):
            try:
                post(
                    self._url,
                    body,
                    shown=self.destination,
                    headers=headers,
                    timeout_s=self._timeout_s,
                    passing=_PASSING,
                    advice={},
                    is_secret=True,
                )
            except ExportError as error:
                if pause is None or not error.is_passing:
                    raise
                time.sleep(pause)
            else:
                return


def _checked_url(url: str, variable: str) -> str:
    if bool(url) == bool(variable):
        raise ConfigError(
            "webhook needs the address: write url, or url_env with the environment variable that holds it, and only "
            "one of the two"
        )
    found = url or _variable("url_env", variable)
    parts = web_parts(found)
    if parts is None:
        raise ConfigError(
            f"webhook: {'url' if url else f'the value of {variable}'} is not a web address; write https://HOST/PATH, "
            "without spaces"
        )
    if "@" in parts.netloc:
        raise ConfigError(
            f"webhook: the address at {parts.hostname} has a user or a password in it, which are not sent; use an "
            "address whose path is the secret, or secret_env"
        )
    return found


def _checked_events(events: Sequence[str]) -> frozenset[str]:
    if isinstance(events, str) or not events:
        raise ConfigError(f'webhook: events is {events!r}; write a list such as ["collapse", "failure"]')
    for event in events:
        if event not in EVENTS:
            hint = did_you_mean(str(event), EVENTS, otherwise=f"there are {', '.join(EVENTS)}")
            raise ConfigError(f"webhook: there is no event {event!r}; {hint}")
    return frozenset(events)


def _variable(key: str, name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"webhook: {key} names the environment variable {name}, which is not set; set it")
    return value


def _file(run: SinkRun) -> Path:
    """Return the path of the file with the ids of sent events, one per line."""
    return Path(run.folder) / f"webhook-{run.id}.txt"


def _place(found: dict[str, Any]) -> str:
    return f"{found['rule']}/{found['algorithm']}/{found['step']}"


def _sentence(found: dict[str, Any]) -> str:
    change = f". To change that: {found['change']}" if found["change"] else ""
    return f"{found['algorithm']} step {found['step']}: {found['evidence']}{change}"


def _result(end: SinkOutcome, steps: int) -> str:
    rewards = {when: end.summary.get(f"reward_{when}") for when in ("before", "after")}
    shown = [f"{value:.3f} {when}" for when, value in rewards.items() if isinstance(value, float)]
    return "; validation reward: ".join(filter(None, (f"finished after step {steps}", ", ".join(shown))))


def _as_mrkdwn(text: str) -> str:
    """Escape a text so that Slack shows it unchanged, instead of interpreting text in angle brackets."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
