"""``agl metrics`` and ``agl metrics --plot`` on a real SQLite store."""

import asyncio
import json
import re
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agl.contracts import ExperimentRecord, Metric
from agl.schemas import PromptTemplate, ResourceVersion
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore

LOGGED = [
    *(("grpo", step, "reward", step / 40) for step in range(1, 41)),
    *(("grpo", step, "loss", -0.5) for step in range(1, 41)),
    ("grpo", 41, "reward", float("nan")),
    ("validate", 0, "reward", 0.0),
    ("validate", 10, "reward", 0.75),
    ("validate", 40, "reward", 1.0),
]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of a store with two experiments, of which one has metrics."""
    url = f"sqlite:///{tmp_path}/runs.db"

    async def fill() -> None:
        made = SQLiteStore(url)
        for name in ("calc", "other"):
            await made.save_state({}, experiment=ExperimentRecord(name=name))
        await made.log_metrics(
            [Metric(experiment="calc", algorithm=a, step=s, name=n, value=v) for a, s, n, v in LOGGED]
        )
        await made.close()

    asyncio.run(fill())
    return url


def agl(*words: str, columns: int = 60) -> Result:
    return CliRunner().invoke(cli, words, env={"COLUMNS": str(columns)})


def test_metrics_are_a_table_for_each_algorithm(store: str) -> None:
    result = agl("metrics", "--store", store, "--last", "2")
    expected = (
        "grpo\nstep  loss  reward\n40    -0.5  1\n41          nan\n\nvalidate\nstep  reward\n10    0.75\n40    1\n"
    )
    assert expected == result.stdout


def test_metrics_are_chosen_by_algorithm_and_name(store: str) -> None:
    result = agl("metrics", "calc", "--store", store, "--algorithm", "grpo", "--name", "re*", "--last", "1", "--json")
    assert [("grpo", 41, "reward")] == [(m["algorithm"], m["step"], m["name"]) for m in json.loads(result.stdout)]


def test_curve_fits_the_terminal_and_keeps_distances_of_steps(store: str) -> None:
    lines = agl("metrics", "--plot", "--store", store, "--algorithm", "validate").stdout.splitlines()
    assert ["reward over step", "● validate: 1 at step 40"] == [lines[0], lines[-1]]
    assert max(map(len, lines)) <= 60
    top, bottom = (next(line for line in lines if line.startswith(label)).partition("┤")[2] for label in ("1 ", "0 "))
    assert (len(top) - 1, 0) == (top.index("●"), bottom.index("●")), (
        "the last step is at the end, the first at the start"
    )
    assert ["0", "40"] == lines[-2].split()


def test_long_curve_is_drawn_by_means_and_a_single_step_is_drawn_too(store: str) -> None:
    rising = agl("metrics", "--plot", "--store", store, "--algorithm", "grpo", columns=30).stdout.splitlines()
    assert all(len(line) <= 30 for line in rising)
    assert "● grpo: 1 at step 40" == rising[-1]  # a value that is not a number is left out
    flat = agl("metrics", "--plot", "--store", store, "--name", "loss").stdout
    assert "loss over step" in flat
    assert "● grpo: -0.5 at step 40" in flat


@pytest.mark.long
def test_picture_shows_every_curve(store: str, tmp_path: Path) -> None:
    result = agl("metrics", "--plot", "--store", store, "--name", "*", "--output", str(tmp_path / "curves.png"))
    assert f"3 curves in {tmp_path / 'curves.png'}\n" == result.stdout
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    unknown = agl("metrics", "--plot", "--store", store, "--output", str(tmp_path / "curves.doc"))
    assert "cannot write" in unknown.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["other"], "experiment 'other' has no metrics; choose from: calc"),
        (["--algorithm", "ppo"], "no algorithm 'ppo' logged metrics of 'calc'; choose from: grpo, validate"),
        (["--name", "rewards"], "'calc' has no metric 'rewards'; did you mean 'reward'?"),
    ],
)
def test_absent_metric_is_answered_with_those_that_exist(store: str, words: list[str], expected: str) -> None:
    for command in (("metrics",), ("metrics", "--plot")):
        result = agl(*command, "--store", store, *words)
        assert (1, f"Error: {expected}\n") == (result.exit_code, result.output)


def test_mistyped_mode_is_answered_with_the_mode_that_was_meant(store: str) -> None:
    result = CliRunner().invoke(cli, ["metrics", "--plto"])
    assert (2, True) == (result.exit_code, "Did you mean '--plot'?" in result.stderr)


def test_store_without_metrics_says_what_comes_first(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/empty.db"
    asyncio.run(SQLiteStore(url).close())
    result = agl("metrics", "--store", url)
    assert (
        "Error: no experiment of this store has metrics; run an experiment with an algorithm first\n" == result.output
    )


SEARCHED = [(1, 32, 0.25, 0.125, 0.5), (2, 60, 0.25, 0.125, 0.5), (3, 96, 0.75, 0.5, 1.0)]
"""Step, spent rollouts, score, and the ends of its interval."""


@pytest.fixture
def searched(tmp_path: Path) -> str:
    """The URL of a store with the metrics of a prompt search that published at its third step."""
    url = f"sqlite:///{tmp_path}/runs.db"
    names = ("spent_rollouts", "score", "score_low", "score_high")
    rows = [(step, name, value) for step, *values in SEARCHED for name, value in zip(names, values, strict=True)]

    async def fill() -> None:
        made = SQLiteStore(url)
        text = PromptTemplate(template="Go.")
        common = {"name": "prompt", "resource": text, "algorithm": "apo"}
        await made.save_state({}, experiment=ExperimentRecord(name="e"))
        await made.log_metrics([Metric(experiment="e", algorithm="apo", step=s, name=n, value=v) for s, n, v in rows])
        await made.publish(
            [
                ResourceVersion(version="e-1-apo-3", step=3, **common),
                ResourceVersion(version="e-1-apo-2-aa", step=2, metadata={"candidate": True}, **common),
                ResourceVersion(version="other-1-apo-1", step=1, **common),
            ]
        )
        await made.close()

    asyncio.run(fill())
    return url


def test_score_of_a_search_is_drawn_over_its_rollouts_with_interval_and_published_versions(searched: str) -> None:
    lines = agl(
        "metrics", "--plot", "--store", searched, "--name", "score", "--over", "spent_rollouts"
    ).stdout.splitlines()
    assert "score over spent_rollouts" == lines[0]
    assert ["32", "96"] == lines[16].split()
    assert ["● apo: 0.75 [0.5, 1] at spent_rollouts 96", "▲ spent_rollouts 96: prompt@e-1-apo-3"] == lines[17:]
    chart = [line.partition("┤")[2] for line in lines[1:15]]
    last = [row[-1] for row in chart if len(row) == max(map(len, chart))]
    assert ["░", "●", "░"] == [mark for mark, _ in groupby(last)], "the interval is shaded above and below the value"
    assert lines[15].index("▲") == len(lines[1]) - 1, "the version is marked at the last value"
    assert max(map(len, lines)) <= 60


def test_picture_of_a_search_holds_interval_and_published_versions(searched: str, tmp_path: Path) -> None:
    words = ("metrics", "--plot", "--store", searched, "--name", "score", "--over", "spent_rollouts", "--output")
    assert f"1 curve in {tmp_path / 'c.svg'}\n" == agl(*words, str(tmp_path / "c.svg")).stdout
    assert agl(*words, str(tmp_path / "c.png")).exit_code == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    drawing = (tmp_path / "c.svg").read_text()
    assert "prompt@e-1-apo-3" in drawing
    assert "e-1-apo-2-aa" not in drawing
    assert "FillBetweenPolyCollection" in drawing or "PolyCollection" in drawing


def test_labels_of_many_versions_have_room_and_the_newest_has_one(store: str, tmp_path: Path) -> None:
    async def publish() -> None:
        made = SQLiteStore(store)
        common = {"name": "a-policy-with-a-long-name", "resource": PromptTemplate(template="Go."), "algorithm": "grpo"}
        await made.publish([ResourceVersion(version=f"calc-1-grpo-{s}", step=s, **common) for s in range(1, 41)])
        await made.close()

    asyncio.run(publish())
    assert 0 == agl("metrics", "--plot", "--store", store, "--output", str(tmp_path / "c.svg")).exit_code
    found = re.findall(
        r"<!-- \S+@calc-1-grpo-(\d+) -->\s+<g style=.+?translate\(([\d.]+)", (tmp_path / "c.svg").read_text()
    )
    steps, points = [int(step) for step, _ in found], sorted(float(x) for _, x in found)
    assert 40 == max(steps)
    assert 8 == len(steps)
    assert min(right - left for left, right in pairwise(points)) > 4 * 6, "four times the size of the letters"


def test_label_that_is_higher_than_the_picture_keeps_its_end(store: str, tmp_path: Path) -> None:
    async def publish() -> None:
        made = SQLiteStore(store)
        common = {"resource": PromptTemplate(template="Go."), "algorithm": "grpo"}
        await made.publish([ResourceVersion(name="long" * 30, version="calc-1-grpo-7", step=7, **common)])
        await made.close()

    asyncio.run(publish())
    assert 0 == agl("metrics", "--plot", "--store", store, "--output", str(tmp_path / "c.svg")).exit_code
    assert re.search(r"<!-- …\w*long@calc-1-grpo-7 -->", (tmp_path / "c.svg").read_text())


def test_axis_that_no_step_has_is_answered_with_the_metrics_that_exist(searched: str) -> None:
    result = agl("metrics", "--plot", "--store", searched, "--name", "score", "--over", "rollouts")
    expected = "there is no metric 'rollouts' at the steps of score; did you mean 'spent_rollouts'?"
    assert (1, f"Error: {expected}\n") == (result.exit_code, result.output)
    result = agl("metrics", "--plot", "--store", searched, "--name", "score", "--over", "money")
    assert "choose from: score, score_high, score_low, spent_rollouts" in result.output


def test_steps_are_shown_as_the_run_printed_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    logged = [
        ("validate", 0, 0, {"reward": 0.125}),
        ("grpo", 1, 1, {"loss": -0.5, "reward": 0.25, "silent_share": 0.5, "kl": 0.01}),
        ("apo", 1, 2, {"best_val_score": 0.5}),
        ("grpo", 2, 3, {"reward": 0.5, "silent_share": 1.0, "updates_skipped": 1.0}),
        ("validate", 3, 3, {"reward": 0.75}),
    ]

    async def fill() -> None:
        made = SQLiteStore(url)
        await made.save_state({}, experiment=ExperimentRecord(name="calc", run=2))
        prompt = PromptTemplate(template="x")
        await made.publish(
            [ResourceVersion(name="p", version="calc-2-grpo-1", resource=prompt, algorithm="grpo")],
        )
        of_run = {"experiment": "calc", "run": 2}
        await made.log_metrics(
            [
                Metric(algorithm=name, step=step, experiment_step=place, name=key, value=value, **of_run)
                for name, step, place, metrics in reversed(logged)
                for key, value in metrics.items()
            ]
        )
        await made.log_metrics([Metric(experiment="calc", algorithm="grpo", step=1, name="reward", value=0.0)])
        await made.close()

    asyncio.run(fill())
    lines = [
        "validate step 0: reward 0.125",
        "grpo step 1: reward 0.250, loss -0.500, 50% silent, kl 0.01",
        "apo step 1: best_val_score 0.500",
        "grpo step 2: reward 0.500, 100% silent, trained nothing",
        "validate step 3: reward 0.750",
    ]
    assert lines == agl("show", "--steps", "--store", url).stdout.splitlines()
    assert lines == agl("show", "calc", "--steps", "--run", "2", "--store", url).stdout.splitlines()
    every = agl("show", "--steps", "--run", "all", "--store", url).stdout.splitlines()
    assert ["run 1 grpo step 1: reward 0.000", *(f"run 2 {line}" for line in lines)] == every
    read = json.loads(agl("show", "--steps", "--json", "--store", url).stdout)
    assert lines == [step["line"] for step in read]
    assert {"kl": 0.01, "loss": -0.5, "reward": 0.25, "silent_share": 0.5} == read[1]["metrics"]


@pytest.mark.parametrize("option", [("--attempt", "1"), ("--full",), ("--agent", "solver")])
def test_option_of_a_rollout_is_refused_with_steps(store: str, option: tuple[str, ...]) -> None:
    result = agl("show", "calc", "--steps", *option, "--store", store)
    assert (2, True) == (result.exit_code, f"{option[0]} is for a rollout; leave it out, or --steps" in result.stderr)


def test_steps_of_what_has_none_are_refused_with_what_there_is(store: str) -> None:
    assert "did you mean 'calc'" in agl("show", "cal", "--steps", "--store", store).stderr
    assert "--run goes with --steps" in agl("show", "latest", "--run", "1", "--store", store).stderr
    assert "give the id of a rollout" in agl("show", "--store", store).stderr
