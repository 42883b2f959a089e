"""A run whose tracer and recording saw different model calls: it says so, and what it then does is declared."""

import sys

import pytest
from click.testing import CliRunner

from agl_run.cli.main import cli

AGENT = """
import agl
import openai

WRITER = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "writer"}
CHAT = {"gen_ai.operation.name": "chat", "agl.client": "pigeon.ChatPigeon", "server.address": "loft.example"}


def ask(text):
    with openai.OpenAI() as client:
        answer = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content


def solve(task):
    '''As a framework's tracer sees it: one call goes over the wire, and one past it in every second task.'''
    with agl.operation("writer", **WRITER):
        with agl.operation("chat", **{"gen_ai.operation.name": "chat"}):
            text = ask(task["question"])
        if task["past"]:
            with agl.operation("chat", **CHAT):
                pass
    return text
"""

PLAIN = AGENT.replace("    return text\n", "    ask(task['question'])\n    return text\n")
HALF, ALL, NONE = (
    [{"question": f"what is {n}?", "answer": str(n), "past": is_past(n)} for n in range(7)]
    for is_past in (lambda n: n % 2 == 0, lambda n: True, lambda n: False)
)


def run(file, **settings):
    text = file.read_text()
    for name, value in settings.items():
        text = text.replace("[runner]", f'{name} = "{value}"\n[runner]', 1)
    file.write_text(text)
    return CliRunner().invoke(cli, ["run", str(file)])


@pytest.fixture(autouse=True)
def own_key(monkeypatch):
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    monkeypatch.delitem(sys.modules, "toy_agent", raising=False)


def test_a_half_seen_rollout_is_left_out_and_its_client_is_named(experiment, caplog, monkeypatch):
    file = experiment(steps=1, agent=AGENT, tasks=HALF)
    result = run(file)
    assert 0 == result.exit_code, result.output
    assert (
        "2 of 6 rollouts have 2 model calls that the framework's tracer saw and that were not recorded" in caplog.text
    )
    assert "pigeon.ChatPigeon to loft.example (2); they are left out" in " ".join(caplog.text.split()).replace(
        ". Let these clients call over HTTP with httpx, or give them the base URL and key of the resource; if they "
        'need no record, such as a cached answer or a local model, set [experiment] unseen_calls = "accept"',
        "",
    )
    monkeypatch.chdir(file.parent)
    why = CliRunner().invoke(cli, ["why", "toy-1-counter-train-00001-00001-000"])
    assert "rejected, unseen_calls: 1 model calls of the attempt were not recorded" in why.output
    assert "unseen: pigeon.ChatPigeon to loft.example (agent 'writer')" in why.output


def test_a_run_of_half_seen_rollouts_only_ends_with_what_to_do(experiment):
    result = run(experiment(steps=1, agent=AGENT, tasks=ALL))
    assert 1 == result.exit_code
    text = " ".join(result.output.split())
    assert "none of 6 rollouts can be used: 6 unseen calls. There are 6 model calls that" in text
    assert "pigeon.ChatPigeon to loft.example (6)" in text
    assert 'unseen_calls = "accept"' in text


def test_an_experiment_may_end_at_once_or_accept(experiment):
    assert (
        "2 of 6 rollouts have 2 model calls"
        in run(experiment(steps=1, agent=AGENT, tasks=HALF), unseen_calls="error").output
    )
    accepted = run(experiment(steps=1, agent=AGENT, tasks=ALL), unseen_calls="accept")
    assert 1 == accepted.exit_code
    assert "--fresh" in accepted.output


def test_accepted_half_seen_rollouts_train(experiment):
    assert 0 == run(experiment(steps=1, agent=AGENT, tasks=ALL), unseen_calls="accept").exit_code


def test_a_call_outside_of_what_the_tracer_saw_is_reported_and_trains_by_default(experiment, caplog):
    result = run(experiment(steps=1, agent=PLAIN, tasks=NONE))
    assert 0 == result.exit_code, result.output
    assert "6 of 6 rollouts have 6 recorded model calls outside of the framework's spans" in caplog.text
    assert "OpenAI/Python" in caplog.text


def test_such_calls_may_be_declared_to_matter(experiment):
    result = run(experiment(steps=1, agent=PLAIN, tasks=NONE), unattributed_calls="drop")
    assert "none of 6 rollouts can be used: 6 unattributed calls" in " ".join(result.output.split())
