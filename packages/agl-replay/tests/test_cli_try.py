"""``agl resources try`` with a real agent, a model server whose answers depend on the prompt, and a SQLite store."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result

import agl
from agl.contracts import ExperimentRecord, RolloutQuery, Store
from agl.errors import ConfigError
from agl.schemas import Json, JsonResource, PromptTemplate, ResourceVersion, Rollout, to_json
from agl_inspect.ownership import Ownership
from agl_inspect.terminal.program import cli
from agl_inspect.versions import read_trials
from agl_replay.trials import TriedRollout, TriedTask, compare_pair
from agl_run.engine import text_of, unknown_placeholders, with_text
from agl_run.run.running_experiment import ExperimentLock
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer
from agl_testing.waiting import wait_until

T = TypeVar("T")

AGENT = """
from openai import OpenAI

def solve(task, llm, style):
    with OpenAI(base_url=llm.endpoint, api_key="k", max_retries=0) as client:
        messages = [{"role": "user", "content": style.format(question=task["question"])}]
        return client.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content
"""
EXPERIMENT = """
[experiment]
name = "sums"
agent = "try_agent:solve"
store = "sqlite:///runs/sums.db"
train = "train.jsonl"
val = "val.jsonl"
hidden = ["answer"]

[runner]
concurrency = 1

[gateway]
use = "none"

[policy.llm]
use = "openai"
model = "scripted"
base_url = "URL"
api_key_env = ""

[resource.style]
template = "Add: {question}"

[[reward]]
use = "exact-match"
params = { answer = "answer" }
"""
CAREFUL = "Add carefully: {question}"


def answer(request: ModelRequest) -> Reply:
    """Answer correctly if the prompt asks for care, or if the number is divisible by 4; shout if asked to."""
    text = request.last_text
    number = int(text.split()[-1])
    is_right = "carefully" in text or number % 4 == 0
    ending = "\x1b[31m[bold]" if "shout" in text else ""
    return Reply(text=f"{2 * number if is_right else 0}{ending}")


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(respond=answer) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, server: ScriptedModelServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the experiment into a folder, and make it the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    monkeypatch.delitem(sys.modules, "try_agent", raising=False)
    (tmp_path / "try_agent.py").write_text(AGENT, encoding="utf-8")
    (tmp_path / "e.toml").write_text(EXPERIMENT.replace("URL", server.base_url), encoding="utf-8")
    for name, count in (("train", 3), ("val", 12)):
        lines = [json.dumps({"question": f"double {n}", "answer": str(2 * n)}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def invoke(*words: str, code: int = 0, given: str | None = None) -> Result:
    result = CliRunner().invoke(cli, words, input=given)
    assert result.exit_code == code, result.output
    return result


def tried(*words: str, code: int = 0, given: str | None = None) -> dict[str, Any]:
    return json.loads(invoke("resources", "try", "e.toml", *words, "--json", code=code, given=given).stdout)


def read(folder: Path, work: Callable[[Store], Any]) -> Any:
    async def use() -> Any:
        store = SQLiteStore(f"sqlite:///{folder}/runs/sums.db")
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(use())


def publish(folder: Path, *versions: ResourceVersion, live: str = "") -> None:
    async def work(store: Store) -> None:
        await store.publish(versions)
        if live:
            record = ExperimentRecord(name="sums", run=1, live={"style": live}, agent="try_agent:solve")
            await store.save_state({}, experiment=record)

    (folder / "runs").mkdir(exist_ok=True)
    read(folder, work)


def version(name: str, text: str) -> ResourceVersion:
    return ResourceVersion(name="style", version=name, resource=PromptTemplate(template=text))


@pytest.mark.usefixtures("folder")
def test_text_is_compared_with_the_file_task_by_task() -> None:
    said = invoke("resources", "try", "e.toml", "--text", CAREFUL)
    lines = said.stdout.splitlines()
    assert "style on 12 validation tasks" == lines[0]
    assert lines[1].split() == ["task", "A", "B", "B", "-", "A", "what"]
    assert [*"1235679", "10", "11", *"048"] == [line.split()[0] for line in lines[2:14]]
    assert lines[2].startswith("1     0.000  1.000  +1.000  ")
    assert "A  sums-try-1-initial  the experiment's file  0.250  12" in said.stdout
    assert "B against A: better, evidence 44 to 1: difference +0.7500 [+" in said.stdout
    assert "paired by 12 tasks, 12 and 12 rollouts" in said.stdout
    assert lines[-1].startswith("promote B with: agl resources promote style sums-try-")
    assert "; look at a rollout with: agl show sums-try-1-try-" in lines[-1]
    assert "24 rollouts: 2 candidates on 12 validation tasks" in said.stderr


@pytest.mark.usefixtures("folder")
def test_candidates_share_the_error_of_a_trial() -> None:
    alone = tried("--text", "Sum: {question}", "--text", CAREFUL)
    several = tried("--text", "Sum: {question}", "--text", "Sum up: {question}", "--text", CAREFUL)
    assert ["better"] == [pair["comparison"]["verdict"] for pair in alone["pairs"]]
    assert ["undecidable"] * 2 == [pair["comparison"]["verdict"] for pair in several["pairs"]]


@pytest.mark.long
def test_trial_is_kept_with_its_comparison(folder: Path) -> None:
    report = tried("--text", CAREFUL)
    tried("--text", "Add now: {question}", "--limit", "1")
    one, kept = read(folder, lambda store: read_trials(store, "style"))
    assert ("sums-try", "style", "12 validation tasks") == (kept.experiment, kept.resource, kept.source)
    first, careful = kept.scores
    assert [each["version"] for each in report["candidates"]] == [first.version, careful.version]
    assert (0.25, 12, None) == (first.mean, first.tasks, first.comparison)
    assert first.low < 0.25 < first.high
    assert report["pairs"][0]["comparison"] == json.loads(to_json(careful.comparison))
    assert [(None, None)] * 2 == [(each.low, each.high) for each in one.scores]
    assert (1, "undecidable") == (one.scores[1].comparison.paired_tasks, one.scores[1].comparison.verdict)
    assert "1 of 12 validation tasks" == one.source
    assert one.time > kept.time


@pytest.mark.long
@pytest.mark.usefixtures("folder")
def test_task_enters_the_comparison_by_the_mean_of_its_samples() -> None:
    found = tried("--text", CAREFUL, "--samples", "2")
    gate = agl.Gate(error=0.025)
    for task in found["tasks"]:
        means = [fmean(each["reward"] for each in task["rollouts"][mark]) for mark in "AB"]
        gate.update(*means)
    compared = found["pairs"][0]["comparison"]
    assert (12, "better", gate.mean, gate.evidence, gate.lower, gate.upper) == tuple(
        compared[name] for name in ("paired_tasks", "verdict", "difference", "evidence", "low", "high")
    )
    assert [24, 24] == [each["rollouts"] for each in found["candidates"]]
    assert all(each["tokens"] > 0 and each["seconds"] > 0 for each in found["candidates"])


def test_candidates_take_turns_with_equal_seeds_and_differ_in_the_version_only(folder: Path) -> None:
    tried("--text", CAREFUL, "--pick", "0,5-6", "--samples", "2")
    rollouts = read(folder, lambda store: store.rollouts(RolloutQuery(experiment="sums-try")))
    ours = sorted(rollouts, key=lambda rollout: rollout.started_at)
    pairs = [ours[place : place + 2] for place in range(0, 12, 2)]
    assert [0, 0, 5, 5, 6, 6] == [int(one.task["question"].split()[1]) for one, _ in pairs]
    assert all(one.task == other.task and one.metadata == other.metadata for one, other in pairs)
    assert 6 == len({one.metadata["seed"] for one, _ in pairs})
    first = [one.resources["style"] == "sums-try-1-initial" for one, _ in pairs]
    assert [True, False] * 3 == first
    assert all(
        {"style"} == {key for key in one.resources if one.resources[key] != other.resources[key]}
        for one, other in pairs
    )


@pytest.mark.long
def test_tried_text_is_a_version_that_is_neither_labelled_nor_the_newest(folder: Path) -> None:
    publish(folder, version("v1", "Add: {question}"), live="v1")
    new = tried("--text", CAREFUL)["candidates"][1]["version"]
    stored = read(folder, lambda store: store.resource("style", new))
    assert ("v1", {"experiment": "sums", "origin": "agl resources try", "candidate": True}) == (
        stored.parent,
        stored.metadata,
    )
    assert [] == read(folder, lambda store: store.labels("style"))
    assert {"style": "v1"} == read(folder, lambda store: store.experiments("sums"))[0].live
    assert "Add: {question}" in invoke("data", "export", "style", "--format", "text").stdout
    assert new not in invoke("resources", "list", "style").stdout
    assert "style  v1" in invoke("resources", "list").stdout
    assert (
        f"- {new} (candidate) from v1, by agl resources try; trials: 12 rollouts of sums-try"
        in invoke("show", "style").stdout
    )
    invoke("resources", "promote", "style", new)
    assert new in invoke("resources", "list", "style").stdout
    assert CAREFUL in invoke("data", "export", "style", "--format", "text").stdout


def test_text_that_a_version_has_already_is_that_version(folder: Path) -> None:
    publish(folder, version("v1", "Add: {question}"), version("v2", CAREFUL), live="v1")
    assert ["v1", "v2"] == [each["version"] for each in tried("--text", CAREFUL, "--limit", "2")["candidates"]]
    assert 2 == len(read(folder, lambda store: store.resources("style")))


def test_first_named_candidate_is_the_baseline_whatever_its_option(folder: Path) -> None:
    publish(folder, version("v1", "Add: {question}"), version("v2", CAREFUL), live="v1")
    invoke("resources", "promote", "style", "v2")
    words = ("--version", "production", "--text", "Sum: {question}", "--version", "style@v1")
    found = tried(*words, "--limit", "2")
    assert ["--version production", "--text", "--version style@v1"] == [each["origin"] for each in found["candidates"]]
    assert ("v2", "v1") == (found["candidates"][0]["version"], found["candidates"][2]["version"])
    assert [("B", "A"), ("C", "A")] == [(pair["mark"], pair["baseline"]) for pair in found["pairs"]]


def test_rollouts_that_a_killed_trial_left_are_cancelled_and_cost_nothing(
    folder: Path, server: ScriptedModelServer
) -> None:
    publish(folder, version("v1", "Add: {question}"), live="v1")
    left = Rollout(rollout_id="left", task={"question": "double 5", "answer": "10"}, experiment="sums-try")
    read(folder, lambda store: store.enqueue([left]))
    tried("--text", CAREFUL, "--limit", "1")
    assert ["cancelled"] == [
        one.status for one in read(folder, lambda store: store.rollouts(RolloutQuery(ids=("left",))))
    ]
    assert 2 == len(server.calls)


def test_only_candidate_is_compared_with_the_labelled_version(folder: Path) -> None:
    publish(folder, version("v1", "Add: {question}"), version("v2", CAREFUL))
    invoke("resources", "promote", "style", "v2", "--label", "best")
    said = invoke("resources", "try", "e.toml", "--text", "Sum: {question}", "--set", "resource.style.label=best")
    assert "A  v2" in said.stdout
    assert "the label best" in said.stdout
    assert "B against A: worse, evidence 44 to 1" in said.stdout
    assert "nothing is shown to be better than A, so there is nothing to promote; look at" in said.stdout


MISTAKES = [
    (["--text", "Add it"], "the text of --text cannot be tried: it lacks the placeholders {question}"),
    (["--text", 'As {"sum": 1}: {question}'], 'it has {"sum"}, which is not a placeholder; write literal braces as {{'),
    (["--text", "{question} {"], "its braces are broken"),
    (["--text", " \n"], "it is empty"),
    (["--text", "\udcff{question}"], "it is not UTF-8"),
    (
        ["--text", "Sum: {question}", "--text", "Sum: {question}"],
        "two candidates have the same text, --text (sums-try-",
    ),
    (["--text", "Add: {question}"], "two candidates have the same text, the experiment's file and --text"),
    ([], "there is nothing to try: name a candidate with --version, --text"),
    (["--version", "nine"], "there is no version 'nine' of 'style' yet, nor any other; give a text"),
    (["--version", "llm@v1"], "'llm' is a policy, whose weights are not a text"),
    (["styl", "--text", CAREFUL], "'styl' is not a resource; did you mean 'style'?"),
    (["style", "--version", "other@v1"], "the candidates are of different resources, style and other"),
    (["--text-file", "none.txt"], "cannot read the text 'none.txt'"),
    (["--text", CAREFUL, "--pick", "1,12"], "--pick names 12, and the positions of the tasks are 0 to 11"),
    (["--text", CAREFUL, "--pick", "1;2"], "--pick '1;2' is not a list of positions"),
    (["--text", CAREFUL, "--task", "{"], "--task '{' is not JSON"),
    (["--text", CAREFUL, "--task", "{}", "--limit", "1"], "--task gives the tasks themselves"),
    (["--text", CAREFUL, "--tasks", "open.jsonl"], "hidden key 'answer' is in no task of open.jsonl"),
    (
        [word for number in range(27) for word in ("--text", f"{number} {{question}}")],
        "there are 27 candidates, and 26 can be compared at once",
    ),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_mistake_is_named_before_anything_runs(
    folder: Path, server: ScriptedModelServer, words: Sequence[str], message: str
) -> None:
    (folder / "open.jsonl").write_text('{"question": "double 1"}\n', encoding="utf-8")
    said = invoke("resources", "try", "e.toml", *words, code=1)
    assert message in said.stderr
    assert [] == server.calls
    assert [] == read(folder, lambda store: store.resources()) if (folder / "runs/sums.db").exists() else True


@pytest.mark.usefixtures("folder")
def test_hostile_text_and_answers_never_reach_the_terminal() -> None:
    hostile = "shout \x1b]0;owned\x07[bold]\u202e carefully: {question}"
    said = invoke(
        "resources",
        "try",
        "e.toml",
        "--text",
        hostile,
        "--task",
        '{"question": "\\u001b[2J 3", "answer": "6"}',
        "--full",
    )
    assert not {"\x1b", "\x07", "\u202e"} & set(said.output)
    assert "6\\x1b[31m[bold]" in said.stdout
    found = tried("--text", hostile, "--task", '{"question": "double 3", "answer": "6"}')
    assert "6\x1b[31m[bold]" == found["tasks"][0]["rollouts"]["B"][0]["answer"]


@pytest.mark.usefixtures("folder")
def test_failed_rollouts_count_0_and_are_named_with_their_error() -> None:
    said = invoke("resources", "try", "e.toml", "--text", "Add {much}: {question}", "--limit", "2")
    assert "--text has the placeholder {much}, which the present text lacks" in said.stderr
    assert "0.000 (1 failed)" in said.stdout
    assert "failed with B: 2 rollouts, such as sums-try-1-try-" in said.stdout
    assert "the prompt template needs ['much']" in said.stdout


@pytest.mark.usefixtures("folder")
def test_exit_status_is_1_when_no_rollout_succeeded() -> None:
    said = invoke("resources", "try", "e.toml", "--text", CAREFUL, "--task", "{}", code=1)
    assert "failed with A: 1 rollout, such as" in said.stdout
    assert "B against A: cannot be told apart, evidence 1 to 1" in said.stdout


@pytest.mark.parametrize(
    ("words", "source", "count"),
    [
        ([], "12 validation tasks", 12),
        (["--limit", "3"], "3 of 12 validation tasks", 3),
        (["--pick", "7,2-3"], "3 of 12 validation tasks", 3),
        (["--tasks", "train.jsonl"], "3 train.jsonl tasks", 3),
        (["--task", '{"question": "double 9", "answer": "18"}'], "1 given task", 1),
        (["--set", "experiment.val="], "3 training tasks", 3),
    ],
)
@pytest.mark.usefixtures("folder")
def test_tasks_are_chosen_and_named(words: list[str], source: str, count: int) -> None:
    found = tried("--text", CAREFUL, *words)
    assert (source, count) == (found["source"], len(found["tasks"]))
    if "--pick" in words:
        assert [7, 2, 3] == [task["number"] for task in found["tasks"]]


def editor(folder: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Set the user's editor to a script that changes the text by a Python expression."""
    script = folder / "editor.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\npath = Path(sys.argv[1])\ntext = path.read_text()\n"
        f"path.write_text({change})\n",
        encoding="utf-8",
    )
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")


def test_editor_opens_on_the_candidate_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor(folder, monkeypatch, "text.replace('Add', 'Add carefully')")
    found = tried("--edit", "--limit", "2")
    assert (
        PromptTemplate(template=CAREFUL)
        == read(folder, lambda store: store.resource("style", found["candidates"][1]["version"])).resource
    )
    found = tried("--text", "Add now: {question}", "--edit", "--limit", "2")
    last = read(folder, lambda store: store.resource("style", found["candidates"][1]["version"]))
    assert ("Add carefully now: {question}", found["candidates"][0]["version"]) == (last.resource.template, last.parent)


@pytest.mark.parametrize(("change", "message"), [("text", "left the text as it was"), ("''", "it is empty")])
def test_editor_that_changes_nothing_or_everything_stops_with_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, server: ScriptedModelServer, change: str, message: str
) -> None:
    editor(folder, monkeypatch, change)
    assert message in invoke("resources", "try", "e.toml", "--edit", code=1).stderr
    assert [] == server.calls


@pytest.mark.usefixtures("folder")
def test_text_comes_from_a_file_or_standard_input_without_its_last_line_break(folder: Path) -> None:
    (folder / "new.txt").write_text(f"{CAREFUL}\n", encoding="utf-8")
    versions = [
        tried("--text-file", "new.txt", "--limit", "1"),
        tried("--text-file", "-", "--limit", "1", given=f"{CAREFUL}\n"),
        tried("--text", CAREFUL, "--limit", "1"),
    ]
    assert 1 == len({found["candidates"][1]["version"] for found in versions})


MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "{question}"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"role": "user", "content": "Add carefully: {question}"}]', ""),
        ('[{"role": "user", "content": "Add carefully"}]', "it lacks the placeholders {question}"),
        ('[{"role": "boss", "content": "{question}"}]', "it is not a list of messages"),
        ('{"question": "{question}"}', "it is an object, and the resource is a list"),
        ("Add: {question}", "it is not JSON, as the resource is"),
        ("[" * 100_000, "it is not JSON"),
    ],
)
def test_prompt_of_messages_is_tried_as_json(folder: Path, text: str, message: str) -> None:
    (folder / "try_agent.py").write_text(
        AGENT.replace(
            '[{"role": "user", "content": style.format(question=task["question"])}]',
            'style.format(question=task["question"])',
        )
    )
    value = ", ".join(f'{{ role = "{one["role"]}", content = "{one["content"]}" }}' for one in MESSAGES)
    file = folder / "e.toml"
    file.write_text(file.read_text().replace('template = "Add: {question}"', f"value = [{value}]"))
    if message:
        assert message in invoke("resources", "try", "e.toml", "--text", text, code=1).stderr
        return
    found = tried("--text", text)
    assert "better" == found["pairs"][0]["comparison"]["verdict"]
    stored = read(folder, lambda store: store.resource("style", found["candidates"][1]["version"]))
    assert JsonResource(value=json.loads(text)) == stored.resource


def test_running_trainer_of_the_experiment_is_not_disturbed(folder: Path) -> None:
    publish(folder, version("v1", "Add: {question}"), live="v1")
    before = read(folder, lambda store: store.load_state("experiment/sums/"))
    lock = ExperimentLock(folder / "runs" / "sums")
    lock.acquire()

    async def beside(store: Store) -> dict[str, Any]:
        async with Ownership(store, "sums", workdir=folder / "runs" / "sums") as own:
            found = await asyncio.to_thread(tried, "--text", CAREFUL)
            await own.save_state({"experiment/sums/note": b"mine"})
        return found

    try:
        assert "better" == read(folder, beside)["pairs"][0]["comparison"]["verdict"]
    finally:
        lock.release()
    after = read(folder, lambda store: store.load_state("experiment/sums/"))
    assert {key: value for key, value in before.items() if value} == {
        key: value for key, value in after.items() if value and not key.endswith("note")
    }


SLOW = """
import asyncio

async def solve(task, style):
    await asyncio.sleep(0 if task["question"] in ("double 0", "double 1") else 600)
    return float("carefully" in style.template and task["question"] == "double 1")
"""


def test_interrupt_reports_what_is_done_and_leaves_nothing_queued(folder: Path) -> None:
    (folder / "try_agent.py").write_text(SLOW, encoding="utf-8")
    (folder / "e.toml").write_text((folder / "e.toml").read_text().partition("[[reward]]")[0], encoding="utf-8")
    words = [sys.executable, "-m", "agl", "resources", "try", "e.toml", "--text", CAREFUL]
    running = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ended() -> int:
        if not (folder / "runs/sums.db").exists():
            return 0
        query = RolloutQuery(experiment="sums-try", status=("succeeded",))
        return len(read(folder, lambda store: store.rollouts(query))) == 4

    wait_until(ended)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert 130 == running.returncode, err
    assert "style on 12 validation tasks; stopped before its end" in out
    assert "no rollout of 10 tasks has ended" in out
    assert "B against A: cannot be told apart, evidence 1.3 to 1 for the new version, 40 to 1 needed: " in out
    assert "stopped; done so far:" in err
    open_ones = RolloutQuery(experiment="sums-try", status=("queued", "running"))
    assert [] == read(folder, lambda store: store.rollouts(open_ones))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Add {{ question }} and {{ hint }}", ""),
        ("Add it", "it lacks the placeholders {{ question }}"),
        ("{{ question", "its line 1 is not a jinja template"),
    ],
)
def test_placeholders_of_a_jinja_template_must_stay(text: str, message: str) -> None:
    present = PromptTemplate(template="Add: {{ question }}", engine="jinja")
    if message:
        with pytest.raises(ConfigError, match=re.escape(message)):
            with_text(present, text)
        return
    made = with_text(present, text)
    assert PromptTemplate(template=text, engine="jinja") == made
    assert ["{{ hint }}"] == unknown_placeholders(made, present, keys=["question"])


@pytest.mark.parametrize(("value", "text"), [("Add.", "Add carefully."), ([1], "[2, 3]"), (1, "2.5"), (None, "null")])
def test_value_is_edited_as_text_or_json(value: Json, text: str) -> None:
    made = with_text(JsonResource(value=value), text)
    assert text == text_of(made).replace("\n  ", " ").replace("[ ", "[").replace("\n]", "]")


def test_broken_braces_can_be_mended() -> None:
    broken = PromptTemplate(template="Add: {question")
    assert PromptTemplate(template="Add: {question}") == with_text(broken, "Add: {question}")


def task(number: int, old: float | None, new: float | None) -> TriedTask:
    def rollouts(reward: float | None) -> list[TriedRollout]:
        return [TriedRollout(rollout_id="r", status="succeeded", reward=reward, tokens=0, seconds=0.0)]

    return TriedTask(number=number, task={}, rollouts={"A": rollouts(old), "B": rollouts(new)})


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([(0.0, 1.0)] * 9 + [(1.0, 1.0)], "better, evidence 44 to 1: difference +0.9000 "),
        ([(1.0, 0.0)] * 9 + [(1.0, 1.0)], "worse, evidence 44 to 1: difference -0.9000 "),
        ([(0.0, 1.0)] * 5, "cannot be told apart, evidence 5.8 to 1 for the new version, 40 to 1 needed: "),
        ([(0.0, None)], "cannot be compared: no task has rewards of both"),
    ],
)
def test_pair_says_in_words_whether_it_is_better(
    rewards: Sequence[tuple[float | None, float | None]], words: str
) -> None:
    tasks = [task(number, old, new) for number, (old, new) in enumerate(rewards)]
    assert compare_pair(tasks, "B", "A").words.startswith(f"B against A: {words}")
