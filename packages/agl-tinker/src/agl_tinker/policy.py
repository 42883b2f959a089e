"""The policy ``tinker``: a base model or trained weights on a server that speaks Tinker's API.

Agents call OpenAI-compatible endpoints on this machine, which turn each request into a sampling call of the server.
New weights are identified by paths on the server, so nothing is downloaded.
"""

import asyncio
import json
import os
import secrets
from http.client import HTTPException
from typing import Annotated, Any, Literal, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import msgspec

from agl.contracts import POLICY_KEY_ENV, ServedModel
from agl.errors import ConfigError, PolicyError
from agl.hints import did_you_mean
from agl.schemas import ResourceVersion, Weights
from agl_tinker.chat import ChatLimits, ChatServer, Live
from agl_tinker.connection import LORA, Connection
from agl_tinker.rendering import ChatText

Tokens = Annotated[int, msgspec.Meta(ge=0)]
"""A number of tokens; 0 for no limit."""

_ANSWER_S = 20.0


class TinkerPolicy:
    """A :class:`~agl.contracts.Policy` over a server of Tinker's API.

    Args:
        name: The policy's name, which is also the model name that requests give.
        model: The base model, by the server's name for it.
        base_url: The server's URL; by default the one in ``TINKER_BASE_URL``, else Tinker's own.
        api_key_env: Environment variable with the API key.
        tokenizer: Folder or hub name of the tokenizer with its chat template; by default `model`.
        context_length: The most tokens of a prompt and its answer; by default the server's limit.
        max_tokens: Length limit of answers to requests that give none; by default the room left in the context.
        tool_parser: Notation of tool calls: `hermes` or `none`.
        project_id: The project at Tinker.

    Attributes:
        losses: The losses that the server lists; ``None`` if it lists none, as Tinker's own server.

    Raises:
        ConfigError: A setting cannot work, or the server, which is asked once, does not have the model.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        base_url: str = "",
        api_key_env: str = "TINKER_API_KEY",
        tokenizer: str = "",
        context_length: Tokens = 0,
        max_tokens: Tokens = 0,
        tool_parser: Literal["hermes", "none"] = "hermes",
        project_id: str = "",
    ) -> None:
        self.name, self.base_model = name, model
        self._tokenizer, self._parses_tools = tokenizer or model, tool_parser == "hermes"
        self._key_env, self._key, self._project_id = api_key_env, os.environ.get(api_key_env, ""), project_id
        self._base_url = _resolved(base_url)
        if not self._key:
            raise ConfigError(
                f"policy {name!r}: the key of Tinker's API is taken from {api_key_env}, which is not set; export it"
            )
        if not all("!" <= char <= "~" for char in self._key):
            raise ConfigError(
                f"policy {name!r}: the key in {api_key_env} has a space, a line break or a character outside of "
                "ASCII, which no key has; export the key alone"
            )
        most, self.losses = self._ask_server()
        self._limits = ChatLimits(context_length=context_length or most, max_tokens=max_tokens)
        self._connection: Connection | None = None
        self._chat: ChatServer | None = None
        self._url = ""

    @property
    def has_token_ids(self) -> bool:
        """Always true: Tinker's API returns token ids and log-probabilities."""
        return True

    @property
    def connection(self) -> Connection:
        """The session with the server; raises PolicyError before :meth:`start`."""
        if self._connection is None:
            raise PolicyError(f"the policy {self.name!r} is not running; start it before it is trained")
        return self._connection

    def resource(self) -> Weights:
        """Return the base model as a resource, identified by its name."""
        return Weights(uri=self.base_model)

    async def start(self) -> ServedModel:
        """Begin a session and start the endpoints, which serve the base model.

        Raises:
            PolicyError: The policy is running already, or the server refuses.
            ConfigError: The tokenizer cannot be loaded.
        """
        if self._chat is not None:
            raise PolicyError(f"the policy {self.name!r} is already serving at {self._url}; stop it first")
        text = await asyncio.to_thread(ChatText, self._tokenizer, parses_tools=self._parses_tools)
        connection = Connection(self._base_url, key=self._key, project_id=self._project_id)
        await connection.open()
        self._connection = connection
        chat = ChatServer(model=self.name, text=text, key=_key(), limits=self._limits)
        chat.live = Live(sampler=await connection.sampler(base_model=self.base_model), version="")
        self._url = await asyncio.to_thread(chat.start)
        self._chat = chat
        return self._served("")

    async def stop(self) -> None:
        """Close the port and end the session; idempotent."""
        if self._chat is not None:
            await asyncio.to_thread(self._chat.stop)
            self._chat = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Serve these weights from the next request on.

        Raises:
            ConfigError: The resource is neither weights on this server nor the base model.
            PolicyError: The server does not have the weights.
        """
        weights = version.resource
        is_ours = isinstance(weights, Weights) and weights.uri.startswith("tinker://")
        is_base = isinstance(weights, Weights) and weights.uri == self.base_model
        if self._chat is None or not (is_ours or is_base):
            raise ConfigError(
                f"the policy {self.name!r} can load weights that are on its server, and {version.name}@"
                f'{version.version} is {weights!r}; let the algorithm "tinker" tune it'
            )
        path = weights.uri if is_ours and isinstance(weights, Weights) else ""
        sampler = await self.connection.sampler(base_model=self.base_model, path=path)
        self._chat.live = Live(sampler=sampler, version=version.version)
        return self._served(version.version)

    def trained(self, path: str) -> Weights:
        """Return weights that training has saved on the server as a resource."""
        return Weights(uri=path, base_model=self.base_model, format=LORA)

    def _ask_server(self) -> tuple[int, tuple[str, ...] | None]:
        """Check with one blocking request that the server can train and sample the base model.

        Returns the server's limit of tokens for a prompt and its answer (0 if unknown), and the losses that it lists.
        """
        found = self._capabilities()
        listed = cast("list[Any]", found.get("supported_models") or [])
        models = [cast("dict[str, Any]", model) for model in listed if isinstance(model, dict)]
        named = {str(model.get("model_name")): model for model in models}
        who = f"policy {self.name!r}: the server at {self._base_url}"
        if self.base_model not in named:
            hint = did_you_mean(self.base_model, named, otherwise=f"it has {', '.join(sorted(named)) or 'none'}")
            raise ConfigError(f"{who} has no base model {self.base_model!r}; {hint}")
        model = named[self.base_model]
        verbs = (("train", "trainable"), ("sample from", "sampleable"))
        if lacks := [verb for verb, key in verbs if model.get(key) is False]:
            raise ConfigError(
                f"{who} does not {' or '.join(lacks)} {self.base_model!r} now; choose another base model of it"
            )
        losses = found.get("losses")
        known = tuple(map(str, cast("list[Any]", losses))) if isinstance(losses, list) else None
        return int(model.get("max_context_length") or 0), known

    def _capabilities(self) -> dict[str, Any]:
        url = f"{self._base_url}/api/v1/get_server_capabilities"
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"policy {self.name!r}: base_url {self._base_url!r} is not a URL; write https://HOST")
        try:
            with urlopen(Request(url, headers={"X-API-Key": self._key}), timeout=_ANSWER_S) as answer:
                found: Any = json.load(answer)
        except HTTPError as error:
            if error.code in (401, 403):
                raise ConfigError(
                    f"policy {self.name!r}: the server at {self._base_url} refuses the key in {self._key_env} "
                    f"({error.code}); set it to a key of this server"
                ) from error
            raise ConfigError(
                f"policy {self.name!r}: {self._base_url} answered {error.code} when it was asked for its capabilities, "
                "so it does not speak Tinker's API, or another version of it; correct base_url"
            ) from error
        except (URLError, OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise ConfigError(
                f"policy {self.name!r}: the server of Tinker's API at {self._base_url} does not answer ({reason}); "
                "start it, or correct base_url"
            ) from error
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    def _served(self, version: str) -> ServedModel:
        return ServedModel(base_urls=(self._url,), model=self.name, version=version, api_key_env=POLICY_KEY_ENV)


def _key() -> str:
    """Return the key for this process's policies; the first call creates it unless the environment has one."""
    return os.environ.setdefault(POLICY_KEY_ENV, secrets.token_urlsafe(32))


def _resolved(base_url: str) -> str:
    from tinker.lib.base_url import resolve_base_url

    return resolve_base_url(base_url or None)
