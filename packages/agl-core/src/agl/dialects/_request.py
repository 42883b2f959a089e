"""Requests: read once, changed to ask for token ids, and stripped of credentials before they are stored."""

from typing import Any

import msgspec

from agl.dialects._foreign import as_dict, as_list, as_text
from agl.schemas import Dialect, Json, Sampling

_SECRET_KEYS = ("api_key", "authorization", "authorization_token", "headers")
_LOGPROBS_INCLUDE = "message.output_text.logprobs"

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decode = msgspec.json.decode


class Request:
    """The body of a model call, parsed at most once on its way from the client to the record.

    The top level is parsed on first use, and each field on its own first use; both are cached. Pass this object on
    instead of bytes.

    Attributes:
        dialect: The API of the request.
        body: The bytes as the client sent them.
    """

    __slots__ = ("_raw", "_values", "body", "dialect")

    def __init__(self, dialect: Dialect, body: bytes) -> None:
        self.dialect: Dialect = dialect
        self.body = body
        self._raw: dict[str, msgspec.Raw] | None = None
        self._values: dict[str, Any] = {}

    @property
    def is_object(self) -> bool:
        """True if the body is a JSON object, as every API's requests are."""
        return self._fields() is not _NO_OBJECT

    @property
    def model(self) -> str:
        """The requested model, ``""`` if it is missing or not text."""
        return as_text(self.get("model"))

    def get(self, key: str) -> Any:
        """The value of a top-level field; ``None`` where it is missing or broken. Do not change it."""
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
        return found if self.is_object and len(self._values) == len(fields) else None

    def prepared(self, *, want_ids: bool, model: str = "") -> bytes:
        """The body to send upstream, with the fields that request token ids, and with ``model`` in place of its own.

        The values of all other fields keep their exact bytes. The body comes back untouched when there is nothing to
        change, and when it is not a JSON object, so that the backend answers with its own error.
        """
        if not (want_ids or model) or not self.is_object:
            return self.body
        changes = self._id_fields() if want_ids else {}
        if model and self.get("model") != model:
            changes["model"] = model
        return self.changed(changes).body

    def changed(self, fields: dict[str, Json]) -> "Request":
        """The request with other values in these fields; itself without any."""
        return Request(self.dialect, msgspec.json.encode({**self._fields(), **fields})) if fields else self

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
                return {"return_token_ids": True, "return_prompt_token_ids": True, "logprobs": True}
            case "completions":
                asked = self.get("logprobs")
                return {"return_token_ids": True, "logprobs": 1 if asked is None else asked}
            case "responses":
                include = list(as_list(self.get("include")))
                if _LOGPROBS_INCLUDE not in include:
                    include.append(_LOGPROBS_INCLUDE)
                return {"enable_response_messages": True, "include": include}
            case "messages":
                return {"return_token_ids": True}
            case "embeddings":
                return {}


_NO_OBJECT: dict[str, msgspec.Raw] = {}


def sampling_of(request: dict[str, Any]) -> Sampling:
    """The sampling parameters of a request in any dialect; a value that is not a number is left out."""
    stop = request.get("stop", request.get("stop_sequences"))
    stops = [stop] if isinstance(stop, str) else as_list(stop)
    return Sampling(
        temperature=_number(request.get("temperature")),
        top_p=_number(request.get("top_p")),
        top_k=_integer(request.get("top_k")),
        min_p=_number(request.get("min_p")),
        frequency_penalty=_number(request.get("frequency_penalty")),
        presence_penalty=_number(request.get("presence_penalty")),
        repetition_penalty=_number(request.get("repetition_penalty")),
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


def without_secrets(request: dict[str, Any]) -> dict[str, Any]:
    """The request without the credentials that clients put into bodies: keys, and headers of remote tools."""
    kept = {key: value for key, value in request.items() if key not in _SECRET_KEYS}
    for key in ("tools", "mcp_servers"):
        if key in kept and isinstance(kept[key], list):
            kept[key] = [_clean(item) for item in as_list(kept[key])]
    return kept


def _clean(item: Json) -> Json:
    entry = as_dict(item)
    if not any(key in entry for key in _SECRET_KEYS):
        return item
    return {key: value for key, value in entry.items() if key not in _SECRET_KEYS}
