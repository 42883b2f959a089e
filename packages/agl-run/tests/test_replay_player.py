"""Answers of a replay in the agent's process: recorded, replaced or live, in every dialect, with real clients."""

import asyncio
import importlib
import json
from typing import Any

import pytest

pytest.importorskip("agl_testing.model_server", reason="agl-testing is not installed")
pytest.importorskip("openai", exc_type=ImportError)

import openai

import agl
from agl.contracts import REPLAY, ReplayPlan, Upstream, replay_of
from agl.errors import AglError
from agl.schemas import Rollout, to_builtins
from agl.tracing import ActiveAttempt, SpanRecorder, activate
from agl_inspect.rollouts.answers import RecordedAnswer, recorded_answers, stream_of
from agl_run.replay.player import Player, ReplayScript
from agl_testing.model_server import Reply, ScriptedModelServer, Status, ToolCall

ASK = [{"role": "user", "content": "which way?"}]


def capture_of(
    recorder: SpanRecorder, server: ScriptedModelServer, script: ReplayScript | None = None
) -> ActiveAttempt:
    return ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="a" * 32,
        root_span_id="1" * 16,
        record=recorder.record,
        upstreams=(Upstream(name="main", base_url=server.base_url, model="m"),),
        responder=None if script is None else Player(script),
    )


def client_of(server: ScriptedModelServer) -> Any:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def record(server: ScriptedModelServer, work: Any) -> tuple[RecordedAnswer, ...]:
    """Return the record of ``work``, run as the agent ``a``, in the form that a replay receives."""
    recorder = SpanRecorder()
    with activate(capture_of(recorder, server)), client_of(server) as client, agl.operation("a"):
        work(client)
    return recorded_answers(recorder.drain())


def replayed(server: ScriptedModelServer, script: ReplayScript, work: Any) -> tuple[Any, list[str]]:
    """Return the result of ``work``, run as the agent ``a``, and the model version of every call."""
    recorder = SpanRecorder()
    with activate(capture_of(recorder, server, script)), client_of(server) as client, agl.operation("a"):
        found = work(client)
    return found, [span.call.model_version for span in recorder.drain() if span.call is not None]


def chat(client: Any) -> Any:
    return client.chat.completions.create(model="m", messages=ASK).choices[0].message.content


def chat_stream(client: Any) -> Any:
    events = client.chat.completions.create(model="m", messages=ASK, stream=True)
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)


def look(client: Any) -> Any:
    content = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,b25l"}},
        {"type": "text", "text": "what is it?"},
    ]
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="m", messages=messages).choices[0].message.content


def chat_twice(client: Any) -> Any:
    choices = client.chat.completions.create(model="m", messages=ASK, n=2).choices
    return [choice.message.content for choice in choices]


def chat_tools(client: Any) -> Any:
    message = client.chat.completions.create(model="m", messages=ASK).choices[0].message
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def completions(client: Any) -> Any:
    return client.completions.create(model="m", prompt="which way?").choices[0].text


def responses(client: Any) -> Any:
    return client.responses.create(model="m", input="which way?").output_text


def responses_stream(client: Any) -> Any:
    with client.responses.stream(model="m", input="which way?") as events:
        return events.get_final_response().output_text


def test_answer_that_was_cut_ends_its_stream_as_it_did() -> None:
    answer = {"id": "r", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": []}
    events = [json.loads(line[6:]) for line in stream_of("responses", answer).splitlines() if line[:6] == b"data: "]
    assert ["response.created", "response.incomplete"] == [event["type"] for event in events]


def chat_parsed(client: Any) -> Any:
    """Return the raw response, as LangChain reads it."""
    raw = client.chat.completions.with_raw_response.create(model="m", messages=ASK)
    return raw.parse().choices[0].message.content, raw.elapsed.total_seconds() >= 0, raw.status_code


WORKS = [chat, look, chat_stream, completions, responses, responses_stream]


@pytest.mark.parametrize("work", [*WORKS, chat_parsed])
def test_the_recorded_answer_comes_without_a_call(work: Any) -> None:
    with ScriptedModelServer(default=Reply(text="left")) as server:
        then = record(server, work)
        first = len(server.calls)
        found, versions = replayed(server, ReplayScript(plan=ReplayPlan(rollout_id="ro-1"), recorded=then), work)
        assert ("left", True, 200) == found if work is chat_parsed else found == "left"
        assert ["replay:recorded"] == versions
        assert first == len(server.calls)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("text", ["", "I pass."])
def test_a_silent_agent_says_the_text(work: Any, text: str) -> None:
    with ScriptedModelServer(default=Reply(text="left")) as server:
        plan = ReplayPlan(rollout_id="ro-1", replaced=("a",), text=text)
        found, versions = replayed(server, ReplayScript(plan=plan), work)
        assert text == found
        assert ["replay:silent"] == versions
        assert [] == server.calls


@pytest.mark.parametrize("plan", [ReplayPlan(rollout_id="r"), ReplayPlan(rollout_id="r", replaced=("a",), text="x")])
def test_all_choices_are_answered(plan: ReplayPlan) -> None:
    with ScriptedModelServer() as server:
        server.enqueue((Reply(text="left"), Reply(text="right")))
        then = record(server, chat_twice)
        found, versions = replayed(server, ReplayScript(plan=plan, recorded=then), chat_twice)
        assert (["x", "x"] if plan.replaced else ["left", "right"]) == found
        assert 2 == len(versions)


def test_tool_calls_are_answered_as_they_were_and_never_by_a_silent_agent() -> None:
    with ScriptedModelServer(default=Reply(tool_calls=(ToolCall("go", {"to": "left"}),))) as server:
        then = record(server, chat_tools)
        plan = ReplayPlan(rollout_id="r")
        assert [("go", {"to": "left"})] == replayed(server, ReplayScript(plan=plan, recorded=then), chat_tools)[0]
        silent = ReplayPlan(rollout_id="r", replaced=("a",))
        assert [] == replayed(server, ReplayScript(plan=silent, recorded=then), chat_tools)[0]


def test_another_conversation_or_agent_is_answered_by_the_model() -> None:
    def other(client: Any) -> Any:
        messages = [{"role": "user", "content": "which way, now?"}]
        return client.chat.completions.create(model="m", messages=messages).choices[0].message.content

    def of_another_agent(client: Any) -> Any:
        with agl.operation("b"):
            return chat(client)

    with ScriptedModelServer(default=Reply(text="left")) as server:
        script = ReplayScript(plan=ReplayPlan(rollout_id="r"), recorded=record(server, chat))
        server.enqueue(Reply(text="right"), Reply(text="right"))
        for work in (other, of_another_agent):
            found, versions = replayed(server, script, work)
            assert "right" == found
            assert not any(version.startswith("replay:") for version in versions)
        assert 3 == len(server.calls)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "other"},
        {"temperature": 0.5},
        {"max_tokens": 1},
        {"n": 2},
        {"tool_choice": "none"},
        {"reasoning_effort": "high"},
    ],
)
def test_request_with_another_setting_is_answered_by_the_model_if_nothing_is_replaced(changed: dict[str, Any]) -> None:
    def work(client: Any, **settings: Any) -> Any:
        answer = client.chat.completions.create(**{"model": "m", "messages": ASK, "temperature": 1} | settings)
        return answer.choices[0].message.content

    def again(client: Any) -> Any:
        return work(client, seed=3, user="u", metadata={"run": "2"})

    with ScriptedModelServer(default=Reply(text="left")) as server:
        then = record(server, work)
        for plan in (ReplayPlan(rollout_id="r"), ReplayPlan(rollout_id="r", replaced=("b",))):
            script = ReplayScript(plan=plan, recorded=then)
            assert ["replay:recorded"] == replayed(server, script, again)[1]
            other = replayed(server, script, lambda client: work(client, **changed))[1]
            assert {"replay:recorded" if plan.replaced else ""} == set(other)


def test_equal_conversations_are_answered_in_order_and_then_by_the_model() -> None:
    def thrice(client: Any) -> Any:
        return [chat(client) for _ in range(3)]

    with ScriptedModelServer() as server:
        server.enqueue(Reply(text="1"), Reply(text="2"), Reply(text="new"))
        script = ReplayScript(
            plan=ReplayPlan(rollout_id="r"), recorded=record(server, lambda client: [chat(client) for _ in range(2)])
        )
        found, versions = replayed(server, script, thrice)
        assert ["1", "2", "new"] == found
        assert ["replay:recorded", "replay:recorded", ""] == versions


def test_a_sibling_is_asked_turn_by_turn_and_its_missing_turns_are_silent() -> None:
    def thrice(client: Any) -> Any:
        return [chat(client) for _ in range(3)]

    with ScriptedModelServer() as server:
        server.enqueue(Reply(text="up"), Reply(text="down"))
        sibling = record(server, lambda client: [chat(client) for _ in range(2)])
        plan = ReplayPlan(rollout_id="r", replaced=("a",), how="sibling", sibling="s", text="-")
        found, versions = replayed(server, ReplayScript(plan=plan, sibling=sibling), thrice)
        assert ["up", "down", "-"] == found
        assert ["replay:sibling", "replay:sibling", "replay:silent"] == versions


def test_of_a_retried_request_the_last_answer_is_replayed() -> None:
    with ScriptedModelServer() as server:
        server.enqueue(Status(code=500), Reply(text="left"))

        def patient(client: Any) -> Any:
            return chat(client.with_options(max_retries=2))

        (answer,) = record(server, patient)
        assert "left" == answer.response["choices"][0]["message"]["content"]
        assert "a" == answer.agent


def test_embeddings_always_come_from_the_model() -> None:
    def embed(client: Any) -> int:
        return len(client.embeddings.create(model="m", input="x", encoding_format="float").data)

    with ScriptedModelServer() as server:
        plan = ReplayPlan(rollout_id="r", replaced=("a",))
        assert 1 == replayed(server, ReplayScript(plan=plan), embed)[0]
        assert 1 == len(server.calls)


@pytest.mark.parametrize("module", [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name)])
def test_async_clients_and_open_streams_are_answered(module: str) -> None:
    http = importlib.import_module(module)

    async def work(url: str) -> list[Any]:
        async with http.AsyncClient() as client:
            plain = await client.post(f"{url}/chat/completions", json={"model": "m", "messages": ASK})
            body = {"model": "m", "messages": ASK, "stream": True}
            async with client.stream("POST", f"{url}/chat/completions", json=body) as response:
                lines = [line async for line in response.aiter_lines() if line]
        return [plain.json()["choices"][0]["message"]["content"], lines[-1], plain.request.url.path]

    with ScriptedModelServer() as server:
        plan = ReplayPlan(rollout_id="r", replaced=("",), text="x")
        with activate(capture_of(SpanRecorder(), server, ReplayScript(plan=plan))):
            found = asyncio.run(work(server.base_url))
        assert ["x", "data: [DONE]", "/v1/chat/completions"] == found


def test_a_plan_travels_in_the_rollouts_metadata() -> None:
    plan = ReplayPlan(rollout_id="r", replaced=("a", "b"), how="sibling", sibling="s", sample=3)
    rollout = Rollout(rollout_id="q", task={}, metadata={REPLAY: to_builtins(plan)})
    assert plan == replay_of(rollout)
    assert replay_of(Rollout(rollout_id="q", task={})) is None


def test_metadata_that_is_no_plan_is_refused() -> None:
    with pytest.raises(AglError, match="reserved for replays"):
        replay_of(Rollout(rollout_id="q", task={}, metadata={"replay": 3}))
