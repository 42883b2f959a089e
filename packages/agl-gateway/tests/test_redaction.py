"""A gateway with a redactor stores no personal data, while clients and models get the original texts."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from click.testing import CliRunner

import agl
from agl import PluginManager, semconv
from agl.contracts import REDACTED, Redactor, RedactorEntry, RolloutQuery, Store
from agl.episodes import build_episode
from agl.errors import StoreError, UnknownComponentError
from agl.schemas import ErrorInfo, Outcome, Reward, Span, SpanEvent, new_span_id
from agl.stores import all_spans
from agl_gateway.client import HttpStore
from agl_gateway.embedded import EmbeddedGateway
from agl_gateway.record.redaction import Patterns, Redaction
from agl_gateway.service import GatewayService
from agl_inspect.rollouts.explanations import explain
from agl_inspect.terminal.program import cli
from agl_run import Quiet
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer, ToolCall

from .conftest import ADMIN, ServiceFactory, StageFactory
from .test_agent_spans import SAID, Send, as_an_exporter, through_the_store_api
from .test_hostile_streams import assert_linear

CLIENT = "a-client-token-of-the-tests"
MAIL = "ann@example.org"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("1-800-555-0199 or 1 (800) 555-0199", "[phone] or [phone]"),
        ("4111\xa01111\xa01111\xa01111 and +49\xa030\xa01234567", "[card] and [phone]"),
        ("write to ann.b+c@mail.example.org, please", "write to [email], please"),
        ("+49 30 1234567 or (555) 123-4567 or 030/1234567", "[phone] or [phone] or [phone]"),
        ("card 4111 1111 1111 1111, order 4111 1111 1111 1112", "card [card], order 4111 1111 1111 1112"),
        ("AKIAIOSFODNN7EXAMPLE ghp_0123456789abcdefghij0123456789abcdef", "[key] [key]"),
        ("sk-0123456789abcdef and Bearer 0123456789abcdef", "sk-*** and Bearer ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----!", "[key]!"),
    ],
)
def test_patterns_replace_each_kind_of_personal_data(text, kept):
    assert kept == Patterns().redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-27 18:42:31, 1,234,567.89 or 12345678 of 3.14159265358979",
        "call_abc123def456, chatcmpl-8d3f4122, 550e8400-e29b-41d4-a716-446655440000 at 10.0.0.12:8080",
        "1764274411123 milliseconds",
        "a @ b, @agl.hookimpl and user@localhost",
    ],
)
def test_patterns_leave_numbers_dates_and_ids(text):
    assert text == Patterns().redact(text)


@pytest.mark.parametrize("piece", ["a", "1", "1 ", "a@", "a.", "+1", "(0", "-----BEGIN PRIVATE KEY-----", "eyJ0"])
def test_patterns_take_time_in_proportion_to_the_text(piece):
    assert_linear(lambda size: Patterns().redact(piece * size), 20_000 // len(piece))


async def say(service: GatewayService, text: str, *, conversation: str = "c", **more: Any) -> tuple[str, str]:
    """Make a conversation's call; returns the answer and the rollout's id."""
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=CLIENT, max_retries=0) as client:
        reply = await client.chat.completions.with_raw_response.create(
            model="main_llm",
            messages=[{"role": "user", "content": text}],
            extra_headers={"x-agl-conversation-id": conversation},
            **more,
        )
        if not more.get("stream"):
            return reply.parse().choices[0].message.content or "", reply.headers["x-agl-rollout-id"]
        parts = [chunk.choices[0].delta.content or "" async for chunk in reply.parse() if chunk.choices]
        return "".join(parts), reply.headers["x-agl-rollout-id"]


async def record_of(store: Store, rollout_id: str) -> str:
    return "".join(map(repr, await all_spans(store, rollout_id)))


@pytest.mark.parametrize("stream", [False, True])
async def test_record_of_a_call_is_redacted_while_client_and_model_get_the_texts(
    serving: ServiceFactory, server: ScriptedModelServer, stream: bool
) -> None:
    server.enqueue(Reply(text=f"I wrote to {MAIL}"))
    async with serving(redactor=Patterns(), client_key=CLIENT) as service:
        answer, rollout_id = await say(service, f"Write to {MAIL}", stream=stream)
        assert f"I wrote to {MAIL}" == answer
        assert f"Write to {MAIL}" == server.calls[-1].json["messages"][-1]["content"]
        (span,) = await all_spans(service.store, rollout_id)
        assert MAIL not in repr(span)
        assert span.call is not None
        assert "Write to [email]" in repr(span.call.request)
        assert "I wrote to [email]" in repr(span.call.response)
        assert "main_llm" == span.call.policy


async def test_arguments_of_tools_and_feedback_are_redacted(
    serving: ServiceFactory, server: ScriptedModelServer
) -> None:
    server.enqueue(Reply(tool_calls=(ToolCall(name="send", arguments={"to": MAIL}),)))
    async with serving(redactor=Patterns(), client_key=CLIENT) as service:
        _, rollout_id = await say(service, "Send it")
        rating = {"value": 0.0, "feedback": f"sent to {MAIL}"}
        sent = {"authorization": f"Bearer {CLIENT}", "x-agl-conversation-id": "c"}
        url = f"{service.url}/conversations/rate"
        async with aiohttp.ClientSession() as session, session.post(url, json=rating, headers=sent) as reply:
            assert 200 == reply.status
        record = await record_of(service.store, rollout_id)
        assert MAIL not in record
        assert "sent to [email]" in record
        assert '"to":"[email]"' in record.replace("\\", "").replace(" ", "")


async def test_only_a_redacted_call_loses_its_token_ids(stage: StageFactory) -> None:
    async with stage(redact="patterns") as it:
        attempt_id, token = await it.open_attempt()
        async with it.openai(token) as client:
            for text in ("hi", f"I am {MAIL}"):
                await client.chat.completions.create(model="main_llm", messages=[{"role": "user", "content": text}])
        clean, redacted = await it.calls(attempt_id)
        assert (True, "") == (clean.response_len > 0, clean.ids_missing)
        assert (b"", b"", b"", REDACTED) == (
            redacted.prompt_ids,
            redacted.response_ids,
            redacted.logprobs,
            redacted.ids_missing,
        )
        (rollout,) = await it.store.rollouts(RolloutQuery(ids=(attempt_id.rpartition(".")[0],)))
        (attempt,) = await it.store.attempts(rollout.rollout_id)
        spans = await all_spans(it.store, rollout.rollout_id)
        episode = build_episode(rollout, attempt, spans)
        assert ["", "missing_token_ids"] == [call.reject for call in episode.transitions]
        assert "missing_token_ids: A redactor changed the call before it was recorded" in "\n".join(
            explain(episode, spans)
        )


async def test_spool_holds_no_text_that_the_store_would_not(serving: ServiceFactory, tmp_path: Path) -> None:
    store = SQLiteStore(f"sqlite:///{tmp_path}/served.db")
    settings: dict[str, Any] = {"spool": tmp_path / "spool", "spool_after_s": 0.0, "client_key": CLIENT}
    async with serving(redactor=Patterns(), store=store, **settings) as service:
        await say(service, f"Write to {MAIL}")
        written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert b"Write to [email]" in written
        assert MAIL.encode() not in written
    await store.close()


async def test_spans_of_agents_are_redacted_and_keep_their_names(serving: ServiceFactory) -> None:
    async with serving(redactor=Patterns(), client_key=CLIENT) as service:
        _, rollout_id = await say(service, "hi")
        names = {"gen_ai.agent.name": "agent@team.example", "gen_ai.tool.call.id": "+49 30 1234567"}
        texts = {"gen_ai.tool.call.arguments": {"to": MAIL}, "agl.observation.content": [MAIL]}
        span = Span(
            rollout_id=rollout_id,
            attempt_id=f"{rollout_id}.1",
            span_id=new_span_id(),
            name="tool",
            attributes={**names, **texts},
            reward=Reward(value=1.0, feedback=MAIL),
        )
        store = HttpStore(service.url, token=ADMIN)
        await store.append_spans([span])
        await store.close()
        found = next(each for each in await all_spans(service.store, rollout_id) if each.name == "tool")
        expected = {**names, "gen_ai.tool.call.arguments": {"to": "[email]"}, "agl.observation.content": ["[email]"]}
        assert expected == found.attributes
        assert found.reward is not None
        assert "[email]" == found.reward.feedback


@pytest.mark.parametrize("send", [through_the_store_api, as_an_exporter])
async def test_spans_that_an_agent_sends_itself_are_redacted(stage: StageFactory, send: Send, monkeypatch: Any) -> None:
    monkeypatch.setitem(SAID, semconv.OBJECT, f"for {MAIL}")
    async with stage(redact="patterns") as it:
        attempt_id, token = await it.open_attempt()
        await send(it.url, token, attempt_id)
        (span,) = await it.spans(attempt_id)
    assert {semconv.OBJECT: "for [email]"} == span.attributes


async def test_outcomes_of_workers_are_redacted(stage: StageFactory) -> None:
    async with stage(redact="patterns") as it:
        attempt_id, _ = await it.open_attempt()
        rollout_id = attempt_id.rpartition(".")[0]
        store = HttpStore(it.url, token=it.tokens.issue("", "", expires_at=2e9, scope="admin"))
        span = Span(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            span_id=new_span_id(),
            name=f"mail to {MAIL}",
            attributes={semconv.OUTPUT: f"I wrote to {MAIL}"},
            events=(SpanEvent(name=f"sent to {MAIL}", time_ns=1),),
            reward=Reward(value=0.0, feedback=MAIL),
        )
        error = ErrorInfo(type="ValueError", message=MAIL, traceback=f"ValueError: {MAIL}")
        await store.finish([Outcome(attempt_id=attempt_id, status="failed", error=error, spans=(span,))])
        await store.close()
        (attempt,) = await it.store.attempts(rollout_id)
        record = await record_of(it.store, rollout_id) + repr(attempt)
    assert MAIL not in record
    assert all(
        text in record for text in ("mail to [email]", "wrote to [email]", "sent to [email]", "ValueError: [email]")
    )


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ('{"body":"Card:\\n4111 1111 1111 1111"}', '{"body":"Card:\\n[card]"}'),
        ('{"body":"Dear\\nann@example.org"}', '{"body":"Dear\\n[email]"}'),
        ('["{\\"to\\":\\"x\\\\nann@example.org\\"}"]', '["{\\"to\\":\\"x\\\\n[email]\\"}"]'),
        ('{"spaces": [1.50] }', '{"spaces": [1.50] }'),
        ("{ann@example.org", "{[email]"),
        ('{"card":4111111111111111}', '{"card":"[card]"}'),
        (4111111111111111, "[card]"),
        (1764274411123, 1764274411123),
    ],
)
async def test_json_in_texts_and_integers_are_redacted(value, kept):
    span = Span(rollout_id="ro", attempt_id="ro.1", span_id=new_span_id(), name="n", attributes={"input": value})
    (found,) = await Redaction(Patterns()).of([span])
    assert {"input": kept} == found.attributes


@pytest.mark.parametrize("piece", ["[", '{"a":', '["[', '{"a":"\\n'])
async def test_broken_json_is_an_ordinary_text(piece):
    span = Span(rollout_id="ro", attempt_id="ro.1", span_id=new_span_id(), name=piece * 20_000)
    assert [span] == await Redaction(Patterns()).of([span])


class Broken:
    def redact(self, text: str) -> str:
        raise RuntimeError(f"no model for {text}")


async def test_call_whose_redactor_fails_is_answered_and_not_stored(serving: ServiceFactory, caplog: Any) -> None:
    async with serving(redactor=Broken(), client_key=CLIENT) as service:
        answer, rollout_id = await say(service, f"Write to {MAIL}")
        assert answer
        assert [] == await all_spans(service.store, rollout_id)
        assert 1 == service.recorder.lost
    assert "the redactor Broken raised RuntimeError" in caplog.text
    assert MAIL not in caplog.text


async def test_error_of_a_redactor_names_it_and_quotes_no_text(serving: ServiceFactory) -> None:
    async with serving(redactor=Broken(), client_key=CLIENT) as service:
        _, rollout_id = await say(service, "hi")
        store = HttpStore(service.url, token=ADMIN)
        span = Span(rollout_id=rollout_id, attempt_id=f"{rollout_id}.1", span_id=new_span_id(), name=MAIL)
        with pytest.raises(StoreError, match="the redactor Broken raised RuntimeError") as raised:
            await store.append_spans([span])
        await store.close()
        rating = {"value": 0.0, "feedback": MAIL}
        sent = {"authorization": f"Bearer {CLIENT}", "x-agl-conversation-id": "c"}
        url = f"{service.url}/conversations/rate"
        async with aiohttp.ClientSession() as session, session.post(url, json=rating, headers=sent) as reply:
            answer = await reply.text()
        assert (500, True) == (reply.status, "the redactor Broken raised RuntimeError" in answer), answer
    assert MAIL not in answer + str(raised.value)


def test_unknown_redactor_is_refused_before_anything_is_served(tmp_path, monkeypatch):
    monkeypatch.setenv("AGL_TOKEN", ADMIN)
    command = ["serve", "--store", f"sqlite:///{tmp_path}/s.db", "--port", "0", "--redact", "pattern"]
    done = CliRunner().invoke(cli, command)
    assert (1, True) == (done.exit_code, "patterns" in done.output), done.output
    with pytest.raises(UnknownComponentError, match="patterns"):
        EmbeddedGateway(redact="pattern")


class Starred:
    def redact(self, text: str) -> str:
        return text.replace(MAIL, "***")


class StarredPlugin:
    @agl.hookimpl
    def agl_redactors(self) -> list[RedactorEntry]:
        return [RedactorEntry(name="starred", factory=Starred)]


def test_experiment_finds_the_redactor_among_its_own_plugins(
    server: ScriptedModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    manager = PluginManager.from_environment()
    manager.register(StarredPlugin(), name="starred")
    params = {"model": "scripted", "base_url": server.base_url, "api_key_env": ""}
    policy: Any = {"use": "openai", "params": params}
    gateway: Any = {"params": {"redact": "starred"}}

    async def agent(task: str, llm: agl.LLM) -> float:
        async with openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key, max_retries=0) as client:
            await client.chat.completions.create(model="main", messages=[{"role": "user", "content": task}])
        return 1.0

    store = f"sqlite:///{tmp_path}/runs.db"
    options: Any = {"policies": {"main": policy}, "gateway": gateway, "plugins": manager, "tracers": ()}
    agl.Trainer(store=store, folder=tmp_path, progress=Quiet(), **options).fit(
        agent, train_dataset=[f"Write to {MAIL}"]
    )

    async def recorded() -> str:
        opened = SQLiteStore(store)
        found = "".join([await record_of(opened, one.rollout_id) for one in await opened.rollouts(RolloutQuery())])
        await opened.close()
        return found

    assert "Write to ***" in asyncio.run(recorded())


def test_plugin_brings_the_redactor_that_agl_redactors_names():
    manager = PluginManager.from_environment()
    made: Redactor = manager.build(manager.redactor("patterns"))
    assert "[email]" == made.redact(MAIL)
