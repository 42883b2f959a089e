"""Experiments whose agent is a coding harness, from the file to the reward."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError
from agl_harness import SandboxError
from agl_harness.sandboxes.local import LocalSandbox
from agl_run import Trainer, load_config, parse_config
from agl_testing.model_server import ScriptedModelServer

from .conftest import FILE, asks, dev, workspaces

pytestmark = pytest.mark.alone

REPAIR = "sed -i 's/a - b/a + b/' calc.py"


def only(result: Any) -> Any:
    """Return the only episode of a dry run."""
    (episode,) = result.episodes
    return episode


def test_harness_repairs_its_workspace_and_is_rewarded_by_hidden_tests(
    project: Path, model: ScriptedModelServer
) -> None:
    model.enqueue(*asks(f"ls; {REPAIR}"))
    episode = only(dev(project, model))

    assert ("succeeded", 1.0) == (episode.rollout.status, episode.reward)
    assert ["tests"] == [reward.name for reward in episode.rewards]
    first, last = model.calls
    assert "Repair add in calc.py." == first.json["messages"][0]["content"]
    assert "calc.py\n" == last.json["messages"][-1]["content"]
    assert 2 == len(episode.transitions)
    assert "a - b" in (project / "repos" / "add" / "calc.py").read_text()
    assert [] == workspaces(project)


def test_reward_is_the_share_of_tests_and_every_rollout_begins_afresh(
    project: Path, model: ScriptedModelServer
) -> None:
    (project / "tasks.jsonl").write_text(2 * '{"name": "add", "prompt": "Repair add."}\n')
    result = dev(project, model, tasks=2)
    assert [0.5, 0.5] == [episode.reward for episode in result.episodes]
    assert "FAILED (failures=1)" in result.episodes[0].rewards[0].feedback


def test_failed_harness_keeps_its_workspace_and_says_where(project: Path, model: ScriptedModelServer) -> None:
    model.enqueue(*asks("echo half > done.txt; kill $PPID"))
    episode = only(dev(project, model))

    (kept,) = workspaces(project)
    assert "failed" == episode.rollout.status
    assert f"Its workspace is kept in {kept}" in episode.attempt.error.message
    assert "half\n" == (kept / "workspace" / "done.txt").read_text()
    assert {"workspace", "home"} == {path.name for path in kept.iterdir()}


@pytest.mark.parametrize(("keep", "left"), [("never", 0), ("always", 1)])
def test_workspaces_are_kept_as_asked(project: Path, model: ScriptedModelServer, keep: str, left: int) -> None:
    dev(project, model, params=f'{{ keep = "{keep}" }}')
    assert left == len(workspaces(project))


def test_only_the_newest_workspaces_stay(project: Path, model: ScriptedModelServer) -> None:
    (project / "tasks.jsonl").write_text(3 * '{"name": "add", "prompt": "Do nothing."}\n')
    dev(project, model, params='{ keep = "always", keep_at_most = 2 }', tasks=3)
    assert 2 == len(workspaces(project))


@pytest.mark.long
def test_harness_beyond_its_time_is_stopped_with_all_that_it_started(project: Path, model: ScriptedModelServer) -> None:
    model.enqueue(*asks("sleep 600"))
    episode = only(dev(project, model, file=FILE.replace("timeout_s = 60", "timeout_s = 3")))
    assert "timeout" == episode.attempt.status
    assert "shell ran longer than 3 s and was stopped" in episode.attempt.error.message


def test_harness_gets_no_key_and_no_settings_of_this_user(
    project: Path, model: ScriptedModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://elsewhere")
    model.enqueue(*asks("env; ls -A $HOME"))
    dev(project, model, params='{ environment = { EXTRA = "given" } }')
    seen = model.calls[-1].json["messages"][-1]["content"]
    variables = dict(line.split("=", 1) for line in seen.splitlines() if "=" in line)
    assert not {"OPENAI_API_KEY", "ANTHROPIC_BASE_URL"} & set(variables)
    assert "given" == variables["EXTRA"]
    assert variables["HOME"].endswith("/home")
    assert variables["KEY"] != "sk-mine"


def test_sandbox_that_dies_is_repeated_and_harms_no_reward(
    project: Path, model: ScriptedModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = ["the first sandbox is gone", "the second is"]
    execute = LocalSandbox.exec

    async def dies(self: LocalSandbox, *args: Any, **options: Any) -> Any:
        if deaths:
            raise SandboxError(deaths.pop(0))
        return await execute(self, *args, **options)

    monkeypatch.setattr(LocalSandbox, "exec", dies)
    episode = only(dev(project, model))
    assert ("succeeded", 0.5, 3) == (episode.rollout.status, episode.reward, episode.attempt.number)
    assert [] == workspaces(project)


def test_hidden_tests_replace_what_the_harness_put_in_their_place(project: Path, model: ScriptedModelServer) -> None:
    outside = project.parent / "outside"
    outside.mkdir()
    cheat = "printf 'import unittest\\nclass T(unittest.TestCase):\\n def test_it(self): pass\\n' > test_calc.py"
    model.enqueue(*asks(f"{cheat}; ln -s {outside} deep; mkdir test_deep.py"))
    (project / "hidden" / "add" / "deep").mkdir()
    (project / "hidden" / "add" / "deep" / "secret.py").write_text("x = 1\n")
    (project / "hidden" / "add" / "test_deep.py").write_text("")
    episode = only(dev(project, model))
    assert 0.5 == episode.reward
    assert [] == list(outside.iterdir())


REPORT = "<testsuite><testcase/><testcase/></testsuite>"


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("true", 0.0),
        ("mkfifo report.xml", 0.0),
        ("truncate -s 64M report.xml", 0.0),
        ("ln -s /dev/zero report.xml", 0.0),
        (f"sh -c 'echo \"{REPORT}\" > report.xml'", 1.0),
    ],
)
def test_report_counts_only_if_the_tests_wrote_it(
    project: Path, model: ScriptedModelServer, command: str, reward: float
) -> None:
    model.enqueue(*asks(f"echo '{REPORT}' > report.xml; chmod 444 report.xml; chmod 555 ."))
    params = f"params = {{ command = {json.dumps(command)}, report = 'report.xml' }}"
    episode = only(dev(project, model, file=FILE.replace(FILE.splitlines()[-1], params)))
    assert reward == episode.reward, episode.attempt.error


def test_hidden_tests_are_programs_where_they_are_files_to_run(project: Path, model: ScriptedModelServer) -> None:
    check = project / "hidden" / "add" / "check.sh"
    check.write_text("#!/bin/sh\ngrep -q 'a + b' calc.py\n")
    check.chmod(0o755)
    model.enqueue(*asks(f"{REPAIR}; echo exit 1 > check.sh; ln -s /tmp deep; chmod 555 ."))
    (project / "hidden" / "add" / "deep").mkdir()
    (project / "hidden" / "add" / "deep" / "file").write_text("")
    file = FILE.replace('"python -m unittest"', '"./check.sh", score = "exit"')
    episode = only(dev(project, model, file=file))
    assert 1.0 == episode.reward, episode.attempt.error


def test_name_of_a_hidden_file_is_one_line(project: Path, model: ScriptedModelServer) -> None:
    task = {"name": "add", "prompt": "x", "tests": {"a\nfcalc.py": ""}}
    (project / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    episode = only(dev(project, model, file=FILE.replace('hidden = "hidden/{name}"', 'hidden_files = "tests"')))
    assert "has a line break in its name" in episode.attempt.error.message


def test_tests_find_the_sandbox_of_another_backend(
    project: Path, model: ScriptedModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes" / "my_boxes.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(tmp_path / "boxes")
    model.enqueue(*asks(REPAIR))
    episode = only(dev(project, model, params='{ sandbox = "my_boxes:Boxes" }'))
    assert 1.0 == episode.reward, episode.attempt.error


BACKEND = """
from pathlib import Path
from agl_harness.sandboxes.local import LocalSandboxes

class Box:
    def __init__(self, inner):
        self._inner = inner
        self.address, self.root = f"mine:{inner.address}", inner.root
        for name in ("exec", "read", "write", "upload", "download", "close"):
            setattr(self, name, getattr(inner, name))

class Boxes:
    def __init__(self, *, base, hidden=(), readable=()):
        self._inner = LocalSandboxes(base=base, hidden=hidden, readable=readable)

    async def create(self, name):
        return Box(await self._inner.create(name))

    async def attach(self, address):
        return Box(await self._inner.attach(address.removeprefix("mine:")))
"""


def test_harness_that_fails_elsewhere_leaves_no_workspace_and_says_none(
    project: Path, model: ScriptedModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes" / "my_boxes.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(tmp_path / "boxes")
    model.enqueue(*asks("kill $PPID"))
    episode = only(dev(project, model, params='{ sandbox = "my_boxes:Boxes" }'))
    assert "is kept in" not in episode.attempt.error.message
    assert [] == workspaces(project)
    with pytest.raises(ConfigError, match='keep = "always" is for sandbox = "local"'):
        dev(project, model, params='{ sandbox = "my_boxes:Boxes", keep = "always" }')


CLAIM = """
import os, urllib.request
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

request = ExportTraceServiceRequest()
span = request.resource_spans.add().scope_spans.add().spans.add(name="x", trace_id=b"1" * 16, span_id=b"1" * 8)
span.attributes.add(key="agl.workspace").value.string_value = "HERE"
headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/x-protobuf"}
url = os.environ["URL"].removesuffix("/v1") + "/v1/traces"
print(urllib.request.urlopen(urllib.request.Request(url, request.SerializeToString(), headers)).status)
"""


def test_sandbox_that_an_agent_claims_is_not_believed(project: Path, model: ScriptedModelServer) -> None:
    """A harness can send spans to the gateway with its attempt's token; such a span must not name the sandbox."""
    claim = CLAIM.replace("HERE", str(project / "elsewhere"))
    (project / "elsewhere" / "workspace").mkdir(parents=True)
    (project / "elsewhere" / "workspace" / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    (project / "repos" / "add" / "claim.py").write_text(claim)
    model.enqueue(*asks("python claim.py"))
    episode = only(dev(project, model))
    assert "200\n" == model.calls[-1].json["messages"][-1]["content"]
    assert 0.5 == episode.reward


def test_workspace_of_a_git_revision_is_a_repository_of_one_commit(project: Path, model: ScriptedModelServer) -> None:
    repo = project / "repos" / "add"
    git = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"], ["tag", "first"]):
        subprocess.run([*git, *words], check=True)
    (repo / "calc.py").write_text("later\n")
    subprocess.run([*git, "commit", "-qam", "the solution"], check=True)
    model.enqueue(*asks("git log --format=%s; git status --short; cat calc.py"))
    dev(project, model, file=FILE.replace('"repos/{name}"', '"git:repos/{name}@first"'))
    assert "Start\ndef add(a, b):\n    return a - b\n" == model.calls[-1].json["messages"][-1]["content"]


def test_workspace_of_a_revision_has_all_its_files_whatever_surrounds_it(
    project: Path, model: ScriptedModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = project / "repos"
    (repo / ".gitattributes").write_text("tests export-ignore\nversion export-subst\n")
    (repo / "add" / "tests").mkdir()
    (repo / "add" / "tests" / "data").write_text("")
    (repo / "add" / "version").write_text("$Format:%H$\n")
    git = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True).stdout
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "hooks" / "pre-commit").chmod(0o755)
    (tmp_path / "config").write_text(f"[core]\nhooksPath = {tmp_path}/hooks\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_DIR", str(repo / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(repo / ".git" / "index"))
    model.enqueue(*asks("git log --format=%s; ls -A . tests; cat version"))
    dev(project, model, file=FILE.replace('"repos/{name}"', '"git:repos/{name}@HEAD"'))
    seen = model.calls[-1].json["messages"][-1]["content"]
    assert "Start\n.:\n.git\ncalc.py\ntests\nversion\n\ntests:\ndata\n$Format:%H$\n" == seen
    assert head == subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True).stdout


def test_workspace_that_would_hold_its_own_copy_is_refused(project: Path, model: ScriptedModelServer) -> None:
    with pytest.raises(ConfigError, match="its copy would hold itself; "):
        dev(project, model, file=FILE.replace('"repos/{name}"', '"."'))
    (project / "tasks.jsonl").write_text(json.dumps({"prompt": "x", "name": "add", "workspace": "runs"}) + "\n")
    episode = only(dev(project, model))
    assert "its copy would hold itself" in episode.attempt.error.message


def test_task_brings_its_own_files_and_hidden_tests(project: Path, model: ScriptedModelServer) -> None:
    test = (
        "import unittest\nfrom new import x\nclass T(unittest.TestCase):\n def test_x(self): self.assertEqual(x, 1)\n"
    )
    task = {"issue": "x is 1", "files": {"pkg/new.py": "x = 0\n"}, "tests": {"pkg/test_new.py": test}}
    (project / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    file = FILE.replace('workspace = "repos/{name}"', 'hidden = ["tests"]').replace(
        '"python -m unittest", hidden = "hidden/{name}"', '"python -m unittest discover pkg", hidden_files = "tests"'
    )
    file += '\n[resource.prompt]\ntemplate = "Make it so that {issue}."\n'
    model.enqueue(*asks("cat pkg/*; echo 'x = 1' > pkg/new.py"))
    episode = only(dev(project, model, file=file))
    assert 1.0 == episode.reward
    assert "Make it so that x is 1." == model.calls[0].json["messages"][0]["content"]
    assert "x = 0\n" == model.calls[-1].json["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ({"name": "add"}, "has no text 'prompt' for the harness, only name"),
        ({"name": "../secret", "prompt": "x"}, "leads out of the folder of 'repos/{name}'"),
        ({"name": "/etc", "prompt": "x"}, "leads out of the folder"),
        ({"name": "none", "prompt": "x"}, "repos/none' is not a folder"),
        ({"prompt": "x"}, "needs the field 'name' of the task, which has prompt"),
        ({"name": "add", "prompt": "x", "files": {"../x": ""}}, "leads out of the workspace"),
        ({"name": "add", "prompt": "x", "files": ["x"]}, "files of a task holds texts by path"),
        ({"name": "add", "prompt": "a\0b"}, "null character"),
        ({"name": "add", "prompt": "x", "workspace": "git:repos/add@--output=mine"}, "'--output=mine' begins with"),
        ({"name": "add", "prompt": "x", "workspace": "git:repos/add@"}, "names no revision"),
        ({"workspace": "repos/../../x", "prompt": "x", "name": "add"}, "leads out of the folder"),
    ],
)
def test_task_that_cannot_run_fails_with_what_to_do(
    project: Path, model: ScriptedModelServer, task: dict[str, Any], problem: str
) -> None:
    (project / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    episode = only(dev(project, model))
    assert "failed" == episode.rollout.status
    assert problem in episode.attempt.error.message
    assert [] == model.calls


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (('harness = "shell.toml"', 'harness = "shelll.toml"'), "shelll.toml' cannot be read"),
        (('harness = "shell.toml"', 'harness = "shell.toml"\nagent = "a:b"'), "keep one of them"),
        (('harness = "shell.toml"', 'agent = ["true"]'), "workspace is what a coding harness works in"),
        (("concurrency = 2", 'use = "process"'), "'process'.*'harness shell.toml'.*go together"),
        (
            ('harness = "shell.toml"\nworkspace = "repos/{name}"', 'agent = ["true"]'),
            'runner.use is "async"|use = "command"',
        ),
        (("[[reward]]", '[gateway]\nuse = "none"\n\n[[reward]]'), "only the gateway can record its model calls"),
        (("params = PARAMS", "params = { memroy = 1 }"), "has no parameter 'memroy'"),
        (("params = PARAMS", 'params = { memory = "lots" }'), "memory is 'lots'; write a size"),
        (("params = PARAMS", 'params = { sandbox = "clay" }'), "no sandbox 'clay'; there are local"),
        (("params = PARAMS", 'params = { keep = "maybe" }'), 'keep is "maybe"; write one of failed, never, always'),
        (('command = "python -m unittest"', 'command = ""'), "needs a command"),
        (('command = "python -m unittest"', 'command = "x", score = "half"'), "no score 'half'"),
    ],
)
def test_wrong_setting_is_refused_before_a_harness_starts(
    project: Path, model: ScriptedModelServer, change: tuple[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        dev(project, model, file=FILE.replace(*change))
    assert [] == model.calls


def test_harness_that_is_not_installed_is_named(project: Path, model: ScriptedModelServer) -> None:
    (project / "shell.toml").write_text('[mine]\ncommand = ["no-such-harness", "$prompt"]\n')
    with pytest.raises(ConfigError, match="mine is not installed: there is no program 'no-such-harness'"):
        dev(project, model)


def test_harness_is_part_of_the_experiment_s_identity(project: Path) -> None:
    (project / "experiment.toml").write_text(FILE.replace("PARAMS", "{}").replace("BASE_URL", "http://127.0.0.1:1/v1"))
    plan = Trainer.from_config(load_config(project / "experiment.toml"), folder=project).plan()
    assert ("harness shell.toml", "harness") == (plan.agent.identity, plan.config.runner.use)


def test_unknown_harness_is_refused_by_a_check(project: Path) -> None:
    file = FILE.replace("shell.toml", "pii").replace("PARAMS", "{}").replace("BASE_URL", "http://127.0.0.1:1/v1")
    (project / "experiment.toml").write_text(file)
    with pytest.raises(ConfigError, match=r"there is no harness 'pii'; did you mean 'pi'\? For one of your own"):
        Trainer.from_config(load_config(project / "experiment.toml"), folder=project).plan()


def test_agent_and_harness_are_optional_in_a_file_but_one_is_needed() -> None:
    config = parse_config({"experiment": {"val": "x.jsonl"}})
    with pytest.raises(ConfigError, match=r'the experiment has no agent.*harness = "pi"'):
        Trainer.from_config(config).plan()


@pytest.mark.long
def test_kept_workspace_is_scored_again_by_another_reward(project: Path, model: ScriptedModelServer) -> None:
    model.enqueue(*asks(REPAIR))
    dev(project, model, params='{ keep = "always" }')
    text = (project / "experiment.toml").read_text()
    (project / "experiment.toml").write_text(text.replace("python -m unittest", "python -m unittest no_such"))
    command = [sys.executable, "-m", "agl_run", "replay", "--score", "experiment.toml", "--experiment", "repairs-dev"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert ": 1 -> 0 (-1)" in done.stdout, done.stderr
