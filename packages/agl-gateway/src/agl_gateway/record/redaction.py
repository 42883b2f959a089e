"""Redacts the texts of spans before they reach the spool or the store; clients and models get the original texts.

A redactor is a plugin. :class:`Patterns` is the built-in one: it finds what regular expressions can find.

Names of models, agents and tools, and ids stay as they are, since calls are joined and selected by them. Keys of JSON
objects stay too.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from agl import PluginManager, semconv
from agl.contracts import REDACTED, BlobRedactor, Redactor
from agl.dialects import media_type_of
from agl.schemas import Blob, Json, ModelCall, Outcome, Span, digest_of
from agl.tracing import redact
from agl_gateway.wire.problems import Problem

T = TypeVar("T")
U = TypeVar("U")

_FIELDS = frozenset({"id", "model", "object"})
"""Top-level fields of requests and responses that stay as they are."""

_ATTRIBUTES = frozenset(
    {
        *(semconv.OPERATION, semconv.PROVIDER, semconv.WORKFLOW_NAME, semconv.REQUEST_MODEL, semconv.RESPONSE_MODEL),
        *(semconv.AGENT_NAME, semconv.AGENT_ID, semconv.NODE, semconv.ROLE, semconv.CALLER, semconv.TOOL_NAME),
        *(semconv.RESPONSE_ID, semconv.TOOL_CALL_ID, semconv.FRAMEWORK_SPAN_ID, semconv.SPLIT_ARM),
    }
)
"""Attributes of spans that stay as they are."""


class Redaction:
    """Redacts spans; without a redactor it returns them as they are."""

    def __init__(self, redactor: Redactor | None = None) -> None:
        self._redactor = redactor

    async def of(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Return redacted copies of the spans.

        Raises:
            Problem: The redactor raised; the message has no text that it got.
        """
        return await self._each(spans, _redacted)

    async def of_outcomes(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Return redacted copies of the outcomes; raises as :meth:`of`."""
        return await self._each(outcomes, _redacted_outcome)

    async def of_blob(self, blob: Blob) -> Blob | None:
        """Return a payload as it may be stored, or ``None`` if it may not be stored; raises as :meth:`of`.

        A redactor that reads texts only cannot tell what is in a picture, so no payload is stored.
        """
        (found,) = await self._each([blob], _redacted_blob)
        return found

    async def _each(self, values: Sequence[T], redacted: Callable[[T, Redactor], U]) -> Sequence[T | U]:
        redactor = self._redactor
        if redactor is None:
            return values
        try:  # in a thread, because a redactor may run a model
            return await asyncio.to_thread(lambda: [redacted(value, redactor) for value in values])
        except Exception as error:  # noqa: BLE001  # isolation: a plugin's message may quote the text
            name, kind = type(redactor).__name__, type(error).__name__
            raise Problem(
                500,
                f"the redactor {name} raised {kind}, so nothing was recorded; correct it, or serve without it",
            ).with_traceback(error.__traceback__) from None


def redaction_of(name: str, manager: PluginManager) -> Redaction:
    """Return the redaction by the redactor with this name; ``""`` redacts nothing."""
    return Redaction(manager.build(manager.redactor(name)) if name else None)


def _redacted(span: Span, redactor: Redactor) -> Span:
    replace, texts = msgspec.structs.replace, _Texts(redactor)
    return replace(
        span,
        name=texts.of(span.name),
        call=None if span.call is None else _redacted_call(span.call, texts),
        reward=span.reward and replace(span.reward, feedback=texts.of(span.reward.feedback)),
        attributes=texts.fields(span.attributes, without=_ATTRIBUTES),
        events=tuple(
            replace(event, name=texts.of(event.name), attributes=texts.fields(event.attributes))
            for event in span.events
        ),
        status_message=texts.of(span.status_message),
    )


def _redacted_outcome(outcome: Outcome, redactor: Redactor) -> Outcome:
    replace, texts, error = msgspec.structs.replace, _Texts(redactor), outcome.error
    return replace(
        outcome,
        error=error and replace(error, message=texts.of(error.message), traceback=texts.of(error.traceback)),
        spans=tuple(_redacted(span, redactor) for span in outcome.spans),
    )


def _redacted_call(call: ModelCall, texts: "_Texts") -> ModelCall:
    """Return a copy with redacted bodies; without token ids if that changed a body."""
    request, response = (texts.of(body, without=_FIELDS) for body in (call.request, call.response))
    inputs = tuple(each if each.startswith("sha256:") else texts.of(each) for each in call.inputs)
    found = msgspec.structs.replace(call, request=request, response=response, error=texts.of(call.error), inputs=inputs)
    if (request, response) == (call.request, call.response):
        return found
    return _without_tokens(found)


def with_digests(span: Span, changed: Mapping[str, str]) -> Span:
    """Return a call's span with the digests of its redacted media, and without tokens: the model saw other media."""
    if span.call is None or changed.keys().isdisjoint(span.call.inputs):
        return span
    call = _redacted_call(span.call, _Texts(_Digests(changed)))
    inputs = tuple(changed.get(digest) or digest for digest in call.inputs)
    return msgspec.structs.replace(span, call=msgspec.structs.replace(_without_tokens(call), inputs=inputs))


def _without_tokens(call: ModelCall) -> ModelCall:
    return msgspec.structs.replace(
        call, prompt_ids=b"", response_ids=b"", logprobs=b"", media=(), processor="", ids_missing=REDACTED
    )


def _redacted_blob(blob: Blob, redactor: Redactor) -> Blob | None:
    data = redactor.redact_blob(blob) if isinstance(redactor, BlobRedactor) else None
    if not data or data == blob.data:
        return blob if data else None
    return Blob(digest=digest_of(data), media_type=media_type_of(data), data=data)


class _Digests:
    """Replaces the digests of redacted media in a recorded request."""

    def __init__(self, changed: Mapping[str, str]) -> None:
        self._changed = changed

    def redact(self, text: str) -> str:
        return self._changed.get(text) or text


class _Texts:
    """Redacts the strings of a JSON value, also those of JSON in a string, and integers as long as a card number."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor

    def of(self, value: Any, *, without: frozenset[str] = frozenset()) -> Any:
        if isinstance(value, str):
            return self._text(value) if value else value
        if isinstance(value, Mapping):
            return self.fields(cast("Mapping[str, Json]", value), without=without)
        if isinstance(value, list | tuple):
            return [self.of(each) for each in cast("Sequence[Json]", value)]
        if isinstance(value, int) and 10**12 <= value < 10**16:
            found = self._redactor.redact(str(value))
            return value if found == str(value) else found
        return value

    def _text(self, text: str) -> str:
        """Redact a text; JSON is decoded first, because its escapes hide where a word begins."""
        if text.lstrip()[:1] in ("{", "["):
            try:
                value = msgspec.json.decode(text)
                found = self.of(value)
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
                pass  # not JSON, or nested too deep
            else:
                return text if found == value else msgspec.json.encode(found).decode()
        return self._redactor.redact(text)

    def fields(self, values: Mapping[str, Json], *, without: frozenset[str] = frozenset()) -> dict[str, Json]:
        return {name: value if name in without else self.of(value) for name, value in values.items()}


_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")
_CARD = re.compile(r"(?<![\w.-])[2-6](?:[ \xa0-]?\d){12,18}(?![\w-])")  # times in milliseconds begin with 1
_PHONE = re.compile(
    r"(?<![\w.+-])(?:"
    r"\+\d(?:[ \xa0()./-]{0,2}\d){6,14}"  # +49 30 1234567
    r"|(?:1[ \xa0.-])?\(?\d{3}\)?[ \xa0.-]\d{3}[ \xa0.-]\d{4}"  # (555) 123-4567 or 1-800-555-0199
    r"|\(?0\d{1,5}\)?[ \xa0/-]\d(?:[ \xa0-]?\d){4,9}"  # 030/1234567
    r")(?![\w-])"
)
_KEY = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[oprsu]_[A-Za-z0-9]{20,255}|\bgithub_pat_\w{20,255}|\bxox[abprs]-[\w-]{10,255}"
    r"|\bey[JI][\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}"  # a JSON Web Token
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]{0,20000}(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
)


class Patterns:
    """Replaces e-mail addresses, telephone numbers, card numbers and keys by their kind, such as ``[email]``."""

    def redact(self, text: str) -> str:
        """Return the text without these; a card number needs a correct check digit."""
        text = _KEY.sub("[key]", redact(text))
        if "@" in text:
            text = _EMAIL.sub("[email]", text)
        return _PHONE.sub("[phone]", _CARD.sub(_card, text))


def _card(found: re.Match[str]) -> str:
    """Return ``[card]`` for digits that pass Luhn's check, else the digits."""
    digits = [int(letter) for letter in reversed(found[0]) if letter.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return found[0] if (sum(digits[::2]) + sum(doubled)) % 10 else "[card]"
