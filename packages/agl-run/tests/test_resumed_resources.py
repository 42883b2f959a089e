"""A resumed run keeps the versions of its resources, and reports it if the file's text has changed since."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl import AlgorithmEntry, PluginManager, hookimpl
from agl.algorithms import algorithm
from agl.contracts import AlgorithmContext, StepReport
from agl.schemas import JsonResource, PromptTemplate
from agl_run import Quiet, Trainer

SAID = (
    "{name}: the run goes on with the version {version}, and not with what the experiment's file says, which has "
    "changed since the run began; to use the file's, start again with --fresh (fresh=True) or give the experiment "
    "another name"
)


class Writing:
    """Collects and publishes a text in each step, and fails in one step."""

    def __init__(self, *, breaks_at: int = 0) -> None:
        self._breaks_at, self._step = breaks_at, 0

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context

    async def step(self) -> StepReport:
        self._step += 1
        await self._context.collect(self._context.train, step=self._step)
        if self._step == self._breaks_at:
            raise RuntimeError("broken")
        await self._context.publish("tuned", PromptTemplate(template=f"step {self._step}"), step=self._step)
        return StepReport(step=self._step, is_finished=self._step == 3)

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    async def restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]

    async def close(self) -> None: ...


class WritingPlugin:
    @hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        return [AlgorithmEntry(name="writing", factory=Writing, tunes=("prompt_template",), needs_token_ids=False)]


class Listening(Quiet):
    """Collects the lines about resources."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        if "experiment's file" in text:
            self.said.append(text)


Start = Callable[..., tuple[list[str], list[tuple[str, str, int]]]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Run or try the experiment with these texts; return the lines about resources, and the text that the agent got."""

    def started(
        tuned: str = "first",
        fixed: str = "first",
        limit: int = 1,
        *,
        breaks_at: int = 0,
        tries: bool = False,
        **how: Any,
    ) -> tuple[list[str], list[tuple[str, str, int]]]:
        got: list[tuple[str, str, int]] = []

        def agent(task: Any, tuned: PromptTemplate, fixed: PromptTemplate, limit: int) -> float:
            got.append((tuned.template, fixed.template, limit))
            return 1.0

        manager, progress = PluginManager(), Listening()
        manager.register(WritingPlugin(), name="writing")
        trainer = Trainer(
            name="small",
            store=f"sqlite:///{tmp_path}/small.db",
            folder=tmp_path,
            algorithm=algorithm("writing", tunes="tuned", breaks_at=breaks_at),
            initial_resources={
                "tuned": PromptTemplate(template=tuned),
                "fixed": PromptTemplate(template=fixed),
                "limit": JsonResource(value=limit),
            },
            plugins=manager,
            progress=progress,
        )
        if tries:
            trainer.dev(agent, ["task"])
        elif breaks_at:
            with pytest.raises(RuntimeError, match="broken"):
                trainer.fit(agent, ["task"], **how)
        else:
            trainer.fit(agent, ["task"], **how)
        return progress.said, got

    return started


def test_changed_resource_is_named_once_and_the_run_keeps_its_version(start: Start) -> None:
    assert [] == start(breaks_at=2)[0]

    said, got = start(fixed="second", limit=2, breaks_at=3, resume=True)
    assert [SAID.format(name=name, version="small-1-initial") for name in ("fixed", "limit")] == said
    assert [("step 2", "first", 1)] == got  # the rollout of the second step had run before

    said, _ = start(tuned="second", resume=True)
    assert [SAID.format(name="tuned", version="small-1-writing-2")] == said


def test_resource_that_only_training_has_changed_is_not_named(start: Start) -> None:
    start(breaks_at=3)
    assert [] == start(resume=True)[0]
    said, got = start("second", "second", 2, fresh=True)
    assert ([], ("second", "second", 2)) == (said, got[0])


def test_trial_says_by_itself_what_it_uses(start: Start) -> None:
    start(fixed="old", tries=True)
    start(breaks_at=2)
    said, got = start(fixed="second", tries=True)
    assert ["fixed", "tuned"] == sorted(line.partition(":")[0] for line in said)
    assert all("the trial uses the version small-1-" in line for line in said)
    assert [("step 1", "first", 1)] == got
