"""Writes the answer to one request, whole or as a stream of chunks; each endpoint has its own writer.

A writer gets the tokens of every choice in order. In a stream, text is held back while it may still become part of a
stop string or of a tool call. Token ids and log-probabilities are never held back, so a chunk may have ids and no text.
Tool calls are sent as deltas when the response is complete, because only then it is known whether they are well formed.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from agl.schemas import to_builtins
from agl_algo_torch.serving.codec import TextStream, cut_at_stop, safe_length

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agl_algo_torch.serving.codec import TextCodec
    from agl_algo_torch.serving.sampling import Draw, SamplingParams
    from agl_algo_torch.serving.sequence import Generation
    from agl_algo_torch.serving.templates import Prompt, PromptBuilder
    from agl_algo_torch.serving.toolcalls import AnswerFormat, ParsedResponse, Tools
    from agl_algo_torch.serving.wire import ChatBody, CompletionBody

Json = dict[str, Any]


class AnswerWriter(Protocol):
    """Writes the answers of one endpoint. The argument `index` is the number of a choice."""

    def top(self) -> Json:
        """Return the fields beside `choices` in a whole answer, and in the first chunk of a stream."""
        ...

    def choice(self, index: int, generation: Generation) -> Json:
        """Return a finished choice as it appears in a whole answer."""
        ...

    def opening(self, index: int) -> Json | None:
        """Return a choice for the first chunk of a stream, before any token; None to send no such chunk."""
        ...

    def token(self, index: int, draw: Draw) -> Json | None:
        """Return a choice for the chunk that sends one token; None if there is nothing to send yet."""
        ...

    def closing(self, index: int, generation: Generation) -> Json:
        """Return a choice for the last chunk of a stream."""
        ...


class _ChoiceTexts:
    """The visible text of each choice of a request, complete or still growing."""

    def __init__(self, codec: TextCodec, *, stops: Sequence[str], stop_ids: frozenset[int], markers: Sequence[str]):
        self._codec = codec
        self._stops, self._stop_ids = stops, stop_ids
        self._held = (*stops, *markers)
        self._streams: dict[int, TextStream] = {}
        self._sent: dict[int, int] = {}

    def whole(self, generation: Generation) -> str:
        """Return the text of a finished choice up to the stop token or the first stop string, without either."""
        ids = generation.token_ids
        if generation.finish_reason == "stop" and ids[-1] in self._stop_ids:
            ids = ids[:-1]
        return cut_at_stop(self._codec.decode(ids, skip_special_tokens=True), self._stops)

    def push(
        self, index: int, draw: Draw, *, split: Callable[[str], tuple[str, int]] = lambda _: ("", 0)
    ) -> tuple[str, str]:
        """Add the next token of a choice; returns the content to send now, and the reasoning before the content.

        `split` returns the reasoning in a text, and where the content begins, as `AnswerFormat.split` does.
        """
        if draw.token_id in self._stop_ids:
            return "", ""
        stream = self._streams.setdefault(index, TextStream(self._codec))
        stream.push(draw.token_id)
        thought, start = split(stream.text)
        content = stream.text[start:] if start >= 0 else ""
        sent = self._sent.get(index, 0)
        safe = max(sent, safe_length(content, self._held))
        self._sent[index] = safe
        return content[sent:safe], thought

    def rest(self, index: int, whole: str) -> str:
        """Return the part of a choice's final content `whole` that was not sent yet."""
        return whole[self._sent.get(index, 0) :]


class ChatWriter:
    """Writes chat completions, and stores every response so that the next turn's prompt can extend its tokens."""

    def __init__(
        self,
        *,
        body: ChatBody,
        prompt: Prompt,
        codec: TextCodec,
        builder: PromptBuilder,
        answers: AnswerFormat,
        tools: Tools,
        stop_ids: frozenset[int],
    ) -> None:
        self._body, self._prompt, self._codec, self._builder = body, prompt, codec, builder
        self._answers, self._tools = answers, tools
        self._is_open = answers.opens_thinking(prompt.text)
        self._thought: set[int] = set()  # choices whose reasoning was sent
        markers = answers.parser.markers if tools or answers.parser.is_whole else ()
        self._texts = _ChoiceTexts(codec, stops=body.stops, stop_ids=stop_ids, markers=markers)

    def top(self) -> Json:
        """Return the ids of the prompt, and which of them are pictures, if the request asks for token ids."""
        if not self._body.return_token_ids:
            return {}
        top: Json = {"prompt_token_ids": list(self._prompt.ids)}
        if self._prompt.media and self._builder.modality is not None:
            top |= {"prompt_media": to_builtins(self._prompt.media), "processor": self._builder.modality.processor}
        return top

    def choice(self, index: int, generation: Generation) -> Json:
        """Return a finished choice."""
        parsed, calls = self._read(generation)
        message: Json = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if calls:
            message["tool_calls"] = calls
        choice: Json = {"index": index, "message": message, "finish_reason": _reason(parsed, generation)}
        return choice | self._details(generation.draws)

    def _read(self, generation: Generation) -> tuple[ParsedResponse, list[Json]]:
        text = self._texts.whole(generation)
        parsed = self._answers.read(text, tools=self._tools, is_open=self._is_open)
        calls = tool_calls(parsed, [new_id("call") for _ in parsed.calls])
        message = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
        message |= {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
        self._builder.remember(self._prompt, generation.token_ids, message=message)
        return parsed, calls

    def _details(self, draws: Sequence[Draw]) -> Json:
        details: Json = {"logprobs": None}
        if self._body.logprobs:
            as_ids = self._body.return_tokens_as_token_ids
            details["logprobs"] = chat_logprobs(draws, self._codec, as_ids=as_ids)
        if self._body.return_token_ids:
            details["token_ids"] = [draw.token_id for draw in draws]
        return details

    def opening(self, index: int) -> Json | None:
        """Return a choice for the first chunk, which carries the assistant's role."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def token(self, index: int, draw: Draw) -> Json | None:
        """Return the chunk of one token; reasoning is sent as a whole with the first token of the content."""
        piece, thought = self._texts.push(index, draw, split=partial(self._answers.split, is_open=self._is_open))
        if not (piece or self._body.logprobs or self._body.return_token_ids):
            return None
        delta = {"content": piece} if piece else {}
        if piece and thought and index not in self._thought:
            self._thought.add(index)
            delta = {"reasoning_content": thought, "content": piece}
        return {"index": index, "delta": delta, "finish_reason": None} | self._details([draw])

    def closing(self, index: int, generation: Generation) -> Json:
        """Return a choice for the last chunk, with the text that was held back and the tool calls."""
        parsed, calls = self._read(generation)
        delta: Json = {}
        if parsed.reasoning and index not in self._thought:
            delta["reasoning_content"] = parsed.reasoning
        if rest := self._texts.rest(index, parsed.content or ""):
            delta["content"] = rest
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": _reason(parsed, generation)}


class CompletionWriter:
    """Writes text completions; the prompt ids are in each choice, and the `n` choices of a prompt are consecutive."""

    def __init__(
        self,
        *,
        body: CompletionBody,
        prompts: Sequence[Sequence[int]],
        codec: TextCodec,
        stop_ids: frozenset[int],
        scores: Sequence[Sequence[float]] | None = None,
    ) -> None:
        self._body, self._prompts, self._codec = body, prompts, codec
        self._scores = scores
        self._texts = _ChoiceTexts(codec, stops=body.stops, stop_ids=stop_ids, markers=())
        self._offsets: dict[int, int] = {}

    def top(self) -> Json:
        """Return no fields: completions carry the prompt ids in the choices."""
        return {}

    def choice(self, index: int, generation: Generation) -> Json:
        """Return a finished choice."""
        choice = {"index": index, "text": self._texts.whole(generation), "finish_reason": generation.finish_reason}
        return choice | self._details(generation.draws) | self._prompt_ids(index) | self._prompt_scores(index)

    def _details(self, draws: Sequence[Draw], *, offset: int = 0) -> Json:
        details: Json = {"logprobs": None}
        if self._body.logprobs is not None:
            as_ids = self._body.return_tokens_as_token_ids
            details["logprobs"] = text_logprobs(draws, self._codec, as_ids=as_ids, offset=offset)
        if self._body.return_token_ids:
            details["token_ids"] = [draw.token_id for draw in draws]
        return details

    def _prompt_ids(self, index: int) -> Json:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._prompts[index // self._body.n])}

    def _prompt_scores(self, index: int) -> Json:
        """Return the log-probabilities of the prompt's tokens in vLLM's form, in which the first token has None."""
        if self._scores is None:
            return {}
        place = index // self._body.n
        found = prompt_logprobs(self._prompts[place][1:], self._scores[place], self._codec)
        return {"prompt_logprobs": [None, *found]}

    def opening(self, index: int) -> Json | None:
        """Return a choice with the prompt ids if the request asks for token ids, else None."""
        if not self._body.return_token_ids:
            return None
        opening: Json = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
        return opening | self._prompt_ids(index)

    def token(self, index: int, draw: Draw) -> Json | None:
        """Return the chunk of one token."""
        piece, _ = self._texts.push(index, draw)
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(self._codec.token_text(draw.token_id))
        if not (piece or self._body.logprobs is not None or self._body.return_token_ids):
            return None
        return {"index": index, "text": piece, "finish_reason": None} | self._details([draw], offset=offset)

    def closing(self, index: int, generation: Generation) -> Json:
        """Return a choice for the last chunk, with the text that was held back."""
        rest = self._texts.rest(index, self._texts.whole(generation))
        return {"index": index, "text": rest, "logprobs": None, "finish_reason": generation.finish_reason}


def _reason(parsed: ParsedResponse, generation: Generation) -> str:
    return "tool_calls" if parsed.calls else generation.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that all chunks of one answer share; `kind` is `chat` or `completions`."""

    id: str
    model: str
    created: int
    kind: str

    def fields(self, *, is_chunk: bool) -> Json:
        """Return these fields under OpenAI's names."""
        name = "text_completion" if self.kind == "completions" else "chat.completion"
        if is_chunk and self.kind == "chat":
            name += ".chunk"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


def new_id(prefix: str) -> str:
    """Return a new random id such as `chatcmpl-...`."""
    return f"{prefix}-{uuid.uuid4().hex}"


def version_fields(generations: Mapping[int, Generation], params: SamplingParams) -> Json:
    """Return the fields that say which model versions sampled each choice, and what the log-probabilities are."""
    spans = [
        {"choice": choice, "version": span.version, "start": span.start, "end": span.end}
        for choice, generation in generations.items()
        for span in generation.versions
    ]
    return {
        "model_version": spans[-1]["version"],
        "model_versions": spans,
        "logprobs_mode": params.logprobs_mode,
        "logprobs_exact": params.is_exact,
    }


def usage(prompt_tokens: int, generations: Sequence[Generation]) -> Json:
    """Return the token counts as OpenAI counts them: a prompt counts once, however many choices it has."""
    completion = sum(len(one.draws) for one in generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": min((one.cached_tokens for one in generations), default=0)},
    }


def chat_logprobs(draws: Sequence[Draw], codec: TextCodec, *, as_ids: bool) -> Json:
    """Return `choices[i].logprobs` of a chat completion; `as_ids` writes tokens as `token_id:N`, as vLLM does."""

    def entry(token_id: int, logprob: float) -> Json:
        text = codec.token_text(token_id)
        # A token may end within a character; its bytes are then unknown here.
        whole = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": f"token_id:{token_id}" if as_ids else text, "logprob": logprob, "bytes": whole}

    content = [
        {**entry(draw.token_id, draw.logprob), "top_logprobs": [entry(*other) for other in draw.top]} for draw in draws
    ]
    return {"content": content, "refusal": None}


def text_logprobs(draws: Sequence[Draw], codec: TextCodec, *, as_ids: bool, offset: int = 0) -> Json:
    """Return `choices[i].logprobs` of a completion; `offset` is the number of characters before the first token."""

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else codec.token_text(token_id)

    offsets: list[int] = []
    for draw in draws:
        offsets.append(offset)
        offset += len(codec.token_text(draw.token_id))
    return {
        "tokens": [name(draw.token_id) for draw in draws],
        "token_logprobs": [draw.logprob for draw in draws],
        "top_logprobs": [{name(i): value for i, value in draw.top} for draw in draws],
        "text_offset": offsets,
    }


def prompt_logprobs(ids: Sequence[int], scores: Sequence[float], codec: TextCodec) -> list[Json]:
    """Return vLLM's `prompt_logprobs` entries for tokens of a prompt, without alternatives."""
    return [
        {str(token_id): {"logprob": score, "decoded_token": codec.token_text(token_id)}}
        for token_id, score in zip(ids, scores, strict=True)
    ]


def tool_calls(parsed: ParsedResponse, ids: Sequence[str]) -> list[Json]:
    """Return the tool calls of a message in OpenAI's form; `ids` has an id for each call."""
    return [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call_id, call in zip(ids, parsed.calls, strict=True)
    ]
