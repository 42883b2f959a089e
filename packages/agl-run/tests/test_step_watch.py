"""Steps that teach nothing are reported, once for each reason."""

import asyncio

from agl.contracts import StepReport
from agl_inspect.advice.suggestions import Suggestion
from agl_inspect.records.metrics import step_line
from agl_run.watch.observers import StepWatch


def told(*shares: float | None, reward: float = 0.0, **others: float) -> list[str]:
    said: list[str] = []
    watch = StepWatch(lambda algorithm, found: note(said, found))
    for step, share in enumerate(shares, start=1):
        metrics = {} if share is None else {"silent_share": share, "reward": reward}
        asyncio.run(watch.step(StepReport(step=step, metrics={**metrics, **others}), algorithm="grpo"))
    return said


async def note(said: list[str], found: Suggestion) -> None:
    said.append(f"{found.evidence}. To change that: {found.change}")


def test_three_silent_steps_are_reported_once_with_what_to_change() -> None:
    (text,) = told(1.0, 0.95, 0.9, 1.0, 1.0, 0.2, 0.2, 0.2, 0.2, 0.2, 1.0, 1.0, 1.0, 1.0, reward=0.02)
    assert text.startswith("95% of the rollouts taught nothing")
    assert "the mean reward is 0.02" in text
    assert "a warm start with sft or rft" in text
    assert "\n" not in text


def test_each_rule_is_reported_by_itself_and_the_time_of_a_step_is_not() -> None:
    assert 2 == len(told(1.0, 1.0, 1.0, 1.0, truncated_share=0.5, collect_s=90.0, update_s=1.0))


def test_steps_with_a_gradient_are_not_told() -> None:
    assert [] == told(1.0, 1.0)
    assert [] == told(0.5, 0.5, 0.5, 0.5, 0.5)


def test_algorithms_that_report_nothing_are_not_told() -> None:
    assert [] == told(None, None, None, None)


def test_long_run_is_watched_in_little_memory() -> None:
    watch = StepWatch(lambda algorithm, found: note([], found))
    for step in range(1, 1001):
        asyncio.run(watch.step(StepReport(step=step, metrics={"reward": 0.001 * step}), algorithm="grpo"))
    assert 60 == len(watch._steps["grpo"])


def line(metrics: dict[str, float], *, has_published: bool = True) -> str:
    return step_line("grpo", 2, metrics=metrics, has_published=has_published, total=3)


def test_line_of_a_step_shows_what_tells_why_it_learns() -> None:
    metrics = {"reward": 0.5, "silent_share": 0.25, "effective_share": 0.98, "entropy": 1.25, "logprob_gap": 1e-6}
    shown = "reward 0.500, 25% silent, 98% effective, entropy 1.25, logprob_gap 1e-06"
    for clipped, ending in (
        ({}, ""),
        ({"clipped_low": 0.0}, ""),
        ({"clipped_low": 0.1, "clipped_high": 0.2}, ", 30% clipped"),
        ({"clipped": 0.25}, ", 25% clipped"),
        ({"staleness": 1.25}, ", staleness 1.25"),
    ):
        assert f"grpo step 2 of 3: {shown}{ending}" == line(metrics | clipped)


def test_line_of_a_step_counts_the_groups_that_were_replaced() -> None:
    counts = {"reward": 0.5, "groups_dropped": 3.0, "rollouts_extra": 12.0}
    assert "grpo step 2 of 3: reward 0.500, 3 silent groups dropped, 12 extra rollouts" == line(counts)
    none = {"reward": 0.5, "groups_dropped": 0.0, "rollouts_extra": 0.0}
    assert "grpo step 2 of 3: reward 0.500" == line(none)


def test_line_of_a_step_without_an_update_says_so() -> None:
    skipped = {"reward": 0.0, "updates_skipped": 1.0}
    assert "grpo step 2 of 3: reward 0.000, trained nothing" == line(skipped, has_published=False)


def test_line_of_a_step_whose_gradients_were_not_finite_says_that_it_trained_nothing() -> None:
    assert "grpo step 2 of 3: trained nothing" == line({"updates_nonfinite": 1.0}, has_published=False)
    assert "grpo step 2 of 3: done" == line({"updates_nonfinite": 1.0})


def test_line_of_a_step_does_not_follow_the_order_in_which_its_numbers_come() -> None:
    metrics = {"kl_loss": 0.1, "pg_loss": 0.2, "loss": 0.3, "reward_std": 0.4, "vf_loss": 0.5, "reward": 0.6}
    shown = "reward 0.600, reward_std 0.400, loss 0.300, kl_loss 0.100"
    for some in (metrics, dict(sorted(metrics.items())), dict(reversed(metrics.items()))):
        assert f"grpo step 2 of 3: {shown}" == line(some)


def test_line_of_a_step_of_which_one_update_was_skipped_does_not() -> None:
    assert "grpo step 2 of 3: done" == line({"updates_skipped": 1.0})


def test_line_of_a_step_ends_with_what_else_there_is_to_say() -> None:
    ended = step_line("grpo", 4, metrics={}, has_published=True, ending=("it is solved", "", "3 min left"))
    assert "grpo step 4: done; it is solved; 3 min left" == ended
