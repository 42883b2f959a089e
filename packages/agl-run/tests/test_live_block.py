"""The block in a terminal shows the progress of a run in little space."""

from math import inf

import pytest

from agl.acceptance import mean_interval
from agl.contracts import StepReport
from agl.schemas import Episode, Rollout
from agl_run.display.run_view import AlgorithmView, RunView, Tally
from agl_run.display.terminal_block import draw


def episodes(*rewards: float | None, group: str) -> list[Episode]:
    return [
        Episode(rollout=Rollout(rollout_id=f"{group}-{place}", task={}, group_id=group), attempt=None, reward=reward)
        for place, reward in enumerate(rewards)
    ]


def running(name: str, *, steps: int = 3) -> AlgorithmView:
    view = AlgorithmView(name=name, total=40, has_begun=True)
    for step in range(1, steps + 1):
        view.collected([*episodes(0.0, 1.0, group="a"), *episodes(1.0, 1.0, None, group="b")])
        view.stepped(StepReport(step=step, metrics={"reward": 0.1 * step}))
        view.left = "about 5 min left"
    return view


def lines(view: RunView, *, width: int = 100, height: int = 20) -> list[str]:
    return [line.plain for line in draw(view, width=width, height=height)]


def test_interval_of_a_reward_is_over_groups_and_the_mean_is_the_reported_one() -> None:
    view = running("grpo", steps=1)
    assert (0.1, mean_interval([0.5, 1.0])) == (view.reward, view.ends)


def test_reward_of_an_algorithm_that_reports_none_is_that_of_its_rollouts() -> None:
    view = AlgorithmView(name="apo")
    view.collected(episodes(0.0, 1.0, None, group="a"))
    view.stepped(StepReport(step=1))
    view.stepped(StepReport(step=2))
    assert (0.5, inf, [0.5]) == (view.reward, view.ends[1], list(view.rewards))


def test_rollouts_are_counted_by_status_and_a_second_try_is_queued_again() -> None:
    tally = Tally(clock=lambda: 5.0)
    tally.ask(["a", "b", "c"])
    for rollout_id, status in [("a", "running"), ("b", "running"), ("b", "queued"), ("x", "failed"), ("c", "failed")]:
        tally.note(rollout_id, status)
    assert (3, 1, 1, 1, 1) == (tally.asked, tally.done, tally.running, tally.queued, tally.failed)
    tally.note("c", "failed")
    assert 1 == tally.failed
    tally.drop(["a", "b", "c"])
    assert (1, 1, 0, 0) == (tally.asked, tally.done, tally.running, tally.queued)


def test_rate_is_that_of_the_last_half_minute() -> None:
    now = 100.0
    tally = Tally(clock=lambda: now)
    tally.ask([str(number) for number in range(30)])
    for number in range(20):
        tally.note(str(number), "succeeded")
    now = 110.0
    assert 2.0 == tally.per_second()
    now = 200.0
    assert 0.0 == tally.per_second()


def test_hostile_names_are_shown_and_never_obeyed() -> None:
    view = RunView(algorithms={"x": running("[bold]\x1b[2J\n漢字漢字漢字漢字")}, tallies={"\x07[red]": Tally()})
    view.tallies["\x07[red]"].ask(["a"])
    text = "\n".join(lines(view))
    assert r"[bold]\x1b[2J" in text
    assert r"\x07[red]" in text
    assert [] == [character for character in "\x1b\x07" if character in text]


@pytest.mark.parametrize("width", [0, 1, 7, 12, 20, 39, 40, 59, 60, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    names = ["grpo", "漢字漢字漢字漢字漢字漢字", "a" * 80]
    view = RunView(algorithms={name: running(name) for name in names}, validation=(4, 1e9), best=(2, -1e300))
    view.tally("grpo").ask(["a"] * 10_000)
    drawn = draw(view, width=width, height=50)
    assert 7 == len(drawn)
    assert [] == [line for line in drawn if line.cell_len > width]


def test_algorithms_that_wait_or_are_finished_make_room_for_the_one_that_runs() -> None:
    others = {f"other-{number}": AlgorithmView(name=f"other-{number}") for number in range(10)}
    view = RunView(algorithms={**others, "grpo": running("grpo")})
    assert 12 == len(lines(view))
    assert ["grpo", ""] == [line.split(" ")[0] for line in lines(view, height=8)]
    assert 1 == len(lines(view, height=1))
    assert [] == lines(view, height=0)


def test_long_run_has_a_curve_of_its_whole_way() -> None:
    (head, _) = lines(RunView(algorithms={"grpo": running("grpo", steps=400)}))
    curve = head.split("  ")[-1]
    assert (32, "▁", "█") == (len(curve), curve[0], curve[-1])
    assert sorted(curve) == list(curve)
