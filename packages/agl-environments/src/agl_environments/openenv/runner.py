"""The runner ``openenv``, for agents that play an OpenEnv environment: each attempt gets a session as ``env``.

The session is opened before the agent starts, so waiting for a free session does not use up the agent's time limit. The
reward of the environment's episode becomes the unnamed reward of the rollout. A number that the agent returns is
recorded too, and is the rollout's reward if the episode has none.
"""

import asyncio
import dataclasses
import inspect
import time
from collections.abc import Awaitable
from typing import Any, Literal

import aiohttp

import agl
from agl.errors import ConfigError
from agl.hints import check_table
from agl.schemas import Claim, NamedResources, Outcome, Record, Rollout
from agl.tracing import current
from agl_environments.openenv.servers import StartedServer
from agl_environments.openenv.session import BlockingSession, CapacityError, OpenEnvError, ServerLostError, Session
from agl_run import AgentSpec, AsyncRunner, LoadedAgent, RunContext

_RETRY_S = 1.0
"""Seconds between attempts to open a session while all sessions of the server are in use."""


class OpenEnvSettings(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the runner, from ``[runner] params``; exactly one of ``url`` and ``command`` must be set.

    Attributes:
        url: Base URL of a running server.
        command: The command, as words, that starts a server for each worker; ``{port}`` is replaced by the port.
        reward: The rollout's reward: the ``sum`` of the rewards of the episode's steps, or the ``last`` of them.
        timeout_s: Seconds that the server may take for one answer.
        start_s: Seconds that a server may take to start.
        wait_s: Seconds that an attempt waits for a session, for example while all sessions are in use.
        max_message_mb: Largest size of one answer in MiB.
    """

    url: str = ""
    command: tuple[str, ...] = ()
    reward: Literal["sum", "last"] = "sum"
    timeout_s: float = 60.0
    start_s: float = 60.0
    wait_s: float = 600.0
    max_message_mb: float = 100.0


class OpenEnvRunner:
    """Runs an agent with a session of an OpenEnv server; see the module's docstring.

    Args:
        setup: The context of the run.
        params: Fields of :class:`OpenEnvSettings`.

    Raises:
        ConfigError: A parameter is invalid, or the agent has no parameter ``env``.
    """

    provides = ("env",)
    """Parameters of the agent that this runner fills."""

    def __init__(self, setup: RunContext, **params: Any) -> None:
        self._settings = _settings(params)
        self._folder = setup.agent.folder
        agent = setup.agent.load()
        if agent.parameters and "env" not in agent.parameters and "resources" not in agent.parameters:
            raise ConfigError(
                f"the agent {setup.agent.identity!r} takes {', '.join(agent.parameters)} and no env, so it cannot play "
                "the OpenEnv environment; add the parameter env, as in def play(task, llm, env)"
            )
        self._runner = AsyncRunner(dataclasses.replace(setup, agent=AgentSpec(target=self._with_session(agent))))
        self._sessions: dict[str, Session] = {}
        self._changed = asyncio.Condition()
        self._limit: int | None = None
        self._client: aiohttp.ClientSession | None = None
        self._server: StartedServer | None = None

    async def start(self) -> None:
        """Start the server, if the settings have a command for it."""
        self._client = aiohttp.ClientSession(trust_env=False)
        try:
            if self._settings.command:
                self._server = StartedServer(
                    self._settings.command, folder=self._folder, start_s=self._settings.start_s, client=self._client
                )
                await self._server.url()
            await self._runner.start()
        except BaseException:
            await self.stop()
            raise

    async def execute(self, claim: Claim) -> Outcome:
        """Run one attempt in a new session.

        Raises:
            ServerLostError: The server went away.
            OpenEnvError: The server opened no session.
        """
        session = await self._open()
        attempt_id = claim.attempt.attempt_id
        self._sessions[attempt_id] = session
        try:
            outcome = await self._runner.execute(claim)
        finally:
            del self._sessions[attempt_id]
            await session.close()
            async with self._changed:
                self._changed.notify_all()
        if session.lost is not None:
            raise session.lost
        return outcome

    async def _open(self) -> Session:
        """Open a session; wait while all sessions are in use or the server restarts.

        Raises:
            OpenEnvError: No session was free within ``wait_s``. The message has the number of sessions, if the server
                reported it.
            ServerLostError: The server did not come back.
        """
        assert self._client is not None  # noqa: S101  # started
        settings, since = self._settings, time.monotonic()
        lost: ServerLostError | None = None
        try:
            async with asyncio.timeout(settings.wait_s):
                while True:
                    try:
                        return await Session.open(
                            self._client,
                            await self._server.url() if self._server else settings.url,
                            timeout_s=settings.timeout_s,
                            max_message=int(settings.max_message_mb * 2**20),
                        )
                    except CapacityError as error:
                        self._limit, lost = error.limit, None
                        await self._until_closed()
                    except ServerLostError as error:
                        lost = error
                        if time.monotonic() - since > settings.start_s:
                            raise
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            if lost is not None:
                raise lost from None
            limit = "" if self._limit is None else f" of its {self._limit}"
            raise OpenEnvError(
                f"the OpenEnv server had no free session{limit} for {settings.wait_s:g} s; start it with a higher "
                "max_concurrent_envs, lower [runner] concurrency, or raise wait_s in its params"
            ) from None

    async def _until_closed(self) -> None:
        """Wait until this runner closes a session, but at most a second, as other clients may free sessions too."""
        try:
            async with asyncio.timeout(_RETRY_S), self._changed:
                await self._changed.wait()
        except TimeoutError:
            return

    def _with_session(self, agent: LoadedAgent) -> Any:
        """Wrap the agent in a function that passes it the attempt's session as ``env``; async if the agent is async."""
        if agent.is_async:

            async def play(resources: NamedResources, rollout: Rollout) -> Any:
                session = self._session()
                value = await agent.call(rollout, {**resources, "env": session})  # pyright: ignore[reportArgumentType]  # a resource of this runner's own
                self._reward(session)
                return value

            return play

        def play_in_thread(resources: NamedResources, rollout: Rollout) -> Any:
            session = self._session()
            value = agent.call(rollout, {**resources, "env": BlockingSession(session)})  # pyright: ignore[reportArgumentType]  # likewise
            if inspect.isawaitable(value):
                return self._awaited(value, session)
            self._reward(session)
            return value

        return play_in_thread

    def _session(self) -> Session:
        """Return the session of the current attempt; a lost attempt of the same rollout may hold another one."""
        attempt = current()
        assert attempt is not None  # noqa: S101  # agents run inside their attempts
        return self._sessions[attempt.attempt_id]

    async def _awaited(self, value: Awaitable[Any], session: Session) -> Any:
        found = await value
        self._reward(session)
        return found

    def _reward(self, session: Session) -> None:
        if session.rewards:
            agl.emit_reward(sum(session.rewards) if self._settings.reward == "sum" else session.rewards[-1])

    async def stop(self) -> None:
        """Stop the server, if this runner started it."""
        try:
            await self._runner.stop()
        finally:
            if self._server is not None:
                await self._server.stop()
            if self._client is not None:
                await self._client.close()


def _settings(params: dict[str, Any]) -> OpenEnvSettings:
    known = OpenEnvSettings.__struct_fields__
    unknown = [name for name in params if name not in known]
    if unknown:
        raise ConfigError(f"the runner 'openenv' has no parameter {unknown[0]!r}; there are {', '.join(sorted(known))}")
    settings = check_table(params, OpenEnvSettings, "runner.params.")
    if bool(settings.url) == bool(settings.command):
        raise ConfigError(
            "the runner 'openenv' needs a server: write params = { url = \"http://HOST:PORT\" } for one that runs, or "
            'params = { command = ["uvicorn", "my_env.server:app", "--port", "{port}"] } to start one'
        )
    if settings.url and not settings.url.startswith(("http://", "https://")):
        raise ConfigError(f"url of the OpenEnv server is {settings.url!r}; write http://HOST:PORT or https://HOST")
    return settings
