"""Single steps of an agent, for debugging by hand: ``LitAgentRunner``."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar

from agl.contracts import Store
from agl.errors import ConfigError, RunError
from agl.schemas import Mode
from agl_lightning.trainer import Trainer
from agl_lightning.types import AttemptedRollout, attempted
from agl_run import Agent, Quiet

T = TypeVar("T")


class LitAgentRunner(Generic[T]):
    """Runs an agent on one task after the other: ``await runner.step(task)`` within ``with runner.run_context(...)``.

    Args:
        tracer: Ignored, as by the trainer.
        settings: Settings of Agent Lightning's polling, which nothing needs here.
    """

    def __init__(self, tracer: Any = None, **settings: Any) -> None:
        self.tracer = tracer
        self.settings = settings
        self._agent: Agent | None = None
        self._store: Store | None = None

    @contextmanager
    def run_context(self, *, agent: Agent, store: Store, hooks: Any = None) -> Generator[Self]:
        """Run an agent and keep its rollouts in a store.

        Raises:
            ConfigError: ``hooks`` are given.
        """
        if hooks:
            raise ConfigError(
                "run_context got hooks=, which have no counterpart here; read what was recorded after the step with "
                "await store.query_spans(rollout.rollout_id), see docs/reference/hooks.md"
            )
        self._agent, self._store = agent, store
        try:
            yield self
        finally:
            self._agent = self._store = None

    async def step(
        self,
        input: T,
        *,
        resources: Mapping[str, Any] | None = None,
        mode: Mode = "train",  # the name there
    ) -> AttemptedRollout:
        """Run the agent on one task, and return the rollout.

        Raises:
            ConfigError: It is called outside of ``run_context``.
            RunError: The agent raised; names its error.
        """
        if self._agent is None:
            raise ConfigError("step() has no agent; call it in `with runner.run_context(agent=..., store=...):`")
        trainer = Trainer(initial_resources=resources, store=self._store, progress=Quiet())
        result = await trainer.dev_async(self._agent, [input], mode=mode)
        (episode,) = result.episodes
        if episode.attempt is not None and episode.attempt.error is not None:
            error = episode.attempt.error
            raise RunError(f"the agent raised {error.type}: {error.message}")
        return attempted(episode.rollout)
