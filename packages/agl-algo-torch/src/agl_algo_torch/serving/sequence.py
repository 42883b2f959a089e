"""The records that go into the engine and come out of it: requests, sequences in flight and finished generations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from agl.errors import PolicyError
from agl_algo_torch.serving.sampling import Draw, SamplingParams

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from agl_algo_torch.serving.kvcache import TokenArray

FinishReason = Literal["stop", "length"]


class EngineError(PolicyError):
    """The engine cannot serve a request; the message says why, and mostly what to do."""


class PromptError(EngineError):
    """The prompt is empty, or contains a token id that the model does not have."""


class QueueFullError(EngineError):
    """The engine holds as many waiting requests as its settings allow."""


class EngineStoppedError(EngineError):
    """The engine was stopped before the request finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate.

    Attributes:
        prompt_ids: Ids of the prompt's tokens, at least one.
        max_tokens: Largest number of tokens to generate, at least 1.
        params: Temperature, top-p, top-k, seed and number of alternatives.
        stop_ids: Tokens that end the sequence; the last token of the result is then the stop token.
        stop_check: Called with all generated ids after each token, in the engine's thread; true ends the sequence.
        wants_tokens: Whether the listener gets every token as soon as it is drawn.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    stop_check: Callable[[Sequence[int]], bool] | None = None
    wants_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """The tokens `start` to `end` (exclusive) of a response, which the weights of `version` generated."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished sequence.

    Attributes:
        draws: One entry per token, the stop token included.
        finish_reason: `stop` for a stop token or a stop string, `length` at the limit of tokens.
        versions: The model versions that generated the tokens, in order.
        cached_tokens: Number of prompt tokens whose keys and values were not computed again.
    """

    draws: tuple[Draw, ...]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    cached_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The generated ids, the stop token included."""
        return [draw.token_id for draw in self.draws]


Event = Draw | Generation | EngineError
"""An event of a sequence: a token (only with `wants_tokens`), and at the end one generation or one error."""


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """A request in flight; only the engine's thread changes it, except for `is_cancelled`."""

    request: GenerationRequest
    listener: Callable[[Event], None]
    uniforms: random.Random  # the stream of random numbers for the draws
    draws: list[Draw] = field(default_factory=list[Draw])
    ids: list[int] = field(default_factory=list[int])
    spans: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])  # (version, end of its tokens)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    is_cancelled: bool = False

    def tokens(self) -> TokenArray:
        """Return the prompt and the tokens generated so far."""
        return np.array([*self.request.prompt_ids, *self.ids], dtype=np.int32)

    def accept(self, draw: Draw, *, version: str) -> None:
        """Take the next token, set `finish_reason` if it ends the sequence, and report it with `wants_tokens`."""
        self.draws.append(draw)
        self.ids.append(draw.token_id)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, len(self.ids))
        else:
            self.spans.append((version, len(self.ids)))
        self.finish_reason = self._finish(draw.token_id)
        if self.request.wants_tokens:
            self.listener(draw)

    def _finish(self, token_id: int) -> FinishReason | None:
        request = self.request
        if token_id in request.stop_ids or (request.stop_check is not None and request.stop_check(self.ids)):
            return "stop"
        return "length" if len(self.ids) >= request.max_tokens else None

    def result(self) -> Generation:
        """Return the finished generation."""
        spans: list[VersionSpan] = []
        for version, end in self.spans:
            spans.append(VersionSpan(version=version, start=spans[-1].end if spans else 0, end=end))
        assert self.finish_reason is not None  # noqa: S101 - only finished sequences are asked
        return Generation(
            draws=tuple(self.draws),
            finish_reason=self.finish_reason,
            versions=tuple(spans),
            cached_tokens=self.cached_tokens,
        )
