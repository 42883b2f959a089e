"""Reads clients' requests strictly: a field that would change the answer, but is not supported, is refused.

Requests follow OpenAI's chat completions and completions; `return_token_ids`, `top_k`, `stop_token_ids`,
`ignore_eos` and `chat_template_kwargs` follow vLLM. Fields that do not change the answer are accepted and ignored.
Unsupported fields are accepted only with their neutral value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec

from agl_algo_torch.serving.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_HARMLESS = frozenset(
    {
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "return_prompt_token_ids",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "reasoning_effort": ("none",),
}


_READS_NO_PICTURES = "it is a text model, or agl-vision is not installed, which reads the pictures of its model."


class WireError(Exception):
    """An error response to a request, in OpenAI's form.

    Attributes:
        status: HTTP status.
        code: Short machine-readable reason.
        param: The field that causes the error, if there is one.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> bytes:
        """Return the JSON body of the error response."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class NamedFunction(msgspec.Struct):
    """The checked fields of a tool call's function; the template gets the others unchecked."""

    name: str
    arguments: str | None = None


class MessageToolCall(msgspec.Struct):
    """A tool call in a message."""

    function: NamedFunction
    id: str | None = None


class ImageUrl(msgspec.Struct):
    """A picture in a message; `detail` is ignored, because pictures are read as the model's processor reads them."""

    url: str


class ContentPart(msgspec.Struct):
    """A part of a message's content: of type `text`, or `image_url` if the policy reads pictures."""

    type: str
    text: str | None = None
    image_url: str | ImageUrl | None = None

    def is_supported(self, *, sees: bool) -> bool:
        """Return true for text, and with `sees` for a picture."""
        given = {"text": self.text, "image_url": self.image_url if sees else None}
        return given.get(self.type) is not None


class Message(msgspec.Struct):
    """The checked fields of a message; the template gets the original message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[MessageToolCall] | None = None


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: bool = False


PositiveInt = Annotated[int, msgspec.Meta(ge=1)]

# Bounds far above what agents send: without them one request could keep the server busy for seconds. Every token is
# searched for every stop text.
Stop = Annotated[str, msgspec.Meta(max_length=256)]


class _Common(msgspec.Struct, kw_only=True):
    model: str
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=32)] = []
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=1024)] = []
    ignore_eos: bool = False
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    def __post_init__(self) -> None:
        if 0 < self.temperature < 1e-20:  # logits divided by it overflow, which would fail all requests of the batch
            raise ValueError(f"temperature is 0 or at least 1e-20, not {self.temperature}")

    @property
    def stops(self) -> list[str]:
        """The stop strings of the request, without empty ones."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return [stop for stop in stops if stop]

    @property
    def limit(self) -> int | None:
        """Largest number of tokens to generate; None for the server's default."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives to report per token; None if the request asks for no log-probabilities."""
        raise NotImplementedError

    def params(self, choice: int) -> SamplingParams:
        """Return the sampling parameters of one choice; with a seed, each choice gets another seed derived from it."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=None if self.seed is None else self.seed + choice,
            top_logprobs=self.alternatives or 0,
        )


class ChatBody(_Common, kw_only=True):
    """A chat completion request."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=4096)]
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=256)] = []
    tool_choice: str | dict[str, Any] = "auto"
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def limit(self) -> int | None:
        """`max_completion_tokens`, or the older `max_tokens` if that is missing."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """`top_logprobs` if `logprobs` is true, else None."""
        return self.top_logprobs if self.logprobs else None


class CompletionBody(_Common, kw_only=True):
    """A completion request; `prompt` is text, token ids, or a list of either.

    A `prompt_logprobs` of 0 asks for the log-probabilities of the prompt's tokens; alternatives are not supported.
    """

    prompt: str | list[Any]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=0)] | None = None

    @property
    def limit(self) -> int | None:
        """`max_tokens`, or 16, OpenAI's default for completions."""
        return self.max_tokens or 16

    @property
    def alternatives(self) -> int | None:
        """`logprobs`, which is a number in completions."""
        return self.logprobs


Body = TypeVar("Body", ChatBody, CompletionBody)


def seeded(body: Body, header: str | None) -> Body:
    """Return the request, with the seed from the gateway's header if the request has no seed of its own."""
    if body.seed is not None or header is None or not header.isdecimal():
        return body
    return msgspec.structs.replace(body, seed=int(header))


def read_body(data: bytes, kind: type[Body]) -> Body:
    """Decode and check a request body; raises WireError that names the invalid field."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"The request body is not JSON: {error}.", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise WireError("The request body must be a JSON object.", code="invalid_json")
    fields = {key: value for key, value in cast("dict[str, Any]", raw).items() if value is not None}
    known = set(kind.__struct_fields__)
    body = {key: value for key, value in fields.items() if key in known}
    for key in fields.keys() - known - _HARMLESS:
        _refuse_unless_neutral(key, fields[key])
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise WireError(f"The request is not valid: {error}.", param=_field(str(error))) from error


def _refuse_unless_neutral(key: str, value: Any) -> None:
    if key not in _NEUTRAL:
        hint = "is not supported by the embedded policy server. Remove it."
    elif value not in _NEUTRAL[key]:
        hint = f"can only be {_NEUTRAL[key][0]!r} on the embedded policy server, not {value!r}. Remove it."
    else:
        return
    raise WireError(f"The parameter {key!r} {hint}", code="unsupported_parameter", param=key)


def _field(message: str) -> str | None:
    """Return the path of the field that msgspec's error message names, without the root; None if it names no field."""
    _, found, path = message.partition("`$.")
    return path.rstrip("`") if found else None


def check_template_kwargs(options: Mapping[str, Any], *, refused: Collection[str]) -> None:
    """Raise WireError for an option in `refused`: an argument of the rendering function, such as another template."""
    for name in options:
        if name in refused:
            raise WireError(
                f"chat_template_kwargs has {name!r}, which this policy takes from no request: templates come with the "
                "model, and only their variables can be set. Remove it.",
                code="unsupported_parameter",
                param=f"chat_template_kwargs.{name}",
            )


def check_messages(messages: list[dict[str, Any]], *, sees: bool = False) -> None:
    """Raise WireError for a message with invalid fields, or with content that is neither text nor, if `sees`, pictures.

    An assistant's message has text only.
    """
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        try:
            checked = msgspec.convert(message, Message)
        except msgspec.ValidationError as error:
            raise WireError(f"{where} is not valid: {error}.", param=where) from error
        for part in checked.content if isinstance(checked.content, list) else ():
            if not part.is_supported(sees=sees and checked.role != "assistant"):
                raise WireError(
                    f"{where} has content of type {part.type!r}, which this policy does not read there: "
                    + ("only other roles have pictures." if sees else _READS_NO_PICTURES)
                    + " Send text only.",
                    code="unsupported_content",
                    param=where,
                )
