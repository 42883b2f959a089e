"""The views of one rollout: its conversation with a time line, the tokens of its rows, and one span in full."""

import shlex
from pathlib import Path

from msgspec.structs import replace

from agl.contracts import Count, Store
from agl.episodes import Enclosing
from agl.errors import NotFoundError
from agl.schemas import Attempt, MediaSpan, ModelCall, Record, Reward, Rollout, Span, Weights, to_json
from agl_console.reading import NOTE, attempt_of, notes_among, rollout_of
from agl_console.rewards import RewardsView, rewards_view
from agl_console.siblings import Neighbours, Order, reason_of_silence, siblings_of, standing
from agl_console.tokens import (
    RowSummary,
    TokenCell,
    TokensFilter,
    TokensView,
    call_cells,
    media_at,
    sentences_of,
    summary_of,
    tokens_view,
)
from agl_console.vocabulary import FILE
from agl_inspect.records.splits import served_facts
from agl_inspect.rollouts.explanations import explain, explain_training
from agl_inspect.rollouts.span_reader import SpanReader, read_episode
from agl_inspect.rollouts.training import is_saved, training_of, uses_of
from agl_inspect.rollouts.tree import LONGEST, Contents, Node, Text, ends_of, facts_of, kind_of, seconds_of
from agl_inspect.rollouts.turns import Conversation, Turn, training_of_call, transitions_of
from agl_inspect.terminal.query import find_ids

SPANS = 300
"""The most spans on a page."""

_VERSIONS = 20
"""The most versions of weights whose folders are looked at for a tokenizer."""

_COMMAND = 20_000
"""The most characters of a command that a page offers."""

_PAGE_BYTES = 4 << 20
"""Bytes of requests and responses after which a page ends."""


class RolloutFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page.

    Attributes:
        attempt: The attempt's number, or 0 for the rollout's own spans; by default the deciding attempt.
        after: The last ``sequence`` of the previous page.
        by: The order of the rollouts before and after this one.
    """

    attempt: int | None = None
    after: Count = 0
    by: Order = "step"


class RolloutView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A rollout, with a page of the spans of one attempt.

    Attributes:
        algorithm: The algorithm that requested the rollout.
        step: The algorithm's step; ``None`` if the rollout belongs to no step.
        reward: The reward that trains.
        facts: The user and the arm of a served conversation.
        notes: What people noted about the rollout.
        attempt: The number of the attempt whose spans are shown; 0 for the rollout's own spans.
        dev: Shell commands that try the task with ``agl dev``; ``""`` for a very long task.
        turns: The conversation.
        nodes: The spans of the time line.
        standing: How the reward compares with those of the rollout's group, as a sentence.
        neighbours: The rollouts before and after this one; ``None`` if it is the only one.
        seconds: The length of the time axis.
        rows: The rows of its calls.
        trained: How many of the rows' tokens trained, and with which advantage, in sentences.
        why: The text of ``agl why``: the outcome of every call, and its use by steps.
        scoring: Every recorded reward.
        late: True if spans belong to the rollout but to no attempt.
        next: The query of the next page; empty on the last.
    """

    rollout_id: str
    experiment: str
    mode: str
    status: str
    algorithm: str
    step: int | None
    group_id: str
    reward: float | None
    resources: dict[str, str]
    facts: list[str]
    notes: list[str]
    created_at: float
    task: Text
    dev: str
    attempts: list[Attempt]
    attempt: int
    turns: list[Turn]
    nodes: list[Node]
    standing: str
    neighbours: Neighbours | None
    seconds: float
    rows: list[RowSummary]
    trained: str
    why: list[str]
    scoring: RewardsView
    late: bool
    is_finished: bool
    next: dict[str, str]


class SpanView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One span in full: the attributes, all texts, and the tokens of a call.

    Attributes:
        training: What training did with the call, in a sentence.
        raw: The call's request and response as JSON.
        curl: A shell command that sends the request again; ``""`` for other spans and for very long requests.
        weights: The folder of the policy's tokenizer; ``""`` if none is on this machine.
        media: The pictures whose tokens are among the cells.
    """

    rollout_id: str
    attempt: int
    span_id: str
    kind: str
    name: str
    path: list[str]
    seconds: float
    status: str
    message: str
    facts: list[str]
    training: str
    reward: Reward | None
    texts: list[Text]
    attributes: list[Text]
    raw: list[Text]
    curl: str
    weights: str
    cells: list[TokenCell]
    media: list[MediaSpan]


async def rollout_view(store: Store, name: str, chosen: RolloutFilter) -> RolloutView:
    """Read a rollout, given the id, a prefix of the id, or ``latest`` for the newest rollout.

    Raises:
        NotFoundError: The rollout or the attempt does not exist.
    """
    (rollout_id,) = await find_ids(store, [name])
    rollout, attempts = await rollout_of(store, rollout_id)
    number, attempt_id = _chosen(rollout, attempts, chosen.attempt)
    episode, every, scores = await read_episode(store, rollout, attempts)
    page, is_last = await _page(store, rollout_id, attempt_id, chosen.after)
    uses = uses_of(every)
    siblings = await siblings_of(store, rollout)
    group = siblings.rewards(rollout.group_id)
    own = uses if attempt_id == rollout.attempt_id else {}
    talk = Conversation(page, transitions_of(episode, attempt_id), own, reason=reason_of_silence(group))
    for span in talk.order:
        talk.add(span)
    step, algorithm = rollout.metadata.get("step"), rollout.metadata.get("algorithm")
    why = explain(episode, every, scores=scores)
    first, last = ends_of(page)
    rows = [summary_of(row, uses) for row in episode.rows]
    advantages = {use.advantage for use in uses.values() if use.advantage is not None}
    only = advantages.pop() if len(advantages) == 1 else None
    for record in training_of(every):
        why += explain_training(record, is_saved=await is_saved(store, rollout_id, record))
    following = {"attempt": str(number), "after": str(page[-1].sequence)} if not is_last else {}
    return RolloutView(
        rollout_id=rollout_id,
        experiment=rollout.experiment,
        mode=rollout.mode,
        status=rollout.status,
        algorithm=algorithm if isinstance(algorithm, str) else "",
        step=step if isinstance(step, int) else None,
        group_id=rollout.group_id,
        reward=episode.reward,
        resources=rollout.resources,
        facts=served_facts(rollout),
        notes=notes_among(every),
        created_at=rollout.created_at,
        task=Contents().text("task", rollout.task),
        dev=dev_of(rollout),
        attempts=attempts,
        attempt=number,
        turns=talk.turns,
        nodes=talk.nodes,
        standing=standing(episode.reward, group, only) if rollout.mode == "train" else "",
        neighbours=siblings.neighbours(rollout, chosen.by),
        seconds=(last - first) / 1e9,
        rows=rows,
        trained=sentences_of(rows, uses, reason=reason_of_silence(group)),
        why=why,
        scoring=rewards_view(rollout, attempts, every),
        late=any(not span.attempt_id and span.name != NOTE and not training_of([span]) for span in every),
        is_finished=rollout.is_finished,
        next=following,
    )


async def rollout_tokens_view(store: Store, name: str, chosen: TokensFilter) -> TokensView:
    """Read a window of the tokens of a rollout's row."""
    (rollout_id,) = await find_ids(store, [name])
    rollout, attempts = await rollout_of(store, rollout_id)
    episode, every, _ = await read_episode(store, rollout, attempts)
    group = (await siblings_of(store, rollout)).rewards(rollout.group_id)
    view = tokens_view(episode, chosen, uses_of(every), reason=reason_of_silence(group))
    policy = next((call.policy for call in episode.transitions if call.branch == view.row), "")
    return replace(view, weights=await weights_of(store, rollout, policy))


async def span_view(store: Store, name: str, place: str, chosen: RolloutFilter) -> SpanView:
    """Read the span of an attempt whose ``sequence`` is ``place``; raises :class:`NotFoundError` if there is none."""
    sequence = int(place)
    (rollout_id,) = await find_ids(store, [name])
    rollout, attempts = await rollout_of(store, rollout_id)
    number, attempt_id = _chosen(rollout, attempts, chosen.attempt)
    found = await store.spans(rollout_id, attempt_id=attempt_id, after=max(0, sequence - 1), limit=1)
    if not found or found[0].sequence != sequence:
        raise NotFoundError("span", str(sequence), f"attempt {number} of {rollout_id} has no span with this number")
    (span,) = found
    episode, every, _ = await read_episode(store, rollout, attempts)
    own = (call for call in episode.transitions if call.attempt_id == attempt_id)
    call = next((call for call in own if call.span_id == span.span_id), None)
    who = Enclosing([each for each in every if each.attempt_id == span.attempt_id]).who(span)
    use = uses_of(every).get(span.span_id) if attempt_id == rollout.attempt_id else None
    trains = call is not None and not call.reject
    contents = Contents(limit=LONGEST)
    cells = call_cells(span.call, trains=trains, use=use) if span.call else []
    return SpanView(
        rollout_id=rollout_id,
        attempt=number,
        span_id=span.span_id,
        kind=kind_of(span),
        name=span.name,
        path=list(who.path),
        seconds=seconds_of(span),
        status=span.status,
        message=span.status_message,
        facts=facts_of(span),
        training=training_of_call(call, use) if span.call else "",
        reward=span.reward,
        texts=contents.of(span),
        attributes=[contents.text(key, value) for key, value in sorted(span.attributes.items())],
        raw=[contents.text("request", span.call.request), contents.text("response", span.call.response)]
        if span.call
        else [],
        curl=curl_of(span.call) if span.call else "",
        weights=await weights_of(store, rollout, span.call.policy) if span.call else "",
        cells=cells,
        media=media_at(span.call.media, cells) if span.call else [],
    )


def dev_of(rollout: Rollout) -> str:
    """Return shell commands that try a rollout's task with ``agl dev``; ``""`` for a task too long for a terminal."""
    task = to_json(rollout.task).decode()
    tried = "agl dev experiment.toml --tasks 1 --set experiment.train=task.jsonl"
    return f"printf '%s\\n' {shlex.quote(task)} > task.jsonl\n{tried}" if len(task) <= _COMMAND else ""


def curl_of(call: ModelCall) -> str:
    """Return a shell command that sends a call's request again, to the server that the environment names."""
    body = to_json(call.request).decode()
    if len(body) > _COMMAND:
        return ""
    if call.dialect == "messages":
        address, key = "$ANTHROPIC_BASE_URL/v1/messages", "x-api-key: $ANTHROPIC_API_KEY"
    else:
        path = "chat/completions" if call.dialect == "chat" else call.dialect
        address, key = f"$OPENAI_BASE_URL/{path}", "Authorization: Bearer $OPENAI_API_KEY"
    return f'curl "{address}" -H "{key}" -H "Content-Type: application/json" -d {shlex.quote(body)}'


async def weights_of(store: Store, rollout: Rollout, policy: str) -> str:
    """Return the folder of the tokenizer of the weights that a rollout ran with, or of another version of them."""
    if not policy:
        return ""
    version = rollout.resources.get(policy)
    versions = sorted(await store.resources(policy), key=lambda each: each.version == version)[-_VERSIONS:]
    for each in reversed(versions):
        if isinstance(each.resource, Weights) and (Path(each.resource.uri) / FILE).is_file():
            return each.resource.uri
    return ""


def _chosen(rollout: Rollout, attempts: list[Attempt], number: int | None) -> tuple[int, str]:
    """Return the number and id of the attempt whose spans are shown; 0 and ``""`` for the rollout's own spans."""
    attempt = None if number == 0 else attempt_of(rollout, attempts, number)
    return (attempt.number, attempt.attempt_id) if attempt else (0, "")


async def _page(store: Store, rollout_id: str, attempt_id: str, after: int) -> tuple[list[Span], bool]:
    """Read a page of spans; the second value is true if it is the last page."""
    page: list[Span] = []
    size = 0
    async for span in SpanReader(store, rollout_id, attempt_id).behind(after):
        if len(page) >= SPANS or size > _PAGE_BYTES:
            return page, False
        page.append(span)
        size += len(str(span.call.request)) + len(str(span.call.response)) if span.call else 0
    return page, True
