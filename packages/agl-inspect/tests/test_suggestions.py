"""For each problem of a run, its rule makes a finding and no other rule does; a healthy run has no finding."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from agl.contracts import ExperimentRecord, Metric
from agl_inspect.advice.suggestions import suggestions_of
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore

STEPS = 12
Values = Callable[[int], float]


def wobble(step: int) -> float:
    """Return noise between -1 and 1 that depends only on the step."""
    return math.sin(7.0 * step)


HEALTHY: dict[str, Values] = {
    "reward": lambda step: 0.2 + 0.04 * step + 0.01 * wobble(step),
    "silent_share": lambda step: 0.25 + 0.05 * wobble(step),
    "dropped_share": lambda _: 0.01,
    "evaluator_failed_share": lambda _: 0.005,
    "slots": lambda _: 16.0,
    "slots_idle_share": lambda step: 0.2 + 0.1 * wobble(step),
    "truncated_share": lambda _: 0.02,
    "clipped_low": lambda _: 0.01,
    "clipped_high": lambda _: 0.02,
    "effective_share": lambda _: 0.97,
    "kl": lambda step: 0.002 * step,
    "entropy": lambda step: 1.5 * 0.98**step,
    "tokens": lambda step: 4000 + 40 * step,
    "rollouts": lambda _: 64,
    "rows": lambda _: 70,
    "grad_norm": lambda step: 1.0 + 0.3 * wobble(step),
    "collect_s": lambda _: 6.0,
    "update_s": lambda _: 4.0,
}
FLAT: dict[str, Values] = {"reward": lambda step: 0.2 + 0.01 * wobble(step)}

SKIPPED: dict[str, Values] = {"updates_skipped": lambda _: 1.0, "grad_norm": lambda _: 0.0}

SITUATIONS: dict[str, dict[str, Values]] = {
    "gold-gap": {
        "gold_reward": lambda _: 0.3,
        "gold_gap": lambda step: 0.05 * step,
        "gold_evidence": lambda step: 50.0 if step == 8 else 0.1,
    },
    "silent-groups": {"silent_share": lambda _: 0.8},
    "skipped-updates": {**SKIPPED, "rejected_share": lambda _: 1.0},
    "dropped-rollouts": {"dropped_share": lambda _: 0.3, "dropped_failed": lambda _: 19.0},
    "evaluator-errors": {"dropped_share": lambda _: 0.3, "evaluator_failed_share": lambda _: 0.29},
    "cut-answers": {"truncated_share": lambda step: 0.05 * step},
    "narrowed-sampling": {"calls_sampling_kept": lambda _: 32.0},
    "clipped-updates": {"clipped_low": lambda _: 0.15, "clipped_high": lambda _: 0.2},
    "stale-rollouts": {"effective_share": lambda _: 0.3},
    "distance-grows": {**FLAT, "kl": lambda step: 0.01 * 1.6**step},
    "entropy-lost": {**FLAT, "entropy": lambda step: 2.0 * 0.6**step},
    "answers-grow": {**FLAT, "tokens": lambda step: 4000 * 1.2**step},
    "gradient-leaps": {"grad_norm": lambda step: 30.0 if step == STEPS else 1.0},
    "critic-blind": {"explained_variance": lambda _: -0.4},
    "no-pairs": {"pairs": lambda _: 0.0},
    "nothing-to-imitate": {"imitated": lambda _: 0.0},
    "one-kind": {"good": lambda _: 0.0, "bad": lambda _: 64.0},
    "split-rows": {"rows": lambda _: 640.0},
    "slow-rollouts": {"collect_s": lambda _: 90.0},
    "slow-updates": {"update_s": lambda _: 90.0},
    "workers-idle": {"collect_s": lambda _: 90.0, "slots_idle_share": lambda _: 0.7},
}


def logged(
    changes: dict[str, Values], *, steps: int = STEPS, algorithm: str = "grpo", validations: Sequence[float] = ()
) -> list[Metric]:
    found = [
        Metric(experiment="e", algorithm=algorithm, step=step, name=name, value=value(step))
        for step in range(1, steps + 1)
        for name, value in {**HEALTHY, **changes}.items()
    ]
    return found + [
        Metric(experiment="e", algorithm="validate", step=3 * place, name="reward", value=value)
        for place, value in enumerate(validations)
    ]


@pytest.mark.parametrize("rule", SITUATIONS)
def test_situation_is_found_and_no_other(rule: str) -> None:
    (found,) = suggestions_of(logged(SITUATIONS[rule]))
    assert (rule, "grpo", STEPS) == (found.rule, found.algorithm, found.step)
    assert any(letter.isdigit() for letter in found.evidence) or rule in ("no-pairs", "nothing-to-imitate", "one-kind")


@pytest.mark.parametrize(
    ("metric", "setting"), [("rejected_share", "rollout_rs_threshold"), ("tis_masked", "rollout_is_threshold")]
)
def test_run_that_trains_nothing_is_told_why_and_not_to_raise_the_lr(metric: str, setting: str) -> None:
    (known,) = suggestions_of(logged({**FLAT, **SKIPPED, metric: lambda _: 0.9}, steps=30))
    assert "skipped-updates" == known.rule
    name = setting.removesuffix("_threshold")
    assert f"5 of the last 5 steps trained nothing, and {name} left 90% of the tokens out of the loss" == known.evidence
    assert f"give {setting} wider bounds" in known.change
    (unknown,) = suggestions_of(logged({**FLAT, **SKIPPED, metric: lambda _: 0.1}, steps=30))
    assert "agl why latest says at each call why it did not train" == unknown.change


def test_skipped_updates_are_no_finding_where_others_of_the_step_trained_or_another_rule_says_why() -> None:
    some: dict[str, Values] = {"updates_skipped": lambda _: 1.0}
    assert [] == suggestions_of(logged(some))
    assert ["no-progress"] == [one.rule for one in suggestions_of(logged({**FLAT, **some}, steps=30))]
    for rule in ("silent-groups", "no-pairs", "nothing-to-imitate", "one-kind"):
        assert [rule] == [one.rule for one in suggestions_of(logged({**SKIPPED, **SITUATIONS[rule]}))]
    last: dict[str, Values] = {name: lambda step: float(step == 30) for name in ("updates_skipped", "rejected_share")}
    assert [] == suggestions_of(logged({**FLAT, **last, "grad_norm": lambda step: float(step < 30)}, steps=30))


def test_idle_slots_are_explained_by_the_rollouts_of_a_step() -> None:
    idle = {**SITUATIONS["workers-idle"], "slots": lambda _: 96.0}
    (few,) = suggestions_of(logged(idle))
    assert "70% of the runner's 96 slots had no rollout in the 90.0 s" in few.evidence
    assert few.evidence.endswith("which are 64")
    assert few.change.startswith("concurrency = 64 in [runner] is as fast")
    (long,) = suggestions_of(logged(SITUATIONS["workers-idle"]))
    assert "timeout_s in [runner]" in long.change
    assert "concurrency = 10 in [runner] is enough" in long.change


def test_slow_rollouts_that_already_run_at_once_are_not_explained_by_the_concurrency() -> None:
    (found,) = suggestions_of(logged({**SITUATIONS["slow-rollouts"], "slots": lambda _: 64.0}))
    assert "slow-rollouts" == found.rule
    assert found.change.startswith("all rollouts of a step run at once already")
    assert "concurrency" not in found.change


def test_idle_slots_do_not_matter_where_collecting_takes_little_of_a_step() -> None:
    assert [] == suggestions_of(logged({"collect_s": lambda _: 1.5, "slots_idle_share": lambda _: 0.7}))


def test_rollouts_that_their_agents_failed_are_told_beside_those_that_a_reward_failed() -> None:
    both = {"dropped_share": lambda _: 0.5, "evaluator_failed_share": lambda _: 0.2}
    assert ["dropped-rollouts", "evaluator-errors"] == [one.rule for one in suggestions_of(logged(both))]


def test_learning_by_heart_is_found() -> None:
    found = suggestions_of(logged({}, validations=(0.2, 0.4, 0.5, 0.41, 0.4)))
    assert ["overfitting"] == [one.rule for one in found]
    assert "fell from 0.5 to 0.41 and 0.4" in found[0].evidence


@pytest.mark.parametrize("validations", [(0.0,) * 5, (-1.0,) * 5, (-3.0, -2.0, -1.5, -1.0), (-5.0, 0.0, -0.1, 0.0)])
def test_validations_that_did_not_fall_are_no_learning_by_heart(validations: Sequence[float]) -> None:
    assert [] == suggestions_of(logged({}, validations=validations))


def test_learning_by_heart_is_found_where_rewards_are_penalties() -> None:
    found = suggestions_of(logged({}, validations=(-9.0, -3.0, -1.0, -4.0, -5.0)))
    assert ["overfitting"] == [one.rule for one in found]
    assert "fell from -1 to -4 and -5" in found[0].evidence


def test_reward_that_stays_where_it_is_is_found_unless_another_rule_says_why() -> None:
    assert ["no-progress"] == [one.rule for one in suggestions_of(logged(FLAT, steps=30))]
    lost = {**FLAT, **SITUATIONS["entropy-lost"]}
    assert ["entropy-lost"] == [one.rule for one in suggestions_of(logged(lost, steps=30))]
    assert [] == suggestions_of(logged(FLAT, steps=10))


def test_a_third_of_silent_groups_is_a_finding_where_the_reward_stands_still() -> None:
    silent: dict[str, Values] = {"silent_share": lambda _: 0.35}
    (found,) = suggestions_of(logged({**silent, "reward": lambda step: 0.15 + 0.03 * wobble(step)}, steps=15))
    assert "silent-groups" == found.rule
    assert "35% of the rollouts taught nothing" in found.evidence
    assert "; in the last 8 steps the reward changed by " in found.evidence
    assert [] == suggestions_of(logged({**silent, "reward": lambda step: 0.9 + 0.03 * wobble(step)}, steps=15))


def test_advice_leaves_out_what_the_run_has_and_says_over_which_steps_it_speaks() -> None:
    settings = {"sft.use": '"sft"', "grpo.reward.r.parts.exact.weight": "0.9", "grpo.sampling.refill": "3"}
    silent, plain = (suggestions_of(logged(SITUATIONS["silent-groups"]), each)[0] for each in (settings, None))
    for words in ("warm start", "part of the way", "sampling.refill"):
        assert (False, True) == (words in silent.change, words in plain.change)
    assert "if some tasks teach: sampling.curriculum" in silent.change
    (cut,) = suggestions_of(logged(SITUATIONS["cut-answers"]), {"grpo.sampling.mask_truncated": "true"})
    assert "raise the agent's max_tokens" == cut.change
    assert (8, 12) == (cut.first, cut.step)


@pytest.mark.parametrize("rise", [0.02, 0.04])
@pytest.mark.parametrize("steps", [12, 20, 30])
def test_noisy_rise_is_no_standstill(rise: float, steps: int) -> None:
    rising: dict[str, Values] = {"reward": lambda step: 0.1 + rise * step + 0.08 * wobble(step)}
    assert [] == suggestions_of(logged(rising, steps=steps))


@pytest.mark.parametrize("steps", [1, 3, 12, 60])
def test_healthy_run_is_left_alone(steps: int) -> None:
    assert [] == suggestions_of(logged({}, steps=steps, validations=(0.2, 0.3, 0.4, 0.39, 0.5)))


@pytest.mark.parametrize("rule", [rule for rule in SITUATIONS if rule != "gradient-leaps"])
def test_two_steps_are_not_enough(rule: str) -> None:
    assert [] == suggestions_of(logged(SITUATIONS[rule], steps=2))


@pytest.mark.parametrize(
    ("metrics", "rule", "evidence"),
    [
        ({"unusable_answers": 3.0, "spent_calls": 8.0}, "unreadable-answers", "3 of 8 answers"),
        ({"texts_unsent": 1.0}, "unsent-text", "in no model call"),
    ],
)
def test_search_that_cannot_work_is_found_after_one_step(metrics: dict[str, float], rule: str, evidence: str) -> None:
    logged_once = [Metric(experiment="e", algorithm="apo", step=1, name=n, value=v) for n, v in metrics.items()]
    (found,) = suggestions_of(logged_once)
    assert (rule, True) == (found.rule, evidence in found.evidence)


def test_each_algorithm_is_looked_at_by_itself_and_unknown_numbers_do_no_harm() -> None:
    both = logged(SITUATIONS["silent-groups"]) + logged(SITUATIONS["split-rows"], algorithm="ppo")
    odd = [Metric(experiment="e", algorithm="search", step=step, name="best", value=math.nan) for step in range(1, 9)]
    found = suggestions_of(both + odd)
    assert [("grpo", "silent-groups"), ("ppo", "split-rows")] == [(one.algorithm, one.rule) for one in found]
    assert [] == suggestions_of([])


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of a store with two runs, the second of which has a fault."""
    url = f"sqlite:///{tmp_path}/runs.db"

    async def fill() -> None:
        made = SQLiteStore(url)
        await made.save_state({}, experiment=ExperimentRecord(name="e", run=2))
        await made.log_metrics(logged({}))
        await made.log_metrics([replace(metric, run=2) for metric in logged(SITUATIONS["clipped-updates"])])
        await made.close()

    asyncio.run(fill())
    return url


def agl(*words: str) -> Result:
    return CliRunner().invoke(cli, ["metrics", "--suggest", *words])


def test_command_names_evidence_and_setting_of_the_newest_run(store: str) -> None:
    lines = agl("--store", store).stdout.splitlines()
    assert "e, run 2, grpo, up to step 12: the clip removed the gradient of 35% of the tokens" == lines[0]
    assert lines[1].startswith("  the policy moves too far within a step: fewer epochs")
    assert lines[1].endswith("[clipped-updates]")
    assert 2 == len(lines)


def test_command_says_so_where_nothing_stands_out(store: str) -> None:
    assert (
        "e, run 1: nothing stands out in 12 steps and validations\n" == agl("e", "--run", "1", "--store", store).stdout
    )


def test_command_names_the_failed_rollouts_of_a_run_that_failed_at_its_start(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'runs.db'}"

    async def fill() -> None:
        made = SQLiteStore(url)
        await made.save_state({}, experiment=ExperimentRecord(name="e"))
        validation = {"experiment": "e", "algorithm": "validate", "step": 0}
        await made.log_metrics(
            [Metric(**validation, name="reward", value=0.0), Metric(**validation, name="failed", value=8.0)]
        )
        await made.close()

    asyncio.run(fill())
    said = "8 rollouts of the newest validation failed; list them with: agl runs --experiment e --status failed"
    assert [f"e, run 1: {said} --store {tmp_path / 'runs.db'}"] == agl("--store", url).stdout.splitlines()
    assert [8] == [run["failed"] for run in json.loads(agl("--json", "--store", url).stdout)]


def test_command_writes_all_runs_as_json(store: str) -> None:
    runs = json.loads(agl("--run", "all", "--json", "--store", store).stdout)
    assert [(1, []), (2, ["clipped-updates"])] == [
        (each["run"], [one["rule"] for one in each["suggestions"]]) for each in runs
    ]


def test_command_names_the_experiments_there_are(store: str) -> None:
    result = agl("f", "--store", store)
    assert 1 == result.exit_code
    assert "experiment 'f' has no metrics; choose from: e" in result.stderr
