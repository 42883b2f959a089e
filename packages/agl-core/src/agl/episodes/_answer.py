"""The final answer of an attempt as text, for rewards that look at it."""

from collections.abc import Sequence

from agl.dialects._conversation import call_messages
from agl.episodes._rejects import is_answered
from agl.episodes._timeline import chronological
from agl.schemas import ModelCall, Span


def final_text(spans: Sequence[Span]) -> str:
    """Text of the last complete model answer that has any, ``""`` if none has; late calls do not count."""
    for span in reversed(chronological(spans).spans):
        if span.call is None or span.is_late or not is_answered(span.call):
            continue
        text = _answer_text(span.call)
        if text:
            return text
    return ""


def _answer_text(call: ModelCall) -> str:
    if call.dialect == "embeddings" or call.response is None:
        return ""
    messages = call_messages(call)
    last = messages[-1] if messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    return content if isinstance(content, str) else ""
