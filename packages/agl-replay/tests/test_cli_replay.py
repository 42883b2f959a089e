"""``agl replay``: runs recorded with real clients and a real server are repeated without the server."""

import asyncio
import json
import sys
from base64 import b64encode
from pathlib import Path

import pytest
from click.testing import CliRunner

import agl
from agl import semconv
from agl.dialects import Request
from agl.hints import count_of
from agl.schemas import ModelCall, ResourceVersion, to_json
from agl_inspect.rollouts.conversations import difference, nearest
from agl_inspect.terminal.program import cli
from agl_replay.cli.replay_server import ReplayServer
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer, ToolCall

AGENT = """
import os
from openai import OpenAI

def chat(client, model, stream):
    messages = [{"role": "user", "content": os.environ.get("QUESTION", "what is 2+3?")}]
    answer = ask(client, model, messages, stream)
    while answer["tool_calls"]:
        call = answer["tool_calls"][0]
        messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
        answer = ask(client, model, messages, stream)
    return answer["content"]

def ask(client, model, messages, stream):
    if not stream:
        message = client.chat.completions.create(model=model, messages=messages).choices[0].message
        calls = [c.model_dump(include={"id", "type", "function"}) for c in message.tool_calls or ()]
        return {"role": "assistant", "content": message.content, "tool_calls": calls}
    with client.chat.completions.stream(model=model, messages=messages) as events:
        message = events.get_final_completion().choices[0].message
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
        for c in message.tool_calls or ()
    ]
    return {"role": "assistant", "content": message.content, "tool_calls": calls}

def completions(client, model, stream):
    answer = client.completions.create(model=model, prompt="once upon", stream=stream)
    return "".join(c.choices[0].text for c in answer if c.choices) if stream else answer.choices[0].text

def responses(client, model, stream):
    if not stream:
        answer = client.responses.create(model=model, input="hello")
    else:
        with client.responses.stream(model=model, input="hello") as events:
            answer = events.get_final_response()
    calls = [item.arguments for item in answer.output if item.type == "function_call"]
    return answer.output_text or f"called {calls}"

def messages(url, model, stream):
    from anthropic import Anthropic

    ask = {"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    with Anthropic(base_url=url.removesuffix("/v1"), api_key="k", max_retries=0) as client:
        if not stream:
            answer = client.messages.create(**ask)
        else:
            with client.messages.stream(**ask) as events:
                answer = events.get_final_message()
    return " ".join(block.text if block.type == "text" else str(block.input) for block in answer.content)

def solve(task, llm):
    dialect, _, stream = task["kind"].partition(" ")
    if dialect == "messages":
        return messages(llm.endpoint, llm.model, bool(stream))
    with OpenAI(base_url=llm.endpoint, api_key="k", max_retries=0) as client:
        return globals()[dialect](client, llm.model, bool(stream))
"""
EXPERIMENT = """
[experiment]
agent = "replay_agent:solve"
store = "sqlite:///runs/agl.db"
train = "tasks.jsonl"

[gateway]
use = "none"

[policy.main_llm]
use = "openai"
model = "scripted"
base_url = "{url}"
api_key_env = ""

[[reward]]
use = "exact-match"
params = {{ answer = "expected" }}
"""
TOOL = Reply(tool_calls=(ToolCall(name="add", arguments='{"a": 2, "b": 3}'),))
KINDS = [f"{dialect}{stream}" for dialect in ("chat", "completions", "responses", "messages") for stream in ("", " s")]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that records one rollout of ``kind`` with the given answers, and then stops the server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    for module in ("replay_agent", "prompted"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "replay_agent.py").write_text(AGENT, encoding="utf-8")

    def run(kind: str, *answers: Reply) -> None:
        (tmp_path / "tasks.jsonl").write_text(json.dumps({"kind": kind, "expected": "five"}), encoding="utf-8")
        with ScriptedModelServer(answers) as server:
            (tmp_path / "e.toml").write_text(EXPERIMENT.format(url=server.base_url), encoding="utf-8")
            found = json.loads(invoke("dev", "e.toml", "--json").stdout)
        assert ["succeeded"] == [episode["rollout"]["status"] for episode in found["episodes"]]

    return run


def invoke(*args: str, code: int = 0):
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def outputs() -> list[str]:
    """The return values of the agent in all rollouts, oldest first."""
    lines = map(json.loads, invoke("data", "export", "--format", "spans").stdout.splitlines())
    return [line["attributes"][semconv.OUTPUT] for line in lines if semconv.OUTPUT in line.get("attributes", {})]


@pytest.mark.parametrize("kind", KINDS)
def test_replay_answers_from_the_record(record, kind):
    if kind.startswith("messages"):
        pytest.importorskip("anthropic", reason="anthropic is not installed")
    answers = (TOOL, Reply(text="five")) if kind.startswith("chat") else (Reply(text="five"),)
    record(kind, *answers)
    output = invoke("replay", "latest", "e.toml").output
    assert f"the agent made exactly the recorded requests ({count_of(len(answers), 'call')})" in output
    assert 2 == output.count("succeeded, reward 1")
    assert ["five", "five"] == outputs()


@pytest.mark.parametrize("kind", ["responses", "responses s", "messages", "messages s"])
def test_replay_answers_with_tool_calls(record, kind):
    if kind.startswith("messages"):
        pytest.importorskip("anthropic", reason="anthropic is not installed")
    record(kind, TOOL)
    assert "(1 call)" in invoke("replay", "latest", "e.toml").output
    first, second = outputs()
    assert first == second
    assert "'a': 2" in first or '"a": 2' in first


def test_replay_names_where_the_agent_diverged(record, monkeypatch):
    record("chat", Reply(text="five"))
    monkeypatch.setenv("QUESTION", "what is 7*7?")
    found = json.loads(invoke("replay", "latest", "e.toml", "--json", code=1).stdout)
    assert (1, 1) == (len(found["diverged"]), found["unused"])
    assert "user: what is 7*7?; message 1 (user) was 'what is 2+3?', is 'what is 7*7?'" in found["diverged"][0]
    sides = [found[name]["episode"]["rollout"] for name in ("recorded", "replayed")]
    assert ["succeeded", "failed"] == [side["status"] for side in sides]
    assert ["experiment-dev", "experiment-replay"] == [side["experiment"] for side in sides]
    assert "status was 'succeeded', is 'failed'" in found["changed"]


def test_replay_live_asks_the_models(record, tmp_path):
    record("chat", Reply(text="five"))
    with ScriptedModelServer(default=Reply(text="six")) as server:
        (tmp_path / "e.toml").write_text(EXPERIMENT.format(url=server.base_url), encoding="utf-8")
        output = invoke("replay", "latest", "e.toml", "--live", code=1).output
    assert "changed: reward was 1.0, is 0.0\nchanged: output was 'five', is 'six'\n" in output
    assert "equal: status, error, calls\n" in output
    assert ["five", "six"] == outputs()


def test_replay_reads_the_experiments_own_store(record, tmp_path):
    record("chat", Reply(text="five"))
    (tmp_path / "runs" / "other.db").write_bytes(b"")
    (tmp_path / "elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "elsewhere")
        assert "(1 call)" in invoke("replay", "latest", "../e.toml").output


@pytest.mark.parametrize("store", ["memory://", "sqlite:///elsewhere/other.db", "http://127.0.0.1:9"])
def test_replay_runs_in_the_store_that_has_the_record(record, tmp_path, store):
    record("chat", Reply(text="five"))
    text = (tmp_path / "e.toml").read_text(encoding="utf-8")
    (tmp_path / "e.toml").write_text(text.replace("sqlite:///runs/agl.db", store), encoding="utf-8")
    assert "(1 call)" in invoke("replay", "latest", "e.toml", "--store", "runs/agl.db").output
    assert ["five", "five"] == outputs()
    assert not (tmp_path / "elsewhere").exists()


def test_replay_uses_the_prompt_that_an_algorithm_had_written(record, tmp_path):
    record("chat", Reply(text="five"))
    agent = "def solve(task, prompt, llm):\n    return prompt.template\n"
    (tmp_path / "prompted.py").write_text(agent, encoding="utf-8")
    more = '[resource.prompt]\ntemplate = "first"\n'
    text = (tmp_path / "e.toml").read_text(encoding="utf-8").replace("replay_agent:solve", "prompted:solve") + more
    (tmp_path / "e.toml").write_text(text, encoding="utf-8")
    invoke("dev", "e.toml")
    second = ResourceVersion(
        name="prompt", version="apo-1", resource=agl.PromptTemplate(template="second"), algorithm="apo", step=1
    )
    rollout = agl.Rollout(rollout_id="ro-tuned", task={"expected": "second"}, resources={"prompt": "apo-1"})
    asyncio.run(write(f"sqlite:///{tmp_path}/runs/agl.db", second, rollout))
    invoke("replay", "ro-tuned", "e.toml", code=1)
    assert ["five", "first", "second"] == outputs()


@pytest.mark.parametrize(
    "metadata", [{"experiment": "experiment", "origin": "agl resources try", "candidate": True}, {}]
)
def test_replay_uses_the_prompt_that_a_person_had_tried_or_published(record, tmp_path, metadata):
    record("chat", Reply(text="five"))
    (tmp_path / "prompted.py").write_text("def solve(task, prompt, llm):\n    return prompt.template\n")
    more = '[resource.prompt]\ntemplate = "first"\n'
    text = (tmp_path / "e.toml").read_text(encoding="utf-8").replace("replay_agent:solve", "prompted:solve") + more
    (tmp_path / "e.toml").write_text(text, encoding="utf-8")
    tried = ResourceVersion(
        name="prompt", version="by-hand", resource=agl.PromptTemplate(template="tried"), metadata=metadata
    )
    rollout = agl.Rollout(rollout_id="ro-tried", task={"expected": "tried"}, resources={"prompt": "by-hand"})
    asyncio.run(write(f"sqlite:///{tmp_path}/runs/agl.db", tried, rollout))
    invoke("replay", "ro-tried", "e.toml", code=1)
    assert ["five", "tried"] == outputs()


def test_replay_uses_the_prompt_of_the_file_where_the_recorded_one_was_its_first(record, tmp_path):
    record("chat", Reply(text="five"))
    (tmp_path / "prompted.py").write_text("def solve(task, prompt, llm):\n    return prompt.template\n")
    text = (tmp_path / "e.toml").read_text(encoding="utf-8").replace("replay_agent:solve", "prompted:solve")
    for template in ("first", "changed"):
        (tmp_path / "e.toml").write_text(f'{text}[resource.prompt]\ntemplate = "{template}"\n', encoding="utf-8")
        invoke("dev", "e.toml") if template == "first" else invoke("replay", "latest", "e.toml", code=1)
    assert ["five", "first", "changed"] == outputs()


PIGEON = """
from agl import RewardEntry, hookimpl

@hookimpl
def agl_rewards():
    yield RewardEntry(name="pigeon", factory="agl_run.builtin:ExactMatch")
"""


def test_replay_leaves_out_the_plugins_that_the_experiment_disables(record, agl_plugins):
    agl_plugins.install(PIGEON, name="pigeon")
    record("chat", Reply(text="five"))
    text = Path("e.toml").read_text(encoding="utf-8").replace("exact-match", "pigeon")
    Path("e.toml").write_text(f'{text}[plugins]\ndisabled = ["pigeon"]\n', encoding="utf-8")
    refused = [CliRunner().invoke(cli, [*words, "e.toml"]) for words in (("check",), ("replay", "latest"))]
    assert [1, 1] == [each.exit_code for each in refused]
    assert refused[0].stderr == refused[1].stderr


async def write(url: str, version: ResourceVersion, rollout: agl.Rollout) -> None:
    store = SQLiteStore(url)
    await store.publish([version])
    await store.enqueue([rollout])
    await store.close()


def test_latest_is_the_rollout_that_was_made_last_whatever_its_name(record, tmp_path):
    record("chat", Reply(text="five"))
    rollout = agl.Rollout(rollout_id="a-first-by-name", task={})
    version = ResourceVersion(name="prompt", version="1", resource=agl.PromptTemplate(template="x"))
    asyncio.run(write(f"sqlite:///{tmp_path}/runs/agl.db", version, rollout))
    assert "a-first-by-name" in invoke("show", "latest").output


def test_difference_shows_where_two_texts_part():
    assert "was 'four', is nothing" == difference("four", "")
    assert "was nothing, is 1.5" == difference(None, 1.5)
    same = "the same words, many of them, and then "
    assert "was '…any of them, and then this', is '…any of them, and then that'" == difference(
        same + "this", same + "that"
    )


def test_nearest_names_the_first_message_that_differs():
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}
    recorded = [[user], [system, user]]
    assert "message 2 (user) was 'hello', is 'bye'" == nearest([system, {**user, "content": "bye"}], recorded)
    assert "message 3 (tool) was nothing, is '5'" == nearest([system, user, {"role": "tool", "content": "5"}], recorded)
    assert "the request was recorded, and made fewer times" == nearest([system, user], recorded)
    assert "" == nearest([user], [])


def test_replay_without_a_file_needs_a_recorded_command(record):
    record("chat", Reply(text="five"))
    result = CliRunner().invoke(cli, ["replay", "latest"])
    assert 1 == result.exit_code
    assert "name its file: agl replay experiment-dev-1-dev" in result.stderr


@pytest.mark.long
def test_replay_runs_a_recorded_command_again(record, tmp_path):
    code = (
        "from openai import OpenAI\n"
        "client = OpenAI(max_retries=0)\n"
        "print(client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}]))\n"
    )
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    (tmp_path / "runs").mkdir()
    with ScriptedModelServer(default=Reply(text="hello")) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "k")
        patch.setenv("OPENAI_BASE_URL", server.base_url)
        invoke("exec", "--", sys.executable, "program.py")
    assert "made exactly the recorded requests (1 call)" in invoke("replay", "latest").output


def test_exec_says_what_to_check_when_it_saw_no_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert "no model call was seen" in invoke("exec", "--", sys.executable, "-c", "").stderr


@pytest.mark.parametrize("seconds", ["0", "-1"])
def test_exec_refuses_a_time_in_which_nothing_can_run(tmp_path, monkeypatch, seconds):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["exec", "--timeout", seconds, "--", sys.executable, "-c", ""])
    assert (2, []) == (result.exit_code, list(tmp_path.iterdir()))
    assert "--timeout" in result.stderr


def test_server_gives_each_recorded_answer_once_and_all_choices():
    def call(request_id: str, text: str, choice: int = 0) -> ModelCall:
        request = {"messages": [{"role": "user", "content": "hi"}]}
        response = {"choices": [{"index": choice, "message": {"role": "assistant", "content": text}}]}
        return ModelCall(
            request_id=request_id, dialect="chat", model="m", request=request, response=response, choice=choice
        )

    failed = ModelCall(request_id="z", dialect="chat", model="m", request={"messages": []}, status_code=429)
    with ReplayServer([call("a", "one"), call("b", "two"), call("b", "three", 1), failed]) as server:
        ask = to_json({"model": "other", "temperature": 0.5, "messages": [{"role": "user", "content": "hi"}]})
        texts = []
        for _ in range(2):
            status, _, body = server.answer("/v1/chat/completions", ask)
            texts.append((status, [choice["message"]["content"] for choice in json.loads(body)["choices"]]))
        assert [(200, ["one"]), (200, ["two", "three"])] == texts
        assert 429 == server.answer("/v1/chat/completions", b'{"messages": []}')[0]
        assert 400 == server.answer("/v1/chat/completions", ask)[0]
        assert 400 == server.answer("/v1/unknown", b"")[0]
        assert (3, 0, 2) == (server.served, server.unused, len(server.diverged))


def test_server_answers_a_request_with_a_picture_from_the_record():
    def ask(picture: bytes) -> bytes:
        url = f"data:image/png;base64,{b64encode(picture).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
        return to_json({"api_key": "secret", "messages": [{"role": "user", "content": content}]})

    recorded = Request("chat", ask(b"one")).stored()
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "a cat"}}]}
    call = ModelCall(request_id="a", dialect="chat", model="m", request=recorded.request, response=response)
    with ReplayServer([call]) as server:
        assert 400 == server.answer("/v1/chat/completions", ask(b"two"))[0]
        assert 200 == server.answer("/v1/chat/completions", ask(b"one"))[0]


def test_divergence_is_compared_with_a_recorded_call_that_was_not_made_yet():
    def ask(text: str) -> dict[str, object]:
        return {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]}

    calls = [
        ModelCall(request_id=text, dialect="chat", model="m", request=ask(text), response={"choices": []})
        for text in ("plan", "write", "review")
    ]
    with ReplayServer(calls) as server:
        assert 200 == server.answer("/v1/chat/completions", to_json(ask("plan")))[0]
        assert 400 == server.answer("/v1/chat/completions", to_json(ask("write it")))[0]
        assert 400 == server.answer("/v1/chat/completions", to_json(ask("plan")))[0]
        assert server.diverged[0].endswith("message 2 (user) was 'write', is 'write it'")
        assert server.diverged[1].endswith("the request was recorded, and made fewer times")
