"""The policy ``tinker``: a base model or trained weights on a server that speaks Tinker's API.

Agents call OpenAI-compatible endpoints on this machine, which turn each request into a call of the server's sampling.
New weights are paths of the server, so nothing is downloaded.
"""

import asyncio
import os
import secrets
from typing import Any

from agl.contracts import POLICY_KEY_ENV, ServedModel
from agl.errors import ConfigError, PolicyError
from agl.schemas import ResourceVersion, Weights
from agl_tinker.chat import ChatLimits, ChatServer, Live
from agl_tinker.connection import LORA, Connection
from agl_tinker.rendering import ChatText
from agl_tinker.settings import ask_server, read_settings


class TinkerPolicy:
    """The role ``Policy`` over a server of Tinker's API.

    Args:
        name: The policy's name, which is also the model name that requests give.
        settings: Keyword arguments, the keys of ``[policy.NAME]``:

            - `model`: the base model, by the server's name for it.
            - `base_url`: the server; absent, that of ``TINKER_BASE_URL``, else Tinker's own.
            - `api_key_env`: environment variable with the API key.
            - `tokenizer`: folder or hub name of the tokenizer with its chat template; absent, `model`.
            - `context_length`: most tokens of prompt and answer; absent, what the server says.
            - `max_tokens`: length of answers to requests that give none; absent, what the context leaves.
            - `tool_parser`: notation of tool calls: `hermes` or `none`.
            - `project_id`: Tinker's project.

    Raises:
        ConfigError: A setting cannot work, or the server does not have the model. The server is asked once.
    """

    def __init__(self, *, name: str, **settings: Any) -> None:
        self.name = name
        self._settings = read_settings(name, settings)
        self._base_url = _resolved(self._settings.base_url)
        self.server = ask_server(name, self._settings, self._base_url)
        self._connection: Connection | None = None
        self._chat: ChatServer | None = None
        self._url = ""

    @property
    def has_token_ids(self) -> bool:
        """Always true: Tinker's API gives token ids and log-probabilities."""
        return True

    @property
    def base_model(self) -> str:
        """The base model, by the server's name for it."""
        return self._settings.model

    @property
    def connection(self) -> Connection:
        """The session with the server; raises PolicyError before :meth:`start`."""
        if self._connection is None:
            raise PolicyError(f"the policy {self.name!r} is not running; start it before it is trained")
        return self._connection

    def resource(self) -> Weights:
        """Return the base model, by its name."""
        return Weights(uri=self._settings.model)

    async def start(self) -> ServedModel:
        """Begin a session and listen; the base model answers.

        Raises:
            PolicyError: It runs already, or the server refuses.
            ConfigError: The tokenizer cannot be loaded.
        """
        if self._chat is not None:
            raise PolicyError(f"the policy {self.name!r} is already serving at {self._url}; stop it first")
        chosen = self._settings
        text = await asyncio.to_thread(
            ChatText, chosen.tokenizer or chosen.model, parses_tools=chosen.tool_parser == "hermes"
        )
        connection = Connection(self._base_url, key=chosen.key, project_id=chosen.project_id)
        await connection.open()
        self._connection = connection
        limits = ChatLimits(
            context_length=chosen.context_length or self.server.context_length, max_tokens=chosen.max_tokens
        )
        chat = ChatServer(model=self.name, text=text, key=_key(), limits=limits)
        chat.live = Live(sampler=await connection.sampler(base_model=chosen.model), version="")
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
        """Answer with these weights from the next request on.

        Raises:
            ConfigError: The resource holds no weights of this server.
            PolicyError: The server does not have them.
        """
        weights = version.resource
        is_ours = isinstance(weights, Weights) and weights.uri.startswith("tinker://")
        is_base = isinstance(weights, Weights) and weights.uri == self._settings.model
        if self._chat is None or not (is_ours or is_base):
            raise ConfigError(
                f"the policy {self.name!r} can load weights that are on its server, and {version.name}@"
                f'{version.version} is {weights!r}; let the algorithm "tinker" tune it'
            )
        path = weights.uri if is_ours and isinstance(weights, Weights) else ""
        sampler = await self.connection.sampler(base_model=self._settings.model, path=path)
        self._chat.live = Live(sampler=sampler, version=version.version)
        return self._served(version.version)

    def trained(self, path: str) -> Weights:
        """Return the resource of weights that training has saved on the server."""
        return Weights(uri=path, base_model=self._settings.model, format=LORA)

    def _served(self, version: str) -> ServedModel:
        return ServedModel(base_urls=(self._url,), model=self.name, version=version, api_key_env=POLICY_KEY_ENV)


def _key() -> str:
    """Return the key that policies of this process ask for; the first one makes it unless it is set."""
    return os.environ.setdefault(POLICY_KEY_ENV, secrets.token_urlsafe(32))


def _resolved(base_url: str) -> str:
    from tinker.lib.base_url import resolve_base_url

    return resolve_base_url(base_url or None)
