"""A world in which tokens of a certain kind are rewarded: two calls per rollout, sampled from the live weights."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from agl.schemas import Episode, Row, Segment, Transition, Weights, pack_floats, pack_ids
from agl_algo_verl.local.trainer import VERL
from agl_algo_verl.settings.settings import OWN
from agl_testing.conformance import AlgorithmScenario

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agl.schemas import Rollout
    from agl_testing.conformance.bench import RolloutOrder

PROMPT, TOKENS = [10, 20, 30], 4
TOGETHER = 8
"""Rollouts of a task that are sampled at once: one at a time, the forward passes take most of a test."""


def good_tokens(response: list[int]) -> float:
    """Return the share of tokens in the upper half of the vocabulary."""
    return sum(token >= 128 for token in response) / len(response)


def whole_model(weights: Weights) -> Any:
    """Return the model with these weights; an adapter is merged."""
    if weights.format == "hf":
        return AutoModelForCausalLM.from_pretrained(weights.uri)
    base: Any = AutoModelForCausalLM.from_pretrained(weights.base_model)
    return PeftModel.from_pretrained(base, weights.uri).merge_and_unload()


def adapter(model_dir: Path, folder: Path) -> Weights:
    """Write an adapter that changes the answers of its base; returns its resource."""
    torch.manual_seed(3)
    base: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    model: Any = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return Weights(uri=str(folder), base_model=str(model_dir), format="lora")


class World:
    """Plays rollouts of two calls with the live weights; both calls are on one row, or each on its own row."""

    def __init__(self, reward: Callable[[list[int]], float] = good_tokens, *, rows: int = 1, bias: float = 0.0) -> None:
        self.reward, self.rows, self.bias = reward, rows, bias
        self._loaded: tuple[str, Any] = ("", None)
        self._drawn: dict[str, tuple[list[int], list[float]]] = {}  # by rollout id, with the loaded model

    def play(self, order: RolloutOrder) -> Episode:
        weights = order.resources["llm"]
        assert isinstance(weights, Weights)
        if self._loaded[0] != weights.uri:
            self._loaded, self._drawn = (weights.uri, whole_model(weights)), {}
        name = order.rollout.rollout_id
        if name not in self._drawn:
            group, _, place = name.rpartition("-")
            first = int(place) // TOGETHER * TOGETHER
            self._drawn |= draw(self._loaded[1], [f"{group}-{first + i}" for i in range(TOGETHER)])
        ids, logprobs = self._drawn[name]
        reward = self.reward(ids[len(PROMPT) :])
        return episode(order.rollout, ids, [p + self.bias for p in logprobs], reward, rows=self.rows)


@torch.no_grad()
def draw(model: Any, names: list[str]) -> dict[str, tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of rollouts, which are sampled together; the name of each is its seed."""
    generators = [torch.Generator().manual_seed(zlib.crc32(name.encode())) for name in names]
    ids_B_T = torch.tensor([PROMPT] * len(names))
    logprobs_B_T = torch.zeros(ids_B_T.shape)
    for _ in range(TOKENS):
        logp_B_V = model(input_ids=ids_B_T, use_cache=False).logits[:, -1].log_softmax(-1)
        drawn = [torch.multinomial(p_V, 1, generator=g) for p_V, g in zip(logp_B_V.exp(), generators, strict=True)]
        token_B_1 = torch.stack(drawn)
        ids_B_T = torch.cat([ids_B_T, token_B_1], dim=1)
        logprobs_B_T = torch.cat([logprobs_B_T, logp_B_V.gather(1, token_B_1)], dim=1)
    return dict(zip(names, zip(ids_B_T.tolist(), logprobs_B_T.tolist(), strict=True), strict=True))


OTHERS_QUESTION, OTHERS_ANSWER = [40, 50], [60, 61, 62]


def other_call(rollout_id: str, **changes: Any) -> Transition:
    """Return a call by an agent with the same weights that is not selected for training."""
    call = Transition(
        rollout_id=rollout_id,
        attempt_id=f"{rollout_id}.1",
        span_id=f"{rollout_id}/other",
        agent="reader",
        policy="llm",
        prompt_ids=pack_ids(OTHERS_QUESTION),
        response_ids=pack_ids(OTHERS_ANSWER),
        reject="not_selected",
    )
    return replace(call, **changes)


class SharedWorld(World):
    """A world in which each rollout also has a call of an agent that is not trained."""

    def play(self, order: RolloutOrder) -> Episode:
        played = super().play(order)
        return replace(played, transitions=(*played.transitions, other_call(order.rollout.rollout_id)))


def episode(rollout: Rollout, ids: list[int], logprobs: list[float], reward: float, *, rows: int = 1) -> Episode:
    """Return an episode of two calls with half of the response each, on one row or on two."""
    middle = len(PROMPT) + (len(ids) - len(PROMPT)) // 2
    bounds = [(len(PROMPT), middle), (middle, len(ids))]
    parts = [Segment(start=a, stop=b, span_id=f"{rollout.rollout_id}/{i}") for i, (a, b) in enumerate(bounds)]
    grouped = [parts] if rows == 1 else [[part] for part in parts]

    def row(branch: int, own: list[Segment]) -> Row:
        stop = own[-1].stop
        is_own = [any(part.start <= i < part.stop for part in own) for i in range(stop)]
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
    rows_of = tuple(row(i, own) for i, own in enumerate(grouped))
    return Episode(rollout=rollout, attempt=None, reward=reward, transitions=calls, rows=rows_of)


def config(**keys: Any) -> dict[str, Any]:
    """Return a small configuration; names such as `actor.ppo_epochs` are put below `actor_rollout_ref`."""
    nested: dict[str, Any] = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"actor": {"optim": {"lr": 3e-3}}, "rollout": {"n": 4}},
        "trainer": {"total_training_steps": 3},
    }
    if "estimator" in keys:  # which is given in place of VERL's key
        del nested["algorithm"]
    for name, value in keys.items():
        path = name.split(".")
        path = path if path[0] in {*nested, "algorithm", "critic", "reward", *OWN} else ["actor_rollout_ref", *path]
        level = nested
        for part in path[:-1]:
            level = level.setdefault(part, {})
        level[path[-1]] = value
    return nested


def scenario(model_dir: Path, world: World | None = None, **keys: Any) -> AlgorithmScenario:
    """Return a scenario that runs the algorithm with a small configuration in a world."""
    return AlgorithmScenario(
        make=lambda: VERL(threads=1, **config(**keys)),
        play=(world or World()).play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )
