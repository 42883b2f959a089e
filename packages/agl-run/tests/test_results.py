"""The display of results in terminals and notebooks."""

import re
import subprocess
import sys

import msgspec

import agl
from agl_run import DevResult, FitResult, Quiet

FIT = FitResult(
    experiment="sums<1>",
    before=0.25,
    after=0.5,
    last=0.5,
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


def test_result_says_which_versions_are_live_if_not_the_last():
    result = msgspec.structs.replace(FIT, after=0.75, kept_step=6)
    said = "0.250 before; 0.750 after; 0.500 after the last step; the versions after step 6 are live"
    assert f"validation reward  {said}" in repr(result)


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


def fail(task):
    raise ValueError(["no answer", "no question\nat all"][task])


def test_result_of_a_trial_has_the_error_of_each_failed_rollout():
    result = agl.Trainer(store="memory://", name="failing", progress=Quiet()).dev(fail, [0, 1], tasks=2)
    first, second = (episode.rollout.rollout_id for episode in result.episodes)
    assert {first: "ValueError: no answer", second: "ValueError: no question"} == result.errors
    _, head, *rows = repr(result).splitlines()
    assert head.endswith("rows  error")
    assert [True, True] == [
        row.endswith(f"failed  none    0      0     {error}")
        for row, error in zip(rows, result.errors.values(), strict=True)
    ]
    assert '<td style="text-align: left">ValueError: no question</td>' in result._repr_html_()


def test_script_whose_trial_fails_prints_the_reason(tmp_path):
    script = """
import agl
def fail(task):
    raise ValueError("no answer")
agl.Trainer(store="memory://", name="failing").dev(fail, [0, 1, 2])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (0, "") == (done.returncode, done.stdout)
    assert "none of 3 rollouts succeeded: ValueError: no answer (3).\n" == done.stderr


def test_result_of_an_experiment_names_the_errors_of_rollouts(tmp_path, caplog):
    def sometimes(task):
        return 1.0 / task

    trainer = agl.Trainer(store="memory://", name="sometimes", progress=Quiet(), folder=tmp_path)
    result = trainer.fit(sometimes, [0, 1, 2])
    assert (1, "ZeroDivisionError: float division by zero (1)") == (result.failed, result.errors)
    assert repr(result).endswith("failed             1 rollout: ZeroDivisionError: float division by zero (1)")
    assert "rollouts" not in repr(msgspec.structs.replace(result, failed=0))
