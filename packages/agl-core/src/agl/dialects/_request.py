"""Requests: what is added to ask for token ids, what is read from them, and what is kept out of the store."""

from typing import Any

import msgspec

from agl.dialects._foreign import as_dict, as_list
from agl.schemas import Dialect, Json, Sampling

_SECRET_KEYS = ("api_key", "authorization", "authorization_token", "headers")
_LOGPROBS_INCLUDE = "message.output_text.logprobs"

_BODY = msgspec.json.Decoder(dict[str, Any])
_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """What routing needs of a request body; values as found."""

    model: Any = ""
    stream: Any = False

    @property
    def model_name(self) -> str:
        """The model asked for, ``""`` if none or not text."""
        return self.model if isinstance(self.model, str) else ""


_HEAD = msgspec.json.Decoder(RequestHead)


def head_of(body: bytes) -> RequestHead | None:
    """Model and stream flag of a request body, without building the rest; ``None`` unless it is a JSON object."""
    try:
        return _HEAD.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def parse_body(body: bytes) -> dict[str, Any] | None:
    """The request as a dict; ``None`` unless it is a JSON object."""
    try:
        return _BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def prepare_body(dialect: Dialect, body: bytes, *, want_ids: bool, model: str | None = None) -> bytes:
    """The body to send upstream: with the fields that ask for token ids, and with ``model`` in place of its own.

    The values of all other fields keep their exact bytes. Bytes come back untouched when there is nothing to
    change, and when the body is not a JSON object: the backend's own error is the best answer to that.
    """
    if not want_ids and not model:
        return body
    try:
        request = _TOP.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    changes = _id_fields(dialect, request) if want_ids else {}
    if model and _value(request, "model") != model:
        changes["model"] = model
    if not changes:
        return body
    return msgspec.json.encode({**request, **changes})


def _value(request: dict[str, msgspec.Raw], key: str) -> Any:
    raw = request.get(key)
    return None if raw is None else msgspec.json.decode(raw)


def _id_fields(dialect: Dialect, request: dict[str, msgspec.Raw]) -> dict[str, Any]:
    match dialect:
        case "chat":
            return {"return_token_ids": True, "return_prompt_token_ids": True, "logprobs": True}
        case "completions":
            asked = _value(request, "logprobs")
            return {"return_token_ids": True, "logprobs": 1 if asked is None else asked}
        case "responses":
            include = list(as_list(_value(request, "include")))
            if _LOGPROBS_INCLUDE not in include:
                include.append(_LOGPROBS_INCLUDE)
            return {"enable_response_messages": True, "include": include}
        case "messages":
            return {"return_token_ids": True}
        case "embeddings":
            return {}


def sampling_of(request: dict[str, Any]) -> Sampling:
    """The sampling parameters of a request in any dialect; what is not a number where one belongs is left out."""
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
    for key in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        if (value := _integer(request.get(key))) is not None:
            return value
    return None


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
