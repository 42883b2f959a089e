"""The policy `verl`: one address for the weights that VERL trains, whichever server has them at the moment.

While VERL's cluster runs, its replicas serve, and the algorithm says where (`attach`). Before and after, as during
another algorithm's turn or the last validation, the policy named by `home` serves here. It is started when the first
call comes, so that it takes no memory from VERL. Both give token ids and log-probabilities.

All mutable state belongs to one event loop in a thread of its own, so that a busy agent delays no answer. Where there
are many replicas or many calls, a process of its own passes the calls on (`relay_process.py`), which a busy trainer
does not delay either. The address stays, for both listen at the same socket.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import aiohttp

from agl import PluginManager
from agl.contracts import POLICY_KEY_ENV, ServedModel
from agl.errors import AglError, ConfigError, PolicyError
from agl.hints import did_you_mean
from agl.schemas import ResourceVersion, Weights
from agl_algo_verl.serving.relay import CONNECT_S, Backend, ReplicaRelay, model_of
from agl_algo_verl.serving.relay_process import RelayProcess

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from agl.contracts import Policy

RelayPlace = Literal["auto", "process", "here"]
PLACES: tuple[RelayPlace, ...] = ("auto", "process", "here")

MANY_REPLICAS, MANY_CALLS = 4, 64
"""Numbers above which calls are passed on by a process of their own."""

BACKLOG = 4096
"""Connections that wait while the relay's process is started again."""


class VerlPolicy:
    """Plays the role `Policy` in front of VERL's replicas.

    Args:
        name: The policy's name, which is also the model name that requests give.
        model: Directory or hub name of the weights to start from.
        home: The kind of policy that serves while no cluster does; it must be able to load weights.
        host: Interface to listen on.
        port: Port; 0 for a free one.
        relay: The place where calls are passed on to replicas: `here`, in this process; a `process` of its own; by
            default that process once there are more than `relay_replicas` replicas, or more than `relay_calls` calls
            have been under way at once.
        relay_replicas: Replicas up to which this process passes calls on by default.
        relay_calls: Calls under way up to which it does.
        params: Parameters of `home`, such as `threads`.

    Raises:
        ConfigError: `home` is `verl` itself, `model` is a path without a directory, or a setting of the relay is wrong.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        home: str = "torch",
        host: str = "127.0.0.1",
        port: int = 0,
        relay: RelayPlace = "auto",
        relay_replicas: int = MANY_REPLICAS,
        relay_calls: int = MANY_CALLS,
        **params: Any,
    ) -> None:
        if home == "verl":
            raise ConfigError(f'policy {name!r}: home = "verl" would serve through itself; use "torch" or "vllm"')
        if is_absent(model):
            raise ConfigError(
                f"policy {name!r} has model = {model!r}, and there is no such directory; give one in Hugging Face's "
                "format (config.json, model.safetensors, tokenizer.json), or a hub name"
            )
        _check_relay(name, relay, relay_replicas, relay_calls)
        self.name = name
        self._place, self._many_replicas, self._many_calls = relay, relay_replicas, relay_calls
        self._model, self._home_name, self._params = model, home, params
        self._host, self._port = host, port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._relays: list[ReplicaRelay | RelayProcess] = []  # the one at work, and one that it took over from
        self._leaving: asyncio.Task[None] | None = None
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
        """Always true: VERL's replicas and `torch` give token ids."""
        return True

    def resource(self) -> Weights:
        """Return the weights to start from, by their place."""
        return Weights(uri=self._model)

    async def start(self) -> ServedModel:
        """Listen; raises PolicyError when the port is taken."""
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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agl-verl-policy", daemon=True)
        self._thread.start()
        await self._there(self._begin(self._listener))
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
        """Serve these weights; replicas of VERL have them already, for VERL handed them over itself."""
        if not isinstance(version.resource, Weights):
            raise ConfigError(
                f"the policy {self.name!r} can load weights, and {version.name}@{version.version} is a "
                f"{type(version.resource).__name__}; let an algorithm that trains weights tune it"
            )
        await self._there(self._load(version))
        return self._served()

    async def attach(self, addresses: Sequence[str], *, version: str = "") -> None:
        """Send calls to VERL's replicas from now on; calls that were held go there.

        Args:
            addresses: The replicas, `host:port` each.
            version: Version of their weights, for answers that do not name it.

        Raises PolicyError when the first replica does not say which model it serves, and when the relay's process does
        not start.
        """
        urls = tuple(f"http://{address}/v1" for address in addresses)
        known = self._replicas
        same = known if known is not None and known.urls == urls else None
        key = policy_key()
        model = same.model if same else await self._there(_model_of(urls[0], key=key))
        await self._there(self._attach(Backend(urls=urls, model=model, version=version, is_awaited=True, key=key)))

    async def hold(self) -> None:
        """Hold new calls until `attach`, `detach` or `stop`; returns once the calls under way have ended."""
        await self._there(self._hold())

    async def detach(self) -> None:
        """Send calls home from now on; idempotent.

        Calls that wait because their replicas are gone go on waiting, for `attach` or `stop`.
        """
        await self._there(self._attach(None))

    async def lost(self) -> None:
        """Return once a call has found that none of the replicas can be reached, or the relay has ended for good."""
        await self._there(self._first_loss())

    def failure(self) -> AglError | None:
        """Return why the relay has ended for good; None while it works."""
        return next((relay.failure for relay in self._relays if isinstance(relay, RelayProcess)), None)

    async def counts(self) -> dict[str, int]:
        """Return how many calls replicas have answered, how many times one could not be reached, and restarts."""
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

    async def _begin(self, listener: socket.socket) -> None:
        """Pass calls on that arrive at a socket: in a process of its own where that is wanted, here otherwise."""
        relay_class = RelayProcess if self._place == "process" else ReplicaRelay
        self._relays.append(relay := relay_class(self._home_backend, key=policy_key()))
        await relay.start(listener.dup())

    async def _end(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        await asyncio.gather(*(relay.stop() for relay in self._relays))
        await self._leave_home()

    async def _hold(self) -> None:
        await asyncio.gather(*(relay.hold() for relay in self._relays))

    async def _first_loss(self) -> None:
        losses = [asyncio.ensure_future(relay.lost.wait()) for relay in self._relays]
        try:
            await asyncio.wait(losses, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for loss in losses:
                loss.cancel()

    async def _counts(self) -> dict[str, int]:
        calls, failures, restarts = Counter[str](), Counter[str](), 0
        for relay in self._relays:
            if isinstance(relay, RelayProcess):
                await relay.count()
                restarts += relay.restarts
            calls += relay.calls
            failures += relay.failures
        return {"replica_calls": calls.total(), "replica_failures": failures.total(), "relay_restarts": restarts}

    async def _attach(self, replicas: Backend | None) -> None:
        async with self._lock:
            self._replicas, self._failure = replicas, None
            if replicas is not None and self._is_outgrown(replicas):
                await self._move_out(replicas)
        for relay in self._relays:
            relay.use(replicas)
        if replicas is not None:
            await self._leave_home()

    def _is_outgrown(self, replicas: Backend) -> bool:
        """Return whether calls are passed on here and should not be any more."""
        relay = self._relays[-1]
        if self._place != "auto" or isinstance(relay, RelayProcess):
            return False
        return len(replicas.urls) > self._many_replicas or relay.most > self._many_calls

    async def _move_out(self, replicas: Backend) -> None:
        """Let a process take the calls from now on; the relay here ends with those that it has."""
        if self._listener is None:
            raise AssertionError("a policy listens before it is attached")
        here, process = self._relays[-1], RelayProcess(self._home_backend, key=policy_key())
        process.use(replicas)
        await process.start(self._listener.dup())
        self._relays.append(process)
        if isinstance(here, ReplicaRelay):
            self._leaving = asyncio.create_task(here.leave())

    async def _leave_home(self) -> None:
        async with self._lock:
            home, self._home, self._home_serves = self._home, None, None
        if home is not None:
            await home.stop()

    async def _home_backend(self) -> Backend:
        """Return VERL's replicas if there are some by now, or the policy at home, which the first call starts."""
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


def _check_relay(name: str, place: str, replicas: int, calls: int) -> None:
    """Raise ConfigError for settings of the relay that are wrong or would be ignored."""
    if place not in PLACES:
        hint = did_you_mean(place, PLACES, otherwise=f"use one of: {', '.join(PLACES)}.")
        raise ConfigError(f"policy {name!r} has relay = {place!r}; {hint}")
    if replicas < 0 or calls < 0:
        raise ConfigError(
            f"policy {name!r} has relay_replicas = {replicas} and relay_calls = {calls}; give whole numbers from 0."
        )
    if place != "auto" and (replicas, calls) != (MANY_REPLICAS, MANY_CALLS):
        raise ConfigError(
            f'policy {name!r} has relay_replicas or relay_calls beside relay = "{place}", which does not read them. '
            'Remove them, or set relay = "auto".'
        )


def policy_key() -> str:
    """Return the key that policies of this process ask for, and VERL's replicas; made at first unless it is set."""
    return os.environ.setdefault(POLICY_KEY_ENV, secrets.token_urlsafe(32))


def is_absent(model: str) -> bool:
    """Return whether this is a path, rather than a hub name, and no directory is there."""
    path = Path(model).expanduser()
    is_place = model.startswith((".", "/", "~")) or (len(path.parts) > 1 and path.parent.is_dir())
    return is_place and not path.is_dir()
