"""Steps that teach nothing are told, once for each time that they fall silent."""

from agl.contracts import StepReport
from agl_run.experiment.drive import _line
from agl_run.experiment.silence import SilenceWatch


def told(*shares: float | None, reward: float = 0.0) -> list[str]:
    said: list[str] = []
    watch = SilenceWatch(said.append)
    for step, share in enumerate(shares, start=1):
        metrics = {} if share is None else {"silent_share": share, "reward": reward}
        watch.add(StepReport(step=step, metrics=metrics))
    return said


def test_three_silent_steps_in_a_row_are_told_once_with_what_to_change() -> None:
    (text,) = told(1.0, 0.95, 0.9, 1.0, 1.0, reward=0.02)
    assert text.startswith("95% of the rollouts of the last 3 steps taught nothing")
    assert "(0.020 on average)" in text
    assert "warm the policy up" in text
    assert "harder ones" in text
    assert "\n" not in text


def test_step_with_a_gradient_begins_the_count_again() -> None:
    assert [] == told(1.0, 1.0, 0.5, 1.0, 1.0)
    assert 2 == len(told(1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0))


def test_algorithms_that_do_not_report_silence_are_not_watched() -> None:
    assert [] == told(None, None, None, None)


def test_line_of_a_step_shows_what_tells_why_it_learns() -> None:
    metrics = {"reward": 0.5, "silent_share": 0.25, "effective_share": 0.98, "entropy": 1.25, "logprob_gap": 1e-6}
    shown = "reward 0.500, 25% silent, 98% effective, entropy 1.25, logprob_gap 1e-06"
    for clipped, ending in (
        ({}, ""),
        ({"clipped_low": 0.0}, ""),
        ({"clipped_low": 0.1, "clipped_high": 0.2}, ", 30% clipped"),
    ):
        report = StepReport(step=2, metrics=metrics | clipped, published=("llm@v2",))
        assert f"grpo step 2 of 3: {shown}{ending}" == _line("grpo", report, total=3, left="")


def test_line_of_a_step_counts_the_groups_that_were_replaced() -> None:
    metrics = {"reward": 0.5, "groups_dropped": 3.0, "rollouts_extra": 12.0}
    line = _line("grpo", StepReport(step=1, metrics=metrics, published=("llm@v1",)), total=3, left="")
    assert "grpo step 1 of 3: reward 0.500, 3 silent groups dropped, 12 extra rollouts" == line
    none = {"reward": 0.5, "groups_dropped": 0.0, "rollouts_extra": 0.0}
    assert "reward 0.500" == _line("grpo", StepReport(step=1, metrics=none), total=3, left="").split(": ")[1]


def test_line_of_a_step_without_an_update_says_so() -> None:
    report = StepReport(step=1, metrics={"reward": 0.0, "updates_skipped": 1.0})
    assert "grpo step 1 of 3: reward 0.000, trained nothing" == _line("grpo", report, total=3, left="")


def test_line_of_a_step_of_which_one_update_was_skipped_does_not() -> None:
    report = StepReport(step=1, metrics={"updates_skipped": 1.0}, published=("llm@v2",))
    assert "grpo step 1 of 3: done" == _line("grpo", report, total=3, left="")
