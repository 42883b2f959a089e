"""Builds the parts of answers: OpenAI's objects with vLLM's fields for token ids, and the versions of the weights.

Beside OpenAI's fields an answer has
- `model_version`, and `model_versions`: the token spans `{choice, version, start, end}`, one per choice unless the
  weights changed on the way;
- `logprobs_mode`: `raw_logprobs`, or `temperature_scaled_logprobs` when the temperature is not 1;
- `logprobs_exact`: false where top-k, top-p or greedy decoding mean that tokens were not drawn from exactly the
  distribution whose log-probabilities are given.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl_algo_torch.codec import TextCodec
    from agl_algo_torch.sampling import Draw, SamplingParams
    from agl_algo_torch.sequence import Generation
    from agl_algo_torch.toolcalls import ParsedResponse

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that all chunks of one answer share; `kind` is `chat` or `completions`."""

    id: str
    model: str
    created: int
    kind: str

    def fields(self, *, is_chunk: bool) -> Json:
        """Return them under OpenAI's names."""
        name = "text_completion" if self.kind == "completions" else "chat.completion"
        if is_chunk and self.kind == "chat":
            name += ".chunk"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


def new_id(prefix: str) -> str:
    """Return a random id such as `chatcmpl-...`, unique among all answers."""
    return f"{prefix}-{uuid.uuid4().hex}"


def version_fields(generations: Mapping[int, Generation], params: SamplingParams) -> Json:
    """Return the fields that name the weights behind each choice's tokens, and the meaning of its log-probabilities."""
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
    """Return the token counts; every prompt counts once, however many choices it has, as OpenAI counts."""
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
        # A token may end within a character; its bytes cannot be told from its text then.
        whole = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": f"token_id:{token_id}" if as_ids else text, "logprob": logprob, "bytes": whole}

    content = [
        {**entry(draw.token_id, draw.logprob), "top_logprobs": [entry(*other) for other in draw.top]} for draw in draws
    ]
    return {"content": content, "refusal": None}


def text_logprobs(draws: Sequence[Draw], codec: TextCodec, *, as_ids: bool, offset: int = 0) -> Json:
    """Return `choices[i].logprobs` of a completion; `offset` is the number of characters sent before."""

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
    """Return the entries of vLLM's `prompt_logprobs` for tokens of a prompt, each with its own token alone."""
    return [
        {str(token_id): {"logprob": score, "decoded_token": codec.token_text(token_id)}}
        for token_id, score in zip(ids, scores, strict=True)
    ]


def tool_calls(parsed: ParsedResponse, ids: Sequence[str]) -> list[Json]:
    """Return the tool calls of a message."""
    return [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call_id, call in zip(ids, parsed.calls, strict=True)
    ]
