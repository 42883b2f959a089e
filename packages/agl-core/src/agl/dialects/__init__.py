"""The wire formats of model calls as pure functions on bytes, shared by the gateway and the in-process tracer.

They cover OpenAI's chat completions, completions and responses, Anthropic's messages, and embeddings. Answers may be
plain bodies or streams, and may be whole, cut or garbage: no answer of a backend makes a function raise. The functions
do no input or output.
"""

from agl.dialects._calls import calls_of
from agl.dialects._conversation import call_messages
from agl.dialects._exchange import Exchange, dialect_of
from agl.dialects._media import media_type_of
from agl.dialects._request import Request, sampled
from agl.dialects._streamed_message import StreamedCalls, StreamedMessage

__all__ = [
    "Exchange",
    "Request",
    "StreamedCalls",
    "StreamedMessage",
    "call_messages",
    "calls_of",
    "dialect_of",
    "media_type_of",
    "sampled",
]
