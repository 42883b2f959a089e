"""Results in terminals and notebooks."""

import re

import agl
from agl_run import DevResult, FitResult, Quiet

FIT = FitResult(
    experiment="sums<1>",
    before=0.25,
    after=0.5,
    best=0.75,
    best_step=6,
    steps={"grpo": 12},
    resources={"small": "7"},
    workdir="runs/sums",
    seconds=9.6,
)


def test_result_of_an_experiment_is_readable():
    expected = """\
FitResult of 'sums<1>'
validation reward  0.250 before; 0.500 after; 0.750 best, after step 6
steps              grpo 12
resources          small 7
folder             runs/sums
seconds            10"""
    assert expected == repr(FIT)


def test_result_without_validation_says_so():
    assert "validation reward  none\nsteps              none" in repr(FitResult(experiment="plain"))


def test_result_of_an_experiment_is_a_table_in_a_notebook():
    html = FIT._repr_html_()  # the name that notebooks ask for
    cells = re.findall(r"<(th|td)[^>]*>(.*?)</\1>", html)
    assert "<caption>FitResult of &#x27;sums&lt;1&gt;&#x27;</caption>" in html
    assert [("th", "steps"), ("td", "grpo 12")] == cells[2:4]


def solve(task):
    return float(task)


def test_result_of_a_trial_has_a_row_for_each_rollout():
    result = agl.Trainer(store="memory://", name="trial", progress=Quiet()).dev(solve, [0, 1], tasks=2)
    title, head, *rows = repr(result).splitlines()
    assert ("DevResult with 2 rollouts", ["rollout", "status", "reward", "calls", "rows"]) == (title, head.split())
    expected = [[e.rollout.rollout_id, "succeeded", f"{e.reward:g}", "0", "0"] for e in result.episodes]
    assert expected == [row.split() for row in rows]
    assert 5 == result._repr_html_().count("<th")
    assert 10 == result._repr_html_().count("<td")


def test_long_trial_is_cut_with_the_number_of_the_rest():
    result = agl.Trainer(store="memory://", name="long", progress=Quiet()).dev(solve, [1] * 22, tasks=22)
    assert "and 2 more" == repr(result).splitlines()[-1]
    assert 23 == len(repr(DevResult(episodes=result.episodes)).splitlines())
