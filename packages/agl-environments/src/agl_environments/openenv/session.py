"""A session with an OpenEnv server over a WebSocket, with the protocol of OpenEnv's own client.

Each message of the type ``reset``, ``step`` or ``state`` gets one answer. Resets and steps are recorded as tool calls
with their rewards. If the environment refuses an action, that is a normal answer; if the server goes away, an error is
raised.
"""

import asyncio
import json
import math
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import aiohttp

import agl
from agl.errors import RunError
from agl.schemas import Json, Record
from agl.tracing import open_span
from agl_run.programs import LostError

T = TypeVar("T")

RECORDED = 32_000
"""Largest number of characters of an observation in its span; the agent always gets the whole observation."""

_INTERRUPTIBLE_S = 0.2
"""Longest uninterrupted wait of a thread in seconds.

An attempt over the time limit is ended by an exception in the attempt's thread, raised only between two waits.
"""

_REFUSED = frozenset({"VALIDATION_ERROR", "EXECUTION_ERROR"})


class OpenEnvError(RunError):
    """The server's answer is invalid or late, or the server refused a session or a reset."""


class ServerLostError(LostError):
    """The server went away, which is not the agent's fault; the attempt is repeated."""


class CapacityError(RunError):
    """The server has no free session; ``limit`` is the server's number of sessions, ``None`` if unknown."""

    def __init__(self, message: str, limit: int | None) -> None:
        super().__init__(message)
        self.limit = limit


class Step(Record, frozen=True, kw_only=True):
    """The answer to a reset or a step.

    Attributes:
        observation: The environment's observation, by field.
        reward: Reward of this step; ``None`` if it has none.
        done: True if the episode is over.
        metadata: Further data from the environment.
        refused: The reason why the environment refused the action, which then had no effect; ``""`` if it did not.
    """

    observation: dict[str, Json] = {}
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Json] = {}
    refused: str = ""


class Session:
    """A session with a server, which handles one message at a time; opened by :meth:`open`, ended by :meth:`close`.

    Attributes:
        loop: The event loop that the session belongs to.
        lost: The error with which the server went away; ``None`` until then.
        rewards: Rewards of the latest reset and of the steps since, in order.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, *, url: str, timeout_s: float) -> None:
        self._socket = socket
        self._url = url
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self.loop = asyncio.get_running_loop()
        self._is_closed = False
        self.lost: ServerLostError | None = None
        self.rewards: list[float] = []

    @classmethod
    async def open(cls, client: aiohttp.ClientSession, url: str, *, timeout_s: float, max_message: int) -> "Session":
        """Open a session with a server.

        Args:
            client: The HTTP client, which must stay open as long as the session.
            url: The server's base URL (``http`` or ``https``), without ``/ws``.
            timeout_s: Seconds that the server may take for one answer.
            max_message: Largest size of one answer in bytes.

        Raises:
            CapacityError: The server has no free session.
            ServerLostError: The server cannot be reached.
            OpenEnvError: The server is not an OpenEnv server, or opened no session.
        """
        try:
            async with asyncio.timeout(timeout_s):
                socket = await client.ws_connect(socket_url(url), max_msg_size=max_message, autoping=True)
        except aiohttp.WSServerHandshakeError as error:
            raise OpenEnvError(
                f"{url} answered the WebSocket at /ws with HTTP {error.status}, so it is not an OpenEnv server; check "
                "url in [runner] params"
            ) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerLostError(f"the OpenEnv server at {url} cannot be reached: {_named(error)}") from error
        session = cls(socket, url=url, timeout_s=timeout_s)
        try:
            await session._begin()
        except BaseException:
            await session.close()
            raise
        return session

    async def _begin(self) -> None:
        """Request the state, because a server without a free session reports that only in its first answer."""
        answer = await self._ask({"type": "state"})
        data = _mapping(answer.get("data"))
        code = data.get("code")
        if code == "CAPACITY_REACHED":
            limit = data.get("max_sessions")
            raise CapacityError(str(data.get("message")), limit if isinstance(limit, int) else None)
        if answer.get("type") == "error" and code not in _REFUSED:
            raise OpenEnvError(f"the OpenEnv server at {self._url} opened no session: {data.get('message')} ({code})")

    async def reset(self, **arguments: Json) -> Step:
        """Start an episode; rewards of an earlier episode in this session no longer count.

        Args:
            arguments: Arguments of the environment's reset, such as ``seed``.

        Raises:
            OpenEnvError: The environment could not be reset.
            ServerLostError: The server went away.
        """
        self.rewards.clear()
        return await self._recorded("reset", arguments, {"type": "reset", "data": arguments})

    async def step(self, action: Mapping[str, Json]) -> Step:
        """Take an action, given as the fields of the environment's action type, and return the answer.

        If the environment refuses the action, the answer has the reason in ``refused``.

        Raises:
            OpenEnvError: The server's answer is invalid or late.
            ServerLostError: The server went away.
        """
        return await self._recorded("step", action, {"type": "step", "data": dict(action)})

    async def state(self) -> dict[str, Json]:
        """Return the fields of the environment's state.

        Raises:
            OpenEnvError: The server's answer is invalid or late.
            ServerLostError: The server went away.
        """
        answer = await self._ask({"type": "state"})
        if answer.get("type") != "state":
            raise OpenEnvError(f"the OpenEnv server at {self._url} has no state: {_message(answer)}")
        return _mapping(answer.get("data"))

    async def _recorded(self, name: str, arguments: Mapping[str, Json], message: Mapping[str, Json]) -> Step:
        with open_span(tool=name, arguments=dict(arguments)) as span:
            step = self._read(name, await self._ask(message))
            span.set(result=_bounded(step))
            if step.refused:
                span.set({"error.type": "refused"})
            if step.reward is not None:
                self.rewards.append(step.reward)
                if span.span_id:
                    agl.emit_reward(step.reward, name=name, scope="span", span_id=span.span_id)
        return step

    def _read(self, name: str, answer: Mapping[str, Any]) -> Step:
        data = _mapping(answer.get("data"))
        if answer.get("type") == "error" and name == "step" and data.get("code") in _REFUSED:
            return Step(refused=_message(answer))
        if answer.get("type") == "error":
            raise OpenEnvError(f"the OpenEnv server at {self._url} refused {name}: {_message(answer)}")
        reward, observation = data.get("reward"), data.get("observation")
        is_step = answer.get("type") == "observation" and isinstance(observation, dict)
        if not is_step or not (reward is None or isinstance(reward, bool | int | float)):
            raise OpenEnvError(
                f"the OpenEnv server at {self._url} answered {name} with {json.dumps(answer)[:200]}, which is not "
                "an observation; check that url in [runner] params is that of an OpenEnv server"
            )
        if reward is not None and not math.isfinite(reward):
            raise OpenEnvError(
                f"the environment at {self._url} rewarded a {name} with {reward}; correct it so that it gives a finite "
                "number"
            )
        return Step(
            observation=cast("dict[str, Json]", observation),
            reward=None if reward is None else float(reward),
            done=bool(data.get("done")),
            metadata=_mapping(data.get("metadata")),
        )

    async def _ask(self, message: Mapping[str, Json]) -> dict[str, Any]:
        """Send a message and return the answer; closes the session on failure, as later answers would not match."""
        try:
            async with self._lock, asyncio.timeout(self._timeout_s):
                with suppress(ConnectionError, aiohttp.ClientError):  # closed after an error that is still to be read
                    await self._socket.send_json(dict(message))
                received = await self._socket.receive()
        except TimeoutError:
            await self.close()
            raise OpenEnvError(
                f"the OpenEnv server at {self._url} did not answer {message['type']} within {self._timeout_s:g} s; "
                "raise timeout_s in [runner] params if its steps take longer"
            ) from None
        except asyncio.CancelledError:
            await self.close()
            raise
        except (ConnectionError, aiohttp.ClientError) as error:
            raise self._gone(_named(error)) from error
        return await self._decoded(received)

    async def _decoded(self, received: aiohttp.WSMessage) -> dict[str, Any]:
        if self._is_closed:
            raise OpenEnvError(f"the session with the OpenEnv server at {self._url} is closed; its attempt is over")
        if received.type is aiohttp.WSMsgType.ERROR or self._socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            await self.close()
            raise OpenEnvError(
                f"an answer of the OpenEnv server at {self._url} cannot be read: {received.data}; if it is too big, "
                "raise max_message_mb in [runner] params"
            )
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise self._gone(f"it closed the session (code {self._socket.close_code})")
        try:
            answer = json.loads(received.data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            await self.close()
            raise OpenEnvError(
                f"the OpenEnv server at {self._url} answered {str(received.data)[:200]!r}, which is not a JSON object"
            )
        return cast("dict[str, Any]", answer)

    def _gone(self, reason: str) -> ServerLostError:
        self.lost = ServerLostError(f"the OpenEnv server at {self._url} went away: {reason}")
        return self.lost

    async def close(self) -> None:
        """End the session, so that the server removes the environment; idempotent."""
        self._is_closed = True
        if not self._socket.closed:
            await self._socket.close()


class BlockingSession:
    """A session for agents that are plain functions: it has the methods of :class:`Session`, which block here."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def reset(self, **arguments: Json) -> Step:
        """Start an episode; see :meth:`Session.reset`."""
        return self._run(self._session.reset(**arguments))

    def step(self, action: Mapping[str, Json]) -> Step:
        """Take an action; see :meth:`Session.step`."""
        return self._run(self._session.step(action))

    def state(self) -> dict[str, Json]:
        """Return the environment's state; see :meth:`Session.state`."""
        return self._run(self._session.state())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if _running_loop() is self._session.loop:
            work.close()
            raise OpenEnvError(
                "the agent waits for its OpenEnv session on the event loop that serves it, because it returns a "
                "coroutine and is no coroutine function; write it as async def, all of its methods for rollouts if it "
                "is a class, and await the methods of env"
            )
        running = asyncio.run_coroutine_threadsafe(work, self._session.loop)
        try:
            while True:
                try:
                    return running.result(timeout=_INTERRUPTIBLE_S)
                except TimeoutError:
                    if running.done():
                        raise
        except BaseException:
            running.cancel()
            raise


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def socket_url(url: str) -> str:
    """Return the URL of a server's WebSocket, given its base URL."""
    parts = urlsplit(url.rstrip("/"))
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return urlunsplit(parts._replace(scheme=scheme, path=f"{parts.path}/ws"))


def _mapping(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _message(answer: Mapping[str, Any]) -> str:
    """Return the text of an error answer, with the invalid fields."""
    data = _mapping(answer.get("data"))
    errors = cast("list[Any]", data.get("errors") or [])
    wrong = [
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}"
        for error in map(_mapping, errors[:5])
        if error.get("msg")
    ]
    return "; ".join([str(data.get("message") or "no reason given"), *wrong])


def _bounded(step: Step) -> Json:
    """Return a step in the form that its span records, in which a long observation is cut."""
    text = json.dumps(step.observation, ensure_ascii=False)
    shown: Json = step.observation
    if len(text) > RECORDED:
        shown = f"{text[:RECORDED]}… [{len(text) - RECORDED} characters left out]"
    found: dict[str, Json] = {"observation": shown, "reward": step.reward, "done": step.done}
    return {**found, "refused": step.refused} if step.refused else found


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
