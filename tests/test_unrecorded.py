"""Agents whose clients are not recorded: every command that runs them names the clients and the way out."""

import json
import sys

import pytest
from click.testing import CliRunner

from agl_inspect.terminal.program import cli
from agl_testing.model_server import Reply, ScriptedModelServer

AGENT = """
import asyncio
import json
import os
import subprocess
import sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx2
import requests

URL = "{url}"
ASKED = {{"model": "scripted", "messages": [{{"role": "user", "content": "what is 4?"}}]}}
JSON = {{"content-type": "application/json"}}


def urllib(url, headers):
    with urlopen(Request(url, data=json.dumps(ASKED).encode(), headers=headers), timeout=30) as answer:
        return answer.read()


def posted(url, headers):
    return requests.post(url, json=ASKED, headers=headers, timeout=30).text


def over_aiohttp(url, headers):
    import aiohttp

    async def call():
        async with aiohttp.ClientSession() as session, session.post(url, json=ASKED, headers=headers) as answer:
            return await answer.text()

    return asyncio.run(call())


def ask(task):
    answer = with_the_environments_key(lambda url, headers: httpx2.post(url, json=ASKED, headers=headers, timeout=30))
    return answer.json()["choices"][0]["message"]["content"]


def only_urllib(task):
    urllib(URL, JSON)
    return task["question"]


def half_requests(task):
    posted(URL, JSON)
    return ask(task)


def only_aiohttp(task):
    over_aiohttp(URL, JSON)
    return task["question"]


def with_the_environments_key(post):
    headers = {{"authorization": f"Bearer {{os.environ['OPENAI_API_KEY']}}", **JSON}}
    return post(f"{{os.environ['OPENAI_BASE_URL']}}/chat/completions", headers)


def environment_requests(task):
    requests.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json=ASKED,
        headers={{"authorization": f"Bearer {{os.environ['OPENAI_API_KEY']}}"}},
        timeout=30,
    ).raise_for_status()
    return task["question"]


def environment_urllib(task):
    try:
        with_the_environments_key(urllib)
    except HTTPError as error:
        error.close()
        raise
    return task["question"]


def environment_aiohttp(task):
    answer = json.loads(with_the_environments_key(over_aiohttp))
    return answer["choices"][0]["message"]["content"]


def environment_body(task):
    raise RuntimeError(with_the_environments_key(posted))


def environment_program(task):
    words = [sys.executable, "-c", "import toy_agent; toy_agent.environment_urllib({{'question': ''}})"]
    subprocess.run(words, check=True, capture_output=True, cwd=os.path.dirname(__file__))
    return task["question"]


def at_the_gateway(task, main):
    headers = {{"authorization": f"Bearer {{main.api_key}}", **JSON}}
    for client in (urllib, posted, over_aiohttp):
        client(f"{{main.endpoint}}/chat/completions", headers)
    return task["question"]
"""
WAY_OUT = (
    "Point these clients at the gateway, with the base URL and key of the resource, or let them call through httpx"
)


@pytest.fixture(autouse=True)
def own_key(monkeypatch):
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    monkeypatch.delitem(sys.modules, "toy_agent", raising=False)


@pytest.fixture
def unrecorded(experiment, server):
    """Makes an experiment with one of the agents above; without ``trains`` it only records."""

    def make(agent, *, trains=False, url=server.base_url, **settings):
        file = experiment(steps=1, agent=AGENT.format(url=f"{url}/chat/completions"), **settings)
        text = file.read_text().replace("toy_agent:solve", f"toy_agent:{agent}")
        before, _, after = text.partition("[[algorithm]]")
        file.write_text(text if trains else before + after[after.index("[[reward]]") :])
        return file

    return make


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("command", "runner", "agent", "client"),
    [
        (["dev", "-n", "7"], "async", "only_urllib", "urllib"),
        (["run"], "async", "half_requests", "requests"),
        (["run"], "process", "half_requests", "requests"),
        (["run"], "async", "only_aiohttp", "aiohttp"),
    ],
)
def test_calls_past_the_record_are_reported_with_their_client(unrecorded, caplog, command, runner, agent, client):
    result = CliRunner().invoke(cli, [*command, str(unrecorded(agent, runner=runner))])
    assert 0 == result.exit_code, result.output
    [warning] = warnings(caplog)
    assert f"7 of 7 rollouts have 7 model calls that were not recorded, made by {client} to 127.0.0.1 (7)" in warning
    assert WAY_OUT in warning


def test_training_leaves_half_recorded_rollouts_out_and_ends_with_what_to_do(unrecorded):
    result = CliRunner().invoke(cli, ["run", str(unrecorded("half_requests", trains=True))])
    text = " ".join(result.output.split())
    assert 1 == result.exit_code
    assert "none of 6 rollouts can be used: 6 unseen calls. Noticed 6 model calls that were not recorded" in text
    assert "requests to 127.0.0.1 (6)" in text
    assert WAY_OUT in text


def test_calls_to_a_model_behind_a_tool_are_reported_and_the_rollout_trains(unrecorded, caplog):
    with ScriptedModelServer(respond=lambda request: Reply(text="no policy")) as other:
        file = unrecorded("half_requests", trains=True, url=other.base_url)
        result = CliRunner().invoke(cli, ["run", str(file)])
    assert 0 == result.exit_code, result.output
    found = [text for text in warnings(caplog) if "were not recorded" in text]
    assert 1 == len(found)
    assert "6 of 6 rollouts have 6 model calls that were not recorded, made by requests to 127.0.0.1 (6)" in found[0]
    assert "they train with the calls that were recorded" in found[0]


@pytest.mark.parametrize("runner", ["async", "process"])
def test_calls_at_the_gateway_are_recorded_and_not_reported(unrecorded, caplog, runner):
    result = CliRunner().invoke(cli, ["run", str(unrecorded("at_the_gateway", trains=True, runner=runner))])
    assert 0 == result.exit_code, result.output
    assert [] == warnings(caplog)


KEY_ADVICE = (
    'pass base_url and api_key of the agent\'s argument llm to the client, or set [runner] use = "process", where the '
    "environment has the attempt's own key"
)


@pytest.mark.parametrize("client", ["requests", "urllib", "aiohttp"])
def test_failed_rollout_says_how_a_client_gets_a_key(unrecorded, client, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    result = CliRunner().invoke(cli, ["dev", "-n", "1", str(unrecorded(f"environment_{client}"))])
    assert 1 == result.exit_code
    assert f"(the key that {client} sent is of no attempt; {KEY_ADVICE})" in result.output


@pytest.mark.parametrize("key", ["", "sk-own"])
def test_failed_run_says_how_a_client_gets_a_key(unrecorded, key, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY") if not key else monkeypatch.setenv("OPENAI_API_KEY", key)
    result = CliRunner().invoke(cli, ["run", str(unrecorded("environment_requests"))])
    text = " ".join(result.output.split())
    assert 1 == result.exit_code
    assert "none of 7 rollouts succeeded" in text
    assert f"the key that requests sent is of no attempt; {KEY_ADVICE}) (7)" in text


@pytest.mark.parametrize(
    ("key", "said"), [("", "the API key is the placeholder 'agl-no-key-needed'"), ("sk-own", "is not an agl token")]
)
def test_gateways_answer_says_how_a_client_gets_a_key(unrecorded, key, said, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY") if not key else monkeypatch.setenv("OPENAI_API_KEY", key)
    result = CliRunner().invoke(cli, ["dev", "-n", "1", str(unrecorded("environment_body"))])
    _, body = result.output.split("RuntimeError: ", 1)
    message = json.JSONDecoder().raw_decode(body)[0]["error"]["message"]
    assert said in message
    assert KEY_ADVICE in message


def test_refused_call_of_an_agents_program_is_told_once(unrecorded, caplog, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    result = CliRunner().invoke(cli, ["dev", str(unrecorded("environment_program"))])
    assert 1 == result.exit_code
    [warning] = warnings(caplog)
    assert warning.startswith("An agent's model call was refused: the API key is the placeholder")
    assert warning.endswith(KEY_ADVICE)


def test_environments_key_of_a_process_is_the_attempts_own(unrecorded, caplog):
    result = CliRunner().invoke(cli, ["run", str(unrecorded("environment_requests", runner="process"))])
    assert 0 == result.exit_code, result.output
    assert [] == warnings(caplog)


def test_why_names_the_client_of_a_call_that_was_not_recorded(unrecorded, monkeypatch):
    file = unrecorded("half_requests")
    assert 0 == CliRunner().invoke(cli, ["dev", str(file)]).exit_code
    monkeypatch.chdir(file.parent)
    why = CliRunner().invoke(cli, ["why", "latest"])
    assert "unseen: requests to 127.0.0.1 (no agent) made a call that was not recorded" in why.output


def test_exec_names_the_client_of_a_program_without_a_record(agl, tmp_path, server):
    (tmp_path / "program.py").write_text(AGENT.format(url=f"{server.base_url}/chat/completions"))
    program = "import program; program.only_urllib({'question': ''})"
    process = agl("exec", "--", sys.executable, "-c", program, cwd=tmp_path)
    _, err = process.communicate(timeout=60)
    assert 0 == process.returncode, err
    assert "agl: noticed 1 model call that was not recorded, made by urllib to 127.0.0.1 (1)." in err
