"""The policy `verl`: one address for the weights that VERL trains, whichever server has them at the moment.

While VERL's cluster runs, its replicas serve, and the algorithm reports their addresses (`attach`). Before and after,
as during another algorithm's turn or the last validation, the policy named by `home` serves in this process. It starts
with the first call, so that it takes no memory from VERL. Both return token ids and log-probabilities.

A separate process passes the calls on (`relay_process.py`), so neither a busy agent nor a busy trainer delays them. All
mutable state here belongs to one event loop in its own thread.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from agl import PluginManager
from agl.contracts import POLICY_KEY_ENV, ServedModel
from agl.errors import AglError, ConfigError, PolicyError
from agl.schemas import ResourceVersion, Weights
from agl_algo_verl.serving.relay import CONNECT_S, Backend, model_of
from agl_algo_verl.serving.relay_process import RelayProcess
from agl_vllm.client import ServerClient

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from agl.contracts import Policy

BACKLOG = 4096
"""The maximum number of connections that wait while the relay's process restarts."""


class VerlPolicy:
    """Implements `Policy` in front of VERL's replicas.

    Args:
        name: The policy's name, which is also the model name in requests.
        model: Directory or hub name of the weights to start from.
        home: The kind of policy that serves while no cluster does; it must be able to load weights.
        host: Interface to listen on.
        port: Port; 0 for a free one.
        params: Parameters of `home`, such as `threads`.

    Raises:
        ConfigError: `home` is `verl` itself, or `model` is a path without a directory.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        home: str = "torch",
        host: str = "127.0.0.1",
        port: int = 0,
        **params: Any,
    ) -> None:
        if home == "verl":
            raise ConfigError(f'policy {name!r}: home = "verl" would serve through itself; use "torch" or "vllm"')
        if is_absent(model):
            raise ConfigError(
                f"policy {name!r} has model = {model!r}, and there is no such directory; give one in Hugging Face's "
                "format (config.json, model.safetensors, tokenizer.json), or a hub name"
            )
        self.name = name
        self._model, self._home_name, self._params = model, home, params
        self._host, self._port = host, port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._relay = RelayProcess(self._home_backend, key=policy_key())
        self._listener: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._replicas: Backend | None = None
        self._home: Policy | None = None
        self._home_serves: ServedModel | None = None
        self._address = ""
        self._failure: AglError | None = None
        self._live: ResourceVersion | None = None

    @property
    def has_token_ids(self) -> bool:
        """Always true: VERL's replicas and `torch` return token ids."""
        return True

    def resource(self) -> Weights:
        """Return the weights from which the policy starts, as a resource."""
        return Weights(uri=self._model)

    async def start(self) -> ServedModel:
        """Start to listen; raises PolicyError if the port is taken."""
        if self._thread is not None:
            raise PolicyError(f"the policy {self.name!r} serves already; stop it first")
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listener = socket.create_server((self._host, self._port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise PolicyError(
                f"the policy {self.name!r} cannot listen on {self._host}:{self._port} ({error}); "
                "give another port, or 0"
            ) from error
        self._relay = RelayProcess(self._home_backend, key=policy_key())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agl-verl-policy", daemon=True)
        self._thread.start()
        await self._there(self._relay.start(self._listener.dup()))
        port = self._listener.getsockname()[1]
        self._address = f"http://{self._host}:{port}/v1"
        return self._served()

    async def stop(self) -> None:
        """Stop serving; idempotent."""
        loop, thread, self._thread = self._loop, self._thread, None
        if loop is None or thread is None:
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(), loop))
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()
        if self._listener is not None:
            self._listener.close()

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Serve the weights of a version; if VERL's replicas serve, they have the weights from VERL already."""
        if not isinstance(version.resource, Weights):
            raise ConfigError(
                f"the policy {self.name!r} can load weights, and {version.name}@{version.version} is a "
                f"{type(version.resource).__name__}; let an algorithm that trains weights tune it"
            )
        await self._there(self._load(version))
        return self._served()

    async def attach(self, addresses: Sequence[str], *, version: str = "", asks_tokens: bool = False) -> bool:
        """Send calls to VERL's replicas from now on, including calls that were held.

        Args:
            addresses: The replicas, `host:port` each.
            version: Version of the replicas' weights, for answers that do not name one.
            asks_tokens: True to send later turns as recorded tokens, if the first replica takes prompts of token ids.

        Returns true if later turns are sent as recorded tokens.
        Raises PolicyError if the first replica does not report its model, or if the relay's process does not start.
        """
        urls = tuple(f"http://{address}/v1" for address in addresses)
        known = self._replicas
        same = known if known is not None and known.urls == urls else None
        key = policy_key()
        model = same.model if same else await self._there(_model_of(urls[0], key=key))
        is_known = same is not None and same.takes_tokens
        takes_tokens = is_known or (asks_tokens and await _takes_tokens(urls[0], model, key=key))
        backend = Backend(urls=urls, model=model, version=version, is_awaited=True, key=key, takes_tokens=takes_tokens)
        await self._there(self._attach(backend))
        return takes_tokens

    async def hold(self) -> None:
        """Hold new calls until `attach`, `detach` or `stop`; returns once the calls in flight have ended."""
        await self._there(self._relay.hold())

    async def detach(self) -> None:
        """Send calls to the `home` policy from now on; idempotent.

        Calls that wait because their replicas are gone keep waiting, for `attach` or `stop`.
        """
        await self._there(self._attach(None))

    async def lost(self) -> None:
        """Return once a call has found all replicas unreachable, or once the relay has ended for good."""
        await self._there(self._relay.lost.wait())

    def failure(self) -> AglError | None:
        """Return the error that ended the relay for good; None while it works."""
        return self._relay.failure

    async def counts(self) -> dict[str, int]:
        """Return three counts: calls that replicas answered, replicas found unreachable, and restarts of the relay."""
        return await self._there(self._counts())

    def _served(self) -> ServedModel:
        version = self._live.version if self._live else ""
        return ServedModel(base_urls=(self._address,), model=self.name, version=version, api_key_env=POLICY_KEY_ENV)

    async def _there(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            work.close()
            raise PolicyError(f"the policy {self.name!r} does not serve; start it first")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _load(self, version: ResourceVersion) -> None:
        async with self._lock:
            self._live = version
            if self._home is not None:
                self._home_serves = await self._home.load(version)

    async def _end(self) -> None:
        await self._relay.stop()
        await self._leave_home()

    async def _counts(self) -> dict[str, int]:
        relay = self._relay
        await relay.count()
        counts = {"replica_calls": relay.calls.total(), "replica_failures": relay.failures.total()}
        return counts | {"relay_restarts": relay.restarts}

    async def _attach(self, replicas: Backend | None) -> None:
        async with self._lock:
            self._replicas, self._failure = replicas, None
        self._relay.use(replicas)
        if replicas is not None:
            await self._leave_home()

    async def _leave_home(self) -> None:
        async with self._lock:
            home, self._home, self._home_serves = self._home, None, None
        if home is not None:
            await home.stop()

    async def _home_backend(self) -> Backend:
        """Return the replicas if they are attached by now, else the `home` policy, started for the first call."""
        async with self._lock:
            if self._replicas is not None:
                return self._replicas
            if self._failure is not None:
                raise self._failure
            if self._home_serves is None:
                try:
                    self._home_serves = await self._start_home()
                except AglError as error:
                    self._failure = error  # later calls fail at once; starting would fail again
                    raise
            home = self._home_serves
            return Backend(urls=home.base_urls, model=home.model, key=os.environ.get(home.api_key_env, ""))

    async def _start_home(self) -> ServedModel:
        manager = PluginManager.from_environment()
        home: Policy = manager.build(manager.policy(self._home_name), name=self.name, model=self._model, **self._params)
        served = await home.start()
        if self._live is not None:
            served = await home.load(self._live)
        self._home = home
        return served


async def _model_of(url: str, *, key: str) -> str:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await model_of(session, url, key=key)


async def _takes_tokens(url: str, model: str, *, key: str) -> bool:
    try:
        return await ServerClient(url, key=key).takes_tokens(model=model)
    except PolicyError:  # such as a server whose template refuses the request: its calls are sent as they come
        return False


def policy_key() -> str:
    """Return the API key of this process's policies and VERL's replicas; it is created if the environment has none."""
    return os.environ.setdefault(POLICY_KEY_ENV, secrets.token_urlsafe(32))


def is_absent(model: str) -> bool:
    """Return true if `model` is the path of a directory that does not exist, and not a hub name."""
    path = Path(model).expanduser()
    is_place = model.startswith((".", "/", "~")) or (len(path.parts) > 1 and path.parent.is_dir())
    return is_place and not path.is_dir()
