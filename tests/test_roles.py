"""Several agents of one program train apart: two policies, each by its own algorithm and credit, and a frozen model."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import agl
from agl import PluginManager
from agl.algorithms import algorithm, component
from agl.errors import AglError, ConfigError
from agl_inspect.terminal.program import cli
from agl_run import Quiet, parse_config, policy
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.plugins import PluginFolder

PLUGIN = '''
import json
from pathlib import Path

import agl
from agl.contracts import StepReport
from agl.schemas import Weights
from agl_testing.toys import ToyAlgorithm, ToyPolicy


class Learner(ToyAlgorithm):
    """Writes down what it would train on: the agent, the policy, the credit and the baseline of every call."""

    def __init__(self, *, log):
        self._log, self._step = Path(log), 0

    async def step(self):
        context, step = self._context, self._step + 1
        collected = await context.collect(context.train[:2], step=step, n=2)
        lines = []
        for group in collected.groups():
            for episode, credits in zip(group, context.credit.assign(group), strict=True):
                given = {credit.span_id: credit for credit in credits}
                lines += [
                    {"agent": call.agent, "policy": call.policy, "reject": call.reject}
                    | ({} if call.reject else {"value": given[call.span_id].value, "tokens": len(call.response_ids)})
                    for call in episode.transitions
                ]
        with self._log.open("a") as file:
            file.writelines(json.dumps(line) + "\\n" for line in lines)
        await context.publish(context.tunes[0], Weights(uri=f"step-{step}"), step=step)
        self._step = step
        trained = tuple(episode.rollout.rollout_id for episode in collected.episodes)
        return StepReport(step=step, is_finished=step >= 2, trained=trained)


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="learner", factory=Learner)


@agl.hookimpl
def agl_policies():
    yield agl.PolicyEntry(name="served", factory=ToyPolicy, trains=True)
'''

AGENT = '''
import os

import agl
import httpx2


def ask(client, text):
    asked = {"model": "gpt-5", "messages": [{"role": "user", "content": text}]}
    return client.post("/chat/completions", json=asked).json()["choices"][0]["message"]["content"]


def solve(task):
    """Three agents, one client, one model name: nothing here knows that they are trained apart."""
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with httpx2.Client(base_url=os.environ["OPENAI_BASE_URL"], headers=headers, timeout=600) as client:
        with agl.operation("write"):
            draft = ask(client, "write " + task["question"])
        with agl.operation("check", **{"agl.role": "critic"}):
            ask(client, "check " + draft)
        with agl.operation("rewrite"):
            ask(client, "rewrite " + draft)
        with agl.operation("report"):
            ask(client, "report " + draft)
    agl.emit_reward(0.25, name="style")
    agl.emit_reward(1.0, name="goal")
    agl.emit_reward(0.5)
'''


@pytest.fixture
def server():
    with ScriptedModelServer(respond=lambda request: Reply(text="well")) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path, agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> Path:
    agl_plugins.install(PLUGIN, name="roles-toy")
    (tmp_path / "three_agents.py").write_text(AGENT)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(3)))
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    return tmp_path


def experiment(folder: Path, server: ScriptedModelServer, **policies: str) -> Path:
    agents = {"writer": "write|rewrite", "reviewer": "critic", **policies}
    served = "\n".join(
        f'[policy.{name}]\nuse = "served"\nbase_url = "{server.base_url}"\nmodel = "m-{name}"\nagents = "{pattern}"'
        for name, pattern in agents.items()
    )
    file = folder / "experiment.toml"
    file.write_text(f"""
[experiment]
name = "roles"
agent = "three_agents:solve"
train = "train.jsonl"
trust_agent_rewards = true

{served}

[policy.frozen]
use = "openai"
base_url = "{server.base_url}"
model = "m-frozen"
aliases = ["gpt-*"]

[[algorithm]]
use = "learner"
name = "writing"
tunes = "writer"
credit = {{ use = "role", params = {{ trust_agent = true, roles = {{ write = {{ reward = "goal", gamma = 0.5 }}, \
rewrite = {{ reward = "style", baseline = "turn" }} }} }} }}
params = {{ log = {json.dumps(str(folder / "writing.jsonl"))} }}

[[algorithm]]
use = "learner"
name = "reviewing"
tunes = "reviewer"
params = {{ log = {json.dumps(str(folder / "reviewing.jsonl"))} }}

[schedule]
mode = "alternate"
""")
    return file


def trained(file: Path) -> list[tuple[str, str, float]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [(line["agent"], line["policy"], line["value"]) for line in lines if not line["reject"]]


@pytest.mark.parametrize("runner", ["async", "process"])
def test_two_policies_train_apart_and_the_frozen_model_never(folder, server, runner):
    file = experiment(folder, server)
    file.write_text(f'{file.read_text()}\n[runner]\nuse = "{runner}"\n')
    result = CliRunner().invoke(cli, ["run", str(file)])
    assert 0 == result.exit_code, result.output
    rollouts = 2 * 2 * 2
    writing = [("write", "writer", 1.0), ("rewrite", "writer", 0.25)] * rollouts
    assert writing == trained(folder / "writing.jsonl")
    assert [("critic", "reviewer", 0.5)] * rollouts == trained(folder / "reviewing.jsonl")
    asked = [(call.json["model"], call.json["messages"][0]["content"].split()[0]) for call in server.calls]
    expected = {"write": "m-writer", "check": "m-reviewer", "rewrite": "m-writer", "report": "m-frozen"}
    assert {(model, verb) for verb, model in expected.items()} == set(asked)
    assert 2 * 4 * rollouts == len(asked)


def test_a_pattern_that_matches_nobody_is_refused_with_the_names_that_were_seen(folder, server):
    result = CliRunner().invoke(cli, ["run", str(experiment(folder, server, writer="author"))])
    assert 0 != result.exit_code
    assert "[policy.writer] agents = 'author' matched none of the agents" in result.output
    assert "'critic', 'report', 'rewrite', 'write'" in result.output


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


SEEN = "these were seen: 'critic', 'report', 'rewrite', 'write'. Correct the pattern"


def test_name_in_a_pattern_that_matches_nobody_in_the_whole_run_is_told(folder, server, caplog):
    result = CliRunner().invoke(cli, ["run", str(experiment(folder, server, writer="write|author|rewrite|editor"))])
    assert 0 == result.exit_code, result.output
    setting = "[policy.writer] agents = 'write|author|rewrite|editor'"
    assert [f"{setting}: 'author', 'editor' matched no agent, node or role in this run; {SEEN}"] == warned(caplog)


def test_dev_tells_patterns_that_match_nobody(folder, server, caplog):
    result = CliRunner().invoke(cli, ["dev", str(experiment(folder, server, writer="author"))])
    assert 0 == result.exit_code, result.output
    setting = "[policy.writer] agents = 'author'"
    assert [f"{setting} matched none of the agents, nodes and roles of the first rollouts; {SEEN}"] == warned(caplog)


def test_role_of_a_credit_that_matches_nobody_is_told(folder, server, caplog):
    file = experiment(folder, server)
    file.write_text(file.read_text().replace("rewrite = {", "revise = {"))
    result = CliRunner().invoke(cli, ["run", str(file)])
    assert 0 == result.exit_code, result.output
    setting = "credit of the algorithm 'writing': the role 'revise'"
    assert [f"{setting} matched none of the first rollouts; {SEEN}"] == warned(caplog)


def test_role_of_a_credit_that_matches_calls_of_no_agent_is_not_reported(folder, server, caplog):
    (folder / "nameless.py").write_text(re.sub(r"with agl\.operation\(.*\):", "if True:", AGENT))
    file = folder / "experiment.toml"
    file.write_text(f"""
[experiment]
agent = "nameless:solve"
train = "train.jsonl"
trust_agent_rewards = true

[policy.writer]
use = "served"
base_url = "{server.base_url}"
model = "m"
aliases = ["gpt-*"]

[[algorithm]]
use = "learner"
tunes = "writer"
credit = {{ use = "role", params = {{ roles = {{ ".*" = {{ gamma = 0.5 }} }} }} }}
params = {{ log = {json.dumps(str(folder / "log.jsonl"))} }}
""")
    result = CliRunner().invoke(cli, ["run", str(file)])
    assert 0 == result.exit_code, result.output
    assert [] == warned(caplog)
    assert [("", "writer", value) for value in (0.0625, 0.125, 0.25, 0.5)] == trained(folder / "log.jsonl")[:4]


PROMPTS = """
import agl
from agl.contracts import StepReport
from agl_testing.toys import ToyAlgorithm


class Prompts(ToyAlgorithm):
    needs_token_ids = False

    def __init__(self, *, roles=None):
        pass

    async def step(self):
        await self._context.collect(self._context.train, step=1, keeps_all=True)
        return StepReport(step=1, is_finished=True)


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="prompts", factory=Prompts, tunes=("prompt_template",), needs_token_ids=False)
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('params = { roles = { text = "critic|write" } }', []),
        (
            'params = { roles = { text = "author" } }',
            [f"algorithm 'prompts': roles.text = 'author' matched none of the first rollouts; {SEEN}"],
        ),
        (
            'params = { roles = { text = "write|author" } }',
            ["algorithm 'prompts': roles.text = 'write|author': 'author' matched no agent, node or role"],
        ),
        ('agents = "author"', [f"algorithm 'prompts': agents = 'author' matched no agent, node or role; {SEEN}"]),
        (
            'agents = "author|write"',
            ["algorithm 'prompts': agents = 'author|write': 'author' matched no agent, node or role in"],
        ),
        ('agents = "critic|write"', []),
    ],
)
def test_algorithm_on_prompts_tells_agents_and_roles_that_match_nobody(folder, server, agl_plugins, caplog, line, told):
    agl_plugins.install(PROMPTS, name="prompts-toy")
    file = folder / "prompts.toml"
    file.write_text(f"""
[experiment]
name = "prompts"
agent = "three_agents:solve"
train = "train.jsonl"
trust_agent_rewards = true
[policy.main]
use = "openai"
base_url = "{server.base_url}"
model = "m"
aliases = ["gpt-*"]
[resource.text]
template = "hi"
[[algorithm]]
use = "prompts"
{line}
""")
    result = CliRunner().invoke(cli, ["run", str(file)])
    assert 0 == result.exit_code, result.output
    assert len(told) == len(warned(caplog))
    assert all(text in warning for text, warning in zip(told, warned(caplog), strict=True))


def test_overlapping_patterns_are_refused_before_the_first_rollout(folder, server):
    result = CliRunner().invoke(cli, ["check", str(experiment(folder, server, reviewer="critic|rewrite"))])
    assert 0 != result.exit_code
    assert "both take the calls of agent 'rewrite'" in result.output
    assert [] == server.calls


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ('[gateway]\nuse = "none"', "agents needs the gateway"),
        ('[runner]\nuse = "command"', "a command is a program that does not say it"),
    ],
)
def test_where_no_one_can_know_the_agent_roles_are_refused(folder, server, section, words):
    file = experiment(folder, server)
    text = file.read_text()
    if "command" in section:
        text = text.replace('agent = "three_agents:solve"', 'agent = ["true"]')
    file.write_text(f"{text}\n{section}\n")
    result = CliRunner().invoke(cli, ["check", str(file)])
    assert words in " ".join(result.output.split())


def test_an_algorithms_own_credit_is_checked(folder, server):
    file = experiment(folder, server)
    file.write_text(file.read_text().replace('credit = { use = "role"', 'credit = { use = "rolle"'))
    result = CliRunner().invoke(cli, ["check", str(file)])
    assert "rolle" in result.output
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm.credit.uses'; did you mean 'use'"):
        parse_config({"experiment": {"agent": "a:b"}, "algorithm": [{"use": "x", "credit": {"uses": "turn"}}]})


def test_python_says_the_same_as_the_file(folder, server):
    trainer = agl.Trainer(
        algorithm=[
            algorithm("learner", name="a", tunes="writer", credit=component("turn", gamma=0.5), log="a"),
            algorithm("learner", name="b", tunes="reviewer", log="b"),
        ],
        policies={
            "writer": policy("served", base_url=server.base_url, model="m", agents="write|rewrite"),
            "reviewer": policy("served", base_url=server.base_url, model="m", aliases=["gpt-*"]),
        },
        progress=Quiet(),
    )
    assert ["write|rewrite", ""] == [policy.agents for policy in trainer.config.policy.values()]
    assert ("gpt-*",) == trainer.config.policy["reviewer"].aliases
    credits = [algorithm.credit for algorithm in trainer.config.algorithm]
    assert credits[0] is not None
    assert ("turn", {"gamma": 0.5}) == (credits[0].use, credits[0].params)
    assert credits[1] is None


def test_agent_match_of_the_adapter_selects_by_agent_node_and_role(folder, server, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    trainer = agl.Trainer(
        algorithm=algorithm("learner", log=str(folder / "log.jsonl")),
        adapter={"agent_match": "^write$|critic"},
        policies={"main": policy("served", base_url=server.base_url, model="m", aliases=["gpt-*"])},
        store=f"sqlite:///{folder}/runs.db",
        folder=folder,
        trust_agent_rewards=True,
        progress=Quiet(),
        plugins=PluginManager.from_environment(),
    )
    trainer.fit("three_agents:solve", [{"question": "1?"}, {"question": "2?"}])
    assert {("write", "main", 0.5), ("critic", "main", 0.5)} == set(trained(folder / "log.jsonl"))


def test_agent_match_that_selects_nobody_says_who_was_there(folder, server):
    trainer = agl.Trainer(
        algorithm=algorithm("learner", log=str(folder / "log.jsonl")),
        adapter={"agent_match": "author"},
        policies={"main": policy("served", base_url=server.base_url, model="m", aliases=["gpt-*"])},
        store=f"sqlite:///{folder}/runs.db",
        folder=folder,
        trust_agent_rewards=True,
        progress=Quiet(),
    )
    with pytest.raises(AglError, match=r"agents = 'author' selected none of the calls.*'write'"):
        trainer.fit("three_agents:solve", [{"question": "1?"}, {"question": "2?"}])


ASKS = """
import os

import agl
import httpx2


def solve(task):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with httpx2.Client(base_url=os.environ["OPENAI_BASE_URL"], headers=headers, timeout=600) as client:
        for model in task["models"]:
            if model == "raises":
                raise KeyError("city")
            path, asked = "/chat/completions", {"messages": [{"role": "user", "content": "q"}]}
            if model == "embedder":
                path, asked = "/embeddings", {"input": "q"}
            with agl.operation("solve"):
                client.post(path, json={"model": model} | asked)
    agl.emit_reward(1.0)
"""


@pytest.fixture
def fit(folder, server, agl_plugins):
    """Return a function that trains ``main``, one rollout per step, each with the models that its task lists."""
    one_by_one = PLUGIN.replace("context.train[:2], step=step, n=2", "context.train[step - 1 : step], step=step")
    one_by_one = one_by_one.replace("step >= 2", "step >= len(context.train)")
    one_by_one = one_by_one.replace('"learner"', '"one-by-one"').replace('"served"', '"still"')
    # A run is interrupted here if the file exists.
    stop = folder / "stop"
    line = "context, step = self._context, self._step + 1"
    one_by_one = one_by_one.replace(
        line, f"{line}\n        if step == 3 and Path({str(stop)!r}).exists(): raise OSError"
    )
    agl_plugins.install(one_by_one, name="one-by-one-toy")
    (folder / "asks.py").write_text(ASKS)

    def fit(models: list[list[str]], *, names=("main",), is_stopped=False, resume=False, **options):
        stop.touch() if is_stopped else stop.unlink(missing_ok=True)
        trainer = agl.Trainer(
            algorithm=[
                algorithm("one-by-one", name=name, tunes=name, log=str(folder / "log.jsonl"), **options)
                for name in names
            ],
            policies={
                **{name: policy("still", base_url=server.base_url, model="m") for name in names},
                "frozen": policy("openai", base_url=server.base_url, model="f", aliases=["gpt-*"]),
            },
            store=f"sqlite:///{folder}/runs.db",
            folder=folder,
            trust_agent_rewards=True,
            progress=Quiet(),
            plugins=PluginManager.from_environment(),
            name="patient",
        )
        return trainer.fit("asks:solve", [{"models": each} for each in models], resume=resume)

    return fit


UNCALLED = (
    "algorithm 'main' has nothing to train on: no model call of the first {} went to the policy 'main'. Reasons: {}. "
    "Let the agent call the model 'main', or write the name that it calls into aliases of the policy"
)
FROZEN = "policy 'frozen' served it, not 'main'"


def test_policy_that_is_never_called_is_reported_at_once_and_refused_after_sixteen_rollouts(fit, folder, caplog):
    with pytest.raises(ConfigError) as caught:
        fit([["gpt-5"]] * 20)
    assert UNCALLED.format("16 rollouts", FROZEN) == str(caught.value)
    assert UNCALLED.format("1 rollout", FROZEN) in warned(caplog)
    assert 15 == len((folder / "log.jsonl").read_text().splitlines())


def test_policy_that_only_some_tasks_need_trains_on_them(fit, folder):
    fit([["gpt-5"], ["gpt-5", "main"]] + [["gpt-5"]] * 18)
    assert [("solve", "main", 1.0)] == trained(folder / "log.jsonl")


def test_algorithm_whose_policy_is_called_later_than_that_of_another_trains(fit, folder):
    fit([["a"], ["b"], ["b"]], names=("a", "b"))
    assert {"a", "b"} == {policy for _, policy, _ in trained(folder / "log.jsonl")}


def test_run_that_has_trained_resumes_with_tasks_that_do_not_need_the_policy(fit, folder):
    models = [["main"]] * 2 + [["gpt-5"]] * 17
    with pytest.raises(OSError):
        fit(models, is_stopped=True)
    fit(models, resume=True)
    assert 2 == len(trained(folder / "log.jsonl"))


def test_agent_that_fails_before_it_calls_the_policy_is_no_uncalled_policy(fit, caplog):
    with pytest.raises(AglError) as caught:
        fit([["gpt-5", "raises"]] * 3)
    assert "KeyError" in str(caught.value)
    assert not any("nothing to train on" in text for text in warned(caplog))


def test_pattern_is_not_judged_by_rollouts_that_failed_before_they_reached_the_agent(fit, caplog):
    with pytest.raises(AglError) as caught:
        fit([["main", "raises"]] * 3, agents="author")
    assert "KeyError" in str(caught.value)
    assert not any("Correct the pattern" in text for text in warned(caplog))


def test_embeddings_alone_are_named_as_the_reason_why_nothing_trains(fit, caplog):
    fit([["embedder"]] * 2)
    assert UNCALLED.format("1 rollout", "an embeddings call samples no tokens") in warned(caplog)
