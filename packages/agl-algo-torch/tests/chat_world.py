"""A world of conversations in ChatML: two calls per rollout on one row, with feedback about every bad answer."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from agl.schemas import Episode, Reward, Rollout, Row, Segment, Transition, Weights, pack_floats, pack_ids
from agl_algo_torch.learner.model import load_model

if TYPE_CHECKING:
    from agl_testing.conformance.bench import RolloutOrder

TOKENS = 2


def good_tokens(response: list[int]) -> float:
    """Return 1 if the first token is in the upper half of the vocabulary, else 0."""
    return float(response[0] >= 128)


class ChatWorld:
    """Plays rollouts of two calls with the live weights; with `remarks` a bad rollout gets feedback."""

    def __init__(self, *, remarks: bool = True, temperature: float = 1.0) -> None:
        self.remarks, self.temperature = remarks, temperature
        self.value_of = good_tokens
        self._models: dict[tuple[str, str], Any] = {}
        self._next: dict[tuple[int, ...], torch.Tensor] = {}  # log-probabilities after a prompt, of the loaded model

    def play(self, order: RolloutOrder) -> Episode:
        weights = order.resources["llm"]
        assert isinstance(weights, Weights)
        generator = torch.Generator().manual_seed(zlib.crc32(order.rollout.rollout_id.encode()))
        key = (weights.uri, order.rollout.resources["llm"])
        if key not in self._models:
            self._models, self._next = {key: _loaded(weights)}, {}
        model, tokenizer = self._models[key]
        ids = _ids(tokenizer, [{"role": "user", "content": order.rollout.task["question"]}])
        parts: list[tuple[int, int]] = []
        logprobs = [0.0] * len(ids)
        for turn in range(2):
            if turn:
                more = tokenizer("<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
                ids += more
                logprobs += [0.0] * len(more)
            start = len(ids)
            for _ in range(TOKENS):
                token, logprob = self._draw(model, ids, generator)
                ids.append(token)
                logprobs.append(logprob)
            parts.append((start, len(ids)))
        return self._episode(order.rollout, ids, logprobs, parts)

    @torch.no_grad()
    def _draw(self, model: Any, ids: list[int], generator: torch.Generator) -> tuple[int, float]:
        if tuple(ids) not in self._next:
            logits_V = model(input_ids=torch.tensor([ids])).logits[0, -1]
            self._next[tuple(ids)] = (logits_V / self.temperature).log_softmax(0)
        logp_V = self._next[tuple(ids)]
        token = int(torch.multinomial(logp_V.exp(), 1, generator=generator))
        return token, float(logp_V[token])

    def _episode(
        self, rollout: Rollout, ids: list[int], logprobs: list[float], parts: list[tuple[int, int]]
    ) -> Episode:
        name = rollout.rollout_id
        value = self.value_of(ids[slice(*parts[0])])
        remark = "the first token was low" if self.remarks and not value else ""
        calls = tuple(
            Transition(
                rollout_id=name,
                attempt_id=rollout.attempt_id,
                span_id=f"{name}/{turn}",
                turn=turn,
                branch=0,
                prompt_ids=pack_ids(ids[:start]),
                response_ids=pack_ids(ids[start:stop]),
                logprobs=pack_floats(logprobs[start:stop]),
                temperature=self.temperature,
            )
            for turn, (start, stop) in enumerate(parts)
        )
        row = Row(
            rollout_id=name,
            attempt_id=rollout.attempt_id,
            group_id=rollout.group_id,
            branch=0,
            ids=pack_ids(ids),
            mask=bytes(int(any(a <= i < b for a, b in parts)) for i in range(len(ids))),
            logprobs=pack_floats(logprobs),
            segments=tuple(
                Segment(start=a, stop=b, span_id=call.span_id) for (a, b), call in zip(parts, calls, strict=True)
            ),
        )
        return Episode(
            rollout=rollout,
            attempt=None,
            reward=value,
            rewards=(Reward(value=value, source="evaluator", feedback=remark),),
            transitions=calls,
            rows=(row,),
        )


def _ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text)["input_ids"])


def _loaded(weights: Weights) -> tuple[Any, Any]:
    loaded = load_model(weights.uri if weights.format == "hf" else weights.base_model, device="cpu")
    if weights.format == "hf":
        return loaded.model, loaded.tokenizer
    from peft import PeftModel

    return PeftModel.from_pretrained(loaded.model, weights.uri), loaded.tokenizer
