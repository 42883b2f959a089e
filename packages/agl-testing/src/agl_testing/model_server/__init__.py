"""A model API for tests, on a real port: it sends scripted replies with known tokens, injects faults, records calls."""

from agl_testing.model_server.codec import (
    ConversationTurn,
    FunctionCall,
    decode,
    encode,
    logprob,
    render_prompt,
    render_turn,
)
from agl_testing.model_server.handler import RecordedCall
from agl_testing.model_server.script import (
    Cut,
    Dialect,
    Flavour,
    Garbage,
    ModelRequest,
    Reply,
    Respond,
    Stall,
    Status,
    Step,
    ToolCall,
)
from agl_testing.model_server.server import ScriptedModelServer

__all__ = [
    "ConversationTurn",
    "Cut",
    "Dialect",
    "Flavour",
    "FunctionCall",
    "Garbage",
    "ModelRequest",
    "RecordedCall",
    "Reply",
    "Respond",
    "ScriptedModelServer",
    "Stall",
    "Status",
    "Step",
    "ToolCall",
    "decode",
    "encode",
    "logprob",
    "render_prompt",
    "render_turn",
]
