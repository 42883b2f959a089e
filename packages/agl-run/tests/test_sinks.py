"""Sinks of plugins receive everything about a run, and cannot change it."""

import asyncio
import logging
import threading
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl
from agl.algorithms import algorithm, component
from agl.contracts import (
    AlgorithmContext,
    ExporterEntry,
    SinkOutcome,
    SinkRow,
    SinkRun,
    SinkTable,
    StepReport,
    flat_config,
    shortened,
)
from agl.errors import ConfigError, ExportError
from agl.schemas import PromptTemplate
from agl_run import ExperimentConfig, Quiet, parse_config
from agl_run.cli.run import sync_plan
from agl_run.deliver import sinking
from agl_run.deliver.sink_contents import shown_config

TASKS = [{"n": 1}, {"n": 3}]


class Kept:
    """A sink that collects what it receives, after raising the given errors at ``begin`` or in the method ``at``."""

    destination = "memory"

    def __init__(self, *raises: BaseException, at: str = "begin") -> None:
        self.raises, self.at = list(raises), at
        self.runs: list[SinkRun] = []
        self.rows: list[SinkRow] = []
        self.tables: dict[str, SinkTable] = {}
        self.ends: list[SinkOutcome] = []

    def begin(self, run: SinkRun) -> None:
        self.runs.append(run)
        self.rows.clear()
        self._raise("begin")

    def log(self, rows: list[SinkRow]) -> None:
        self.rows.extend(rows)

    def show(self, tables: list[SinkTable]) -> None:
        self._raise("show")
        self.tables.update({table.name: table for table in tables})

    def end(self, end: SinkOutcome) -> None:
        self.ends.append(end)

    def _raise(self, at: str) -> None:
        if self.raises and at == self.at:
            raise self.raises.pop(0)


def trainer(folder: Path, *sinks: Kept, plugin: object = None, **settings: Any) -> agl.Trainer:
    class Plugin:
        @agl.hookimpl
        def agl_exporters(self) -> Iterable[ExporterEntry]:
            for number, sink in enumerate(sinks):
                yield ExporterEntry(name=f"kept-{number}", factory=lambda sink=sink: sink)

    manager = agl.PluginManager.from_environment()
    manager.register(Plugin(), name="kept")
    if plugin is not None:
        manager.register(plugin, name="further")
    names = [f"kept-{number}" for number in range(len(sinks))]
    options = {"exporters": names, "store": "memory://", "folder": folder, "name": "small", **settings}
    return agl.Trainer(plugins=manager, progress=Quiet(), **options)


def solve(task: dict[str, int]) -> float:
    return task["n"] / 2


def config_of(text: str) -> ExperimentConfig:
    return parse_config(tomllib.loads(f'[experiment]\nagent = "agent:solve"\n{text}'))


def test_every_sink_gets_the_run_its_rows_its_rollouts_and_its_end(tmp_path: Path) -> None:
    one, other = Kept(), Kept()

    trainer(tmp_path, one, other).fit(solve, val_dataset=TASKS)

    for sink in (one, other):
        (run,) = sink.runs
        assert ("small-1", "small", 1) == (run.name, run.experiment, run.run)
        assert [("validate", 0, 0)] == [(row.algorithm, row.step, row.experiment_step) for row in sink.rows]
        assert {"reward": 1.0, "failed": 0.0} == sink.rows[0].metrics
        assert {0.5, 1.5} == {row[5] for row in sink.tables["rollouts"].rows}
        (end,) = sink.ends
        assert ("finished", 1.0) == (end.status, end.summary["reward_after"])
    assert one.runs[0].id != other.runs[0].id


def test_a_run_that_a_person_stops_ends_as_stopped(tmp_path: Path) -> None:
    sink = Kept()

    async def stop() -> None:
        running = asyncio.create_task(trainer(tmp_path, sink).fit_async(_wait, val_dataset=TASKS))
        while not sink.runs:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(stop())

    assert ["stopped"] == [end.status for end in sink.ends]


async def _wait(task: dict[str, int]) -> float:
    await asyncio.Event().wait()
    return 0.0


def test_sink_begins_again_after_errors_which_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinking, "PAUSE_S", 0.01)
    sink = Kept(ValueError("no room"), SystemExit(3))

    async def patient(task: dict[str, int]) -> float:
        while len(sink.runs) < 3:
            await asyncio.sleep(0.01)
        return 1.0

    trainer(tmp_path, sink).fit(patient, val_dataset=TASKS)

    assert 1 == len({run.id for run in sink.runs})
    assert ["validate"] == [row.algorithm for row in sink.rows]
    assert ["finished"] == [end.status for end in sink.ends]
    own = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "kept-0" in r.getMessage()]
    assert [
        "kept-0: ValueError: no room; the experiment goes on, and its numbers are written when this works again"
    ] == own


class Scripted:
    """An algorithm that publishes the next of its texts in every step."""

    def __init__(self, *, texts: list[str]) -> None:
        self._texts, self._step = texts, 0

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context

    async def step(self) -> StepReport:
        self._step += 1
        prompt = PromptTemplate(template=self._texts[self._step - 1])
        await self._context.publish(self._context.tunes[0], prompt, step=self._step)
        return StepReport(step=self._step, is_finished=self._step == len(self._texts))

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    async def restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]

    async def close(self) -> None: ...


class ScriptedPlugin:
    @agl.hookimpl
    def agl_algorithms(self) -> list[agl.AlgorithmEntry]:
        entry = {"factory": Scripted, "tunes": ("prompt_template",), "needs_token_ids": False}
        return [agl.AlgorithmEntry(name="scripted", **entry)]


def test_number_that_is_logged_after_the_others_of_its_step_is_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinking, "PAUSE_S", 0.01)
    monkeypatch.setattr(sinking, "SHARE", 0)
    sink = Kept()

    async def share(task: dict[str, int], prompt: PromptTemplate) -> float:
        while prompt.template == "0.45" and ("validate", 1) not in {(row.algorithm, row.step) for row in sink.rows}:
            await asyncio.sleep(0.01)
        return float(task["n"] < 20 * float(prompt.template))

    steps: dict[str, Any] = {"algorithm": algorithm("scripted", tunes="prompt", texts=["0.5", "0.45"])}
    resources = {"prompt": PromptTemplate(template="0")}
    made = trainer(
        tmp_path, sink, plugin=ScriptedPlugin(), initial_resources=resources, validate_every=1, n_runners=32, **steps
    )
    made.fit(share, [{"n": 0}], [{"n": n} for n in range(20)])  # the last step is close to the best: both run again

    found = [(row.step, name, value) for row in sink.rows for name, value in row.metrics.items()]
    assert [(1, "final_reward", 0.5), (1, "reward", 0.5)] == sorted(
        each for each in found if each[0] == 1 and "reward" in each[1]
    )
    assert [(2, "final_reward", 0.45)] == [each for each in found if each[:2] == (2, "final_reward")]
    assert len(found) == len({each[:2] for each in found})


def test_what_a_sink_missed_is_written_afterwards_under_the_same_id(tmp_path: Path) -> None:
    away, back = Kept(*[OSError("away")] * 9), Kept(OSError("back, but busy"), at="show")
    settings = {"store": f"sqlite:///{tmp_path}/runs.db", "workdir": str(tmp_path / "work")}
    trainer(tmp_path, away, **settings).fit(solve, val_dataset=TASKS)
    said: list[str] = []

    asyncio.run(sync_plan(trainer(tmp_path, back, **settings).plan(solve, None, TASKS), run=None, say=said.append))

    assert [] == away.rows
    assert {run.id for run in away.runs} == {run.id for run in back.runs}
    assert [("validate", 0)] == [(row.algorithm, row.step) for row in back.rows]
    assert 2 == len(back.tables["rollouts"].rows)
    (end,) = back.ends
    assert ("finished", 1.0) == (end.status, end.summary["reward_after"])
    assert ["kept-0: 1 step written to memory"] == said


def test_writing_afterwards_says_when_a_sink_fails_or_there_is_nothing_to_write(tmp_path: Path) -> None:
    settings = {"store": f"sqlite:///{tmp_path}/runs.db", "workdir": str(tmp_path / "work")}

    def sync(run: int | None, *sinks: Kept) -> None:
        plan = trainer(tmp_path, *sinks, **settings).plan(solve, None, TASKS)
        asyncio.run(sync_plan(plan, run=run, say=lambda _: None))

    with pytest.raises(ConfigError, match="'small' names no system that shows runs; add"):
        sync(None)
    with pytest.raises(ConfigError, match=r"'small' never ran in sqlite:.*runs.db; run it first"):
        sync(None, Kept())
    trainer(tmp_path, Kept(), **settings).fit(solve, val_dataset=TASKS)
    with pytest.raises(ConfigError, match="the newest run of 'small' is 1; give --run a number up to it"):
        sync(2, Kept())
    with pytest.raises(ExportError, match="not everything was written; see the warnings above"):
        sync(1, Kept(*[OSError("away")] * 9))


def test_sink_that_hangs_holds_the_end_up_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sinking.Sinks.__init__.__kwdefaults__, "end_s", 0.1)
    opened = threading.Event()

    class Stuck(Kept):
        def log(self, rows: list[SinkRow]) -> None:
            opened.wait()

    result = trainer(tmp_path, Stuck()).fit(solve, val_dataset=TASKS)
    opened.set()

    assert result.after == 1.0
    assert "kept-0: 1 of the run's 1 known steps and its end were not written to memory" in caplog.text


def test_dry_run_and_check_write_nothing(tmp_path: Path) -> None:
    sink = Kept()

    trainer(tmp_path, sink).dev(solve, TASKS)

    assert [] == sink.runs


def test_sink_with_an_unknown_parameter_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    ran: list[int] = []

    with pytest.raises(ConfigError, match="the exporter 'kept-0' takes no parameter 'colour'"):
        trainer(tmp_path, Kept(), exporters=component("kept-0", colour="red")).fit(
            lambda task: ran.append(task["n"]), val_dataset=TASKS
        )

    assert [] == ran


def test_configuration_is_shown_without_secrets() -> None:
    config = config_of(
        """
        store = "postgresql://me:swordfish@host/runs"
        group_key = "id"
        [policy.monkey]
        use = "openai"
        base_url = "http://me:swordfish@host/v1"
        api_key = "swordfish"
        api_key_env = "MY_KEY"
        headers = { Authorization = "Bearer swordfish-swordfish" }
        [policy.monkey.nested]
        tokens = ["swordfish"]
        max_tokens = 5
        [[exporter]]
        use = "wandb"
        params = { password = "swordfish", project = "p" }
        """
    )

    shown = shown_config(config)

    assert "swordfish" not in repr(shown)
    flat = flat_config(shown)
    assert ("id", "openai", "MY_KEY") == tuple(
        flat[name] for name in ("experiment.group_key", "policy.monkey.use", "policy.monkey.params.api_key_env")
    )
    assert ("5", "p") == (flat["policy.monkey.params.nested.max_tokens"], flat["exporter.wandb.project"])


def test_place_of_a_validation_is_behind_the_step_before_it_and_before_the_next() -> None:
    places = [row(algorithm, step).place for algorithm, step in (("a", 1), ("validate", 1), ("b", 2))]
    assert sorted(set(places)) == places


@given(st.lists(st.text(), unique=True, min_size=2, max_size=2))
def test_names_are_plain_short_and_never_become_one(names: list[str]) -> None:
    made = row("a", 1, metrics=dict.fromkeys(names, 1.0)).named()
    assert len({*names, "step", "experiment_step"}) == len(made)
    for name in made:
        assert len(name) <= 200
        assert name.isascii()
        assert name.isprintable()
        assert "//" not in name


@given(st.text(max_size=300), st.integers(min_value=60, max_value=200))
def test_shortened_text_has_its_length_and_no_control_characters(text: str, limit: int) -> None:
    short = shortened(text, limit, rest="agl show p@1")
    assert len(short) <= limit
    assert not any(ord(each) < 32 and each not in "\t\n" for each in short)
    short.encode()


def row(algorithm: str, step: int, *, metrics: dict[str, float] | None = None) -> SinkRow:
    return SinkRow(algorithm=algorithm, step=step, experiment_step=step, time=0.0, metrics=metrics or {})
