"""Turns an attempt's spans into an episode: every recorded call as a transition, and the rows that train.

There is no recursion and only one sort, so an attempt may have a hundred thousand spans, nested to any depth.
A row is one branch of the call forest as packed arrays: int32 ids, uint8 mask, float32 log-probabilities. The trainer
adds the advantages.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from agl import semconv
from agl._actors import Enclosing, Who
from agl.episodes._agreement import Agreement, Verdict, find_disagreement
from agl.episodes._forest import Decode, build_forest
from agl.episodes._rejects import Reject, find_rejects
from agl.episodes._scores import ScoreOptions, call_rewards, counts, score
from agl.episodes._timeline import Timeline, chronological
from agl.schemas import Attempt, Episode, Record, Reward, Rollout, Row, Sampling, Segment, Span, Transition

_KEPT = Reject(reason="", detail="")
_PLAIN = Sampling()
# Calls with these reasons are not part of the rollout, so rewards do not refer to them. Other
# rejected calls only do not train, and rewards may refer to them.
_NEVER_REWARDED = frozenset({"superseded", "not_final", "late"})


class EpisodeOptions(Record, frozen=True, kw_only=True):
    """The settings by which an episode is built.

    Attributes:
        score: The choice of rewards that train.
        decode: Decodes token ids to text for descriptions of drift, such as a tokenizer's ``decode``; ``None`` to show
            only ids.
        unseen: Whether an attempt's calls train if other calls of the attempt bypassed the gateway.
        unattributed: Whether an attempt's calls train if some recorded calls lie outside all framework spans.
        processor: The processor of the trained model's pictures, see :class:`agl.schemas.ModelCall`; calls whose
            pictures went through another one are rejected. ``""`` rejects all calls with pictures, and ``None`` is for
            readers who only look: it accepts those of any processor.
    """

    score: ScoreOptions = ScoreOptions()
    decode: Decode | None = None
    unseen: Verdict = "drop"
    unattributed: Verdict = "accept"
    processor: str | None = ""


def build_episode(
    rollout: Rollout,
    attempt: Attempt | None,
    spans: Sequence[Span],
    *,
    agent_match: str | None = None,
    policy: str | None = None,
    options: EpisodeOptions | None = None,
) -> Episode:
    """Build an episode from the spans of a rollout; its transitions are in order of time, its rows in branch order.

    Args:
        rollout: The rollout, including its hidden keys.
        attempt: The deciding attempt; ``None`` if no attempt was started. Calls of other attempts are rejected, and
            their rewards do not count.
        spans: The spans of all attempts, in any order. Late calls are rejected; a late reward counts if its source is
            outside the attempt.
        agent_match: Regular expression that selects calls, by :func:`re.search` on the names of the agent and of the
            nodes and tools within the agent; ``None`` for all calls.
        policy: Name of the policy that is trained; ``None`` for all.
        options: See :class:`EpisodeOptions`.

    Raises:
        ConfigError: ``agent_match`` is not a regular expression.
    """
    chosen = options or EpisodeOptions()
    attempt_id = attempt.attempt_id if attempt else None
    agreement = find_disagreement(spans, attempt_id=attempt_id)
    timeline = chronological(spans)
    calls = [span for span in timeline.spans if span.call is not None]
    enclosing = Enclosing(timeline.spans)
    who = {span.span_id: enclosing.who(span) for span in calls}
    rejects = find_rejects(
        calls, attempt_id=attempt_id, agent_match=agent_match, policy=policy, who=who, processor=chosen.processor
    )
    against_all = _unreadable(spans, attempt_id) or _disagreement(agreement, chosen)
    if against_all is not None:
        # A call's own reason comes first: it names what to repair about this call.
        rejects = {i: rejects.get(i, against_all) for i in range(len(calls))}
    own_rewards = _rewards_of_calls(timeline, calls, rejects, enclosing, attempt_id, chosen.score)
    transitions = _transitions(calls, rejects, who, own_rewards, chosen)
    # Credit decides by itself which sources it trusts, and cannot see which rewards are late.
    rewards = admitted_rewards(spans, attempt_id, replace(chosen.score, trust_agent=True))
    admitted = admitted_rewards(spans, attempt_id, chosen.score)
    return Episode(
        rollout=rollout,
        attempt=attempt,
        reward=score(admitted, options=chosen.score).value,
        rewards=tuple(rewards),
        transitions=transitions,
        rows=make_rows(transitions, group_id=rollout.group_id),
        unseen=agreement.unseen,
        unattributed=agreement.unattributed,
        unreadable=_count_unreadable(spans, attempt_id),
    )


def _transitions(
    calls: Sequence[Span],
    rejects: Mapping[int, Reject],
    who: Mapping[str, Who],
    rewards: Mapping[str, float],
    options: EpisodeOptions,
) -> tuple[Transition, ...]:
    """Turn every model call into a transition with its branch or its reject reason, in order of time."""
    kept = [i for i in range(len(calls)) if i not in rejects]
    # Rejected calls are left out of the forest: a call that extends one starts a branch, as if that were no sample.
    forest = build_forest([calls[i] for i in kept], decode=options.decode)
    placed = dict(zip(kept, forest.branch, strict=True))
    drift = {kept[i]: text for i, text in forest.drift.items()}
    turns = _turns(calls, who)
    return tuple(
        _transition(
            span,
            who=who[span.span_id],
            turn=turns[i],
            branch=placed.get(i, -1),
            reward=rewards.get(span.span_id),
            reject=rejects.get(i, _KEPT),
            drift=drift.get(i, ""),
        )
        for i, span in enumerate(calls)
    )


def _disagreement(found: Agreement, options: EpisodeOptions) -> Reject | None:
    """The reject that applies to all calls of an incompletely recorded attempt; ``None`` if its calls may train."""
    # A tool's own model is not a policy of the experiment: what it said is in the tool's result.
    missed = [call for call in found.unseen if not call.is_foreign]
    if missed and options.unseen == "drop":
        detail = f"model calls of the attempt that were not recorded: {len(missed)}, such as by {missed[0].client}"
        return Reject(reason="unseen_calls", detail=detail)
    if found.unattributed and options.unattributed == "drop":
        detail = f"recorded calls outside the framework's spans: {len(found.unattributed)}"
        return Reject(reason="unattributed", detail=detail)
    return None


def _unreadable(spans: Sequence[Span], attempt_id: str | None) -> Reject | None:
    count = _count_unreadable(spans, attempt_id)
    return Reject(reason="unreadable", detail=f"damaged spans of the attempt: {count}") if count else None


def _count_unreadable(spans: Sequence[Span], attempt_id: str | None) -> int:
    """The number of spans of the deciding attempt that stand for damaged ones."""
    return sum(1 for span in spans if span.name == semconv.UNREADABLE and span.attempt_id == attempt_id)


def recorded_rewards(spans: Sequence[Span], attempt_id: str | None) -> list[Span]:
    """The deciding attempt's reward spans in order of time, from every source."""
    own = [span for span in spans if span.reward is not None and span.attempt_id == attempt_id]
    return chronological(own).spans


def admitted_rewards(spans: Sequence[Span], attempt_id: str | None, options: ScoreOptions) -> list[Reward]:
    """The rewards of the deciding attempt that count under ``options``, in order of time.

    An attempt with an unreadable span has none, because the span might be the reward that counts.
    """
    if _count_unreadable(spans, attempt_id):
        return []
    found = recorded_rewards(spans, attempt_id)
    return [span.reward for span in found if span.reward is not None and counts(span, options)]


def _rewards_of_calls(
    timeline: Timeline,
    calls: Sequence[Span],
    rejects: Mapping[int, Reject],
    enclosing: Enclosing,
    attempt_id: str | None,
    options: ScoreOptions,
) -> dict[str, float]:
    own = [span for span in timeline.spans if span.attempt_id == attempt_id]
    if not any(span.reward is not None and span.reward.scope != "rollout" for span in own):
        return {}
    candidates = [span for i, span in enumerate(calls) if i not in rejects or rejects[i].reason not in _NEVER_REWARDED]
    return call_rewards(timeline._replace(spans=own), candidates, enclosing=enclosing, options=options)


def _turns(calls: Sequence[Span], who: Mapping[str, Who]) -> list[int]:
    """Each call's position among its agent's calls; retries and choices of one request share a turn."""
    requests: dict[tuple[str, str], dict[str, int]] = {}
    turns: list[int] = []
    for span in calls:
        # A turn is one decision of the agent; retries and the choices of n > 1 are samples of one
        # decision.
        own = requests.setdefault((span.attempt_id, who[span.span_id].agent), {})
        request = span.call.request_id if span.call else ""
        turns.append(own.setdefault(request or span.span_id, len(own)))
    return turns


def _transition(
    span: Span, *, who: Who, turn: int, branch: int, reward: float | None, reject: Reject, drift: str
) -> Transition:
    call = span.call
    assert call is not None  # noqa: S101  # the caller keeps model calls only
    sampling = call.sampling
    return Transition(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        span_id=span.span_id,
        agent=who.agent,
        path=who.path,
        turn=turn,
        branch=branch,
        start=-1 if reject.reason else len(call.prompt_ids) // 4,
        policy=call.policy,
        model_version=call.model_version,
        prompt_ids=call.prompt_ids,
        response_ids=call.response_ids,
        logprobs=call.logprobs,
        reward=reward,
        reject=reject.reason,
        detail=reject.detail or drift,
        # The default of OpenAI's API.
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        is_distribution_changed=sampling != _PLAIN and sampling.changes_distribution,
        finish_reason=call.finish_reason,
        media=call.media,
        processor=call.processor,
    )


def make_rows(transitions: Sequence[Transition], *, group_id: str) -> tuple[Row, ...]:
    """Make one row per branch of an attempt's transitions, in order of the branches.

    The row's tokens are the prompt and response of the branch's last call, which contain those of every earlier call as
    a prefix. The mask is 1 for the branch's own responses. A prefix that comes from another branch trains in that
    branch's row and has mask 0 in this one, so that each sampled token trains in exactly one row.
    """
    # Transitions are in order of time, and so are the calls of a branch.
    branches: dict[int, list[Transition]] = {}
    for transition in transitions:
        if not transition.reject:
            branches.setdefault(transition.branch, []).append(transition)
    return tuple(_row(branches[branch], group_id) for branch in sorted(branches))


def _row(calls: Sequence[Transition], group_id: str) -> Row:
    last = calls[-1]
    ids = last.prompt_ids + last.response_ids
    # mask: uint8 [T]; logprobs: float32 [T] as bytes, 4 each.
    mask, logprobs = bytearray(len(ids) // 4), bytearray(len(ids))
    segments: list[Segment] = []
    # Only the branch's own answers: a shared prefix has its mask in the branch that sampled it, so
    # that each sampled token has weight in exactly one row.
    for call in calls:
        start, stop = call.start, call.start + len(call.response_ids) // 4
        mask[start:stop] = b"\x01" * (stop - start)
        logprobs[start * 4 : stop * 4] = call.logprobs
        segments.append(
            Segment(start=start, stop=stop, span_id=call.span_id, agent=call.agent, model_version=call.model_version)
        )
    return Row(
        rollout_id=last.rollout_id,
        attempt_id=last.attempt_id,
        group_id=group_id,
        branch=last.branch,
        ids=ids,
        mask=bytes(mask),
        logprobs=bytes(logprobs),
        segments=tuple(segments),
        media=last.media,
        processor=last.processor,
    )
