"""The settings of a ``[policy.NAME] use = "tinker"`` table, and the answer of the server that they name."""

import json
import os
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Literal, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import msgspec

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Record

_ANSWER_S = 20.0


class TinkerSettings(Record, frozen=True, kw_only=True):
    """The arguments of :class:`agl_tinker.policy.TinkerPolicy`, which describes them."""

    model: str
    base_url: str = ""
    api_key_env: str = "TINKER_API_KEY"
    tokenizer: str = ""
    context_length: int = 0
    max_tokens: int = 0
    tool_parser: Literal["hermes", "none"] = "hermes"
    project_id: str = ""

    @property
    def key(self) -> str:
        """The API key."""
        return os.environ.get(self.api_key_env, "")


def read_settings(name: str, values: Mapping[str, Any]) -> TinkerSettings:
    """Return the settings of policy ``name``; raises :class:`ConfigError` for what cannot work."""
    known = TinkerSettings.__struct_fields__
    unknown = sorted(values.keys() - set(known))
    if unknown:
        hint = did_you_mean(unknown[0], known, otherwise=f"use some of {', '.join(known)}")
        raise ConfigError(f"policy {name!r}: tinker does not know {unknown}; {hint}")
    if "model" not in values:
        raise ConfigError(f"policy {name!r}: tinker needs model, the name of a base model of the server")
    try:
        settings = msgspec.convert(dict(values), TinkerSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy {name!r}: a setting of tinker is of the wrong kind: {error}; correct it") from error
    if settings.context_length < 0 or settings.max_tokens < 0:
        raise ConfigError(f"policy {name!r}: context_length and max_tokens are numbers of tokens, or 0 for no limit")
    if not settings.key:
        raise ConfigError(
            f"policy {name!r}: the key of Tinker's API is taken from {settings.api_key_env}, which is not set; "
            "export it"
        )
    if not all("!" <= char <= "~" for char in settings.key):
        raise ConfigError(
            f"policy {name!r}: the key in {settings.api_key_env} has a space, a line break or a character that is no "
            "ASCII, which no key has; export the key alone"
        )
    return settings


class ServerModel(Record, frozen=True, kw_only=True):
    """The facts that a server gives about the base model.

    Attributes:
        context_length: Most tokens of a prompt and its answer; 0 if unknown.
        losses: Losses that the server says it has; ``None`` where it does not say, as Tinker's own does not.
    """

    context_length: int = 0
    losses: tuple[str, ...] | None = None


def ask_server(name: str, settings: TinkerSettings, base_url: str) -> ServerModel:
    """Ask the server if it trains and samples the base model; one request, which blocks.

    Raises:
        ConfigError: It cannot be reached, refuses the key, or does not have the model; names those that it has.
    """
    found = _capabilities(name, settings, base_url)
    listed = cast("list[Any]", found.get("supported_models") or [])
    models = [cast("dict[str, Any]", model) for model in listed if isinstance(model, dict)]
    named = {str(model.get("model_name")): model for model in models}
    if settings.model not in named:
        hint = did_you_mean(settings.model, named, otherwise=f"it has {', '.join(sorted(named)) or 'none'}")
        raise ConfigError(f"policy {name!r}: the server at {base_url} has no base model {settings.model!r}; {hint}")
    model = named[settings.model]
    lacks = [verb for verb, key in (("train", "trainable"), ("sample from", "sampleable")) if model.get(key) is False]
    if lacks:
        raise ConfigError(
            f"policy {name!r}: the server at {base_url} does not {' or '.join(lacks)} {settings.model!r} now; choose "
            "another base model of it"
        )
    losses = found.get("losses")
    return ServerModel(
        context_length=int(model.get("max_context_length") or 0),
        losses=tuple(map(str, cast("list[Any]", losses))) if isinstance(losses, list) else None,
    )


def _capabilities(name: str, settings: TinkerSettings, base_url: str) -> dict[str, Any]:
    url = f"{base_url}/api/v1/get_server_capabilities"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"policy {name!r}: base_url {base_url!r} is no URL; write https://HOST")
    try:
        with urlopen(Request(url, headers={"X-API-Key": settings.key}), timeout=_ANSWER_S) as answer:
            found: Any = json.load(answer)
    except HTTPError as error:
        if error.code in (401, 403):
            raise ConfigError(
                f"policy {name!r}: the server at {base_url} refuses the key in {settings.api_key_env} "
                f"({error.code}); set it to a key of this server"
            ) from error
        raise ConfigError(
            f"policy {name!r}: {base_url} answered {error.code} to the question what it can do, so it is no server of "
            "Tinker's API, or not one of this version; correct base_url"
        ) from error
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise ConfigError(
            f"policy {name!r}: the server of Tinker's API at {base_url} does not answer ({reason}); start it, or "
            "correct base_url"
        ) from error
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
