"""A run whose tracer and recording saw different model calls: it says so, and what it then does is declared."""

import sys

import pytest
from click.testing import CliRunner

from agl_inspect.terminal.program import cli

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
    assert "2 of 6 rollouts have 2 model calls that were not recorded" in caplog.text
    assert "pigeon.ChatPigeon to loft.example (2); they are left out" in " ".join(caplog.text.split()).replace(
        ". Point these clients at the gateway, with the base URL and key of the resource, or let them call through "
        "httpx; if they need no record, such as a cached answer or a local model, set [experiment] unseen_calls = "
        '"accept"',
        "",
    )
    monkeypatch.chdir(file.parent)
    why = CliRunner().invoke(cli, ["why", "toy-1-counter-train-00001-00001-000"])
    assert "rejected, unseen_calls: model calls of the attempt that were not recorded: 1" in why.output
    assert "unseen: pigeon.ChatPigeon to loft.example (agent 'writer')" in why.output


def test_a_run_of_half_seen_rollouts_only_ends_with_what_to_do(experiment):
    result = run(experiment(steps=1, agent=AGENT, tasks=ALL))
    assert 1 == result.exit_code
    text = " ".join(result.output.split())
    assert "none of 6 rollouts can be used: 6 unseen calls. Noticed 6 model calls that" in text
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


UNSEEN_BY_ALL = "have {} model calls that were not recorded"
NO_CALL = "rollouts made no recorded model call. If their agent calls a model"
MIXED = """
from urllib.request import urlopen

import toy_seen


def solve(task):
    '''Asks through urllib in two of three tasks, whose calls nothing records.'''
    if not task["past"]:
        return toy_seen.ask(task["question"])
    with urlopen("data:,4") as answer:
        return answer.read().decode()
"""


def without_training(file, **settings):
    """Make the experiment one that records its tasks, and validates where it has validation tasks."""
    text = file.read_text()
    before, _, after = text.partition("[[algorithm]]")
    file.write_text(before + after[after.index("[[reward]]") :])
    for name, value in settings.items():
        file.write_text(file.read_text().replace("[runner]", f'{name} = "{value}"\n[runner]', 1))
    return file


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("command", [["dev", "-n", "7"], ["run"]])
def test_command_that_trains_nothing_reports_calls_that_were_not_recorded(experiment, caplog, command):
    result = CliRunner().invoke(cli, [*command, str(without_training(experiment(agent=AGENT, tasks=HALF)))])
    assert 0 == result.exit_code, result.output
    [warning] = warnings(caplog)
    assert f"4 of 7 rollouts {UNSEEN_BY_ALL.format(4)}, made by pigeon.ChatPigeon to loft.example (4)" in warning
    assert "; their records are incomplete and training leaves such rollouts out. See: agl why toy" in warning


def test_validation_reports_calls_that_were_not_recorded_and_training_what_becomes_of_its_own(experiment, caplog):
    file = experiment(steps=1, agent=AGENT, tasks=HALF)
    result = run(file, val="train.jsonl")
    assert 0 == result.exit_code, result.output
    validated, trained = warnings(caplog)
    assert f"4 of 7 rollouts {UNSEEN_BY_ALL.format(4)}" in validated
    assert "their records are incomplete" in validated
    assert f"2 of 6 rollouts {UNSEEN_BY_ALL.format(2)}" in trained
    assert "they are left out of training" in trained


@pytest.mark.parametrize("command", [["dev"], ["run"]])
def test_accepted_unseen_calls_are_not_reported(experiment, caplog, command):
    file = without_training(experiment(agent=AGENT, tasks=HALF), unseen_calls="accept")
    assert 0 == CliRunner().invoke(cli, [*command, str(file)]).exit_code
    assert [] == warnings(caplog)


def test_accepted_unseen_calls_that_train_are_not_reported(experiment, caplog):
    assert 0 == run(experiment(steps=1, agent=AGENT, tasks=HALF), unseen_calls="accept").exit_code
    assert [] == warnings(caplog)


def test_run_ends_and_dev_goes_on_where_unseen_calls_are_an_error(experiment, caplog):
    file = without_training(experiment(agent=AGENT, tasks=HALF), unseen_calls="error")
    ended = CliRunner().invoke(cli, ["run", str(file)])
    assert (1, True) == (ended.exit_code, f"4 of 7 rollouts {UNSEEN_BY_ALL.format(4)}" in ended.output)
    tried = CliRunner().invoke(cli, ["dev", "-n", "7", str(file)])
    assert 0 == tried.exit_code, tried.output
    assert "their records are incomplete and such a rollout ends a run" in warnings(caplog)[-1]


@pytest.mark.parametrize("command", [["dev", "-n", "7"], ["run"]])
def test_command_that_trains_nothing_reports_calls_outside_of_the_frameworks_spans(experiment, caplog, command):
    file = without_training(experiment(agent=PLAIN, tasks=NONE))
    assert 0 == CliRunner().invoke(cli, [*command, str(file)]).exit_code
    [warning] = warnings(caplog)
    assert "7 of 7 rollouts have 7 recorded model calls outside of the framework's spans" in warning
    assert "; no agent is recorded for these calls. See: agl why toy" in warning


@pytest.mark.parametrize("command", [["dev", "-n", "7"], ["run"]])
def test_rollouts_without_a_recorded_call_are_reported_with_what_to_check(experiment, caplog, command):
    file = without_training(experiment(agent=MIXED, tasks=HALF))
    (file.parent / "toy_seen.py").write_text(AGENT)
    result = CliRunner().invoke(cli, [*command, str(file)])
    assert 0 == result.exit_code, result.output
    [warning] = warnings(caplog)
    assert f"4 of 7 {NO_CALL}, let its client call over HTTP with httpx" in warning
    assert "or give it the base URL and key of the resource. See: agl show toy" in warning
