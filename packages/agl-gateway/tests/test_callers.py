"""Coding agents are recognised by the headers and bodies that they send anyway, and their helper calls do not train."""

import json
from typing import Any

import aiohttp
import pytest

from agl import semconv
from agl.contracts import RolloutQuery, Upstream
from agl.dialects import Request
from agl.episodes import build_episode
from agl.errors import ConfigError
from agl.tracing import WHO_HEADER
from agl_gateway.record.exchanges import Origin
from agl_gateway.relay.callers import HelperRules
from agl_gateway.traffic.conversations import conversation_of

CLAUDE = {"user-agent": "claude-cli/2.1.197 (external, sdk-cli)", "x-claude-code-session-id": "s-1"}
OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk/4", "x-session-id": "ses_1"}
CODEX = {"user-agent": "codex_exec/0.169.0 (Debian)", "session-id": "c-1"}
QWEN = {"user-agent": "QwenCode/0.15.10 (linux; x64)"}
ROOT = "/root"
USER = {"role": "user", "content": "repair the test"}
ANSWER = {"role": "assistant", "content": "done"}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]


def codex(**about: Any) -> dict[str, str]:
    return {**CODEX, "x-codex-turn-metadata": json.dumps({"session_id": "c-1", "thread_id": "t-2", **about})}


def origin(headers: dict[str, str], body: Any = None, *, has_tracer: bool = False, **rules: Any) -> Origin:
    asked = Request("chat", json.dumps(body or {"messages": [USER], "tools": TOOLS}).encode())
    return HelperRules(**rules).origin_of(headers, asked, has_tracer=has_tracer)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (CLAUDE, Origin(agent="claude-code", session="s-1")),
        (
            {**CLAUDE, "x-claude-code-agent-id": "a7f"},
            Origin(agent="claude-code/subagent", agent_id="a7f", session="s-1"),
        ),
        (CODEX, Origin(agent="codex", session="c-1")),
        (codex(agent_name="/root", request_kind="turn"), Origin(agent="codex", session="c-1")),
        (codex(agent_name=f"{ROOT}/tests"), Origin(agent="codex/tests", agent_id="t-2", session="c-1")),
        (codex(agent_name="/root", request_kind="compaction"), Origin(agent="codex", session="c-1", role="compaction")),
        (
            {**CODEX, "x-openai-subagent": "memory_consolidation"},
            Origin(agent="codex", session="c-1", role=semconv.HELPER),
        ),
        (OPENCODE, Origin(agent="opencode", session="ses_1")),
        (
            {**OPENCODE, "x-parent-session-id": "ses_0"},
            Origin(agent="opencode/subagent", agent_id="ses_1", session="ses_1"),
        ),
        (QWEN, Origin(agent="qwen-code")),
        ({"user-agent": "GeminiCLI/0.50 (linux)"}, Origin(agent="gemini-cli")),
        ({"x-interaction-type": "conversation-user"}, Origin(agent="copilot-cli")),
        ({"user-agent": "OpenAI/JS 6.26.0", "x-session-id": "1"}, Origin()),
        ({}, Origin()),
    ],
)
def test_harness_is_named_with_its_session_and_subagent(headers: dict[str, str], expected: Origin):
    assert expected == origin(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {**CLAUDE, "x-claude-code-session-id": "x" * 8000 + "\x07\u202e"},
        {**CODEX, "session-id": "\x00" * 50, "x-codex-turn-metadata": "{" * 20_000},
        {**CODEX, "x-codex-turn-metadata": "[" * 5000},
        codex(agent_name=["/root"], request_kind={"a": 1}, session_id=7),
        codex(agent_name=f"{ROOT}/" + "y" * 5000),
        {**OPENCODE, "x-agl-role": "r" * 4000},
    ],
)
def test_hostile_identity_is_cut_and_cleaned(headers: dict[str, str]):
    found = origin(headers)
    assert len(found.agent) <= 90
    assert len(found.role) <= 80
    assert len(found.session) <= 200
    assert (found.agent + found.session + found.role).isprintable()
    assert found.agent.partition("/")[0] in ("claude-code", "codex", "opencode")


TITLE = {"messages": [{"role": "system", "content": "You are a title generator."}, USER], "max_tokens": 32000}
COMPACTION = {"messages": [USER, ANSWER, {"role": "user", "content": "summarize"}], "max_tokens": 32000}
MEMORY = {
    "messages": [{"role": "system", "content": "You are the managed memory extraction subagent"}, USER, ANSWER],
    "tools": TOOLS,
}


@pytest.mark.parametrize(
    ("headers", "body", "rules", "is_helper"),
    [
        (OPENCODE, TITLE, {}, True),
        (OPENCODE, TITLE, {"is_on": False}, False),
        (OPENCODE, {**TITLE, "tools": TOOLS}, {}, False),
        (OPENCODE, COMPACTION, {}, False),
        (CLAUDE, {"messages": [USER, ANSWER, USER], "max_tokens": 64}, {}, True),
        (QWEN, MEMORY, {}, True),
        (QWEN, {**MEMORY, "messages": [USER]}, {}, False),
        ({}, TITLE, {}, False),
        ({}, {"messages": [USER], "max_tokens": 16}, {}, False),
        ({}, TITLE, {"match": "title gen"}, True),
        ({}, {"messages": [USER]}, {"match": "title gen"}, False),
        ({"x-agl-role": "helper"}, {"messages": [USER], "tools": TOOLS}, {}, True),
        ({}, [], {"match": "title gen"}, False),
    ],
)
def test_helper_calls_are_found_by_rule(headers: Any, body: Any, rules: Any, is_helper: bool):
    assert is_helper == (semconv.HELPER == origin(headers, body, **rules).role)


def test_compaction_without_tools_is_no_helper_call():
    agent = {"role": "system", "content": "You are a context summarization agent. You are given a conversation"}
    body = {"messages": [agent, {"role": "user", "content": "Here is the conversation so far"}], "max_tokens": 32000}
    assert "compaction" == origin(OPENCODE, body).role
    assert "" == origin({}, body).role


def test_wrong_expression_is_refused():
    with pytest.raises(ConfigError, match="not a regular expression"):
        HelperRules(match="(")


def test_session_names_the_conversation_and_billing_does_not():
    def asked(count: int) -> Request:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={count};"}
        body = {"system": [billing, {"type": "text", "text": "be brief"}], "messages": [USER]}
        return Request("messages", json.dumps(body).encode())

    assert conversation_of({}, asked(1)) == conversation_of({}, asked(2))
    assert "session-claude-code:s-1" == conversation_of({}, asked(1), session="claude-code:s-1")


async def post(it: Any, token: str, body: Any, headers: dict[str, str]) -> int:
    sent = {**headers, "authorization": f"Bearer {token}"}
    url = f"{it.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=sent) as reply:
        await reply.read()
        return reply.status


async def test_helper_calls_do_not_train_unless_selected(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        turn = {"model": "main_llm", "messages": [USER], "tools": TOOLS}
        assert 200 == await post(it, token, {"model": "main_llm", **TITLE}, OPENCODE)
        assert 200 == await post(it, token, turn, OPENCODE)
        spans = await it.spans(attempt_id)
        (rollout,) = await it.store.rollouts(RolloutQuery(ids=(attempt_id.rpartition(".")[0],)))
        (attempt,) = await it.store.attempts(rollout.rollout_id)

    def trained(match: str | None) -> list[bool]:
        episode = build_episode(rollout, attempt, spans, agent_match=match, policy="main_llm")
        return [not one.reject for one in episode.transitions]

    assert [[False, True], [False, True], [True, False]] == [trained(m) for m in (None, "opencode", semconv.HELPER)]
    (why, _) = build_episode(rollout, attempt, spans).transitions
    assert ("opencode", "not_selected") == (why.agent, why.reject)
    assert "a helper call of 'opencode'" in why.detail
    title, plain = (span.attributes for span in spans)
    assert (semconv.HELPER, None) == (title.get(semconv.ROLE), plain.get(semconv.ROLE))
    assert ["ses_1", "ses_1"] == [found[semconv.CONVERSATION_ID] for found in (title, plain)]


async def test_tracer_outranks_the_harness(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        headers = {**OPENCODE, WHO_HEADER: "write"}
        assert 200 == await post(it, token, {"model": "main_llm", **TITLE}, headers)
        (span,) = await it.spans(attempt_id)
    assert (["write"], "ses_1") == (span.attributes[semconv.CALLER], span.attributes[semconv.CONVERSATION_ID])
    assert semconv.AGENT_NAME not in span.attributes
    assert semconv.ROLE not in span.attributes


async def test_policies_select_harnesses_and_helpers_by_name(stage, server):
    upstreams = [
        Upstream(name="big", base_url=server.base_url, agents="claude-code.*", is_trained=True),
        Upstream(name="small", base_url=server.base_url, agents=semconv.HELPER),
    ]
    async with stage(upstreams=upstreams) as it:
        attempt_id, token = await it.open_attempt()
        turn = {"model": "claude-x", "messages": [USER], "tools": TOOLS}
        assert 200 == await post(it, token, turn, CLAUDE)
        assert 200 == await post(it, token, turn, {**CLAUDE, "x-claude-code-agent-id": "a7f"})
        assert 200 == await post(it, token, {"model": "claude-x", "messages": [USER], "max_tokens": 32}, CLAUDE)
        assert ["big", "big", "small"] == [call.policy for call in await it.calls(attempt_id)]


async def test_helper_calls_are_counted(stage):
    async with stage() as it, aiohttp.ClientSession() as session:
        _, token = await it.open_attempt()
        assert 200 == await post(it, token, {"model": "main_llm", **TITLE}, OPENCODE)
        async with session.get(f"{it.url}/metrics") as reply:
            assert "agl_helper_calls_total 1\n" in await reply.text()
