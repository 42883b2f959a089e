"""Requests of model calls: parsed once, changed on the way to the model, and recorded without secrets and media.

Two changes are made on the way. First, if the policy is trained, the request is made to ask for token ids. Second, it
may be kept from narrowing the policy's distribution. Training computes probabilities by the policy's softmax at the
request's temperature, and policy gradients and importance weights are wrong for tokens that were drawn from another
distribution, as they are with top-p, top-k and penalties. A temperature above 0 needs no change, because training
divides by it as well.

Inputs that are not tokens (images, audio, files) are recorded by reference, and their payloads as blobs.
"""

from typing import Any, NamedTuple

import msgspec

from agl import semconv
from agl.dialects._foreign import as_dict, as_list, as_text, is_list
from agl.dialects._media import Media, may_hold_media
from agl.schemas import Blob, Dialect, Json, Sampling

_SECRET_KEYS = ("api_key", "authorization", "authorization_token", "headers")
_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_MAX_BROKEN = 2000
_LOGPROBS_INCLUDE = "message.output_text.logprobs"

_NEUTRAL: dict[str, tuple[Json, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty"), (1.0,)),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_tokens", "no_repeat_ngram_size"), (0,)),
    **{
        "top_k": (-1, 0),
        "best_of": (None, 1),
        "use_beam_search": (False,),
        "watermarking": (False,),
        "logit_bias": ({},),
        "bad_words": ([],),
    },
}
"""The values of each sampling parameter that do not change the distribution.

The first value replaces any other, because a server's default may differ from it.
"""

_TYPED = ("response_format", "text", "output_config", "tool_choice")
_GUIDES = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "allowed_token_ids"),
    *("thinking_token_budget", "logits_processors"),  # vLLM's too, as those above
    *("regex", "ebnf", "json_schema", "structural_tag", "custom_logit_processor"),  # SGLang's
)
"""Parameters that constrain the form of the answer; agents depend on them, so they are never overridden."""

# Raw values are slices of the body, so that a field that nobody reads costs nothing, and changing
# one field leaves the bytes of all others as the client wrote them.
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decode = msgspec.json.decode


class Request:
    """The body of a model call, parsed at most once on its way from the client to the record.

    The top level is parsed on first use, and each field when it is first read; both are cached. Pass this object around
    instead of bytes.

    Attributes:
        dialect: The API of the request.
        body: The bytes as the client sent them.
    """

    __slots__ = ("_raw", "_stored", "_values", "body", "dialect")

    def __init__(self, dialect: Dialect, body: bytes) -> None:
        self.dialect: Dialect = dialect
        self.body = body
        self._raw: dict[str, msgspec.Raw] | None = None
        self._values: dict[str, Any] = {}
        self._stored: Stored | None = None

    @property
    def is_object(self) -> bool:
        """True if the body is a JSON object, as every API's requests are."""
        return self._fields() is not _NO_OBJECT

    @property
    def model(self) -> str:
        """The requested model; ``""`` if the field is missing or not text."""
        return as_text(self.get("model"))

    def get(self, key: str) -> Any:
        """The value of a top-level field; ``None`` if the field is missing or broken. Do not change the value."""
        # A field that is read twice, such as the model, is decoded once.
        if key not in self._values and (raw := self._fields().get(key)) is not None:
            try:
                self._values[key] = _decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
        return self._values.get(key)

    def to_dict(self) -> dict[str, Any] | None:
        """The whole request; ``None`` unless it is a JSON object. Do not change the values in it."""
        fields = self._fields()
        found = {key: self.get(key) for key in fields}
        # A field that could not be decoded is not in _values: then the request as a whole is
        # broken.
        return found if self.is_object and len(self._values) == len(fields) else None

    def prepared(self, *, want_ids: bool, model: str = "") -> bytes:
        """The body to send upstream.

        With ``want_ids`` it requests token ids; a non-empty ``model`` replaces the requested model. All other fields
        keep their exact bytes. The body is returned unchanged if there is nothing to change, and if it is not a JSON
        object, so that the backend answers with its own error.
        """
        if not (want_ids or model) or not self.is_object:
            return self.body
        changes = self._id_fields() if want_ids else {}
        if model and self.get("model") != model:
            changes["model"] = model
        return self.changed(changes).body

    def changed(self, fields: dict[str, Json]) -> "Request":
        """A copy of the request in which ``fields`` have new values; the same object if ``fields`` is empty."""
        return Request(self.dialect, msgspec.json.encode({**self._fields(), **fields})) if fields else self

    def stored(self) -> "Stored":
        """The request as it is recorded, with the payloads of its media; computed once.

        Credentials that clients put into bodies, such as keys and headers of remote tools, are removed. Media are
        replaced by references: the URL, the provider's file id, or ``sha256:<hex>`` of the payload. Only the start of a
        body that is not JSON is recorded.
        """
        if self._stored is None:
            self._stored = _stored(self)
        return self._stored

    def _fields(self) -> dict[str, msgspec.Raw]:
        if self._raw is None:
            try:
                self._raw = _FIELDS.decode(self.body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._raw = _NO_OBJECT
        return self._raw

    def _id_fields(self) -> dict[str, Any]:
        match self.dialect:
            case "chat":
                # vLLM takes the first, SGLang the second; a server ignores the other's, or refuses
                # what it does not know, and then it can serve no policy in training.
                return {"return_token_ids": True, "return_prompt_token_ids": True, "logprobs": True}
            case "completions":
                asked = self.get("logprobs")
                # Completions count: a number of alternatives, where 1 is the sampled token alone.
                return {"return_token_ids": True, "logprobs": 1 if asked is None else asked}
            case "responses":
                include = list(as_list(self.get("include")))
                if _LOGPROBS_INCLUDE not in include:
                    include.append(_LOGPROBS_INCLUDE)
                # vLLM's switch for raw messages with their tokens; OpenAI's for log-probabilities
                # of the text.
                return {"enable_response_messages": True, "include": include}
            case "messages":
                return {"return_token_ids": True}
            case "embeddings":
                return {}


_NO_OBJECT: dict[str, msgspec.Raw] = {}


def sampled(asked: Request, rule: str) -> tuple[Request, dict[str, Json]]:
    """Apply a rule of :attr:`agl.contracts.Upstream.sampling` to a request.

    The rule ``override`` sets parameters that narrow the distribution to their neutral values (temperature 0 to 1), but
    keeps constraints on the answer's form. Every other rule leaves the request unchanged.

    Returns:
        The request to send, and attributes for the call's span: the parameters that were overridden, and those that
        narrow the distribution and were kept. Without a rule there are no attributes.
    """
    found = {key: asked.get(key) for key in (*_NEUTRAL, *_TYPED, *_GUIDES)} if rule else {}
    # None means the same as an absent field, so it narrows nothing.
    before = {key: value for key, value in found.items() if value is not None and _narrows(key, value)}
    changes = {key: _NEUTRAL[key][0] for key in before if key in _NEUTRAL and rule == "override"}
    named = {semconv.SAMPLING_OVERRIDDEN: changes.keys(), semconv.SAMPLING_KEPT: before.keys() - changes.keys()}
    notes = {name: [f"{key} = {before[key]!r}"[:100] for key in sorted(keys)] for name, keys in named.items() if keys}
    return asked.changed(changes), notes


def _narrows(key: str, value: Json) -> bool:
    if key in _TYPED:
        fields = as_dict(value)
        kind = as_dict(fields.get("format", fields)).get("type") if fields else value
        return kind not in (None, "text", "auto", "none")
    # Greedy decoding is no sample of any temperature, and log-probabilities at temperature 0 are
    # undefined.
    return value == 0 if key == "temperature" else value not in _NEUTRAL.get(key, ())


def sampling_of(request: dict[str, Any]) -> Sampling:
    """The sampling parameters of a request in any dialect; values of the wrong type are left out."""
    stop = request.get("stop", request.get("stop_sequences"))
    stops = [stop] if isinstance(stop, str) else as_list(stop)
    return Sampling(
        **{name: _number(request.get(name)) for name in _FLOATS},
        top_k=_integer(request.get("top_k")),
        max_tokens=_max_tokens(request),
        stop=tuple(item for item in stops if isinstance(item, str)),
        seed=_integer(request.get("seed")),
    )


def _max_tokens(request: dict[str, Any]) -> int | None:
    given = (_integer(request.get(key)) for key in ("max_completion_tokens", "max_output_tokens", "max_tokens"))
    return next((value for value in given if value is not None), None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Stored(NamedTuple):
    """A request as it is recorded, the references to its media in order, and their payloads."""

    request: Json
    inputs: tuple[str, ...] = ()
    blobs: tuple[Blob, ...] = ()


def _stored(request: Request) -> Stored:
    fields = request.to_dict()
    if fields is None:
        return Stored(request.body[:_MAX_BROKEN].decode("utf-8", "replace"))
    kept = {key: value for key, value in fields.items() if key not in _SECRET_KEYS}
    # Remote tools are described with the headers that reach them, credentials included.
    for key in ("tools", "mcp_servers"):
        if is_list(kept.get(key)):
            kept[key] = [_clean(item) for item in as_list(kept[key])]
    if not may_hold_media(request.body):
        return Stored(kept)
    media = Media()
    kept |= {key: media.referenced(kept[key]) for key in ("messages", "input", "system") if key in kept}
    return Stored(kept, tuple(media.inputs), tuple(media.blobs.values()))


def _clean(item: Json) -> Json:
    entry = as_dict(item)
    if not any(key in entry for key in _SECRET_KEYS):
        return item
    return {key: value for key, value in entry.items() if key not in _SECRET_KEYS}
