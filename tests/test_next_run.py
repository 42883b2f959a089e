"""Several runs of one agent: their parameters ranked by a model, noise called noise, and the next run started."""

import asyncio
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from agl.contracts import ExperimentRecord
from agl.errors import ConfigError
from agl_inspect.advice.past_runs import History, Kind, PastRun
from agl_inspect.advice.ranking import Fit, fit, read_fits
from agl_inspect.records.state import AlgorithmState
from agl_inspect.records.validations import Validation
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore
from agl_testing.plugins import PluginFolder

LR, LOSS, SIZE = "algorithm.dial.params.lr", "algorithm.dial.params.loss", "algorithm.dial.params.size"

KIND = Kind(agent="agent:solve", train="t", val="v", rewards={}, algorithms={"dial": "dial"})


def past(number: int, mean: float, **values: object) -> PastRun:
    names = {"lr": LR, "loss": LOSS, "size": SIZE}
    return PastRun(
        experiment=f"e{number:02}",
        run=1,
        turn=3,
        mean=mean,
        low=mean - 0.1,
        high=mean + 0.1,
        tasks=20,
        values={names[name]: json.dumps(value) for name, value in values.items()},
    )


def history(count: int, reward: Callable[[float, str], float], *, seed: int = 0) -> History:
    """Runs with a rate over four powers of ten, one of three losses, and a size that only some of them set."""
    draw = random.Random(seed)
    runs: list[PastRun] = []
    for number in range(count):
        rate, loss = float(f"{10 ** draw.uniform(-5, -1):.3g}"), draw.choice(["plain", "clipped", "soft"])
        size = {"size": draw.choice([4, 8, 16])} if draw.random() < 0.6 else {}
        mean = reward(rate, loss) + draw.gauss(0, 0.02)
        runs.append(past(number, mean, lr=rate, loss=loss, **size))
    return History(kind=KIND, runs=tuple(runs))


def peak(rate: float, _loss: str) -> float:
    """Best at a rate of 0.001."""
    return 0.9 - 0.2 * abs(math.log10(rate) + 3)


def clear(found: Fit) -> list[str]:
    return [each.name for each in found.parameters if each.is_clear]


def test_parameter_that_matters_is_found_with_its_uncertainty_and_the_next_run_is_near_its_best() -> None:
    runs = history(16, peak)
    found = fit(runs)
    assert [LR] == clear(found)
    assert [LR, LOSS, SIZE] == sorted((each.name for each in found.parameters), key=[LR, LOSS, SIZE].index)
    best = found.parameters[0]
    assert LR == best.name
    assert best.importance > 0.6
    assert 0 <= best.low < best.importance <= best.high <= 1
    assert best.chance < 0.01
    assert found.best is not None
    assert max(run.mean for run in runs.runs) == found.best.mean
    proposed = found.next[LR]
    assert proposed is not None
    assert 1e-4 < float(proposed) < 1e-2
    assert found.next[LOSS] in ('"plain"', '"clipped"', '"soft"')
    assert found.next[SIZE] is None or 4 <= int(found.next[SIZE]) <= 16
    assert runs.runs == tuple(found.runs), "every number names its source"


def test_choice_that_matters_is_found() -> None:
    found = fit(history(14, lambda _rate, loss: 0.8 if loss == "soft" else 0.3))
    assert [LOSS] == clear(found)
    assert '"soft"' == found.next[LOSS]


def test_parameter_whose_setting_at_all_matters_is_found_among_gaps() -> None:
    runs = [
        past(n, 0.2 + 0.5 * (n % 2) + 0.01 * (n % 5), **({"lr": 0.001 * (n + 1)} if n % 2 else {})) for n in range(12)
    ]
    found = fit(History(kind=KIND, runs=tuple(runs)))
    assert found == fit(History(kind=KIND, runs=tuple(runs))), "the same runs give the same answer"
    assert [LR] == clear(found)
    assert found.next[LR] is not None
    assert "0.002 to 0.012, or not set" == found.parameters[0].tried


def test_noise_is_called_noise() -> None:
    alarms = 0
    for seed in range(3):
        found = fit(history(9, lambda _rate, _loss: 0.5, seed=seed))
        assert found.parameters
        is_told = any("no parameter stands out from chance" in note for note in found.notes)
        assert is_told == (not clear(found))
        alarms += not is_told
    assert alarms <= 1


@pytest.mark.parametrize("count", [0, 1, 7])
def test_fewer_than_eight_runs_are_not_fitted_and_need_no_model(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    found = fit(history(count, peak))
    assert (8 - count, [], {}) == (found.missing, found.parameters, found.next)
    assert (found.best is None) == (count == 0)


def test_missing_library_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'agl-inspect\[suggest\]'"):
        fit(history(8, peak))


def test_runs_that_cannot_be_ranked_say_why() -> None:
    same = [past(number, 0.1 * number, lr=0.1) for number in range(8)]
    assert ["the runs differ in no parameter, so there is nothing to rank: change one with --set"] == fit(
        History(kind=KIND, runs=tuple(same))
    ).notes
    equal = [past(number, 0.5, lr=0.1 * number) for number in range(8)]
    assert ["all runs reached the same reward, so there is nothing to rank"] == fit(
        History(kind=KIND, runs=tuple(equal))
    ).notes


def test_best_value_at_the_edge_and_values_that_are_not_kept_are_told() -> None:
    runs = [past(number, 0.1 * number, lr=0.001 * 2**number) for number in range(10)]
    hidden = [
        msgspec.structs.replace(run, values={**run.values, LOSS: f"sha256:{number % 2}f00"})
        for number, run in enumerate(runs)
    ]
    found = fit(History(kind=KIND, runs=tuple(hidden)))
    assert [LR] == list(found.next)
    edge, kept = found.notes
    assert f"the best run has the largest {LR} that was tried" in edge
    assert f"{LOSS}: only digests of the values are stored, so no value is proposed" == kept


def test_combinations_that_were_all_tried_are_not_proposed_again() -> None:
    runs = [past(n, 0.1 * (n % 2) + 0.01 * n, loss="plain" if n % 2 else "soft", lr=n % 2 == 0) for n in range(8)]
    found = fit(History(kind=KIND, runs=tuple(runs)))
    assert {(run.values[LOSS], run.values[LR]) for run in found.runs} == {('"plain"', "false"), ('"soft"', "true")}
    assert (found.next[LOSS], found.next[LR]) not in {('"plain"', "false"), ('"soft"', "true")}
    both = [past(n, 0.1 * n, loss="plain" if n % 2 else "soft") for n in range(8)]
    done = fit(History(kind=KIND, runs=tuple(both)))
    assert ({}, "every combination of the values was tried, so no next run is proposed") == (done.next, done.notes[-1])


PLUGIN = '''
import agl
from agl.contracts import StepReport
from agl.schemas import PromptTemplate
from agl_testing.toys import ToyAlgorithm


class Dial(ToyAlgorithm):
    """Writes its rate into the prompt, in one step."""

    def __init__(self, *, lr, loss="plain"):
        self._lr, self._step = lr, 0

    async def step(self):
        self._step += 1
        prompt = PromptTemplate(template=f"{self._lr} {{question}}")
        await self._context.publish("prompt", prompt, step=self._step)
        return StepReport(step=self._step, is_finished=True, metrics={"reward": 0.9})


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="dial", factory=Dial, tunes=("prompt_template",), needs_token_ids=False)
'''

AGENT = """
def solve(task, prompt):
    return 0.9
"""

EXPERIMENT = """
[experiment]
name = "dialled"
agent = "dial_agent:solve"
store = "sqlite:///runs.db"
train = "train.jsonl"
val = "val.jsonl"

[resource.prompt]
template = "0 {question}"

[[algorithm]]
use = "dial"
tunes = "prompt"

[algorithm.params]
lr = 0.001
"""


@pytest.fixture
def folder(tmp_path: Path, agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An experiment that ran once."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("AGL_STORE", raising=False)
    agl_plugins.install(PLUGIN, name="dial")
    (tmp_path / "dial_agent.py").write_text(AGENT)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    for name in ("train", "val"):
        lines = [json.dumps({"question": f"{name} {number}"}) for number in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    first = agl("run", "experiment.toml", "--quiet")
    assert 0 == first.exit_code, first.output
    yield tmp_path
    sys.modules.pop("dial_agent", None)


def agl(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def suggest(*words: str) -> Result:
    return agl("metrics", "--suggest", *words, "--store", "runs.db")


def ranked(*words: str) -> Result:
    return agl("metrics", "--rank", *words, "--store", "runs.db")


def start(*words: str) -> Result:
    return agl("run", "experiment.toml", "--next", *words)


def repeat(folder: Path, count: int) -> None:
    """Copy the run under other names, with other rates and rewards."""

    async def copy() -> None:
        store = SQLiteStore(f"sqlite:///{folder}/runs.db")
        states = await store.load_state("experiment/dialled/1/")
        draw = random.Random(count)
        for number in range(count):
            name, rate = f"copy-{number:02}", float(f"{10 ** draw.uniform(-5, -1):.3g}")
            copied: dict[str, bytes] = {}
            for key, data in states.items():
                place = key.replace("/dialled/", f"/{name}/")
                if "/algorithm/" in key:
                    state = msgspec.json.decode(data, type=AlgorithmState)
                    settings = {**state.settings, "lr": json.dumps(rate)}
                    copied[place] = msgspec.json.encode(msgspec.structs.replace(state, settings=settings))
                elif "/validation/" in key and not key.endswith("/best"):
                    one = msgspec.json.decode(data, type=Validation)
                    rewards = tuple(peak(rate, "") + 0.01 * place for place in range(3))
                    copied[place] = msgspec.json.encode(msgspec.structs.replace(one, rewards=rewards))
            record = ExperimentRecord(name=name, status="finished", agent="dial_agent:solve", turn=1)
            await store.save_state(copied, experiment=record)
        await store.close()

    asyncio.run(copy())


def test_command_says_how_many_runs_are_missing_and_ranks_from_eight_on(folder: Path) -> None:
    few = ranked("dialled")
    assert 0 == few.exit_code, few.output
    assert few.stdout.startswith("1 comparable run (dialled): same agent (dial_agent:solve), tasks, validation")
    assert "a model needs 8 runs to rank parameters: 7 more comparable runs first" in few.stdout
    repeat(folder, 4)
    assert "dialled: 5 runs compare with it; 3 more, and agl metrics --rank" in suggest("dialled").stdout
    repeat(folder, 12)
    assert "dialled: 13 runs compare with it: agl metrics dialled --rank" in suggest("dialled").stdout
    text = ranked("dialled").stdout
    assert "13 comparable runs (copy-00, copy-01" in text
    assert LR in text
    assert "next, as Optuna's TPE proposes from these runs: --set algorithm.dial.params.lr=" in text
    found = json.loads(ranked("copy-03", "--json").stdout)
    assert 13 == len(found["runs"])
    assert [(LR, True)] == [(each["name"], each["is_clear"]) for each in found["parameters"]]


def test_start_runs_the_proposal_under_a_name_of_its_own_and_it_counts_next_time(folder: Path) -> None:
    refused = start()
    assert 1 == refused.exit_code
    assert "no next run can be proposed: a model needs 8 runs" in refused.stderr
    repeat(folder, 9)
    started = start()
    assert 0 == started.exit_code, started.output
    assert (
        "starting: agl run experiment.toml --set experiment.name=dialled-next-1 --set algorithm.dial" in started.stderr
    )
    assert "finished dialled-next-1" in started.stdout
    found = json.loads(ranked("dialled", "--json").stdout)
    assert "dialled-next-1" in [run["experiment"] for run in found["runs"]]
    [(proposed)] = [run["values"][LR] for run in found["runs"] if run["experiment"] == "dialled-next-1"]
    assert proposed in started.stdout
    again = start("--json")
    assert "dialled-next-2" == json.loads(again.stdout)["experiment"]


def test_fit_is_kept_with_its_runs_for_the_console(folder: Path) -> None:
    repeat(folder, 9)
    ranked("dialled")
    ranked("copy-00")

    async def read() -> None:
        store = SQLiteStore(f"sqlite:///{folder}/runs.db")
        [kept] = await read_fits(store, await store.experiments())
        assert 10 == len(kept.fit.runs)
        await store.close()

    asyncio.run(read())


def test_runs_of_other_tasks_or_rewards_do_not_count(folder: Path) -> None:
    repeat(folder, 8)
    (folder / "val.jsonl").write_text('{"question": "another"}\n')
    refused = start()
    assert 1 == refused.exit_code
    assert "no next run can be proposed: a model needs 8 runs" in " ".join(refused.stderr.split())
    assert 0 == agl("run", "experiment.toml", "--quiet", "--set", "experiment.name=other").exit_code
    assert "1 comparable run (other)" in ranked("other").stdout
    assert "9 comparable runs" in ranked("dialled").stdout


def test_what_cannot_be_asked_for_is_refused_in_a_sentence(folder: Path) -> None:
    assert "did you mean 'dialled'" in ranked("diall").stderr
    assert "No such option '--run'" in ranked("dialled", "--run", "1").stderr
