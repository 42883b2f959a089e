"""Splits a chat call of vLLM into three parts, so that the prompt can be sent as token ids.

`render` turns a chat request into token ids and sampling parameters, `generate` takes ids and returns ids, and
`derender` turns the ids into a chat answer, with vLLM's own parsers of tool calls and reasoning. vLLM 0.24 always has
the three (schemas: ``entrypoints/serve/disagg/protocol.py``), vLLM 0.32 behind ``--enable-scale-out`` (schemas:
``entrypoints/scale_out/token_in_token_out/protocol.py``).

A call that does not continue a remembered turn goes to the chat endpoint unchanged, and is counted by its reason.
Limit: a streamed answer is sent in one piece, once it is complete.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import aiohttp
from aiohttp import web

from agl_vllm.turns import Turn, TurnBook, is_shown, messages_of, reasoning_of

_TEXT_ONLY = (
    *("continue_final_message", "truncate_prompt_tokens", "prompt_logprobs", "use_beam_search", "echo"),
    *("chat_template", "return_tokens_as_token_ids"),
    "stop",  # `derender` would show the stop string, which the chat endpoint cuts off
)
"""Options of a chat request that prevent splicing, so the prompt is sent as text."""


class AnswerError(Exception):
    """Raised if the server refuses a call; `status` and `body` are those of its answer."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


class _TextError(Exception):
    """Raised if a request has to go to the chat endpoint; the message is the reason."""


class TokenCalls:
    """Answers chat requests from the tokens of remembered turns where that is exact. Used in one event loop.

    Args:
        session: Sends the requests to the servers.

    Attributes:
        counts: The number of calls with a ``spliced`` prompt and, by reason, of calls whose prompt was sent as text.
            ``first``: the prompt holds no remembered answer; ``options``: an option or a picture needs the chat
            endpoint; ``template``: the template cannot print an answer as the model wrote it; ``changed``: an earlier
            part of the conversation was changed; ``tokens``: the tokenizer does not reproduce the new text on its own.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.counts: Counter[str] = Counter()
        self._session, self._book = session, TurnBook()

    async def respond(self, root: str, content: bytes, headers: Mapping[str, str]) -> web.Response | None:
        """Return the response to the chat request `content`, or the server's error; None if it is not a JSON object.

        Args:
            root: The server's URL, without ``/v1``.
            content: The body of the request.
            headers: Headers for the server, such as its key.

        Raises aiohttp.ClientError or OSError if the server cannot be reached.
        """
        body = _object(content)
        if body is None:
            return None
        is_streamed = bool(body.pop("stream", False))
        options: dict[str, Any] = body.pop("stream_options", None) or {}
        try:
            answer = await self._answer(root, body, headers)
        except AnswerError as error:
            return web.Response(status=error.status, body=error.body, content_type="application/json")
        if not is_streamed:
            return web.json_response(answer)
        return web.Response(body=_in_one_piece(answer, options), content_type="text/event-stream")

    async def _answer(self, root: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the chat answer to a request without streaming; raises :class:`AnswerError`."""
        server = _Server(self._session, root, headers, model=body.get("model"))
        try:
            ids, text, rendered = await self._spliced(server, body)
        except _TextError as reason:
            self.counts[str(reason)] += 1
            found = await server.ask("/v1/chat/completions", body)
            text = ""
        else:
            self.counts["spliced"] += 1
            found = await _generated(server, body, rendered, ids)
        if messages_of(body):  # tokens of pictures are nothing without the pictures
            with suppress(AnswerError, aiohttp.ClientError, OSError):  # the answer itself is complete
                await self._remember(server, found, text)
        return found

    async def _spliced(self, server: "_Server", body: Mapping[str, Any]) -> tuple[list[int], str, dict[str, Any]]:
        """Return the prompt's token ids with remembered answers spliced in, its text, and the rendered request.

        Raises `_TextError` if the prompt must be sent as text.
        """
        messages = messages_of(body)
        if not messages or (body.get("n") or 1) > 1 or any(body.get(name) for name in _TEXT_ONLY):
            raise _TextError("options")
        marked = self._book.marked(messages)
        if marked is None:
            raise _TextError("first")
        try:
            rendered = await server.ask("/v1/chat/completions/render", {**body, "messages": marked.messages})
        except AnswerError as error:
            if error.status >= 500:
                raise
            raise _TextError("template") from error
        text = marked.unmarked(await server.text(rendered["token_ids"]))
        if text is None or rendered.get("features"):
            raise _TextError("template")
        turn = marked.continued(text)
        if turn is None:
            raise _TextError("changed")
        rest = text[len(turn.prompt + turn.whole) :]
        ids = await server.tokens(rest)
        if await server.text(ids) != rest:
            raise _TextError("tokens")
        return [*turn.ids, *ids], text, rendered

    async def _remember(self, server: "_Server", answer: Mapping[str, Any], text: str) -> None:
        """Remember a turn, unless the answer has no token ids; `text` is the prompt's text, "" if unknown."""
        choices: list[dict[str, Any]] = answer.get("choices") or [{}]
        choice, *others = choices
        prompt: list[int] = answer.get("prompt_token_ids") or []
        ids: list[int] = choice.get("token_ids") or []
        if others or not prompt or not ids or isinstance(choice.get("stop_reason"), str):
            return
        whole = await server.text(ids)
        # The last token is the end token, unless the answer was cut at its maximum length.
        written = whole if choice.get("finish_reason") == "length" else await server.text(ids[:-1])
        if is_shown(choice["message"], written) or reasoning_of(choice["message"]):
            prompt_text = text or await server.text(prompt)
            turn = Turn(
                message=choice["message"], prompt=prompt_text, written=written, whole=whole, ids=(*prompt, *ids)
            )
            self._book.add(turn)


async def _generated(
    server: "_Server", body: Mapping[str, Any], rendered: Mapping[str, Any], ids: list[int]
) -> dict[str, Any]:
    """Return the chat answer to a prompt given as token ids."""
    sampling = dict(rendered["sampling_params"])
    sampling.pop("max_tokens", None)  # computed for the prompt with marks
    given = body.get("max_completion_tokens") or body.get("max_tokens")
    request = {**rendered, "token_ids": ids, "sampling_params": sampling | ({"max_tokens": given} if given else {})}
    for name in ("token_offsets", "stream_options"):
        request.pop(name, None)
    output = await server.ask("/inference/v1/generate", {**request, "stream": False, "return_token_ids": True})
    parts = {"generate_response": {**output, "choices": [_without_end(made) for made in output["choices"]]}}
    parts |= {"prompt_tokens": len(ids), "prompt_token_ids": ids, "chat_request": body}
    answer = await server.ask("/v1/chat/completions/derender", {"model": body.get("model"), **parts})
    for choice, made in zip(answer["choices"], output["choices"], strict=True):
        choice["token_ids"] = made["token_ids"]
        choice["finish_reason"] = _finish_reason(choice, body.get("tool_choice"))
    n_made = sum(len(made["token_ids"]) for made in output["choices"])
    usage = {"prompt_tokens": len(ids), "completion_tokens": n_made, "total_tokens": len(ids) + n_made}
    return {**answer, "usage": {**answer["usage"], **usage}, "prompt_token_ids": ids}


def _without_end(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice without its end token, which `derender` of vLLM 0.24 would show in the message's content."""
    ids: list[int] = choice["token_ids"]
    return {**choice, "token_ids": (ids[:-1] if choice["finish_reason"] == "stop" else ids) or ids}


def _finish_reason(choice: Mapping[str, Any], tool_choice: Any) -> str:
    """Return the finish reason of the chat endpoint; vLLM 0.32's `derender` gives `stop` with tool calls."""
    called = bool(choice["message"].get("tool_calls"))
    is_auto = tool_choice in (None, "auto")
    if called and (is_auto or (tool_choice == "required" and choice["finish_reason"] == "stop")):
        return "tool_calls"
    return str(choice["finish_reason"])


class _Server:
    """Sends the calls that one chat request needs to a vLLM server."""

    def __init__(
        self, session: aiohttp.ClientSession, root: str, headers: Mapping[str, str], *, model: str | None
    ) -> None:
        self._session, self._root, self._headers, self._model = session, root, headers, model

    async def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        if not ids:
            return ""
        return str((await self.ask("/detokenize", {"model": self._model, "tokens": list(ids)}))["prompt"])

    async def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text inside a prompt, without special tokens at its start."""
        asked = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return list((await self.ask("/tokenize", asked))["tokens"])

    async def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post a body; raises :class:`AnswerError` if the server answers with an error."""
        async with self._session.post(f"{self._root}{path}", json=body, headers=self._headers) as reply:
            content = await reply.read()
            if reply.status != 200:
                raise AnswerError(reply.status, content)
            return dict(await reply.json())


def _object(content: bytes) -> dict[str, Any] | None:
    """Return a JSON object; None for other content."""
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _in_one_piece(answer: dict[str, Any], options: dict[str, Any]) -> bytes:
    """Return a stream with the whole answer in one chunk, and a chunk with the usage if the client asked for it."""
    head = {name: answer.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choices = [_delta(choice) for choice in answer["choices"]]
    chunks = [{**head, "choices": choices, "prompt_token_ids": answer.get("prompt_token_ids")}]
    if options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": answer.get("usage")})
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in choice["message"].items() if value is not None}
    if message.get("tool_calls"):
        message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
    return {name: value for name, value in choice.items() if name != "message"} | {"delta": message}
