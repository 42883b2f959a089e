"""Collects a run's spans and rewards from a reader, and makes its rollout, with one attempt.

A reader identifies the run and its spans by keys from its format. The ids of rollout and spans are digests of these
keys, so importing a file again gives the same ids. Times that the format does not have stay 0 in the spans.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from agl import semconv
from agl.contracts import Recording
from agl.dialects import Request
from agl.errors import DatasetError
from agl.schemas import (
    Attempt,
    Blob,
    ErrorInfo,
    Json,
    Mode,
    ModelCall,
    Reward,
    Rollout,
    Span,
    SpanEvent,
    SpanStatus,
    attempt_id_of,
    to_json,
)
from agl.tracing import chat_spans, make_reward_span
from agl_data.importing.values import as_dict, digest, json_text
from agl_inspect.exports import call_of_record, reward_of_record

NO_IDS = (
    "calls without token ids: they feed sft and dpo (agl data export writes their data), prompts and rewards, not grpo"
)
IDS_MISSING = "the source of the import has the text of the call and no token ids"
NO_TIMES = "runs without times: they carry the time of the import"
CHANGED_TEXT = "records with halves of characters, which were replaced, or integers beyond 64 bits, now texts"

WORKER = "agl-data"
_KEPT_TEXT = 200


def agent_attributes(name: str) -> dict[str, Json]:
    """Return the attributes of an agent's span."""
    return {semconv.OPERATION: semconv.OP_INVOKE_AGENT, semconv.AGENT_NAME: name}


def tool_attributes(name: str, arguments: Json, result: Json, *, call_id: str = "") -> dict[str, Json]:
    """Return the attributes of a tool's span."""
    found: dict[str, Json] = {
        semconv.OPERATION: semconv.OP_EXECUTE_TOOL,
        semconv.TOOL_NAME: name,
        semconv.TOOL_CALL_ID: call_id,
        semconv.TOOL_ARGUMENTS: None if arguments is None else json_text(arguments),
        semconv.TOOL_RESULT: None if result is None else json_text(result),
    }
    return {key: value for key, value in found.items() if value not in (None, "")}


class Target(NamedTuple):
    """The experiment that runs are imported into, and the fields that become task and reward.

    Attributes:
        experiment: The experiment's name.
        mode: The mode of the rollouts.
        task_from: The field with the task; ``""`` to use the first user message.
        reward_from: The field with the reward; ``""`` to read no reward from a field.
    """

    experiment: str
    mode: Mode = "train"
    task_from: str = ""
    reward_from: str = ""


class Run:
    """A run that a reader fills. Spans may be added in any order, and name their parents by key.

    Attributes:
        key: The run's id in its format, such as the id of a session; ``""`` if the format has no id.
        grows: True if the run may continue after it was read, as a session does: the key alone identifies it then. If
            false, the run's contents are part of its identity.
        place: The file and line of the run, for messages.
        fields: The record as read; the fields for task and reward are looked up in it.
        prompt: The first user message; ``None`` if there is none.
        error: The error that ended the run; ``None`` if it succeeded or its end is unknown.
        unread: Names of fields that are not imported, unless they are named as the task or the reward.
        lost: Number of items that could not be imported, by description.
        calls: Number of model calls added so far.
        blobs: The pictures and other payloads that the calls hold, by digest.
    """

    def __init__(self, key: str, *, place: str, fields: Json = None, grows: bool = False) -> None:
        self.key = key
        self.grows = grows
        self.place = place
        self.fields = fields
        self.prompt: Json = None
        self.error: ErrorInfo | None = None
        self.unread: tuple[str, ...] = ()
        self.lost: Counter[str] = Counter()
        self.calls = 0
        self.blobs: dict[str, Blob] = {}
        self._spans: list[tuple[str, str, Span]] = []
        self._rewards: dict[str, tuple[str, str, Span]] = {}
        self._times: list[int] = []

    def add(
        self,
        key: str,
        name: str,
        *,
        parent: str = "",
        start_ns: int = 0,
        end_ns: int = 0,
        status: SpanStatus = "unset",
        message: str = "",
        attributes: Mapping[str, Json] | None = None,
        events: tuple[SpanEvent, ...] = (),
        kind: Any = "internal",
    ) -> None:
        """Add a span of any kind; ``parent`` is the key of its parent span, ``""`` for the root span."""
        known = {name: value for name, value in (attributes or {}).items() if value not in (None, "")}
        span = Span(
            rollout_id="",
            attempt_id="",
            span_id="",
            name=name,
            kind=kind,
            start_ns=start_ns,
            end_ns=max(start_ns, end_ns),
            status=status,
            status_message=message,
            attributes=known,
            events=events,
        )
        self._keep(key, parent, span)

    def add_agent(
        self,
        key: str,
        name: str,
        *,
        parent: str = "",
        start_ns: int = 0,
        end_ns: int = 0,
        attributes: Mapping[str, Json] | None = None,
    ) -> None:
        """Add the span of an agent, which is the parent of the agent's calls and tools."""
        about = {**agent_attributes(name), **(attributes or {})}
        title = f"{semconv.OP_INVOKE_AGENT} {name}".rstrip()
        self.add(key, title, parent=parent, start_ns=start_ns, end_ns=end_ns, attributes=about)

    def add_tool(
        self,
        key: str,
        name: str,
        *,
        parent: str = "",
        call_id: str = "",
        arguments: Json = None,
        result: Json = None,
        is_error: bool = False,
        start_ns: int = 0,
        end_ns: int = 0,
    ) -> None:
        """Add the span of a tool's execution, with digests in place of the payloads in its result."""
        about = tool_attributes(name, arguments, self.referenced(result), call_id=call_id)
        title = f"{semconv.OP_EXECUTE_TOOL} {name}".rstrip()
        status: SpanStatus = "error" if is_error else "ok"
        self.add(key, title, parent=parent, start_ns=start_ns, end_ns=end_ns, status=status, attributes=about)

    def add_call(
        self,
        key: str,
        call: ModelCall,
        *,
        parent: str = "",
        start_ns: int = 0,
        end_ns: int = 0,
        about: Mapping[str, Json] | None = None,
        sequence: int = 0,
    ) -> None:
        """Add a model call; counts it as a loss if it succeeded and has no token ids.

        Payloads in its request, such as pictures, are replaced by their digests, as the gateway does.
        ``sequence`` is the call's position among the run's spans; 0 if it is unknown.
        """
        self.calls += 1
        if call.ids_missing and not call.error:
            self.lost[NO_IDS] += 1
        if request := as_dict(call.request):
            stored = Request(call.dialect, to_json(request)).stored()
            self.blobs |= {blob.digest: blob for blob in stored.blobs}
            call = replace(call, request=stored.request, inputs=call.inputs or stored.inputs)
        known = {name: value for name, value in (about or {}).items() if value not in (None, "")}
        spans = chat_spans(
            [call],
            rollout_id="",
            attempt_id="",
            trace_id="",
            parent_id=None,
            framework_span_id="",
            start_ns=start_ns,
            end_ns=max(start_ns, end_ns),
            about=known,
        )
        self._keep(key, parent, replace(spans[0], span_id="", sequence=sequence))

    def referenced(self, content: Json) -> Json:
        """Return a message's content with digests in place of payloads, which become blobs of the run."""
        if not isinstance(content, list):
            return content
        stored = Request("chat", to_json({"messages": content})).stored()
        self.blobs |= {blob.digest: blob for blob in stored.blobs}
        return as_dict(stored.request)["messages"]

    def add_reward(self, key: str, reward: Reward, *, about: str = "", at_ns: int = 0, is_late: bool = False) -> None:
        """Add a reward, unless its key was added before; ``about`` is its target span's key, ``""`` for the run."""
        span = make_reward_span("", "", reward)
        self._rewards.setdefault(key, (key, about, replace(span, start_ns=at_ns, end_ns=at_ns, is_late=is_late)))

    def _in_order(self) -> list[tuple[str, str, Span]]:
        """Return the spans in the order they were added; if every call has a sequence number, these sort the calls."""
        places = [place for place, (_, _, span) in enumerate(self._spans) if span.call is not None]
        calls = [self._spans[place] for place in places]
        found = list(self._spans)
        if all(span.sequence for _, _, span in calls):
            for place, own in zip(places, sorted(calls, key=lambda each: each[2].sequence), strict=True):
                found[place] = own
        return [(key, parent, replace(span, sequence=0)) for key, parent, span in found]

    def _keep(self, key: str, parent: str, span: Span) -> None:
        self._spans.append((key, parent, span))
        self._times += [each for each in (span.start_ns, span.end_ns) if each]

    def contents(self) -> str:
        """Return a digest of the prompt and the spans, which changes when the run does."""
        return digest([self.prompt, *((key, parent, span) for key, parent, span in self._spans)], size=16)

    def identity(self) -> str:
        """Return a digest that is the same for the same run in any file."""
        return digest([self.key, "" if self.grows and self.key else self.contents()], size=12)

    def recording(self, target: Target, *, format: str, task: Json, copy: int, now: float) -> Recording:
        """Return the run as a rollout with one attempt.

        Args:
            target: The experiment and the mode.
            format: The format's name.
            task: The task.
            copy: Number of earlier runs in the file with this identity; identical runs become separate rollouts.
            now: Unix seconds, used as the time of a run without times.
        """
        contents = self.contents()
        own = digest([target.experiment, format, self.identity(), copy], size=12)
        rollout_id, attempt_id = f"im-{own}", attempt_id_of(f"im-{own}", 1)
        if not self._times:
            self.lost[NO_TIMES] += 1
        start_ns, end_ns = min(self._times, default=0), max(self._times, default=0)
        start, end = (start_ns / 1e9, end_ns / 1e9) if start_ns else (now, now)
        failed = self.error is not None
        rollout = Rollout(
            rollout_id=rollout_id,
            task=task,
            experiment=target.experiment,
            group_id=f"task-{digest(task, size=12)}",
            mode=target.mode,
            metadata={"imported": {"format": format, "key": self.key[:_KEPT_TEXT], "contents": contents}},
            status="failed" if failed else "succeeded",
            attempts=1,
            failures=int(failed),
            attempt_id=attempt_id,
            created_at=start,
            started_at=start,
            finished_at=end,
        )
        attempt = Attempt(
            attempt_id=attempt_id,
            rollout_id=rollout_id,
            number=1,
            worker=WORKER,
            status="failed" if failed else "succeeded",
            started_at=start,
            finished_at=end,
            error=self.error,
        )
        root = Span(
            rollout_id="",
            attempt_id="",
            span_id="",
            name=semconv.ROOT_SPAN_NAME,
            start_ns=start_ns,
            end_ns=end_ns,
            status="error" if failed else "ok",
        )
        every = [("", "", root), *self._in_order(), *self._rewards.values()]
        known = {key for key, _, _ in every}
        placed = ((key, parent if parent in known else "", span) for key, parent, span in every)
        spans = [_placed(each, rollout_id, attempt_id) for each in placed]
        return Recording(rollout=rollout, attempts=[attempt], spans=spans)


def _placed(keyed: tuple[str, str, Span], rollout_id: str, attempt_id: str) -> Span:
    """Return a span with its ids filled in; a reward and another span with the same key get different ids."""
    key, parent, span = keyed
    is_root = span.name == semconv.ROOT_SPAN_NAME and not key
    reward = span.reward
    about = _span_id(attempt_id, "span", parent) if parent else None
    if reward is not None and about:
        reward = replace(reward, span_id=about)
    return replace(
        span,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        span_id=_span_id(attempt_id, "reward" if reward is not None else "span", key),
        trace_id=digest(attempt_id, size=16),
        parent_id=None if is_root else _span_id(attempt_id, "span", parent),
        reward=reward,
    )


def _span_id(attempt_id: str, kind: str, key: str) -> str:
    return digest([attempt_id, kind, key], size=8)


def own_call(place: str, about: Json, *, request: Json, response: Json) -> ModelCall | None:
    """Return the call in an exported ``agl`` object; ``None`` if it has none.

    Raises:
        DatasetError: The call is damaged.
    """
    record = as_dict(about).get("call")
    if not record:
        return None
    try:
        return call_of_record(record, request=request, response=response)
    except ValueError as error:
        raise _damaged(place, error) from error


def own_reward(place: str, record: Any) -> Reward:
    """Return the reward in an exported ``agl`` object; raises :class:`DatasetError` if it is damaged."""
    try:
        return reward_of_record(record)
    except ValueError as error:
        raise _damaged(place, error) from error


def _damaged(place: str, error: ValueError) -> DatasetError:
    return DatasetError(
        f"{place} has a field agl that agl data export did not write so ({error}), and nothing was imported; export "
        "the runs once more, or remove that field"
    )
