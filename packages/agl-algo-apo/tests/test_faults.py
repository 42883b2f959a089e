"""Outages do not count against candidates: failures of infrastructure are distinguished from those of the agent."""

import asyncio
import email.message
import hashlib
import json
import traceback
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import agl
from agl.schemas import LLM, ErrorInfo, Rollout
from agl.stores import MemoryStore
from agl_algo_apo.measurement.faults import is_foreign
from agl_inspect.records.state import load_algorithm
from agl_run import Quiet, policy
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Status, Step
from worlds.prompts import complete_order, easy, order_text
from worlds.prompts_run import HIDDEN, TASK_MODEL, filled, model_server, order_reward

FOREIGN = [
    ("httpx.HTTPStatusError", "Server error '503 Service Unavailable' for url 'http://llm/v1'\nFor more information"),
    ("httpx.HTTPStatusError", "Client error '429 Too Many Requests' for url 'http://llm/v1'"),
    ("requests.exceptions.HTTPError", "502 Server Error: Bad Gateway for url: http://llm/v1"),
    ("requests.exceptions.HTTPError", "429 Client Error: Too Many Requests for url: http://llm/v1"),
    ("requests.exceptions.Timeout", "no answer"),
    ("urllib.error.HTTPError", "HTTP Error 503: Service Unavailable"),
    ("urllib.error.URLError", "<urlopen error [Errno 111] Connection refused>"),
    ("urllib3.exceptions.MaxRetryError", "HTTPConnectionPool(host='llm', port=80): Max retries exceeded"),
    ("aiohttp.client_exceptions.ClientResponseError", "503, message='Service Unavailable', url='http://llm/v1'"),
    ("aiohttp.client_exceptions.ClientConnectorDNSError", "Cannot connect to host llm:80"),
    ("aiohttp.client_exceptions.ServerDisconnectedError", "Server disconnected"),
    ("botocore.errorfactory.ThrottlingException", "An error occurred (ThrottlingException) when calling Converse"),
    ("botocore.exceptions.ClientError", "An error occurred (ServiceUnavailableException) when calling InvokeModel"),
    ("botocore.exceptions.ClientError", "An error occurred (503) when calling the InvokeModel operation"),
    ("botocore.exceptions.EndpointConnectionError", 'Could not connect to the endpoint URL: "http://llm"'),
    ("litellm.exceptions.RateLimitError", "litellm.RateLimitError: RateLimitError: OpenAIException - slow down"),
    ("litellm.exceptions.Timeout", "litellm.Timeout: APITimeoutError - Request timed out"),
    ("litellm.exceptions.ServiceUnavailableError", "litellm.ServiceUnavailableError: AnthropicException"),
    ("openai.InternalServerError", "Error code: 500 - {'error': {'message': 'oops'}}"),
    ("anthropic.APIStatusError", "Error code: 529 - {'type': 'overloaded_error'}"),
    ("google.genai.errors.ClientError", "429 RESOURCE_EXHAUSTED. {'error': {}}"),
    ("google.genai.errors.ServerError", "503 UNAVAILABLE. {'error': {}}"),
    ("TimeoutError", "timed out"),
    ("OSError", "[Errno 24] Too many open files"),
    ("agent.ModelError", "the model did not answer: HTTP 503"),
    ("agl.errors.AglError", "the judge gave no score: http://127.0.0.1:8000/v1 answered 429: slow down"),
    ("socket.gaierror", "[Errno -3] Temporary failure in name resolution"),
]

OWN = [
    ("KeyError", "'total'"),
    ("KeyError", "503"),
    ("ValueError", "500 items are too many"),
    ("ValueError", "500 USD is more than the limit of 429"),
    ("IndexError", "list index out of range"),
    ("TimeoutError", "the agent gave up after 10 turns"),
    ("openai.BadRequestError", "Error code: 400 - {'error': {'code': 'context_length_exceeded'}}"),
    ("litellm.exceptions.ContextWindowExceededError", "litellm.BadRequestError: too long"),
    ("httpx.HTTPStatusError", "Client error '422 Unprocessable Entity' for url 'http://llm/v1'"),
    ("botocore.errorfactory.ValidationException", "An error occurred (ValidationException) when calling Converse"),
    ("tenacity.RetryError", "RetryError[<Future at 0x7f state=finished raised ValueError>]"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: 'notes.txt'"),
]


@pytest.mark.parametrize(("kind", "message"), FOREIGN)
def test_error_of_infrastructure_is_known_by_its_status_or_type(kind: str, message: str) -> None:
    assert is_foreign(ErrorInfo(type=kind, message=message))


@pytest.mark.parametrize(("kind", "message"), OWN)
def test_error_that_a_text_can_cause_is_the_agents_own(kind: str, message: str) -> None:
    assert not is_foreign(ErrorInfo(type=kind, message=message))


def described(work: Callable[[], Any]) -> ErrorInfo:
    """Return the error that ``work`` raises, as an attempt records it."""
    try:
        work()
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return ErrorInfo(type=type(error).__qualname__, message=str(error), traceback=text)
    raise AssertionError("nothing was raised")


def unavailable() -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://llm/v1")
    try:
        httpx.Response(503, request=request).raise_for_status()
    except httpx.HTTPStatusError as error:
        return error
    raise AssertionError("503 was no error")


def caused() -> None:
    raise RuntimeError("no answer") from unavailable()


def while_handling() -> None:
    try:
        raise unavailable()
    except httpx.HTTPStatusError:
        {}["cached"]


def grouped() -> None:
    raise ExceptionGroup("two calls", [ValueError("first"), unavailable()])


def handled_before() -> None:
    try:
        raise unavailable()
    except httpx.HTTPStatusError:
        pass
    "{total}".format()  # noqa: F524 - a text with a wrong placeholder


def quoting() -> None:
    raise ValueError("the tool printed:\nConnectionError: no route to host")


@pytest.mark.parametrize("work", [caused, while_handling, grouped])
def test_cause_that_is_an_outage_makes_the_error_one(work: Callable[[], None]) -> None:
    assert is_foreign(described(work))


@pytest.mark.parametrize("work", [handled_before, quoting])
def test_outage_that_the_agent_survived_is_not_its_error(work: Callable[[], None]) -> None:
    assert not is_foreign(described(work))


def is_hit(key: str, *, percent: int) -> bool:
    """Return true for ``percent`` of all keys; the answer for a key is always the same."""
    return hashlib.sha256(key.encode()).digest()[0] * 100 < percent * 256


def strike(rollout: Rollout) -> None:
    """Fail every fifth rollout, each time in another way."""
    key = rollout.rollout_id
    if not is_hit(key, percent=20):
        return
    request = httpx.Request("POST", "http://llm/v1")
    match hashlib.sha256(key.encode()).digest()[1] % 4:
        case 0:
            httpx.Response(429, request=request).raise_for_status()
        case 1:
            httpx.Response(503, request=request).raise_for_status()
        case 2:
            raise urllib.error.HTTPError("http://llm", 502, "Bad Gateway", email.message.Message(), None)
        case _:
            raise RuntimeError("no answer") from unavailable()


def test_one_fifth_of_faults_of_several_kinds_is_never_scored(optimize: Callable[..., Any]) -> None:
    run = optimize(budget=450, fault=strike)
    failed = [rollout for rollout in run.paid if rollout.status == "failed"]
    assert len(failed) > 0.15 * len(run.paid)
    assert {"ok"} == {row[4].get("status", "ok") for row in run.state["scores"]}
    assert not {rollout.rollout_id for rollout in failed} & {row[4]["rollout"] for row in run.state["scores"]}
    assert easy(1).gap_closed(run.best) > 0.5


class OpaqueAgent:
    """An agent that calls its model once and hides the reason of a failure."""

    def __init__(self, *, swallows: bool) -> None:
        self._swallows = swallows

    async def rollout(self, task: Any, resources: Any, rollout: Rollout) -> None:
        llm: LLM = next(value for value in resources.values() if isinstance(value, LLM))
        text = filled(resources["clerk_prompt"], order_text(task["order"], task["fields"]["clerk"]))
        body = {"model": llm.model, "messages": [{"role": "user", "content": text}], "user": rollout.rollout_id}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {llm.api_key}"}) as client:
            reply = await client.post(f"{llm.base_url}/chat/completions", json=body)
        if reply.status_code != 200 and not self._swallows:
            raise RuntimeError("no answer")
        answer = reply.json()["choices"][0]["message"]["content"] if reply.status_code == 200 else "{}"
        agl.emit_object({"fields": json.loads(answer), "is_short": False}, name="answer")


@pytest.mark.parametrize("swallows", [False, True])
def test_outage_that_only_the_recorded_calls_show_is_never_scored(tmp_path: Path, swallows: bool) -> None:
    world, store = msgspec.structs.replace(easy(1), train_size=16, val_size=9), MemoryStore("memory://")

    def respond(request: ModelRequest) -> Step:
        seed = str(request.body["user"])
        if is_hit(seed, percent=20):
            return Status(code=503)
        return Reply(text=json.dumps(complete_order(request.last_text, world=world, seed=seed)))

    with (
        model_server(world) as editor,
        ScriptedModelServer(respond=respond, models=(TASK_MODEL,)) as server,
    ):
        trainer = agl.Trainer(
            name="orders",
            store=store,
            algorithm=agl.APO(
                tunes="clerk_prompt", optimizer={"base_url": editor.base_url, "model": "editor"}, budget=60
            ),
            policies={"clerk": policy("openai", base_url=server.base_url, model=TASK_MODEL, api_key_env="")},
            initial_resources=dict(world.seeds()),
            rewards=(order_reward(world),),
            hidden=HIDDEN,
            folder=tmp_path,
            progress=Quiet(),
            validation_limit=2,
        )
        trainer.fit(OpaqueAgent(swallows=swallows), world.train, world.val)
    scored = asyncio.run(load_algorithm(store, "orders", 1, "apo")).state["scores"]
    hit = [row[4]["rollout"] for row in scored if is_hit(row[4]["rollout"], percent=20)]
    assert ([], True) == (hit, len(scored) > 20)
