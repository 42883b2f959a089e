"""The conformance class of sinks: every number of a run arrives exactly once, and a sink never changes the run."""

# ruff: noqa: D102  # the names of the tests say what holds

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agl.schemas import Json, Record
from agl_testing.conformance._base import Conformance, require
from agl_testing.sink_world import HELD, run, search, started
from agl_testing.waiting import wait_until

HOSTILE = {"a b/c": 101.0, "naïve 🙂\0": 102.0, "naïve 🙃\0": 103.0, "x" * 300: 104.0, "": 105.0}
LONG = "<b>|\\ {} \x00\x1b[31m\ud800 🙂\n" * 40_000


class SinkRead(Record, frozen=True, kw_only=True):
    """A run as read from the sink's system with that system's own library.

    Attributes:
        name: The name of the run.
        figures: Steps and values of each metric, by name, in stored order.
        config: The values of the configuration as text, by dotted name.
        tables: The newest version of each table, by name, with one dictionary per row.
        result: The final summary and ``status``, as text by name; empty as long as the run may be incomplete.
    """

    name: str
    figures: dict[str, list[tuple[int, float]]] = {}
    config: dict[str, str] = {}
    tables: dict[str, list[dict[str, Json]]] = {}
    result: dict[str, str] = {}


class SinkConformance(Conformance):
    """Run every test of the sink contract, reading the results with the library of the sink's system.

    .. code-block:: python

        class TestMySink(SinkConformance):
            use = "mine"

            def params(self, folder):
                return {"file": str(folder / "mine.txt")}

            def read(self, folder):
                return read_runs(folder / "mine.txt")
    """

    contract: ClassVar[str] = "sink"

    use: ClassVar[str] = ""
    """The sink's registered name."""

    statuses: ClassVar[dict[str, str]] = {"finished": "finished", "failed": "failed"}
    """The names that the sink's system gives to runs which agl calls ``finished`` and ``failed``."""

    search: ClassVar[str] = ""
    """The prompt search of ``agl-algo-apo`` that one test runs, ``apo`` or ``gepa``; ``""`` skips that test."""

    def params(self, folder: Path) -> dict[str, Any]:
        """Return parameters with which the sink writes into a folder."""
        raise NotImplementedError("override params() with parameters that let the sink write below the folder")

    def broken_params(self, folder: Path) -> dict[str, Any]:
        """Return valid parameters with which the sink cannot write, for example because a file is in its way."""
        raise NotImplementedError("override broken_params() with parameters with which the sink cannot write")

    def read(self, folder: Path) -> list[SinkRead]:
        """Return the runs that the sink has written, even while it is writing; empty before it has written any."""
        raise NotImplementedError("override read() with what the system's own library reads")

    def test_steps_of_several_algorithms_arrive_each_on_its_own_axis(self, tmp_path: Path) -> None:
        run(str(tmp_path), self.use, self.params(tmp_path), left={"steps": 3}, right={"steps": 2})

        found = self._ended(tmp_path)
        assert found.name == "small-1"
        assert [(1, 0.125), (2, 0.25), (3, 0.375)] == found.figures["left/score"]
        assert [(1, 0.125), (2, 0.25)] == found.figures["right/score"]
        assert [(1, 1.0), (2, 3.0), (3, 5.0)] == found.figures["left/experiment_step"]
        assert [(1, 2.0), (2, 4.0)] == found.figures["right/experiment_step"]
        assert [(0, 1.0), (5, 1.0)] == found.figures["validate/reward"]

    def test_configuration_tables_and_result_arrive(self, tmp_path: Path) -> None:
        run(str(tmp_path), self.use, self.params(tmp_path), left={"steps": 2, "text": "sk-0123456789abcdef"})

        found = self._ended(tmp_path)
        assert found.config["experiment.name"] == "small"
        assert found.config["algorithm.left.params.steps"] == "2"
        assert found.config["algorithm.left.params.text"] == "sk-***"
        versions = {str(row["version"]): row for row in found.tables["resources"]}
        assert ["small-1-initial", "small-1-left-1", "small-1-left-2"] == sorted(versions)
        last = versions["small-1-left-2"]
        assert ("small-1-left-1", "left", 2.0) == (last["parent"], last["algorithm"], float(str(last["step"])))
        assert str(last["show"]).startswith("agl show left_prompt@small-1-left-2 --store ")
        candidates = {str(row["candidate"]): row for row in found.tables["candidates"]}
        assert ("c1", 0.25) == (candidates["c2"]["from"], float(str(candidates["c2"]["score"])))
        assert {"small-1-left-train-00002-00000-000"} <= {str(row["rollout"]) for row in found.tables["rollouts"]}
        assert found.result["status"] == self.statuses["finished"]
        assert float(found.result["reward_after"]) == 1.0
        assert found.result["version/left_prompt"] in versions

    def test_killed_run_is_continued_and_nothing_is_lost_or_doubled(self, tmp_path: Path) -> None:
        params, counting = self.params(tmp_path), {"left": {"steps": 4, "hold_at": 3}}
        with started(tmp_path, self.use, params, **counting) as process:
            try:
                wait_until(lambda: (tmp_path / HELD).exists() or process.poll() is not None)
                assert process.poll() is None
                wait_until(lambda: self._scores(tmp_path) == [1, 2])
            finally:
                process.kill()

        run(str(tmp_path), self.use, params, resume=True, **counting)

        found = self._ended(tmp_path)
        assert [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)] == found.figures["left/score"]
        assert [0, 4] == [step for step, _ in found.figures["validate/reward"]]
        assert found.result["status"] == self.statuses["finished"]

    def test_failed_run_is_marked_as_failed(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError):
            run(str(tmp_path), self.use, self.params(tmp_path), left={"steps": 4, "fail_at": 3})

        found = self._ended(tmp_path)
        assert [1, 2] == [step for step, _ in found.figures["left/score"]]
        assert found.result["status"] == self.statuses["failed"]

    def test_hostile_names_and_texts_arrive_shortened_and_harmless(self, tmp_path: Path) -> None:
        counting = {
            "steps": 1,
            "metrics": {**HOSTILE, "not a number": float("nan")},
            "text": LONG.replace("\ud800", ""),
        }

        run(str(tmp_path), self.use, self.params(tmp_path), left=counting)

        found = self._ended(tmp_path)
        names = {name: values for name, values in found.figures.items() if name.startswith("left/")}
        assert any(name.startswith("left/not") for name in names)
        assert all(1 == len(values) for values in names.values())
        assert [*HOSTILE.values()] == sorted(value for ((_, value),) in names.values() if value > 100)
        contents = [str(row["content"]) for row in found.tables["resources"]]
        assert any("characters; all of it: agl show left_prompt@small-1-left-1" in text for text in contents)

    def test_sink_that_cannot_write_is_reported_once_and_the_run_goes_on(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        result = run(str(tmp_path), self.use, self.broken_params(tmp_path), left={"steps": 2})

        assert {"left": 2} == result.steps
        own = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("agl")]
        goes_on, left = [message for message in own if message.startswith(f"{self.use}: ")]
        assert "the experiment goes on, and its numbers are written when this works again" in goes_on
        assert "4 of the run's 4 known steps and its end were not written" in left

    def test_prompt_search_shows_its_budget_scores_and_candidates(self, tmp_path: Path) -> None:
        require(bool(self.search), "search", self.contract)
        logged = search(str(tmp_path), self.use, self.params(tmp_path), algorithm=self.search)

        found = self._ended(tmp_path)
        own = [metric for metric in logged if metric.algorithm == self.search]
        for name in ("spent_rollouts", "best_val_score"):
            expected = {metric.step: metric.value for metric in own if metric.name == name}
            assert expected
            read = found.figures[f"{self.search}/{name}"]
            assert [*expected] == [step for step, _ in read]
            assert dict(read) == pytest.approx(expected, rel=1e-6)  # TensorBoard keeps 32 bits
        candidates = {str(row["candidate"]): row for row in found.tables["candidates"]}
        made = [row for row in candidates.values() if row["from"]]
        assert made
        assert all(set(str(row["from"]).split(", ")) <= candidates.keys() for row in made)
        assert any(row["decision"] == "accepted" and float(str(row["score"])) > 0 for row in made)
        assert all("{order}" in str(row["text"]) for row in candidates.values() if row["decision"] == "accepted")

    def _ended(self, folder: Path) -> SinkRead:
        """Wait until the end of the only run can be read, and return the run."""
        (found,) = wait_until(lambda: [one for one in self.read(folder) if one.result])
        return found

    def _scores(self, folder: Path) -> list[int]:
        return [step for found in self.read(folder) for step, _ in found.figures.get("left/score", [])]
