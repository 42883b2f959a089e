"""Reads and writes ``POST /v1/embeddings``: each input gives a short vector that depends on every byte."""

import base64
import struct
from typing import Any

from agl_testing.model_server.dialects.completions import prompts_of

DIMENSIONS = 8


def prompt_ids(body: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of each input."""
    return prompts_of({"prompt": body.get("input", "")})


def body_of(body: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the response's body, with vectors as floats, or in base64 if the request asks for it."""
    inputs = prompt_ids(body)
    is_packed = body.get("encoding_format") == "base64"
    vectors = [embedding(ids) for ids in inputs]
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if is_packed else vector,
        }
        for index, vector in enumerate(vectors)
    ]
    total = sum(map(len, inputs))
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": total, "total_tokens": total}}


def embedding(ids: list[int]) -> list[float]:
    """Return the embedding of token ids, [DIMENSIONS]: weighted sums modulo 97, scaled to [0, 1)."""
    return [
        sum(token * (position + dimension + 1) for position, token in enumerate(ids)) % 97 / 97
        for dimension in range(DIMENSIONS)
    ]
