"""A model call: the request, the response, and the exact tokens of both.

Token ids are packed as little-endian int32, and log-probabilities as little-endian float32. They stay ``bytes`` from
recording to training, because a list of Python numbers costs a hundred times more.
"""

import struct
from collections.abc import Iterable
from typing import Literal

import msgspec

from agl.schemas._base import Json, Record
from agl.schemas._media import MediaSpan

Dialect = Literal["chat", "completions", "responses", "messages", "embeddings"]
"""The supported model APIs: OpenAI's chat completions, completions and responses, Anthropic's messages, and
embeddings."""


class Sampling(Record, frozen=True, kw_only=True):
    """The sampling parameters of a request; ``None`` for a parameter that the request does not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    @property
    def changes_distribution(self) -> bool:
        """True if the sampled distribution differs from the model's own softmax at temperature 1."""
        # 1 leaves the distribution whole for these, 0 for the offsets; for top_k it is 0 in some
        # servers and -1 in others.
        factors = {self.temperature, self.top_p, self.repetition_penalty}
        offsets = (self.min_p, self.frequency_penalty, self.presence_penalty)
        return not factors <= {None, 1.0} or any(offsets) or self.top_k not in (None, 0, -1)


LIMITS = frozenset({"length", "max_tokens", "max_output_tokens", "model_context_window_exceeded"})
"""Finish reasons of OpenAI, Anthropic and Google, in lower case, for an answer that was cut off at a token limit."""


# gc=False: a call holds no cycles, and tens of thousands of them would make each garbage collection
# slow.
class ModelCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One sampled answer of a model. A request with ``n > 1`` gives one record per choice.

    Attributes:
        request_id: Id of the request; shared by the client's retries of the request, and by all choices.
        dialect: The wire format of ``request`` and ``response``.
        policy: Name of the policy resource that served the call; ``""`` if no configured policy did.
        model: The model name in the request.
        model_version: Version of the weights that served the call; ``""`` if unknown.
        request: The request body as JSON, without secrets.
        response: The response body as JSON with this choice only, without ids and log-probabilities.
        prompt_ids: Packed int32, [P].
        response_ids: Packed int32, [R], stop token included where the backend reports it.
        logprobs: Packed float32, [R]: behaviour log-probability of each response token.
        ids_missing: The reason why ids are absent; ``""`` when they are present.
        finish_reason: The backend's word for the end of the answer: ``stop``, ``length``, ``tool_calls`` ...
        choice: Index of this choice.
        choices: Number of choices that the request asked for.
        retry_count: The client's own count of retries for this request.
        status_code: HTTP status; 0 when no response came.
        is_complete: False when the answer was cut: by the client, the backend or the network.
        latency_s: Seconds from the request's last byte to the response's last byte.
        first_token_s: Seconds from the request's last byte to the first byte of the response's body; equals
            ``latency_s`` for an answer that is not streamed.
        inputs: References (URL or content digest) to inputs that are not tokens, such as images.
        media: The runs of placeholder tokens in the prompt that stand for inputs, in order of their offsets.
        processor: The processor that made the runs: name, version of its library, and start of a hash of its settings,
            such as ``Qwen2VLProcessor 5.23.0 1a2b3c4d``; ``""`` without media.
        error: The call's failure as text; ``""`` if it did not fail.
    """

    request_id: str
    dialect: Dialect
    model: str
    policy: str = ""
    model_version: str = ""
    request: Json = None
    response: Json = None
    sampling: Sampling = Sampling()
    prompt_ids: bytes = b""
    response_ids: bytes = b""
    logprobs: bytes = b""
    # A reason and not a flag: whoever trains wants to know what to change about the server.
    ids_missing: str = ""
    finish_reason: str = ""
    choice: int = 0
    choices: int = 1
    retry_count: int = 0
    status_code: int = 200
    is_streamed: bool = False
    is_complete: bool = True
    latency_s: float = 0.0
    first_token_s: float = 0.0
    inputs: tuple[str, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    processor: str = ""
    error: str = ""

    @property
    def is_truncated(self) -> bool:
        """True if the answer was cut off at a token limit, by the finish reason of any backend."""
        return self.finish_reason.lower() in LIMITS

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_ids) // 4

    @property
    def response_len(self) -> int:
        """Number of response tokens."""
        return len(self.response_ids) // 4


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack token ids as little-endian int32; raises :class:`ValueError` for other values."""
    return _packed(tuple(ids), "i")


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack floats as little-endian float32; raises :class:`ValueError` for other values."""
    return _packed(tuple(values), "f")


def _packed(values: tuple[float, ...], code: str) -> bytes:
    # struct packs twice as fast as array does, and a call has more than a thousand ids. "<" is little-endian on every
    # machine.
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(str(error)) from error


def unpack_ids(data: bytes) -> list[int]:
    """Unpack token ids; the inverse of :func:`pack_ids`."""
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def unpack_floats(data: bytes) -> list[float]:
    """Unpack floats; the inverse of :func:`pack_floats`."""
    return list(struct.unpack(f"<{len(data) // 4}f", data))
