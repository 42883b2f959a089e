"""Opens an experiment for a trial, under another name and with the versions that the experiment has reached.

A trial has its own lock and record, so a trainer of the experiment may run at the same time. It saves no state of the
experiment.
"""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

from agl.contracts import ExperimentRecord, Store
from agl.schemas import Episode, Json, Mode
from agl_inspect.records.state import load_experiment
from agl_run.display.progress import Progress
from agl_run.plan import Plan
from agl_run.run.collector import cancel_unfinished
from agl_run.run.driver import Driver
from agl_run.run.resume import is_of_another_agent
from agl_run.run.running_experiment import RunningExperiment


async def reached(store: Store, plan: Plan) -> ExperimentRecord | None:
    """Return the experiment's record; ``None`` if the experiment has not run yet, or last ran with another agent."""
    found = await load_experiment(store, plan.name)
    return None if found is None or is_of_another_agent(found, plan) else found


@asynccontextmanager
async def trial(
    plan: Plan,
    *,
    record_as: str,
    progress: Progress,
    live: Mapping[str, str] | None = None,
    arms: Sequence[Mapping[str, str]] = (),
) -> AsyncGenerator[Driver]:
    """Start the experiment's parts under the name ``record_as``; close them and ``progress`` at the end.

    Queued rollouts of a killed trial of this name are cancelled, but those of a resumable experiment never are.

    Args:
        plan: The experiment.
        record_as: Name of the experiment under which the rollouts are recorded.
        progress: Shows the progress, and says which resources differ from the experiment's file.
        live: Versions by resource that replace the ones that the experiment has reached.
        arms: Sets of versions that run side by side with the live ones.
    """
    # Its own name means its own lock and lease, so a trainer of the experiment may run meanwhile.
    running = RunningExperiment(plan.renamed(record_as))
    try:
        store = await running.open_store()
        # A record under this name belongs to an experiment that can be resumed, so its queue is not
        # touched.
        if await load_experiment(store, record_as) is None:
            await cancel_unfinished(store, record_as)
        # A trial shows the agent with the versions that training has reached, not with those of the
        # file.
        previous = await reached(store, plan)
        # What is asked for explicitly wins.
        versions = {**(previous.live if previous else {}), **(live or {})}
        state = ExperimentRecord(name=record_as, run=previous.run if previous else 1, live=versions)
        await running.start(state, say=progress.say, arms=arms)
        for key, resource in plan.resources.items():
            if key not in (live or {}) and running.live.current(key).resource != resource:
                progress.say(
                    f"{key}: the trial uses the version {running.live.current(key).version}, which the experiment has "
                    "reached or a label points at, and not what the experiment's file says, which differs; to try the "
                    "file's, give the experiment another name: --set experiment.name=NAME"
                )
        yield Driver(running, state, progress=progress, is_trial=True)
    finally:
        progress.close()
        await running.close()


class Tasks:
    """Runs tasks within one trial, and reads the episodes as the experiment's first algorithm would."""

    def __init__(self, driver: Driver) -> None:
        algorithms = driver.running.plan.config.algorithm
        self._driver, self._rounds = driver, 0
        self._collect = driver.collector(f"dev-{time.time_ns() // 1_000_000}", algorithms[0] if algorithms else None)

    async def run(self, tasks: Sequence[Json], *, samples: int = 1, mode: Mode) -> Sequence[Episode]:
        """Run each task ``samples`` times and return the episodes; may be called again with more tasks."""
        # Rounds are steps of one caller, so the ids of a further round never collide.
        collected = await self._collect(tasks, step=self._rounds, n=samples, mode=mode, keeps_all=True)
        self._rounds += 1
        self._driver.patterns.end()
        return collected.episodes
