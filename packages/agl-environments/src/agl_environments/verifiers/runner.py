"""The runner ``verifiers``: the environment performs the task, calls the policy, and computes the reward.

Rollouts share this process and its event loop, as in verifiers' own evaluation. An environment that blocks the loop
therefore delays the other rollouts; more workers give more processes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from agl.errors import ConfigError
from agl.hints import check_table
from agl.schemas import LLM, Claim, Json, NamedResources, Outcome, Record, Reward, Rollout
from agl.tracing import current
from agl_environments.verifiers.environment import Model
from agl_environments.verifiers.loading import load, locate
from agl_run import AgentSpec, AsyncRunner, RunContext
from agl_run.programs import LostError, TaskSets


class VerifiersSettings(Record, frozen=True, kw_only=True):
    """Settings of the runner, from ``[runner] params``.

    Attributes:
        policy: Name of the policy that the environment calls; by default the only policy.
        sampling: Sampling parameters of every call, such as ``{ max_tokens = 512 }``.
    """

    policy: str = ""
    sampling: dict[str, Json] = {}


class VerifiersRunner:
    """Runs a rollout of a verifiers environment for each attempt; see the module's docstring.

    Args:
        setup: The context of the run, whose agent has the environment's name and arguments.
        params: Fields of :class:`VerifiersSettings`.

    Raises:
        ConfigError: A parameter is wrong, or the environment cannot be loaded.
    """

    def __init__(self, setup: RunContext, **params: Any) -> None:
        agent = setup.agent
        if not agent.name:
            raise ConfigError(
                "the runner 'verifiers' needs the name of an environment: write [experiment] agent = \"verifiers:NAME\""
            )
        self._settings = _settings(params)
        self._environment = load(agent.name, agent.args, folder=agent.folder)
        self._runner = AsyncRunner(dataclasses.replace(setup, agent=AgentSpec(target=self._play)))
        self._claims: dict[str, Claim] = {}
        self._lost: dict[str, LostError] = {}

    @staticmethod
    def check(agent: AgentSpec) -> None:
        """Raise :class:`ConfigError` if the agent's environment is not installed."""
        if not agent.name:
            raise ConfigError('the agent names no environment; write agent = "verifiers:NAME"')
        locate(agent.name, folder=agent.folder)

    @staticmethod
    def tasks(agent: AgentSpec) -> TaskSets:
        """Load the environment, and return its tasks for training and validation."""
        return load(agent.name, agent.args, folder=agent.folder).tasks()

    async def start(self) -> None:
        """Start the environment."""
        await self._environment.start()
        await self._runner.start()

    async def execute(self, claim: Claim) -> Outcome:
        """Run one attempt.

        Raises:
            LostError: The environment's infrastructure went away.
        """
        attempt_id = claim.attempt.attempt_id
        self._claims[attempt_id] = claim
        try:
            outcome = await self._runner.execute(claim)
        finally:
            del self._claims[attempt_id]
            lost = self._lost.pop(attempt_id, None)
        if lost is not None:
            raise lost
        return outcome

    async def _play(self, task: Json, resources: NamedResources, rollout: Rollout) -> Reward | None:
        attempt = current()
        assert attempt is not None  # noqa: S101  # agents run inside their attempts
        claim = self._claims[attempt.attempt_id]  # a rollout may have a second, lost attempt running
        model = _model(self._settings, resources, claim)
        try:
            return await self._environment.play(claim.rollout.task, model)
        except LostError as error:
            self._lost[claim.attempt.attempt_id] = error
            raise

    async def stop(self) -> None:
        """Stop the environment."""
        try:
            await self._runner.stop()
        finally:
            await self._environment.stop()


def _model(settings: VerifiersSettings, resources: Mapping[str, Any], claim: Claim) -> Model:
    llms = {name: value for name, value in resources.items() if isinstance(value, LLM)}
    name = settings.policy or (next(iter(llms)) if len(llms) == 1 else "")
    if name not in llms:
        raise ConfigError(
            f"an environment of verifiers calls one policy, and there are {sorted(llms)}; name it: [runner] params = "
            '{ policy = "NAME" }'
        )
    llm = llms[name]
    return Model(
        base_url=llm.endpoint,
        routed_url=llm.get_base_url(claim.rollout.rollout_id, claim.attempt.attempt_id),
        key=llm.api_key,
        name=llm.model or name,
        sampling={**llm.sampling_parameters, **settings.sampling},
    )


def _settings(params: dict[str, Any]) -> VerifiersSettings:
    known = VerifiersSettings.__struct_fields__
    unknown = [name for name in params if name not in known]
    if unknown:
        raise ConfigError(
            f"the runner 'verifiers' has no parameter {unknown[0]!r}; there are {', '.join(sorted(known))}, and "
            "arguments of the environment go into experiment.agent_args"
        )
    return check_table(params, VerifiersSettings, "runner.params.")
