"""``agl replay --score`` on real SQLite stores, with functions of the user's own and emitters of plugins."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agl import Reward, Rollout, Span, semconv
from agl.contracts import RolloutQuery, Store
from agl.errors import RewardError
from agl.schemas import ErrorInfo, Outcome
from agl.tracing import make_reward_span
from agl_inspect.terminal.program import cli
from agl_replay.reward_change import agreement
from agl_run.runners.result import describe_error
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.waiting import wait_until

JUDGE = """
import asyncio

from agl import Reward, semconv

def said(spans):
    return next(span.attributes[semconv.OUTPUT] for span in spans if semconv.OUTPUT in span.attributes)

def length(rollout, spans, *, most=3):
    return min(1.0, len(said(spans)) / most)

def above(rollout, spans):
    return -float(len(said(spans)))

def seen(rollout, spans):
    return Reward(value=None, dimensions={span.reward.name: 1.0 for span in spans if span.reward is not None})

async def later(rollout, spans):
    await asyncio.sleep(0)
    return Reward(value=float(said(spans) == rollout.task["answer"]), feedback="[bold]\\x1b[31mno")

def raises(rollout, spans):
    if said(spans) == "aa":
        raise KeyError("anser")
    return 1.0

def state(rollout, spans):
    return Reward(value=rollout.finished_at, name=rollout.status)

def infinite(rollout, spans):
    return float("inf")

def parts(rollout, spans):
    return [Reward(value=1.0, name="form"), Reward(value=float(len(said(spans))), name="size")]

async def forever(rollout, spans):
    if rollout.task["answer"] == "stop":
        await asyncio.Event().wait()
    return 1.0

async def judged_together(rollout, spans):
    together.append(rollout.rollout_id)
    most.append(len(together))
    await asyncio.sleep(0.05)
    together.remove(rollout.rollout_id)
    return float(max(most))

together, most = [], []

class Ranks:
    def __init__(self, *, fails_on=""):
        self._fails_on = fails_on

    def __call__(self, rollout, spans):
        return None

    async def compare(self, group):
        assert all(span.reward is None or span.reward.source == "agent" for one in group for span in one.spans)
        sizes = [len(said(one.spans)) for one in group]
        if self._fails_on in [said(one.spans) for one in group]:
            raise ValueError("no order")
        return [sum(own > other for other in sizes) for own in sizes]

def signed(rollout, spans):
    number = int(rollout.rollout_id[-5])
    return Reward(value=2.0 * (-1) ** number, name="big", dimensions={"": 1.0, "[bold]\x1b": None})
"""

EXPERIMENT = """
[experiment]
agent = "missing:agent"
name = "spell"
store = "sqlite:///runs/spell.db"
train = "missing.jsonl"
hidden = ["answer"]

[[reward]]
use = "measure:length"
"""

Recorded = Sequence[tuple[str, str, float]]
"""Rollouts, each as group, the agent's answer, and the recorded reward."""


async def record(
    store: Store,
    found: Recorded,
    *,
    status: str = "succeeded",
    experiment: str = "spell",
    error: ErrorInfo | None = None,
) -> None:
    for number, (group, said, value) in enumerate(found):
        made = Rollout(
            rollout_id=f"spell-1-grpo-train-00001-{number:05d}-000",
            task={"word": group, "answer": "top-secret"},
            experiment=experiment,
            group_id=group,
            hidden=("answer",),
            metadata={"algorithm": "grpo", "step": 1},
        )
        await store.enqueue([made])
        (claim,) = await store.claim(worker="w", experiment=experiment)
        ids = (made.rollout_id, claim.attempt.attempt_id)
        spans = (
            Span(
                rollout_id=ids[0],
                attempt_id=ids[1],
                span_id="a" * 16,
                name="rollout",
                attributes={semconv.OUTPUT: said},
            ),
            make_reward_span(*ids, Reward(value=value, name="measure:length", source="evaluator", feedback="old")),
            make_reward_span(*ids, Reward(value=0.5, name="own", source="agent")),
        )
        await store.finish([Outcome(attempt_id=ids[1], status=status, spans=spans, error=error)])  # pyright: ignore[reportArgumentType]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that records rollouts in ``runs/spell.db``, next to ``experiment.toml`` and ``measure.py``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    monkeypatch.delitem(sys.modules, "measure", raising=False)
    (tmp_path / "measure.py").write_text(JUDGE)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    (tmp_path / "runs").mkdir()

    def use(found: Recorded, **options: Any) -> None:
        async def main() -> None:
            store = SQLiteStore("sqlite:///runs/spell.db")
            await record(store, found, **options)
            await store.close()

        asyncio.run(main())

    return use


GROUPS = (("x", "a", 0.0), ("x", "aaa", 1.0), ("y", "aa", 0.5), ("y", "aaa", 0.5))


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli, ["replay", "--score", "experiment.toml", *args], catch_exceptions=False)


def data_of(*args: str) -> Any:
    result = invoke(*args, "--json")
    assert result.output.startswith("{"), result.output
    return json.loads(result.output)


def test_rollouts_are_scored_again_the_newest_first(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)
    result = invoke()
    assert 0 == result.exit_code, result.output
    lines = result.output.splitlines()
    assert "spell-1-grpo-train-00001-00003-000: 0.5 -> 1 (+0.5)" == lines[0]
    assert "  was    'measure:length' 0.5 by evaluator; feedback: old" == lines[1]
    assert "  now    'measure:length' 1 by evaluator" == lines[2]
    assert "  kept   'own' 0.5 by agent" == lines[3]
    assert "scored 4 rollouts" in lines
    assert "mean over 2 tasks: 0.5 recorded, 0.75 now (+0.25)" in lines
    assert "top-secret" not in result.output + invoke("--json").output


def test_summary_compares_order_and_spread_within_groups(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)
    groups = data_of()["change"]["groups"]
    expected = {"groups": 2, "rollouts": 4, "silent_before": 1, "silent_after": 0, "reordered": 1, "turned": 2}
    assert expected == groups
    groups = data_of("--set", "reward.use=measure:above")["change"]["groups"]
    assert {**expected, "reordered": 2, "turned": 4} == groups
    assert "silent groups, which teach nothing: 50% recorded, 0% now" in invoke("--summary").output


def test_rewards_that_compare_rollouts_see_each_group(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)
    found = data_of("--set", "reward.use=measure:Ranks")
    assert [1.0, 0.0, 1.0, 0.0] == [one["after"] for one in found["rollouts"]]
    failed = data_of("--set", "reward.use=measure:Ranks", "--set", "reward.params.fails_on=aa")
    assert [None, None, 1.0, 0.0] == [one["after"] for one in failed["rollouts"]]
    assert {"the reward 'measure:Ranks' failed on a group: no order": 2} == failed["change"]["errors"]


async def add_late(reward: Reward) -> None:
    """Add the reward to every rollout."""
    store = SQLiteStore("sqlite:///runs/spell.db")
    rollouts = await store.rollouts(RolloutQuery())
    await store.append_spans([make_reward_span(one.rollout_id, one.attempt_id or "", reward) for one in rollouts])
    await store.close()


def test_agreement_with_people_is_shown_for_recorded_and_new_rewards(recorded: Callable[..., None]) -> None:
    recorded([("x", "aaa", 0.0), ("x", "aa", 0.0), ("y", "a", 1.0), ("y", "", 0.0)])
    assert "agreement" not in invoke("--summary").output
    for number, rating in enumerate(["up", "up", "down", "down"]):
        rated = [
            "runs",
            "rate",
            f"spell-1-grpo-train-00001-{number:05d}-000",
            rating,
            "--store",
            "sqlite:///runs/spell.db",
        ]
        assert 0 == CliRunner().invoke(cli, rated, catch_exceptions=False).exit_code
    asyncio.run(add_late(Reward(value=4.0, name="minutes", source="human")))  # no rating, because it has a name
    lines = invoke("--summary").output.splitlines()
    words = "agreement with people on 4 rated rollouts: kappa"
    assert any(line.startswith(f"recorded: {words} -0.50 (") for line in lines), lines
    (now,) = [line for line in lines if line.startswith(f"now: {words} 1.00 (")]
    assert now.endswith("; 0 called good that people do not, 0 missed")


@pytest.mark.parametrize(
    ("cells", "n"),
    [
        ((0.4, 0.1, 0.1, 0.4), 30),
        pytest.param((0.7, 0.05, 0.1, 0.15), 60, marks=pytest.mark.long),
        pytest.param((0.3, 0.2, 0.2, 0.3), 20, marks=pytest.mark.long),
        pytest.param((0.48, 0.02, 0.02, 0.48), 40, marks=pytest.mark.long),
    ],
)
def test_interval_of_kappa_contains_the_truth(cells: Sequence[float], n: int) -> None:
    both, reward, rating, neither = cells
    chance = (both + reward) * (both + rating) + (rating + neither) * (reward + neither)
    truth = (both + neither - chance) / (1 - chance)
    rng = random.Random(1)
    kinds = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0))
    found = [agreement(rng.choices(kinds, cells, k=n)) for _ in range(200)]
    assert 0.9 * 200 <= sum(one is not None and one.low <= truth <= one.high for one in found)
    assert 0.9 > fmean(one.high - one.low for one in found if one is not None)


def test_parts_have_mean_spread_and_shares_at_their_ends(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)
    (part,) = data_of()["change"]["parts"]
    now = part["after"]
    assert [4, 0, 1 / 3, 0.25, 1.0, 0.5] == [
        now[key] for key in ("n", "missing", "least", "at_least", "greatest", "at_greatest")
    ]
    assert pytest.approx(0.75) == now["mean"]
    assert pytest.approx(0.2764, abs=1e-4) == now["spread"]
    assert 0.5 == part["before"]["mean"]


def test_rule_sees_the_agents_rewards_and_no_evaluators(recorded: Callable[..., None]) -> None:
    recorded(GROUPS[:1])
    (one,) = data_of("--set", "reward.use=measure:seen")["rollouts"]
    assert {"own": 1.0} == one["rewards"][0]["dimensions"]


def test_rule_sees_the_rollout_as_a_worker_has_it_and_no_late_spans(recorded: Callable[..., None]) -> None:
    recorded(GROUPS[:1])
    asyncio.run(add_late(Reward(value=0.9, name="person", source="human")))
    (one,) = data_of("--set", "reward.use=measure:state")["rollouts"]
    assert ("running", 0.0) == (one["rewards"][0]["name"], one["rewards"][0].get("value"))
    assert ["own", "person"] == [reward["name"] for reward in one["kept"]]
    (one,) = data_of("--set", "reward.use=measure:seen")["rollouts"]
    assert ["own"] == list(one["rewards"][0]["dimensions"])


def test_emitter_that_raises_is_counted_and_the_others_go_on(recorded: Callable[..., None]) -> None:
    recorded([*GROUPS, ("z", "aa", 0.0)])
    result = invoke("--set", 'reward=[{use="measure:raises"}, {use="measure:length"}]')
    assert 1 == result.exit_code
    assert "error in 2 rollouts: the reward 'measure:raises' raised KeyError: 'anser' at measure.py:" in result.output
    assert "00002-000: 0.5 -> none" in result.output
    assert "  now    'measure:length' 0.666667 by evaluator" in result.output
    assert "5 of them lost their reward, and 0 got their first" in result.output
    several = "several rewards were recorded (measure:length, measure:raises); declare a key or weights for them"
    assert 3 == result.output.count(f"  none because {several}")


def test_rollouts_that_a_reward_failed_are_scored_and_those_that_their_agent_failed_are_not(
    recorded: Callable[..., None],
) -> None:
    recorded(GROUPS[:2], status="failed", error=describe_error(RewardError("the reward 'measure:length' raised")))
    (second, first) = data_of("--status", "failed")["rollouts"]
    assert [(None, 1.0), (None, 1 / 3)] == [(one["before"], one["after"]) for one in (second, first)]


def test_rollouts_that_failed_are_not_scored(recorded: Callable[..., None]) -> None:
    recorded(GROUPS[:1], status="failed", error=describe_error(ValueError("no answer")))
    assert "not scored, failed: only successful attempts are judged" in invoke("--status", "failed").output


def test_number_that_is_not_finite_is_an_error_as_in_a_run(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)
    result = invoke("--set", "reward.use=measure:infinite")
    assert "error in 4 rollouts: the reward 'measure:infinite' returned inf; return a finite number" in result.output


def test_async_reward_is_awaited_and_its_feedback_cannot_reach_the_terminal(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)
    output = invoke("--set", "reward.use=measure:later").output
    assert "now    0 by evaluator; feedback: [bold]\\x1b[31mno" in output
    assert "\x1b" not in output


@pytest.mark.parametrize(("concurrency", "most"), [("1", 1.0), ("3", 3.0)])
def test_rollouts_are_judged_at_once_up_to_a_limit(
    recorded: Callable[..., None], concurrency: str, most: float
) -> None:
    recorded([("x", "a", 0.0)] * 8)
    found = data_of("--set", "reward.use=measure:judged_together", "--concurrency", concurrency)["rollouts"]
    assert most == max(one["after"] for one in found)


def test_recorded_rewards_count_by_the_file_and_new_ones_by_its_overrides(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)
    Path("experiment.toml").write_text(EXPERIMENT.replace("measure:length", "measure:parts"))
    found = data_of("--set", "experiment.reward_weights={form=1.0, size=0.5}")["rollouts"]
    assert [(0.5, 2.5), (0.5, 2.0), (1.0, 2.5), (0.0, 1.5)] == [(one["before"], one["after"]) for one in found]


def test_composite_of_a_plugin_shows_its_parts_with_their_weights(recorded: Callable[..., None]) -> None:
    pytest.importorskip("agl_rewards")
    recorded(GROUPS)
    Path("experiment.toml").write_text(
        EXPERIMENT.replace('use = "measure:length"', 'use = "composite"')
        + '[reward.params.parts]\nlong = { use = "measure:length", weight = 0.5 }\n'
        'plain = { use = "format", weight = 0.25, params = { source = "output", pattern = "a+" } }\n'
    )
    result = invoke()
    assert 0 == result.exit_code, result.output
    assert "0.75 (plain.pattern 1, long 1 weighing 0.5, plain 1 weighing 0.25) by evaluator" in result.output


def test_values_and_nameless_parts_are_summed_up(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)
    result = invoke("--set", "reward.use=measure:signed")
    assert 0 == result.exit_code, result.output
    (value, part) = (one for one in data_of("--set", "reward.use=measure:signed")["change"]["parts"] if one["after"])
    assert ("", -2.0, 2.0) == (value["part"], value["after"]["least"], value["after"]["greatest"])
    assert ("(no name)", 1.0) == (part["part"], part["after"]["mean"])


def test_judge_may_ask_a_policy_that_is_an_endpoint(recorded: Callable[..., None]) -> None:
    pytest.importorskip("agl_rewards")
    recorded(GROUPS)
    with ScriptedModelServer(default=Reply(text="Score: 8")) as server:
        policy = f'[policy.far]\nuse = "openai"\nmodel = "m"\nbase_url = "{server.base_url}"\napi_key_env = ""\n'
        Path("experiment.toml").write_text(policy + EXPERIMENT)
        judge = 'reward=[{use="judge", params={model="far", source="output"}}]'
        assert [0.8] * 4 == [one["after"] for one in data_of("--set", judge)["rollouts"]]
    assert 4 == len(server.calls)


def test_named_rollouts_are_scored_whatever_the_limit(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)
    first = "spell-1-grpo-train-00001-00000"
    found = data_of(first, "latest", first, "--limit", "1")["rollouts"]
    assert [f"{first}-000", "spell-1-grpo-train-00001-00003-000"] == [one["rollout_id"] for one in found]
    assert 2 == len(data_of("--limit", "2")["rollouts"])


def test_rollout_that_failed_is_not_scored(recorded: Callable[..., None]) -> None:
    recorded(GROUPS[:1], status="failed")
    result = invoke("latest")
    assert "not scored, failed: only successful attempts are judged" in result.output
    assert "scored 0 rollouts, skipped 1" in result.output


def test_nothing_is_written(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)

    async def everything() -> Any:
        store = SQLiteStore("sqlite:///runs/spell.db")
        found = await store.cursor(), await store.recordings(RolloutQuery(), spans="all")
        await store.close()
        return found

    before = asyncio.run(everything())
    assert 0 == invoke().exit_code
    assert before == asyncio.run(everything())


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--experiment", "spel"), "no rollout of an experiment 'spel' is recorded"),
        (("--mode", "val"), "no rollout of 'spell' with the status succeeded in mode val is recorded; agl runs lists"),
        (("latest", "--mode", "val"), "name rollouts, or select them with --experiment, --status and --mode, not both"),
        (("--set", "reward=[]"), "the experiment has no [[reward]] to score with"),
        (("--set", "reward.use=measure:missing"), "measure.py has no 'missing'"),
        (("--set", "experiment.store=memory://"), "which ended with its process; name another store with --store"),
        (("--set", "experiment.store=sqlite:///runs/no.db"), "there is no store"),
        (("ro-nothing",), "ro-nothing"),
    ],
)
def test_mistake_is_answered_with_what_to_do(
    recorded: Callable[..., None], args: tuple[str, ...], expected: str
) -> None:
    recorded(GROUPS)
    result = invoke(*args)
    assert result.exit_code in (1, 2)
    assert expected in result.output


def test_reward_that_needs_a_policy_which_must_be_started_says_so(recorded: Callable[..., None]) -> None:
    pytest.importorskip("agl_rewards")
    recorded(GROUPS)
    policies = '[policy.small]\nuse = "torch"\nmodel = "none"\n[policy.far]\nuse = "openai"\nmodel = "m"\n'
    Path("experiment.toml").write_text(policies + EXPERIMENT)
    assert 0 == invoke("--summary").exit_code
    judge = ("--set", 'reward=[{use="judge", params={model="small"}}]')
    assert "scoring again starts nothing" in invoke(*judge).output


def test_experiment_that_was_only_tried_is_answered_with_the_name_of_the_trial(recorded: Callable[..., None]) -> None:
    recorded(GROUPS[:1], experiment="spell-dev")
    assert "only those of agl dev; to score them, pass --experiment spell-dev" in invoke().output
    assert 0 == invoke("--experiment", "spell-dev").exit_code


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_interrupt_prints_what_was_scored_until_then(recorded: Callable[..., None]) -> None:
    recorded(GROUPS)
    code = JUDGE.replace('rollout.task["answer"] == "stop"', 'rollout.rollout_id.endswith("00001-000")')
    Path("measure.py").write_text(code)
    command = [
        sys.executable,
        "-m",
        "agl",
        "replay",
        "--score",
        "experiment.toml",
        "--set",
        "reward.use=measure:forever",
    ]
    with (
        Path("said").open("w") as said,
        subprocess.Popen([*command, "--concurrency", "1"], stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        wait_until(lambda: "00002-000: 0.5 -> 1" in Path("said").read_text(), within_s=60)
        process.send_signal(signal.SIGINT)
        assert 130 == process.wait(60)
    output = Path("said").read_text()
    assert "scored 2 rollouts" in output
    assert "stopped; scored so far:" in output
    assert "Traceback" not in output
