"""Runs an agent in one experiment after the other, in threads or processes, for tests of adapters.

Programs keep clients, agents and graphs in modules, where they outlive an experiment and are shared by its rollouts.
:func:`check_repeats` sees that neither breaks them, and :func:`check_processes` that they work in processes too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agl.schemas import LLM
from agl_run import Quiet, Trainer, runner
from agl_testing.model_server import ScriptedModelServer
from tests.adapters import MODEL

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


def check_processes(
    source: str, server: ScriptedModelServer, *, tracer: str, agents: Sequence[str], folder: Path
) -> None:
    """Run an agent in a process of its own, recorded there and then by the gateway, and check the agents of its calls.

    Args:
        source: Text of the agent's module, with the function ``solve`` of a task and ``main``, an ``LLM``; its reward
            is 1.
        server: The model's server.
        tracer: Name of the tracer.
        agents: The agent of every model call of a rollout, in order.
        folder: Where the module and the store are.
    """
    name = f"program_of_{tracer.replace('-', '_')}"
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    tasks = [{"marker": f"#{number}#"} for number in range(2)]
    for gateway in ("none", "auto"):
        trainer = Trainer(
            name=f"with-{gateway}",
            initial_resources={"main": LLM(endpoint=server.base_url, model=MODEL, api_key_env="")},
            tracers=tracer,
            gateway=gateway,
            runner=runner("process", concurrency=1),
            progress=Quiet(),
            folder=folder,
        )
        episodes = trainer.dev(f"{name}:solve", tasks, tasks=2).episodes
        assert [None] * 2 == [episode.attempt and episode.attempt.error for episode in episodes]
        assert [[*agents]] * 2 == [[call.agent for call in episode.transitions] for episode in episodes]
