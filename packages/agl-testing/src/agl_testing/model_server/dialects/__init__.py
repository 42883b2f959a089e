"""The wire formats: each module turns requests into turns, and exchanges into bodies and streamed events."""

from agl_testing.model_server.dialects import chat, completions, embeddings, messages, responses

__all__ = ["chat", "completions", "embeddings", "messages", "responses"]
