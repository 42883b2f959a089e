"""A gateway over a real store and the scripted model server, and an attempt that calls through it."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from openai import AsyncOpenAI

from agl.contracts import Redactor, Store, Upstream
from agl.schemas import ModelCall, Rollout, Span, new_rollout_id
from agl.stores import MemoryStore
from agl_gateway.access.certificate import Certificate
from agl_gateway.embedded import EmbeddedGateway
from agl_gateway.record.redaction import Redaction
from agl_gateway.record.spool_file import spools_for
from agl_gateway.service import GatewayService
from agl_gateway.settings import Settings
from agl_run.access.tokens import AttemptTokens, Secret
from agl_testing.model_server import Reply, ScriptedModelServer

ADMIN = "an-admin-token-of-the-tests"
SECRET = b"a secret of the gateway's own tests"


@dataclass
class Stage:
    """A running gateway, its store, and the model server behind it."""

    gateway: EmbeddedGateway
    store: Store
    server: ScriptedModelServer
    url: str
    tokens: AttemptTokens = field(default_factory=lambda: AttemptTokens(SECRET))

    async def open_attempt(self) -> tuple[str, str]:
        """Enqueue and claim a rollout; returns the id and the token of its attempt."""
        rollout = Rollout(rollout_id=new_rollout_id(), task={"question": "?", "answer": "!"}, hidden=("answer",))
        await self.store.enqueue([rollout])
        claims = await self.store.claim(worker="test")
        attempt = claims[0].attempt
        token = self.tokens.issue(attempt.rollout_id, attempt.attempt_id, expires_at=time.time() + 600)
        return attempt.attempt_id, token

    def openai(self, token: str, **settings: object) -> AsyncOpenAI:
        """Return an OpenAI client that calls the gateway with ``token``."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=token, **{"max_retries": 0, "timeout": 60.0, **settings})  # type: ignore[arg-type]

    async def spans(self, attempt_id: str) -> list[Span]:
        """Return the attempt's spans, once all of them are in the store."""
        await self.gateway.settle(attempt_id)
        return await self.store.spans(attempt_id.rpartition(".")[0], attempt_id=attempt_id)

    async def calls(self, attempt_id: str) -> list[ModelCall]:
        """Return the attempt's model calls, once all of them are in the store."""
        return [span.call for span in await self.spans(attempt_id) if span.call is not None]


@asynccontextmanager
async def listening(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Run a server whose every request ``handle`` answers; yields its address."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(default=Reply(text="hello there, how are you?")) as server:
        yield server


StageFactory = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
def stage(server: ScriptedModelServer, tmp_path: Path) -> StageFactory:
    """Return a factory of stages: ``async with stage(upstreams=..., is_trained=...) as it``."""

    @asynccontextmanager
    async def make(
        *,
        upstreams: list[Upstream] | None = None,
        is_trained: bool = True,
        store: Store | None = None,
        secret: Secret = SECRET,
        **settings: Any,
    ) -> AsyncIterator[Stage]:
        used = store or MemoryStore()
        gateway = EmbeddedGateway(**settings)
        one = Upstream(name="main_llm", base_url=server.base_url, model="scripted", is_trained=is_trained)
        url = await gateway.start(store=used, upstreams=upstreams or [one], secret=secret)
        try:
            yield Stage(gateway=gateway, store=used, server=server, url=url)
        finally:
            await gateway.stop()
            await used.close()

    return make


ServiceFactory = Callable[..., AbstractAsyncContextManager[GatewayService]]


@pytest.fixture
def serving(server: ScriptedModelServer) -> ServiceFactory:
    """Return a factory of services in the test's event loop: ``async with serving(backend=..., max_body=...) as
    it``.
    """

    @asynccontextmanager
    async def make(
        *,
        backend: str = "",
        store: Store | None = None,
        spool: Path | None = None,
        certificate: Certificate | None = None,
        client_key: str = "",
        redactor: Redactor | None = None,
        **settings: Any,
    ) -> AsyncIterator[GatewayService]:
        used = store or MemoryStore()
        service = GatewayService(
            store=used,
            upstreams=[Upstream(name="main_llm", base_url=backend or server.base_url, model="scripted")],
            tokens=AttemptTokens(SECRET),
            settings=Settings(**settings),
            admin_key=ADMIN,
            client_key=client_key,
            certificate=certificate,
            redaction=Redaction(redactor),
            spools=await spools_for(used, str(spool), shown="memory://") if spool else (),
        )
        await service.start()
        try:
            yield service
        finally:
            await service.stop()
            if store is None:
                await used.close()

    return make
