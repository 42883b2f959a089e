"""The parts of :mod:`worlds.team` that an experiment runs: agent, model server and a tabular algorithm.

Everything but the model is real: the agent calls its model with the ``openai`` client, calls are captured and
stored, and the algorithm learns from collected episodes by the experiment's credit.

    plugins = PluginManager.from_environment()
    plugins.register(TeamPlugin(), name="team")
    trainer = agl.Trainer(
        algorithm=algorithm("team-gradient", tunes="team"),
        policies={"team": "team-table"},
        credit="episode",
        gateway="none",
        plugins=plugins,
    )
    trainer.fit(play, train_dataset=tasks())
"""

import json
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import agl
from agl.contracts import AlgorithmContext, ServedModel, StepReport
from agl.schemas import LLM, CallCredit, Episode, Json, ResourceVersion, Transition, Weights, unpack_ids
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, decode
from agl_testing.model_server.codec import OFFSET
from worlds.team import (
    ROLES,
    ROOMS,
    WORDS,
    contributions,
    expected_contributions,
    expected_reward,
    key,
    probabilities,
    reward,
    uniform,
)

__all__ = [
    "TeamGradient",
    "TeamPlugin",
    "TeamTable",
    "play",
    "tasks",
]


def tasks(*, is_chained: bool = False) -> list[Json]:
    """Return one task per room; in chained ones every role reads what the roles before it said."""
    return [{"room": room, "is_chained": is_chained} for room in ROOMS]


async def play(task: Any, team: LLM) -> float:
    """Run the agent: its three roles speak one after the other. Returns the team's reward."""
    import openai  # only where the agent runs

    said: dict[str, str] = {}
    plain = openai.DefaultAsyncHttpxClient(verify=False)  # the server speaks no TLS; its setup costs more than a call
    async with openai.AsyncOpenAI(base_url=team.base_url, api_key="none", max_retries=0, http_client=plain) as client:
        for role in ROLES:
            with agl.operation(role):
                heard = "".join(f" {name} said {word!r}" for name, word in said.items()) if task["is_chained"] else ""
                messages: list[Any] = [{"role": "user", "content": f"{key(role, task['room'])}{heard}"}]
                answer = await client.chat.completions.create(model=team.model, messages=messages)
                said[role] = answer.choices[0].message.content or ""
    return reward(task["room"], said)


class TeamTable:
    """Serves a table of logits as a policy, behind an OpenAI-compatible endpoint; its weights are a JSON file.

    Args:
        name: The policy's name.
        seed: Seed of the words that it draws.
    """

    def __init__(self, *, name: str, seed: int = 0) -> None:
        self._name, self._draw = name, random.Random(seed)
        self._table: dict[str, list[float]] = uniform()
        self._version = "uniform"
        self._server = ScriptedModelServer(respond=self._answer, models=(name,))

    async def start(self) -> ServedModel:
        """Serve."""
        self._server.start()
        return self._served()

    async def stop(self) -> None:
        """Close the port."""
        self._server.stop()

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Serve the table in the file that the version names."""
        if isinstance(version.resource, Weights) and version.resource.uri:
            self._table = json.loads(Path(version.resource.uri).read_text(encoding="utf-8"))
        self._version = version.version
        self._server.clear_calls()
        return self._served()

    def resource(self) -> Weights:
        """The uniform table, which is in no file."""
        return Weights(uri="")

    @property
    def has_token_ids(self) -> bool:
        """True."""
        return True

    def _served(self) -> ServedModel:
        return ServedModel(base_urls=(self._server.base_url,), model=self._name, version=self._version)

    def _answer(self, request: ModelRequest) -> Reply:
        logits = self._table[request.turns[0].text.split()[0]]
        return Reply(text=self._draw.choices(WORDS, probabilities(logits))[0])


class TeamGradient:
    """Learns the table by policy gradients (REINFORCE), with the advantages that the experiment's credit gives.

    For logits z of one role in one room, p = softmax(z), a call that said word w with advantage A, and N rollouts:

        d log p(w) / d z_i = 1[i = w] - p_i
        z_i <- z_i + lr / N * sum over calls of A * (1[i = w] - p_i)

    A credit that is no advantage yet becomes one within its group, as in GRPO: less the mean of the rollouts' means,
    over their standard deviation. The metric ``signs_right`` is the share of a step's calls whose advantage has the
    sign of the role's true contribution, 0 where that is nothing; ``signs_right_of_active`` leaves out the latter.
    ``signs_right_of_choice`` compares with the word's true advantage: its contribution less what the role's words
    contribute on average, without words that are exactly average.

    Args:
        steps: Most steps.
        goal: Expected reward of the table that ends the training.
        group_size: Rollouts per room and step.
        lr: Step length.
    """

    def __init__(self, *, steps: int = 100, goal: float = 0.9, group_size: int = 4, lr: float = 4.0) -> None:
        self._steps, self._goal, self._size, self._lr = steps, goal, group_size, lr
        self._step, self._table = 0, uniform()

    async def setup(self, context: AlgorithmContext) -> None:
        """Keep the context."""
        self._context = context

    async def step(self) -> StepReport:
        """Collect a group of rollouts per room, take a gradient step for each, and publish the table."""
        step = self._step + 1
        collected = await self._context.collect(self._context.train, step=step, n=self._size)
        signs: list[tuple[int, int]] = []
        choices: list[tuple[int, int]] = []
        for group in collected.groups():
            advantages = _advantages(self._context.credit.assign(group))
            signs += _signs(group, advantages)
            choices += _choices(group, advantages, self._table)
            self._climb(group, advantages)
        path = self._context.workdir / f"table-{step:05d}.json"
        path.write_text(json.dumps(self._table), encoding="utf-8")
        await self._context.publish(self._context.tunes[0], Weights(uri=str(path)), step=step)
        self._step = step
        expected = expected_reward(self._table)
        rewards = [episode.reward or 0.0 for episode in collected.episodes]
        is_reached = expected >= self._goal
        return StepReport(
            step=step,
            is_finished=is_reached or step >= self._steps,
            metrics={
                "reward": statistics.fmean(rewards),
                "expected_reward": expected,
                "signs_right": _agreement(signs),
                "signs_right_of_active": _agreement([pair for pair in signs if pair[0]]),
                "signs_right_of_choice": _agreement(choices),
            },
            trained=tuple(episode.rollout.rollout_id for episode in collected.episodes),
            stop_reason="the goal is reached" if is_reached else "",
        )

    def _climb(self, group: Sequence[Episode], advantages: Mapping[str, float]) -> None:
        """Take one gradient step on a group's calls; all gradients are those at the table before the step."""
        gradients: dict[str, list[float]] = {}
        for episode in group:
            for call in episode.transitions:
                name, word = key(call.agent, _room(episode)), _word(call)
                chances = probabilities(self._table[name])
                gradient = gradients.setdefault(name, [0.0] * len(WORDS))
                for index, chance in enumerate(chances):
                    gradient[index] += advantages[call.span_id] * ((WORDS[index] == word) - chance)
        for name, gradient in gradients.items():
            logits = self._table[name]
            self._table[name] = [z + self._lr * g / len(group) for z, g in zip(logits, gradient, strict=True)]

    def state(self) -> dict[str, Json]:
        """Return the table and the number of steps done."""
        return {"step": self._step, "table": self._table}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from :meth:`state`."""
        self._step, self._table = state["step"], dict(state["table"])

    async def close(self) -> None:
        """Do nothing: nothing is held open."""


def _room(episode: Episode) -> str:
    return episode.rollout.task["room"]


def _word(call: Transition) -> str:
    return decode(token for token in unpack_ids(call.response_ids) if token >= OFFSET)


def _signs(group: Sequence[Episode], advantages: Mapping[str, float]) -> list[tuple[int, int]]:
    """Return, for every call, the sign of its role's true contribution and the sign of its advantage."""
    found: list[tuple[int, int]] = []
    for episode in group:
        known = contributions(_room(episode), {call.agent: _word(call) for call in episode.transitions})
        found += [(_sign(known[call.agent]), _sign(advantages[call.span_id])) for call in episode.transitions]
    return found


def _choices(
    group: Sequence[Episode], advantages: Mapping[str, float], table: Mapping[str, Sequence[float]]
) -> list[tuple[int, int]]:
    """Return the sign of a word's true advantage and of its advantage, for every call but those with average words."""
    found: list[tuple[int, int]] = []
    for episode in group:
        expected = expected_contributions(table, _room(episode))
        known = contributions(_room(episode), {call.agent: _word(call) for call in episode.transitions})
        for call in episode.transitions:
            true = _sign(known[call.agent] - expected[call.agent])
            if true or call.agent == "rider":  # whatever the rider says, it is worth nothing
                found.append((true, _sign(advantages[call.span_id])))
    return found


def _agreement(signs: Sequence[tuple[int, int]]) -> float:
    return statistics.fmean(one == other for one, other in signs) if signs else 1.0


def _sign(value: float) -> int:
    return 0 if math.isclose(value, 0.0, abs_tol=1e-9) else int(math.copysign(1, value))


def _advantages(credits: Sequence[Sequence[CallCredit]]) -> dict[str, float]:
    """Return the advantage of every call, by span id."""
    scores: dict[str, list[float]] = {}
    for calls in credits:
        own: dict[str, list[float]] = {}
        for call in calls:
            own.setdefault(call.baseline, []).append(call.value)
        for baseline, values in own.items():
            scores.setdefault(baseline, []).append(statistics.fmean(values))

    def advantage(call: CallCredit) -> float:
        if call.is_advantage:  # compared already; doing so again would shrink it
            return call.value
        compared = scores[call.baseline]
        deviation = statistics.stdev(compared) if len(compared) > 1 else 0.0  # one rollout has nothing to compare with
        return (call.value - statistics.fmean(compared)) / deviation if deviation > 1e-9 else 0.0

    return {call.span_id: advantage(call) for calls in credits for call in calls}


class TeamPlugin:
    """Registers the policy ``team-table`` and the algorithm ``team-gradient``."""

    @agl.hookimpl
    def agl_policies(self) -> Iterable[agl.PolicyEntry]:
        """Register the table behind an endpoint."""
        yield agl.PolicyEntry(name="team-table", factory=TeamTable, trains=True)

    @agl.hookimpl
    def agl_algorithms(self) -> Iterable[agl.AlgorithmEntry]:
        """Register gradient ascent on the table."""
        yield agl.AlgorithmEntry(name="team-gradient", factory=TeamGradient)
