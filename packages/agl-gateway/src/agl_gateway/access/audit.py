"""The audit log: one line of JSON per privileged action, with its caller, objects, time and result.

The lines go to the logger ``agl.audit`` and, if a file is configured, to that file. Each line is one appending write,
so several processes can share the file, and it can be moved away at any time. Lines hold ids, names and addresses,
never a token, a task or an answer.
"""

import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from agl.errors import AglError
from agl_gateway.wire.http.calls import EitherRequest
from agl_run.access import AttemptToken

_LOG = logging.getLogger("agl.audit")
_OWN_LOG = logging.getLogger(__name__)

_SHOWN = 20
"""The maximum number of object names in an audit line; ``count`` gives the total."""

_TEXT = 300
"""The maximum number of characters of an error message in an audit line."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the audit log.

    Attributes:
        time: When the action happened, as ISO 8601 in UTC.
        scope: The kind of the token.
        token: The holder that the token was made for, or the number of the gateway's own token.
        remote: The address from which the request came.
        action: The action, such as ``delete``.
        result: ``done`` or ``failed``.
        experiment: The experiment, where the action is about one.
        objects: The first 20 ids or names.
        count: The number of objects.
        error: The error of a failed action.
    """

    time: str
    scope: str
    token: str
    remote: str
    action: str
    result: str
    experiment: str = ""
    objects: tuple[str, ...] = ()
    count: int = 0
    error: str = ""


class Deed(msgspec.Struct, frozen=True, kw_only=True):
    """A privileged action and the objects it affects. :meth:`Audit.write` makes an audit :class:`Line` from it."""

    action: str
    objects: Sequence[str] = ()
    experiment: str = ""


class Audit:
    """Writes the lines of the audit log.

    Args:
        path: The file to append to; ``None`` for the logger alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @contextmanager
    def of(self, deed: Deed | None, *, claim: AttemptToken, request: EitherRequest) -> Generator[None]:
        """Write the audit line of ``deed`` when the block ends or raises an :class:`AglError`; ``None`` writes no
        line.
        """
        try:
            yield
        except AglError as error:
            if deed is not None:
                self.write(deed, claim=claim, request=request, error=error)
            raise
        if deed is not None:
            self.write(deed, claim=claim, request=request)

    def write(self, deed: Deed, *, claim: AttemptToken, request: EitherRequest, error: Exception | None = None) -> None:
        """Write the audit line of a privileged action; with ``error``, the line's result is ``failed``."""
        line = Line(
            time=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            scope=claim.scope,
            token=claim.name,
            remote=request.remote or "",
            action=deed.action,
            result="done" if error is None else "failed",
            experiment=deed.experiment,
            objects=tuple(deed.objects[:_SHOWN]),
            count=len(deed.objects),
            error="" if error is None else f"{type(error).__name__}: {error}"[:_TEXT],
        )
        text = msgspec.json.encode(line)
        _LOG.info("%s", text.decode())
        if self._path is not None:
            self._append(self._path, text + b"\n")

    def _append(self, path: Path, line: bytes) -> None:
        """Append a line to the audit log in one write. The file is opened for each line, so it can be moved away."""
        try:
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            _OWN_LOG.error("the audit log %s cannot be written (%s); the logger agl.audit has its lines", path, error)


def deed_of(name: str, params: dict[str, Any]) -> Deed | None:
    """Return the privileged action that a call of a store method performs; ``None`` for a worker's everyday calls."""
    match name:
        case "enqueue":
            rollouts = params["rollouts"]
            return Deed(
                action=name,
                objects=[rollout.rollout_id for rollout in rollouts],
                experiment=_only(rollout.experiment for rollout in rollouts),
            )
        case "cancel" | "delete":
            return Deed(action=name, objects=list(params["rollout_ids"]))
        case "publish" | "save_scores":
            versions = params["versions" if name == "publish" else "scores"]
            return Deed(action=name, objects=[f"{one.name}@{one.version}" for one in versions])
        case "move_label":
            move = params["move"]
            action = "rollback" if move.is_back else "promote"
            return Deed(action=action, objects=[f"{move.name}@{move.version} as {move.label}"])
        case "save_state":
            record = params["experiment"]
            return Deed(action=name, objects=list(params["states"]), experiment="" if record is None else record.name)
        case _:
            return None


def _only(names: Any) -> str:
    """Return the common name if all names are equal; ``""`` if they differ or there are no names."""
    found = set(names)
    return found.pop() if len(found) == 1 else ""
