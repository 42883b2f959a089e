"""A world that rewards one half of the vocabulary: two calls per rollout, sampled from the live weights."""

from __future__ import annotations

import asyncio
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec.structs import replace

from agl import AlgorithmEntry, PluginManager
from agl.schemas import Episode, Rollout, Row, Segment, Transition, Weights, pack_floats, pack_ids
from agl_algo_torch.learner.model import load_model
from agl_algo_torch.preferences import PreferenceAlgorithm, live_rows
from agl_testing.conformance.bench import AlgorithmBench, RolloutOrder

if TYPE_CHECKING:
    from pathlib import Path

    from agl.contracts import StepReport

PROMPT, TOKENS = [10, 20, 30], 2
Reward = Callable[[list[int]], float]
RatioLoss = Callable[[dict[str, torch.Tensor], dict[str, int]], torch.Tensor]
"""A loss as a function of the log-ratios and the numbers of trained tokens, both by rollout id."""


def good_tokens(response: list[int]) -> float:
    """Return the share of tokens in the upper half of the vocabulary; the random model samples few of them."""
    return sum(token >= 128 for token in response) / len(response)


class World:
    """Plays rollouts of two calls with the live weights; both calls are on one row, or each on its own row."""

    def __init__(self, reward: Reward = good_tokens, *, rows: int = 1, bias: float = 0.0) -> None:
        self.reward, self.rows, self.bias = reward, rows, bias
        self._models: dict[tuple[str, str], Any] = {}
        self._next: dict[tuple[int, ...], torch.Tensor] = {}  # log-probabilities after a prompt, of the loaded model

    def play(self, order: RolloutOrder) -> Episode:
        weights = order.resources["llm"]
        assert isinstance(weights, Weights)
        key = (weights.uri, order.rollout.resources["llm"])
        if key not in self._models:
            self._models, self._next = {key: self._load(weights)}, {}
        ids, logprobs = self._sample(self._models[key], seed=zlib.crc32(order.rollout.rollout_id.encode()))
        return episode(order.rollout, ids, [p + self.bias for p in logprobs], self.reward(ids[3:]), rows=self.rows)

    def _load(self, weights: Weights) -> Any:
        if weights.format == "hf":
            return load_model(weights.uri, device="cpu").model
        from peft import PeftModel

        return PeftModel.from_pretrained(load_model(weights.base_model, device="cpu").model, weights.uri)

    @torch.no_grad()
    def _sample(self, model: Any, *, seed: int) -> tuple[list[int], list[float]]:
        generator = torch.Generator().manual_seed(seed)
        ids, logprobs = list(PROMPT), [0.0] * len(PROMPT)
        for _ in range(TOKENS):
            if tuple(ids) not in self._next:
                self._next[tuple(ids)] = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(0)
            logp_V = self._next[tuple(ids)]
            token = int(torch.multinomial(logp_V.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(logp_V[token]))
        return ids, logprobs


def episode(rollout: Any, ids: list[int], logprobs: list[float], reward: float, *, rows: int) -> Episode:
    """Return an episode of two calls with half of the response each, on one row or on two."""
    middle = len(PROMPT) + TOKENS // 2
    bounds = [(len(PROMPT), middle), (middle, len(ids))]
    parts = [Segment(start=a, stop=b, span_id=f"{rollout.rollout_id}/{i}") for i, (a, b) in enumerate(bounds)]
    grouped = [parts] if rows == 1 else [[part] for part in parts]

    def row(branch: int, own: list[Segment]) -> Row:
        stop = own[-1].stop
        is_own = [any(s.start <= i < s.stop for s in own) for i in range(stop)]
        return Row(
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt_id,
            group_id=rollout.group_id,
            branch=branch,
            ids=pack_ids(ids[:stop]),
            mask=bytes(map(int, is_own)),
            logprobs=pack_floats(p if m else 0.0 for p, m in zip(logprobs[:stop], is_own, strict=True)),
            segments=tuple(own),
        )

    calls = tuple(
        Transition(
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt_id,
            span_id=part.span_id,
            branch=i if rows > 1 else 0,
        )
        for i, part in enumerate(parts)
    )
    return Episode(
        rollout=rollout,
        attempt=None,
        reward=reward,
        transitions=calls,
        rows=tuple(row(i, own) for i, own in enumerate(grouped)),
    )


def paid_by_another(model_dir: Path, *, count: int = 32, rows: int = 1) -> list[Episode]:
    """Return `count` rollouts of another algorithm, in groups of four, sampled from the model."""

    def order(index: int) -> RolloutOrder:
        rollout = Rollout(
            rollout_id=f"payer-{index:03d}",
            task={"n": index // 4},
            group_id=f"g{index // 4}",
            resources={"llm": "v0"},
            metadata={"algorithm": "payer", "step": 1},
            status="succeeded",
            attempt_id=f"payer-{index:03d}.1",
        )
        return RolloutOrder(rollout=rollout, resources={"llm": Weights(uri=str(model_dir))}, llms={}, seed=index)

    world = World(rows=rows)
    return [world.play(order(index)) for index in range(count)]


async def run(bench: AlgorithmBench) -> list[StepReport]:
    async with bench:
        algorithm = bench.scenario.make()
        try:
            await algorithm.setup(bench.context())
            reports: list[StepReport] = []
            while not (reports and reports[-1].is_finished):
                reports.append(await algorithm.step())
        finally:
            await algorithm.close()
        return reports


def mean_reward(model: Path, *, count: int = 64) -> float:
    episodes = paid_by_another(model, count=count)
    return sum(episode.reward or 0.0 for episode in episodes) / len(episodes)


def published(bench: AlgorithmBench) -> Path:
    weights = bench.published[-1].resource
    assert isinstance(weights, Weights)
    load_model(weights.uri, device="cpu")
    return type(bench.workdir)(weights.uri)


def with_rewards(episodes: Sequence[Episode], *rewards: float | None) -> list[Episode]:
    return [replace(episode, reward=reward) for episode, reward in zip(episodes, rewards, strict=True)]


def check_gradient(
    algorithm: PreferenceAlgorithm,
    bench: AlgorithmBench,
    group: Sequence[Episode],
    examples: Sequence[Any],
    loss: RatioLoss,
    *,
    reference: float = -3.0,
) -> None:
    """Check that the two passes of an update give the gradient that autograd gives for the whole loss."""

    async def body() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        async with bench:
            await algorithm.setup(bench.context())
            learner = await algorithm._tuned.learner()
            rows = {e.rollout.rollout_id: live_rows(e) for e in group}
            references = {name: reference * (1 + index) for index, name in enumerate(rows)}
            model = learner.loaded.model
            ours: dict[str, torch.Tensor] = {}
            learner.apply = lambda report: ours.update(gradient(model)) or dict(report)  # type: ignore[method-assign]
            report = algorithm._update(learner, examples, rows, references)
            model.zero_grad()
            used = dict.fromkeys(name for example in examples for name in example.rollouts)
            ratios = {name: log_policy(model, rows[name]) - references[name] for name in used}
            whole = loss(ratios, {name: sum(row.trained_tokens for row in rows[name]) for name in used})
            assert abs(float(whole.detach()) - report["loss"]) < 1e-4 * max(1.0, abs(report["loss"]))
            whole.backward()
            return ours, gradient(model)

    ours, theirs = asyncio.run(body())
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, atol=1e-5, rtol=1e-4, msg=name)


def gradient(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def log_policy(model: Any, rows: Sequence[Any]) -> torch.Tensor:
    """Return the log-probability of a rollout's trained tokens, with gradient and without batches."""
    total = torch.zeros(())
    for row in rows:
        logp = model(input_ids=row.ids[None]).logits[0, :-1].log_softmax(-1)
        chosen = logp.gather(1, row.ids[1:, None])[:, 0]
        total = total + chosen[row.mask[1:]].sum()
    return total


def made(factory: Callable[..., Any], **given: Any) -> Any:
    """Return an algorithm with settings by their bare names (`sorted_settings`), which a test can override."""
    entry = AlgorithmEntry(name=factory.__name__.lower(), factory=factory, summary="under test")
    return PluginManager().build(entry, **sorted_settings(factory, given))


def sorted_settings(factory: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return settings sorted into the tables of an algorithm.

    A name that is in several tables, or that is also a parameter, has the name of its table as prefix: `critic_lr`.
    """
    own = {name: parameter.default for name, parameter in inspect.signature(factory).parameters.items()}
    tables = {name: default.__struct_fields__ for name, default in own.items() if isinstance(default, msgspec.Struct)}
    params: dict[str, Any] = {}
    for name, value in given.items():
        if name in own:
            params[name] = value
            continue
        spelt = [(table, name.removeprefix(f"{table}_")) for table in tables if name.startswith(f"{table}_")]
        plain = [(table, name) for table in sorted(tables, key=lambda table: table != "optim")]
        table, field = next((table, field) for table, field in (*spelt, *plain) if field in tables[table])
        params.setdefault(table, {})[field] = value
    return params
