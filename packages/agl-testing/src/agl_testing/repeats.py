"""Runs an agent in one experiment after the other, eight rollouts at once, for tests of adapters.

Programs keep clients, agents and graphs in modules, where they outlive an experiment and are shared by its rollouts.
:func:`check_repeats` sees that neither breaks them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agl.schemas import LLM
from agl_run import Quiet, Trainer
from agl_testing.adapters import MODEL
from agl_testing.model_server import ScriptedModelServer

AT_ONCE = 8
ROLLOUTS = 16


def check_repeats(
    agent: Any, server: ScriptedModelServer, *, tracers: Sequence[str], gateway: str, folder: Path, calls: int = 1
) -> None:
    """Call ``dev`` twice, then ``fit`` twice, and check that every rollout succeeded and every call is recorded.

    Args:
        agent: A function that gets the task, an object with a ``marker``; its reward is 1.
        server: The model's server; the policy's name is ``main``, the model's ``MODEL``.
        tracers: Names of tracers.
        gateway: ``none`` or ``auto``.
        folder: Where the store is.
        calls: Model calls of one rollout.
    """
    tasks = [{"marker": f"#{number}#"} for number in range(ROLLOUTS)]

    def trainer(name: str) -> Trainer:
        return Trainer(
            name=name,
            initial_resources={"main": LLM(endpoint=server.base_url, model=MODEL)},
            tracers=tracers,
            gateway=gateway,
            n_runners=AT_ONCE,
            progress=Quiet(),
            folder=folder,
        )

    for name in ("one", "two"):
        before = len(server.calls)
        episodes = trainer(name).dev(agent, tasks, tasks=ROLLOUTS).episodes
        assert [None] * ROLLOUTS == [episode.attempt and episode.attempt.error for episode in episodes]
        assert [calls] * ROLLOUTS == [len(episode.transitions) for episode in episodes]
        assert ROLLOUTS * calls == len(server.calls) - before
    for name in ("three", "four"):
        before = len(server.calls)
        assert 1.0 == trainer(name).fit(agent, val_dataset=tasks).before
        assert ROLLOUTS * calls == len(server.calls) - before
