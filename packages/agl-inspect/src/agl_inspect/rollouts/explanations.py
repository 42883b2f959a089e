"""Explains the outcome of every recorded call, for ``agl why``."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, cast

from agl import semconv
from agl.contracts import REDACTED, CallUse
from agl.episodes import ScoreOptions, admitted_rewards, recorded_rewards, score
from agl.hints import count_of
from agl.schemas import Episode, LooseCall, RejectReason, Reward, Span, Transition
from agl_inspect.rollouts.training import TrainingRecord, token_values

_MOST_TOKENS = 2**53
"""Counts of tokens above this are not believed, and do not fit every store's integers."""

NEXT_STEP: dict[RejectReason, str] = {
    "error": "The backend answered with an error or not at all: look at its log; a client that retries is recorded "
    "as superseded.",
    "incomplete": "The answer was cut: look for a client time limit, a cancelled task, or a backend that was stopped.",
    "superseded": "Nothing to do: the retry that answered is what trains.",
    "missing_token_ids": "Ask the backend for token ids (vLLM: return_token_ids) and send the calls through the "
    "gateway; a model that returns none cannot be trained on tokens.",
    "length_mismatch": "The backend dropped tokens or log-probabilities, as streaming with a tool parser does in some "
    "releases: update it, or switch streaming off.",
    "empty_response": "The model ended at once: look at max_tokens, the stop strings and the chat template.",
    "non_token_input": (
        "Pictures train with the algorithms of agl-algo-torch (tinker and verl train on text only) and a model that "
        "reads them, if the record holds them: send them as data URLs, or set fetch_media in [gateway] params. Audio "
        "and files do not train."
    ),
    "not_selected": "If it should train, change agent_match or the policy that the algorithm tunes.",
    "unseen_calls": "Point that client at the gateway, with the base URL and the key of the resource, or let it call "
    'through httpx; if these calls need no record, set [experiment] unseen_calls = "accept".',
    "unattributed": "Install the tracer of the calling framework, or name the calls: with agl.operation(...).",
    "late": "The call ended after its attempt did: await it in the agent, or raise the time limit.",
    "unreadable": "Another version of agl wrote it, or the store is damaged: open the store with that version, or look "
    "at the disk and restore the rollout from an archive or a backup.",
    "not_final": "Nothing to do: only the attempt that decided the rollout trains.",
    "no_reward": "Return or emit a reward, add a reward emitter, or declare what a missing one means.",
    "too_long": "Raise the token limit of the algorithm, or shorten the prompt.",
    "stale": "The weights moved on too far since it was sampled: allow more staleness, or collect less ahead.",
}
"""Advice by reject reason, for calls that are in no row."""

_NO_CALLS = (
    "No model call was recorded. Expected: calls of an OpenAI- or Anthropic-compatible client made while the agent "
    "ran. Check that the agent called a model at all; that its client uses the base URL of the resource "
    "(llm.get_base_url(...)) or OPENAI_BASE_URL, with the attempt's key; that a client other than httpx, or one in "
    "another process, got both; and that the gateway and the wire tracer are switched on."
)

_DRIFT = (
    "drift: exact ids train, so a prompt that differs from the sampled ids starts a new row. Common causes: "
    "a chat template that drops reasoning from earlier turns, tool calls printed anew, text tokenised again."
)


_WITHOUT_IDS = (
    "The model gave no token ids. Measuring, prompt search and export need none; to train weights, serve the model "
    "with agl's torch policy or vLLM, and send the calls through the gateway."
)

_REDACTED = (
    "A redactor changed the call before it was recorded, and token ids would reveal the original texts. Measuring, "
    "prompt search and export need none; to train weights, record the calls without a redactor."
)

_IMPORTED_WITHOUT_IDS = (
    "The run was imported, and its source has the text of these calls, not their token ids. Text feeds sft and dpo "
    "(agl data export writes their data), prompt search and rewards, not grpo or another algorithm that trains on "
    "sampled tokens."
)


def explain(episode: Episode, spans: Sequence[Span], *, scores: ScoreOptions | None = None) -> list[str]:
    """Explain an episode in lines: the outcome, each call with its row or reject reason, and next steps.

    ``spans`` and ``scores`` must be the ones from which the episode was built. Each next step appears only once.
    """
    lines = [_outcome(episode), *_reward(episode, spans, scores or ScoreOptions())]
    lines += [
        f"recorded reward {reward_text(reward)}"
        for reward in episode.rewards
        if reward.name or reward.dimensions or reward.feedback or reward.span_id
    ]
    lines += _agreement(episode)
    if not episode.transitions:
        damaged = sum(span.name == semconv.UNREADABLE for span in spans)
        unread = f"{count_of(damaged, 'span')} cannot be read. {NEXT_STEP['unreadable']}"
        return [*lines, unread if damaged else _NO_CALLS]
    recorded = {span.span_id: span for span in spans if span.call is not None}
    lines.append(_summary(episode))
    is_without_ids = _is_without_ids(episode)
    lines.extend(_call(call, recorded.get(call.span_id), is_without_ids=is_without_ids) for call in episode.transitions)
    reasons = {call.reject for call in episode.transitions}
    steps = NEXT_STEP
    if "imported" in episode.rollout.metadata:
        steps = {**NEXT_STEP, "missing_token_ids": _IMPORTED_WITHOUT_IDS}
    elif any(call.detail == REDACTED for call in episode.transitions):
        steps = {**NEXT_STEP, "missing_token_ids": _REDACTED}
    elif is_without_ids:
        steps = {**NEXT_STEP, "missing_token_ids": _WITHOUT_IDS}
    lines.extend(f"{reason}: {step}" for reason, step in steps.items() if reason in reasons)
    if any(call.detail and not call.reject for call in episode.transitions):
        lines.append(_DRIFT)
    return lines


def explain_training(record: TrainingRecord, *, is_saved: bool = True) -> list[str]:
    """Explain what a step did with each call of a rollout: credit, advantage and row, or why it did not train.

    ``is_saved`` is false for a step that did not end, for example because its process was killed.
    """
    name = f"{record.algorithm}, step {record.step}" if record.step else record.algorithm
    if record.note:
        return [f"{name}: left out before training, {record.note}{_LEFT_OUT.get(record.note, '')}"]
    trained = sum(call.row >= 0 for call in record.calls)
    notes = {call.note for call in record.calls if call.row >= 0}
    common = f"; {notes.pop()}" if len(notes) == 1 and notes != {""} else ""
    ending = "" if is_saved else "; the step was not saved, and is repeated when the run is resumed"
    calls = f"{trained} of {count_of(len(record.calls), 'call')}"
    said = f"trained on {calls}"
    if trained and record.is_silent:
        said = f"{calls} could train, none changed the model"
    lines = [f"{name}: {said}{common}{ending}"]
    return lines + [f"{name}, call {_use(call, hides_note=bool(common))}" for call in record.calls]


_LEFT_OUT = {
    "failed": ': the attempt failed; [experiment] failed = "penalise" would train on it with the penalty',
    "no reward": ': it has no reward; [experiment] missing_reward = "penalise" would train on it with the penalty',
}


def _use(call: CallUse, *, hides_note: bool) -> str:
    credit = f"credit {_number(call.credit)}" if call.credit is not None else ""
    if call.row < 0:
        return ", ".join(filter(None, (f"{call.span_id}: did not train: {call.note}", credit)))
    advantage = f"advantage {_number(call.advantage)}" if call.advantage is not None else ""
    tokens = [_spread(call, "advantage"), _mean_entropy(call)]
    parts = (f"{call.span_id}: row {call.row}", credit, advantage, *tokens, "" if hides_note else call.note)
    return ", ".join(filter(None, parts))


def _spread(call: CallUse, name: str) -> str:
    """Return the range of a value over a call's tokens as text; ``""`` if the tokens have no such value."""
    values = _known(call, name)
    return f"{name} of its tokens from {_number(min(values))} to {_number(max(values))}" if values else ""


def _mean_entropy(call: CallUse) -> str:
    values = _known(call, "entropy")
    return f"mean entropy {_number(fmean(values))}" if values else ""


def _known(call: CallUse, name: str) -> list[float]:
    return [value for value in token_values(call, name) if math.isfinite(value)]


def _is_without_ids(episode: Episode) -> bool:
    """Return true if no call is in a row and some calls lack token ids.

    The model then returns no token ids at all, which matters only for the training of weights.
    """
    reasons = [call.reject for call in episode.transitions]
    return "missing_token_ids" in reasons and "" not in reasons


def reward_text(reward: Reward) -> str:
    """Describe a reward: its name, value, parts with weights, source, the call that it is about, and its feedback."""
    parts = ", ".join(
        f"{name} {_number(value)}{f' weighing {reward.weights[name]:g}' if name in reward.weights else ''}"
        for name, value in reward.dimensions.items()
    )
    name = f"{reward.name!r} " if reward.name else ""
    about = f" about {reward.scope} {reward.span_id or ''}".rstrip() if reward.scope != "rollout" else ""
    words = f"; feedback: {reward.feedback}" if reward.feedback else ""
    value = f"{_number(reward.value)} ({parts})" if parts else _number(reward.value)
    return f"{name}{value} by {reward.source}{about}{words}"


def _outcome(episode: Episode) -> str:
    rollout, attempt = episode.rollout, episode.attempt
    if attempt is None:
        return f"rollout {rollout.rollout_id}: {rollout.status}; no attempt was started"
    line = f"rollout {rollout.rollout_id}: {rollout.status}; attempt {attempt.number} {attempt.status}"
    return f"{line}: {attempt.error.type}: {attempt.error.message}" if attempt.error else line


def _reward(episode: Episode, spans: Sequence[Span], options: ScoreOptions) -> list[str]:
    """Return lines about the reward that trains, and about recorded rewards that do not count."""
    attempt_id = episode.attempt.attempt_id if episode.attempt else None
    if damaged := episode.unreadable:
        return [f"no reward: {count_of(damaged, 'span')} of the attempt cannot be read. {NEXT_STEP['unreadable']}"]
    admitted = admitted_rewards(spans, attempt_id, options)
    lines = [f"reward {_number(episode.reward)}: {score(admitted, options=options).note}"]
    recorded = recorded_rewards(spans, attempt_id)
    gold = [span.reward for span in recorded if span.reward is not None and span.reward.is_gold]
    lines += [f"gold reward {_number(one.value)}: it only measures and does not train" for one in gold]
    recorded = [span for span in recorded if span.reward not in gold]
    untrusted = sum(1 for span in recorded if span.reward is not None and span.reward.source == "agent")
    if untrusted and not options.trust_agent:
        lines.append(
            f"{count_of(untrusted, 'reward')} came with the agent's own token and {_do(untrusted)} not count; "
            "let an evaluator compute them, or trust the agent in the experiment"
        )
    own_late = len(recorded) - len(admitted) - (0 if options.trust_agent else untrusted)
    if own_late:
        late = f"{count_of(own_late, 'reward')} {'was' if own_late == 1 else 'were'} reported by the attempt"
        lines.append(f"{late} after it was decided and {_do(own_late)} not count")
    return lines


def _do(count: int) -> str:
    return "does" if count == 1 else "do"


def _agreement(episode: Episode) -> list[str]:
    """Return a line for each call that was reported but not recorded, or recorded outside of the tracer's spans."""
    lines = [
        f"unseen: {_loose(call)} made a call that was not recorded; span {call.span_id} has the known facts"
        for call in episode.unseen
    ]
    return lines + [
        f"unattributed: {_loose(call)} made call {call.span_id} outside of the framework's spans"
        for call in episode.unattributed
    ]


def _loose(call: LooseCall) -> str:
    who = f"agent {call.agent!r}" if call.agent else "no agent"
    return f"{call.client} ({who}{f', {call.model}' if call.model else ''})"


def _summary(episode: Episode) -> str:
    rejected = sum(1 for call in episode.transitions if call.reject)
    drifted = sum(1 for call in episode.transitions if call.detail and not call.reject)
    tokens = sum(row.mask.count(1) for row in episode.rows)
    if _is_without_ids(episode):
        other = sum(1 for call in episode.transitions if call.reject != "missing_token_ids")
        return f"{count_of(rejected - other, 'call')} recorded without token ids, {other or 'none'} rejected"
    calls, rows = count_of(len(episode.transitions), "call"), count_of(len(episode.rows), "row")
    # What of this trains depends on the step, which reports it by itself.
    line = f"{calls} recorded, {rejected} rejected; {rows} with {count_of(tokens, 'sampled token')}"
    if episode.rollout.mode != "train":
        line += f", which do not train because the rollout's mode is {episode.rollout.mode}"
    return f"{line}; {count_of(drifted, 'prompt')} drifted from what was sampled" if drifted else line


def token_counts(span: Span) -> str:
    """Return the token counts of a call's prompt and response as text; ``""`` if both are unknown.

    Prompt tokens that a provider read from its cache are named, because they cost less.
    """
    prompt, response = tokens_of(span)
    cached = cached_tokens_of(span)
    return f"{prompt}{f' ({cached} cached)' if cached else ''} + {response} tokens" if prompt or response else ""


def _sampling(span: Span) -> list[tuple[str, list[str]]]:
    """Return the sampling parameters of a request that were overridden, and those that were kept, with words for both.

    A policy in training samples from its full distribution.
    """
    names = {"sampled without": semconv.SAMPLING_OVERRIDDEN, "sampled with": semconv.SAMPLING_KEPT}
    return [(word, cast("list[str]", span.attributes.get(name, []))) for word, name in names.items()]


def call_facts(span: Span) -> list[str]:
    """Return short texts about a call: policy or model, tokens, finish reason, version, sampling, and problems."""
    call = span.call
    if call is None:
        return []
    facts = [
        call.policy or call.model,
        token_counts(span),
        "no token ids" if call.ids_missing else "",
        "cut off at the token limit" if call.is_truncated else call.finish_reason,
        f"version {call.model_version}" if call.model_version else "",
        *(f"{word} {' and '.join(names)}" for word, names in _sampling(span) if names),
        "" if call.is_complete else "cut",
        f"ERROR {call.status_code or ''} {call.error}" if call.error else "",
    ]
    return [fact for fact in facts if fact]


def tokens_of(span: Span) -> tuple[int, int]:
    """Return the token counts of a call's prompt and response, 0 if unknown.

    The token ids are counted; without token ids, the numbers that the backend reported are returned.
    """
    if span.call is None:
        return 0, 0
    prompt = span.call.prompt_len or _count(span.attributes.get(semconv.INPUT_TOKENS))
    response = span.call.response_len or _count(span.attributes.get(semconv.OUTPUT_TOKENS))
    return prompt, response


def cached_tokens_of(span: Span) -> int:
    """Return how many tokens of a call's prompt the provider read from its cache, 0 if unknown; they cost less."""
    return _count(span.attributes.get(semconv.CACHE_READ_TOKENS))


def _count(given: Any) -> int:
    """Return ``given`` if it is a plausible number of tokens, else 0; any program may have written it."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return int(given) if is_number and 0 <= given <= _MOST_TOKENS else 0


def _call(call: Transition, span: Span | None, *, is_without_ids: bool) -> str:
    who = f"agent {call.agent!r}" if call.agent else "no agent"
    tokens = (token_counts(span) if span else "") or "no token counts"
    served = call.policy or (span.call.model if span and span.call else "")
    head = f"call {call.span_id} ({who}, turn {call.turn}, {served}, {tokens})"
    own = f", own reward {_number(call.reward)}" if call.reward is not None else ""
    if call.reject == "missing_token_ids" and is_without_ids:
        return f"{head}: recorded without token ids{own}"
    if call.reject:
        return f"{head}: rejected, {call.reject}: {call.detail}"
    line = f"{head}: row {call.branch} at {call.start}{own}"
    return f"{line}; {call.detail}" if call.detail else line


def _number(value: float | None) -> str:
    return "None" if value is None else f"{value:g}"
