"""Records a Python program from within, for `agl exec`, and for the `command` runner without a gateway.

The program's interpreter finds agl's ``sitecustomize`` first on its path. This module then records the whole process
as one attempt and appends each span to a file when the span ends, so that a kill loses only unfinished spans.
"""

import atexit
import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from agl import semconv
from agl.contracts import Tracer, Upstream
from agl.schemas import Claim, Record, Span, decode, encode, from_json, new_span_id, new_trace_id, to_json

VARIABLE = "AGL_SPAN_FILE"
"""The environment variable that holds the :class:`SpanFileSettings` as JSON."""

_HEADER = struct.Struct("<I")


class SpanFileSettings(Record, frozen=True, kw_only=True):
    """The settings with which a program records itself: its file, its ids, the models' addresses, and its tracers."""

    file: str
    rollout_id: str
    attempt_id: str
    trace_id: str
    root_span_id: str
    upstreams: tuple[Upstream, ...] = ()
    gateway_url: str = ""
    token: str = ""
    tracers: tuple[str, ...] = ()


def root_of(claim: Claim) -> Span:
    """Make the root span of a program that starts now."""
    return Span(
        rollout_id=claim.rollout.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        span_id=new_span_id(),
        trace_id=new_trace_id(),
        name=semconv.ROOT_SPAN_NAME,
        start_ns=time.time_ns(),
    )


class SpanFile:
    """The file to which a program in another process appends its spans, also those of ``tracers``."""

    def __init__(self, file: Path, root: Span, *, tracers: Sequence[str] = ()) -> None:
        self._file = file
        self._root = root
        self._tracers = tuple(tracers)

    def environment(
        self, upstreams: Sequence[Upstream] = (), *, gateway_url: str = "", token: str = ""
    ) -> dict[str, str]:
        """Return the variables that make a Python program record itself, except calls through ``gateway_url``."""
        settings = SpanFileSettings(
            file=str(self._file),
            rollout_id=self._root.rollout_id,
            attempt_id=self._root.attempt_id,
            trace_id=self._root.trace_id,
            root_span_id=self._root.span_id,
            upstreams=tuple(upstreams),
            gateway_url=gateway_url,
            token=token,
            tracers=self._tracers,
        )
        # In front of the user's own path: Python imports the first sitecustomize that it finds.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent / "inject"), os.environ.get("PYTHONPATH")]))
        return {VARIABLE: to_json(settings).decode(), "PYTHONPATH": path}

    def read(self) -> list[Span]:
        """Read the spans that are in the file so far; an incomplete last span is left out."""
        if not self._file.exists():
            return []
        data = self._file.read_bytes()
        spans: list[Span] = []
        position = 0
        # The program may have been killed in the middle of a write, so the last span may be
        # incomplete.
        while position + _HEADER.size <= len(data):
            size = _HEADER.unpack_from(data, position)[0]
            position += _HEADER.size
            if position + size > len(data):
                break
            spans.append(decode(data[position : position + size], Span))
            position += size
        return spans


def record_this_process() -> None:
    """Record the rest of this process as one attempt; called by the injected ``sitecustomize``."""
    from agl import PluginManager
    from agl.errors import AglError
    from agl.tracing import ActiveAttempt, WireTracer, activate
    from agl_run.agents.importing import load_tracers
    from agl_run.tracers.unrecorded import UnrecordedCalls

    # Removed from the environment: programs that this one starts are other processes and would
    # record under the same span.
    settings = from_json(os.environ.pop(VARIABLE), SpanFileSettings)
    lock = threading.Lock()

    def record(span: Span) -> None:
        data = encode(span)
        # Opened for each span: a fork shares an open file's position, and appends stay whole.
        with lock, open(settings.file, "ab") as file:
            file.write(_HEADER.pack(len(data)) + data)

    WireTracer().install()
    UnrecordedCalls().install()
    tracers: list[Tracer] = []
    for name in settings.tracers:
        try:
            tracers += load_tracers([name], PluginManager.from_environment())
        except AglError as error:
            sys.stderr.write(f"agl: {error}\n")
        except Exception as error:  # noqa: BLE001  # a tracer may raise anything, and the program runs without it
            sys.stderr.write(
                f"agl: the tracer {name!r} records nothing, because it raised {type(error).__name__}: {error}\n"
            )
    for tracer in tracers:
        # Frameworks may end their spans in threads of their own.
        atexit.register(tracer.flush, 1.0)
    attempt = ActiveAttempt(
        rollout_id=settings.rollout_id,
        attempt_id=settings.attempt_id,
        trace_id=settings.trace_id,
        root_span_id=settings.root_span_id,
        record=record,
        upstreams=settings.upstreams,
        gateway_url=settings.gateway_url,
        token=settings.token,
        tracers=tuple(tracers),
    )
    # Never left: the whole process is the attempt.
    activate(attempt).__enter__()
