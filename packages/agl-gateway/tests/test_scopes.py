"""Every gateway route and store method accepts exactly the kinds of tokens that it is meant for.

A new route or scope that is missing from the tables here fails a test, so that nothing is open by accident.
"""

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import aiohttp
import pytest

from agl.contracts import LabelMove, Upstream
from agl.schemas import PromptTemplate, ResourceVersion, Rollout
from agl.stores import MemoryStore
from agl_gateway.service import GatewayService
from agl_gateway.settings import Settings
from agl_gateway.status.openapi import openapi_document
from agl_gateway.store_api.contract import METHODS
from agl_gateway.traffic.conversations import HEADER
from agl_gateway.traffic.splits import parse_split
from agl_run.access.tokens import AttemptTokens, TokenScope
from agl_testing.model_server import ScriptedModelServer

from .conftest import ADMIN, SECRET

CLIENT = "a-client-token-of-the-tests"
SCOPES: tuple[TokenScope, ...] = get_args(TokenScope)
EVERYBODY = {"none", *SCOPES}
CALLERS = {"attempt", "client", "admin"}

ROUTES: dict[str, set[str]] = {
    "GET /": EVERYBODY,
    "HEAD /": EVERYBODY,
    "GET /healthz": EVERYBODY,
    "GET /identity": set(SCOPES),
    "GET /metrics": {"admin"},
    "GET /openapi.json": {"admin"},
    "GET /split": {"admin"},
    "GET /split/resources/*": CALLERS,
    "GET /v1/models": CALLERS,
    "GET /v1beta/models": CALLERS,
    "POST /conversations/end": {"client", "admin"},
    "POST /conversations/rate": {"client", "admin"},
    "POST /peers": {"admin"},
    "POST /peers/metrics": {"admin"},
    "POST /settle": {"attempt", "admin", "worker"},
    "POST /store/*": {"attempt", "admin", "worker"},
    "POST /v1/traces": {"attempt", "admin"},
    "POST /worker-tokens": {"admin"},
    "POST /v1/chat/completions": CALLERS,
    "POST /v1/completions": CALLERS,
    "POST /v1/embeddings": CALLERS,
    "POST /v1/messages": CALLERS,
    "POST /v1/messages/count_tokens": CALLERS,
    "POST /v1/responses": CALLERS,
    "POST /v1/responses/compact": CALLERS,
    "POST /v1/responses/input_tokens": CALLERS,
    "POST /v1beta/models/*:countTokens": CALLERS,
    "POST /v1beta/models/*:generateContent": CALLERS,
    "POST /v1beta/models/*:streamGenerateContent": CALLERS,
}
"""The scopes that each route accepts on a gateway that serves a split and conversations, with a protected status."""

WORKER = {
    *("announce", "append_spans", "attempts", "claim", "count_rollouts", "experiments", "finish", "presences"),
    *("recordings", "renew", "resource", "rollouts", "spans", "withdraw"),
}
"""The store methods that a worker's token may call."""

REFUSED = (401, 403)


@asynccontextmanager
async def everything(server: ScriptedModelServer) -> AsyncIterator[tuple[GatewayService, dict[str, str]]]:
    """Run a gateway that serves everything it can; yields it with a token of each scope, by scope."""
    store, tokens, soon = MemoryStore(), AttemptTokens(SECRET), time.time() + 600
    await store.publish([ResourceVersion(name="prompt", version="v1", resource=PromptTemplate(template="hi"))])
    await store.enqueue([Rollout(rollout_id="ro-1", task={}, experiment="mine", resources={"prompt": "v1"})])
    await store.claim(worker="test")
    service = GatewayService(
        store=store,
        upstreams=[Upstream(name="main_llm", base_url=server.base_url, model="scripted")],
        tokens=tokens,
        settings=Settings(is_status_protected=True),
        admin_key=ADMIN,
        client_key=CLIENT,
        split=parse_split("stable=0.5,canary=0.5"),
    )
    for label in ("stable", "canary"):
        await store.move_label(LabelMove(name="prompt", label=label, version="v1"))
    await service.start()
    try:
        yield (
            service,
            {
                "none": "",
                "attempt": tokens.issue("ro-1", "ro-1.1", expires_at=soon),
                "client": CLIENT,
                "admin": ADMIN,
                "worker": tokens.issue_for_worker("mine", expires_at=soon),
            },
        )
    finally:
        await service.stop()
        await store.close()


async def status(session: aiohttp.ClientSession, url: str, name: str, token: str) -> int:
    """Return the status for a request to a route; the request is harmless or cannot be carried out."""
    method, _, path = name.partition(" ")
    path = path.replace("*:", "main_llm:").replace("/store/*", "/store/append_spans").replace("*", "prompt")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    headers |= {HEADER: "a-conversation"}
    body: dict[str, Any] = {"attempt_id": "ro-1.1", "spans": [], "model": "main_llm"}
    async with session.request(method, url + path, headers=headers, json=body if method == "POST" else None) as reply:
        await reply.read()
        return reply.status


async def test_every_route_takes_the_tokens_of_its_row_and_no_others(server: ScriptedModelServer) -> None:
    async with everything(server) as (service, tokens), aiohttp.ClientSession() as session:
        assert sorted(ROUTES) == sorted(service.routes)
        found = {
            name: {scope for scope in tokens if await status(session, service.url, name, tokens[scope]) not in REFUSED}
            for name in ROUTES
        }
    assert ROUTES == found


async def test_every_method_of_the_store_takes_the_tokens_of_its_row_and_no_others(server: ScriptedModelServer) -> None:
    expected = {name: {"admin"} | ({"worker"} if name in WORKER else set()) for name in METHODS}
    expected["append_spans"] = {"admin", "worker", "attempt"}
    async with everything(server) as (service, tokens), aiohttp.ClientSession() as session:

        async def opens(name: str, scope: str) -> bool:
            headers = {"authorization": f"Bearer {tokens[scope]}"}
            # No method takes this body, so that one that is allowed answers 400 before it does anything.
            async with session.post(f"{service.url}/store/{name}", headers=headers, json=[]) as reply:
                return reply.status not in REFUSED

        found = {name: {scope for scope in SCOPES if await opens(name, scope)} for name in METHODS}
    assert expected == found


def test_openapi_names_the_tokens_that_each_route_takes() -> None:
    """``/metrics`` is documented as without protection; the store's methods have their own lists."""
    left_out = {"GET /metrics", "GET /openapi.json", "POST /peers", "POST /peers/metrics", "POST /store/*", "HEAD /"}
    found = {
        f"{method.upper()} {re.sub(r'{.*?}', '*', path)}": {name for one in about.get("security", []) for name in one}
        for path, methods in openapi_document()["paths"].items()
        if not path.startswith("/store/") and path != "/metrics"
        for method, about in methods.items()
    }
    expected = {name: set() if "none" in scopes else scopes for name, scopes in ROUTES.items()}
    assert {name: scopes for name, scopes in expected.items() if name not in left_out} == found


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_path_with_an_attempts_ids_takes_that_attempts_token_only(
    server: ScriptedModelServer, scope: str
) -> None:
    async with everything(server) as (service, tokens), aiohttp.ClientSession() as session:
        path = f"/rollout/ro-1/attempt/ro-1.1/key/{tokens[scope]}/v1/chat/completions"
        body = {"model": "main_llm", "messages": [{"role": "user", "content": "hi"}]}
        async with session.post(service.url + path, json=body) as reply:
            assert (200 if scope == "attempt" else 401) == reply.status
