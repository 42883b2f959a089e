"""Asks an OpenAI-compatible endpoint for one chat completion, over the standard library's HTTP client.

The calls leave from threads of their own, outside any rollout, through a client that the wire hook does not wrap. They
are therefore never recorded as an agent's. Redirects are refused, because they would carry the key elsewhere.
Retries are left to the caller.
"""

import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

import msgspec

from agl.errors import AglError
from agl.schemas import LLM, Json

MAX_ANSWER_BYTES = 4_000_000
"""Size of the longest answer that is read; a longer one is an error."""


class EndpointError(AglError):
    """The endpoint gave no answer; with ``is_passing`` asking again may help."""

    def __init__(self, message: str, *, is_passing: bool) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def ask(llm: LLM, prompt: str, *, request: Mapping[str, Json], timeout_s: float) -> str:
    """Return the text of the answer; raises :class:`EndpointError`.

    The key is read from the environment variable that ``llm`` names, if any. Blocks for up to ``timeout_s`` seconds
    per read.
    """
    body = msgspec.json.encode({"model": llm.model, "messages": [{"role": "user", "content": prompt}], **request})
    sent = urllib.request.Request(f"{llm.endpoint.rstrip('/')}/chat/completions", data=body, headers=_headers(llm))
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(sent, timeout=timeout_s) as response:
            data = response.read(MAX_ANSWER_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            detail = error.read(400).decode("utf-8", "replace")
        is_passing = error.code in (408, 409, 429) or error.code >= 500  # timeout, conflict, rate limit, server
        raise EndpointError(f"{llm.endpoint} answered {error.code}: {detail}", is_passing=is_passing) from error
    except (OSError, HTTPException) as error:
        raise EndpointError(f"{llm.endpoint} could not be reached: {error}", is_passing=True) from error
    return _text(data, llm.endpoint)


def _headers(llm: LLM) -> dict[str, str]:
    key = os.environ.get(llm.api_key_env, "") if llm.api_key_env else ""
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def _text(data: bytes, endpoint: str) -> str:
    if len(data) > MAX_ANSWER_BYTES:
        raise EndpointError(f"{endpoint} answered more than {MAX_ANSWER_BYTES} bytes", is_passing=False)
    try:
        answer: Any = msgspec.json.decode(data)
        text = answer["choices"][0]["message"]["content"]
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise EndpointError(f"{endpoint} answered with no chat completion: {data[:200]!r}", is_passing=True) from error
    if not isinstance(text, str):
        raise EndpointError(f"{endpoint} answered without text", is_passing=True)
    return text
