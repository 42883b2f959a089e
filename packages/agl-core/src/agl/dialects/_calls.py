"""Turns an exchange into model calls: one per sampled choice, with tokens or the reason why they are missing."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from agl._redact import redact
from agl.dialects import _chat as chat
from agl.dialects import _messages as messages
from agl.dialects import _responses as responses
from agl.dialects._exchange import Answer, Choice, Exchange
from agl.dialects._foreign import as_dict
from agl.dialects._request import sampling_of
from agl.schemas import Dialect, Json, MediaSpan, ModelCall, pack_floats, pack_ids
from agl.schemas._media import media_fault

_READERS = {
    "chat": (chat.read_body, chat.read_stream),
    "completions": (partial(chat.read_body, content_key="text"), partial(chat.read_stream, content_key="text")),
    "responses": (responses.read_body, responses.read_stream),
    "messages": (messages.read_body, messages.read_stream),
}

# These reasons are stored with the call and shown by `agl show --why`, so they say what to do.
NOT_ASKED = "token ids were not asked for: the policy is not in training"
NO_IDS = (
    "the backend returned no token ids although they were requested; serve the model with vLLM >= 0.10.2, with "
    "SGLang, or with agl's own policy server"
)
NO_IDS_IN_MESSAGES = (
    "the backend returned no token ids: the Anthropic messages format has none; let the agent call "
    "/v1/chat/completions, or use agl's own policy server"
)
_MAX_ERROR = 2000


def calls_of(
    exchange: Exchange, *, policy: str = "", model_version: str = "", want_ids: bool = True
) -> list[ModelCall]:
    """The model calls of one exchange; no answer of a backend makes it raise.

    Args:
        exchange: A request and its answer.
        policy: Name of the policy that served the request.
        model_version: The version of the weights, used if the answer does not name one.
        want_ids: Whether token ids were requested; ``ids_missing`` gives the reason accordingly.

    Returns:
        One call per choice, sorted by index, or a single call without an answer. ``ids_missing`` is set if ids or
        log-probabilities are absent, or if their numbers differ (then both are kept).
    """
    dialect = exchange.request.dialect
    answer = _embeddings(exchange) if dialect == "embeddings" else _answer(dialect, exchange)
    base = _base(exchange, answer)
    base = msgspec.structs.replace(base, policy=policy, model_version=answer.model_version or model_version)
    if not answer.choices:
        why = "embeddings sample no tokens" if dialect == "embeddings" else f"no answer: {base.error}"
        return [msgspec.structs.replace(base, ids_missing=why)]
    return [_call(base, answer, choice, want_ids=want_ids) for choice in answer.choices]


def _answer(dialect: Dialect, exchange: Exchange) -> Answer:
    if exchange.status >= 400 or exchange.status == 0:
        return Answer(error=_http_error(exchange))
    read_body, read_stream = _READERS[dialect]
    read = read_stream if exchange.is_streamed else read_body
    try:
        answer = read(exchange.response)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Answer(error=_unreadable(exchange, error))
    # A 200 whose body has no choice, as proxies send it that time out; kept as a failed call,
    # because the agent saw it.
    if not answer.choices and not answer.error:
        return Answer(error=_unreadable(exchange, None), model_version=answer.model_version)
    return answer


def _embeddings(exchange: Exchange) -> Answer:
    is_error = exchange.status >= 400 or exchange.status == 0
    return Answer(error=_http_error(exchange) if is_error else "")


def _unreadable(exchange: Exchange, error: Exception | None) -> str:
    size = len(exchange.response)
    if not size:
        return exchange.error or "the backend sent an empty body"
    if not exchange.is_complete:
        return exchange.error or f"the answer was cut after {size} bytes"
    start = exchange.response[:120].decode("utf-8", "replace")
    return f"the answer is not what the API promises ({error or 'it holds no choice'}); it starts with {start!r}"


def _http_error(exchange: Exchange) -> str:
    body = _object(exchange.response)
    found = chat.error_text(body.get("error")) or chat.error_text(body.get("message") or body.get("detail"))
    text = found or exchange.response[:_MAX_ERROR].decode("utf-8", "replace")
    status = f"HTTP {exchange.status}" if exchange.status else "no response"
    return redact(f"{status}: {text or exchange.error or 'no message'}"[:_MAX_ERROR])


def _base(exchange: Exchange, answer: Answer) -> ModelCall:
    """A call with the fields that all choices of an exchange share."""
    dialect, given = exchange.request.dialect, exchange.request.to_dict() or {}
    request, inputs, _ = exchange.request.stored()
    # A bool, which is an int in Python, and any other value count as 1; backends refuse them.
    asked = given.get("n")
    return ModelCall(
        request_id=exchange.request_id,
        dialect=dialect,
        model=exchange.request.model,
        request=request,
        response=_plain_response(exchange, dialect),
        sampling=sampling_of(given),
        choices=asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0 else 1,
        retry_count=exchange.retry_count,
        status_code=exchange.status,
        is_streamed=exchange.is_streamed,
        is_complete=exchange.is_complete and (bool(answer.choices) or dialect == "embeddings"),
        latency_s=exchange.latency_s,
        first_token_s=exchange.first_token_s,
        inputs=inputs,
        error=answer.error or ("" if _is_whole(exchange, answer.choices) else exchange.error),
    )


def _is_whole(exchange: Exchange, choices: Sequence[Choice]) -> bool:
    """True if the end of every choice of a stream was seen, even if the connection broke afterwards.

    Clients hang up after they read the last event, which may be before the end of the body.
    """
    return exchange.is_streamed and bool(choices) and all(choice.is_finished for choice in choices)


def _plain_response(exchange: Exchange, dialect: Dialect) -> Json:
    """The response to record if an answer has no choices: an error's JSON, or an embedding without its vectors."""
    if exchange.status < 400 and dialect != "embeddings":
        return None
    # Errors of providers repeat a part of the key that they refused.
    body = _object(redact(exchange.response.decode("utf-8", "replace")).encode())
    return {key: value for key, value in body.items() if key != "data"} if body else None


def _object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``; empty if ``data`` is not a JSON object."""
    try:
        return as_dict(msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _call(base: ModelCall, answer: Answer, choice: Choice, *, want_ids: bool) -> ModelCall:
    prompt_ids, response_ids, problem = _pack(choice)
    logprobs, logprob_problem = _pack_logprobs(choice.logprobs or ())
    media, processor, media_problem = _media(answer, len(prompt_ids) // 4) if answer.prompt_media else ((), "", "")
    problem = problem or logprob_problem or _missing(base.dialect, choice, want_ids=want_ids) or media_problem
    # A stream may be cut after some choices are complete; each choice answers for itself.
    is_complete = choice.is_finished if base.is_streamed else base.is_complete
    cut = "" if is_complete else "the stream ended before the answer did"
    return msgspec.structs.replace(
        base,
        response=choice.response,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        logprobs=logprobs,
        ids_missing=problem,
        media=media,
        processor=processor,
        finish_reason=choice.finish_reason,
        choice=choice.index,
        is_complete=is_complete,
        error=base.error or cut,
    )


def _media(answer: Answer, tokens: int) -> tuple[tuple[MediaSpan, ...], str, str]:
    """The pictures in a prompt, their processor, and the reason why they cannot be read or ``""``."""
    try:
        media = msgspec.convert(answer.prompt_media, tuple[MediaSpan, ...])
        processor = msgspec.convert(answer.processor, str)
    except msgspec.ValidationError as error:
        return (), "", f"the backend's prompt_media or processor has another form: {error}"
    fault = media_fault(media, tokens)
    return ((), "", f"the backend's prompt_media has {fault}") if fault else (media, processor, "")


def _pack(choice: Choice) -> tuple[bytes, bytes, str]:
    try:
        return pack_ids(choice.prompt_ids or ()), pack_ids(choice.response_ids or ()), ""
    except ValueError as error:
        return b"", b"", f"the backend's token ids are not 32-bit integers: {error}"


def _pack_logprobs(values: Sequence[float | None]) -> tuple[bytes, str]:
    try:
        return pack_floats(values), ""  # pyright: ignore[reportArgumentType]  # None is refused in the next line
    except ValueError:
        return b"", f"the backend's log-probabilities are not all numbers ({len(values)} values)"


def _missing(dialect: Dialect, choice: Choice, *, want_ids: bool) -> str:
    """The reason why the tokens of a choice cannot be trained on; ``""`` if they can."""
    if choice.response_ids is None and choice.prompt_ids is None:
        # Named before what is missing: without this reason a frozen model's calls would look like a
        # defect of its backend.
        if not want_ids:
            return NOT_ASKED
        return NO_IDS_IN_MESSAGES if dialect == "messages" else NO_IDS
    if choice.response_ids is None:
        return "the backend returned the prompt's token ids but not the response's"
    if not choice.prompt_ids:
        return "the backend returned the response's token ids but not the prompt's"
    if choice.logprobs is None and choice.response_ids:
        return "the backend returned token ids without log-probabilities"
    # The Responses API of vLLM leaves out those of tool calls and marker tokens. A row with shifted
    # ones would train on the wrong ratios, so the call is rejected rather than padded.
    given, expected = len(choice.logprobs or ()), len(choice.response_ids)
    if given != expected:
        return f"{given} log-probabilities for {expected} response tokens"
    return ""
