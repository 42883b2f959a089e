"""Redacts the texts of spans before they reach the spool or the store; clients and models get the original texts.

A redactor is a plugin. :class:`Patterns` is the built-in one: it finds what regular expressions can find.

Names, ids and models stay as they are, since calls are joined and selected by them. Keys of JSON objects stay too.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from agl import PluginManager, semconv
from agl.contracts import REDACTED, Redactor
from agl.schemas import Json, ModelCall, Span
from agl.tracing import redact

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
        """Return redacted copies of the spans. Works in a thread, because a redactor may run a model."""
        redactor = self._redactor
        if redactor is None:
            return spans
        return await asyncio.to_thread(lambda: [_redacted(span, redactor) for span in spans])


def redaction_of(name: str, manager: PluginManager) -> Redaction:
    """Return the redaction by the redactor with this name; ``""`` redacts nothing."""
    return Redaction(manager.build(manager.redactor(name)) if name else None)


def _redacted(span: Span, redactor: Redactor) -> Span:
    replace, texts = msgspec.structs.replace, _Texts(redactor)
    return replace(
        span,
        call=None if span.call is None else _redacted_call(span.call, texts),
        reward=span.reward and replace(span.reward, feedback=texts.of(span.reward.feedback)),
        attributes=texts.fields(span.attributes, without=_ATTRIBUTES),
        events=tuple(replace(event, attributes=texts.fields(event.attributes)) for event in span.events),
        status_message=texts.of(span.status_message),
    )


def _redacted_call(call: ModelCall, texts: "_Texts") -> ModelCall:
    """Return a copy with redacted bodies; without token ids if that changed a body."""
    request, response = (texts.of(body, without=_FIELDS) for body in (call.request, call.response))
    found = msgspec.structs.replace(call, request=request, response=response, error=texts.of(call.error))
    if (request, response) == (call.request, call.response):
        return found
    return msgspec.structs.replace(found, prompt_ids=b"", response_ids=b"", logprobs=b"", ids_missing=REDACTED)


class _Texts:
    """Redacts every string of a JSON value."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor

    def of(self, value: Any, *, without: frozenset[str] = frozenset()) -> Any:
        if isinstance(value, str):
            return self._redactor.redact(value) if value else value
        if isinstance(value, Mapping):
            return self.fields(cast("Mapping[str, Json]", value), without=without)
        if isinstance(value, list | tuple):
            return [self.of(each) for each in cast("Sequence[Json]", value)]
        return value

    def fields(self, values: Mapping[str, Json], *, without: frozenset[str] = frozenset()) -> dict[str, Json]:
        return {name: value if name in without else self.of(value) for name, value in values.items()}


_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")
_CARD = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])")
_PHONE = re.compile(
    r"(?<![\w.+-])(?:"
    r"\+\d(?:[ ()./-]{0,2}\d){6,14}"  # +49 30 1234567
    r"|\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}"  # (555) 123-4567
    r"|\(?0\d{1,5}\)?[ /-]\d(?:[ -]?\d){4,9}"  # 030/1234567
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
