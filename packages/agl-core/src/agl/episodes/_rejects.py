"""Finds the reject reason of each recorded call that cannot be in a row."""

import re
from collections.abc import Mapping, Sequence

from agl import semconv
from agl._actors import Who
from agl.episodes._timeline import is_answered
from agl.errors import ConfigError
from agl.schemas import ModelCall, Record, RejectReason, Span
from agl.schemas._media import media_fault


class Reject(Record, frozen=True, kw_only=True):
    """A reject reason, with details as text."""

    reason: RejectReason
    detail: str


def find_rejects(
    spans: Sequence[Span],
    *,
    attempt_id: str | None,
    agent_match: str | None,
    policy: str | None,
    who: Mapping[str, Who],
    processor: str | None = "",
) -> dict[int, Reject]:
    """The reject reasons of model calls, by the call's index in ``spans``.

    Args:
        spans: The model calls, in order of time.
        attempt_id: The deciding attempt.
        agent_match: Regular expression for the names of the agent and of the nodes and tools within that agent;
            ``None`` selects all calls. It is applied by :func:`re.search`, as in Agent Lightning: ``write|rewrite``
            also selects ``write_query``, and ``^write$`` selects only ``write``. The name of an agent does not select
            the calls of other agents inside it.
        policy: Name of the policy whose calls train; ``None`` for any.
        who: The actors of each call, by span id.
        processor: The processor of the trained model's pictures; ``""`` to reject calls with pictures,
            and ``None`` to accept those of any processor.

    Raises:
        ConfigError: ``agent_match`` is not a regular expression.
    """
    superseded = _superseded(spans)
    pattern = _pattern(agent_match)
    found: dict[int, Reject] = {}
    for index, span in enumerate(spans):
        call = span.call
        if call is None:
            continue
        reject = (
            # In this order: place and time of recording, retries, selection, defects. The first
            # reason found is the one that a person would repair first.
            _outside(span, attempt_id)
            or superseded.get(index)
            or _unselected(call, who[span.span_id], policy, pattern)
            or _unusable(call, processor)
        )
        if reject is not None:
            found[index] = reject
    return found


def _pattern(agent_match: str | None) -> re.Pattern[str] | None:
    try:
        return None if agent_match is None else re.compile(agent_match)
    except re.error as error:
        raise ConfigError(
            f"agent_match = {agent_match!r} is not a regular expression: {error}; "
            "escape special characters with a backslash, or list names as in 'write|rewrite'"
        ) from error


def _outside(span: Span, attempt_id: str | None) -> Reject | None:
    if span.attempt_id != attempt_id:
        return Reject(reason="not_final", detail=f"attempt {span.attempt_id} did not decide the rollout")
    if span.is_late:
        return Reject(reason="late", detail="recorded after the attempt was decided")
    return None


def _superseded(spans: Sequence[Span]) -> dict[int, Reject]:
    """Reject all exchanges of a request except the last complete one; if none is complete, reject none.

    The choices of one exchange have the same request id and retry count, and differ in their index.
    """
    requests = [span.call.request_id for span in spans if span.call is not None and span.call.request_id]
    # The usual case: nothing was retried.
    if len(set(requests)) == len(requests):
        return {}
    exchanges: dict[tuple[str, str], list[int]] = {}
    for index, span in enumerate(spans):
        if span.call is not None and span.call.request_id:
            # Request ids are unique within an attempt only, for a program may choose them.
            exchanges.setdefault((span.attempt_id, span.call.request_id), []).append(index)
    found: dict[int, Reject] = {}
    for members in exchanges.values():
        if len(members) > 1:
            found.update(_replaced_by_retry(spans, members))
    return found


def _replaced_by_retry(spans: Sequence[Span], members: Sequence[int]) -> dict[int, Reject]:
    answered: dict[int, int] = {}
    retry = -1
    for index in members:
        call = spans[index].call
        if call is None or not is_answered(call) or spans[index].is_late:
            continue
        # A later retry replaces the choices of the earlier ones, even if it has fewer.
        if call.retry_count != retry:
            retry, answered = call.retry_count, {}
        answered[call.choice] = index
    if not answered:
        return {}
    kept = spans[next(reversed(answered.values()))].span_id
    winners = set(answered.values())
    detail = f"the client retried the request; call {kept} answered it"
    return {
        index: Reject(reason="superseded", detail=detail)
        for index in members
        if index not in winners and not _is_cut_choice(spans[index].call, retry, answered)
    }


def _is_cut_choice(call: ModelCall | None, retry: int, answered: Mapping[int, int]) -> bool:
    """True if the call is a choice of the winning exchange, and its own answer was cut."""
    return call is not None and call.retry_count == retry and call.choice not in answered


def _unselected(call: ModelCall, who: Who, policy: str | None, pattern: re.Pattern[str] | None) -> Reject | None:
    if call.dialect == "embeddings":
        return Reject(reason="not_selected", detail="an embeddings call samples no tokens")
    if policy is not None and call.policy != policy:
        served = (
            f"policy {call.policy!r}" if call.policy else f"model {call.model!r}, which is not a configured policy,"
        )
        return Reject(reason="not_selected", detail=f"{served} served it, not {policy!r}")
    # A coding agent's calls for titles and summaries get its reward but did not earn it, so they
    # train only if they are selected by name.
    if semconv.HELPER in who.named and not (pattern and pattern.search(semconv.HELPER)):
        detail = f"a helper call of {who.agent!r}, such as one for a title; agents = {semconv.HELPER!r} selects these"
        return Reject(reason="not_selected", detail=detail)
    if pattern is not None and not _matches(pattern, who):
        names = f"agent {who.agent!r}" if who.agent else "a call without an agent"
        return Reject(reason="not_selected", detail=f"agent_match {pattern.pattern!r} does not select {names}")
    return None


def _matches(pattern: re.Pattern[str], who: Who) -> bool:
    # search and not fullmatch, as Agent Lightning's agent_match works.
    return pattern.search(who.agent) is not None or any(pattern.search(name) for name in who.inside)


def _unusable(call: ModelCall, processor: str | None) -> Reject | None:
    if call.error or not 200 <= call.status_code < 400:
        status = f"HTTP status {call.status_code}" if call.status_code else "no response"
        return Reject(reason="error", detail=f"{status}: {call.error}" if call.error else status)
    if not call.is_complete:
        return Reject(reason="incomplete", detail=f"the answer was cut at token {call.response_len}")
    if (call.inputs or call.media) and (detail := _unseeable(call, processor)):
        return Reject(reason="non_token_input", detail=detail)
    if call.ids_missing:
        return Reject(reason="missing_token_ids", detail=call.ids_missing)
    return _badly_packed(call)


def _unseeable(call: ModelCall, processor: str | None) -> str:
    """The reason why a call's pictures and other inputs cannot be trained on; ``""`` if they can."""
    # Placeholder ids without their picture would teach the model to answer images that it was not shown.
    known = {span.digest for span in call.media}
    loose = [each for each in call.inputs if each not in known]
    if loose or processor == "":
        given = loose or call.inputs or [span.digest for span in call.media]
        why = f"; {call.ids_missing}" if processor != "" and call.ids_missing else ""
        if processor != "" and given[0].startswith("http"):
            why = "; list its host in fetch_media of [gateway] params, so that the gateway fetches it"
        return f"{len(given)} inputs are not tokens: {given[0]}{why}"
    if processor is not None and call.processor != processor:
        return f"the pictures went through the processor {call.processor!r}, and rows need {processor!r}"
    fault = media_fault(call.media, call.prompt_len)
    return f"the record has {fault}" if fault else ""


def _badly_packed(call: ModelCall) -> Reject | None:
    """The reject of a call whose packed ids are missing, torn, or do not match the log-probabilities; else ``None``."""
    if not call.prompt_ids:
        return Reject(reason="missing_token_ids", detail="the record has no prompt ids")
    if not call.response_ids:
        return Reject(reason="empty_response", detail="the model sampled no token")
    # A record of a foreign program may hold anything; a row of torn ids would be garbage from there
    # on.
    if len(call.prompt_ids) % 4 or len(call.response_ids) % 4:
        sizes = f"{len(call.prompt_ids)} and {len(call.response_ids)} bytes"
        return Reject(reason="length_mismatch", detail=f"packed ids of {sizes} are not whole int32 numbers")
    if len(call.logprobs) != len(call.response_ids):
        count = len(call.logprobs) // 4
        return Reject(reason="length_mismatch", detail=f"{call.response_len} response ids, {count} log-probabilities")
    return None
