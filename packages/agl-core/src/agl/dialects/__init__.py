"""The wire formats of model calls as pure functions on bytes, shared by the gateway and the in-process tracer.

OpenAI's chat completions, completions and responses, Anthropic's messages, and embeddings; plain bodies and
streams; whole, cut or garbage. Nothing here does any input or output, and nothing raises for what a backend sends.
"""

from agl.dialects._calls import calls_of
from agl.dialects._conversation import call_messages, comparable
from agl.dialects._exchange import Exchange, dialect_of
from agl.dialects._request import Request

__all__ = ["Exchange", "Request", "call_messages", "calls_of", "comparable", "dialect_of"]
