"""From samples to the batches that VERL's engine reads: updates that keep rollouts whole, micro-batches, jagged rows.

T is the length of a row, R of its response.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from agl_algo_verl.typed import integers, ragged, verl_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict
    from torch import Tensor

    from agl_algo_verl.rows import RowSample


def updates(
    samples: Sequence[RowSample], rollouts: Sequence[tuple[str, int]], *, tasks: int
) -> list[tuple[list[RowSample], int]]:
    """Cut a step into updates of `tasks` tasks: the rows of each and the number of its rollouts.

    Rollouts whose rows were all left out count; an update without rows is left out.
    """
    parts: dict[int, tuple[list[RowSample], int]] = {}
    for _, group in rollouts:
        rows, count = parts.get(group // tasks, ([], 0))
        parts[group // tasks] = (rows, count + 1)
    for sample in samples:
        parts[sample.group // tasks][0].append(sample)
    return [part for _, part in sorted(parts.items()) if part[0]]


def per_rollout(samples: Sequence[RowSample]) -> list[RowSample]:
    """Scale advantages so that a mean over the tokens of each row becomes one over the tokens of its rollout.

    VERL's losses are proportional to a positive factor of the advantages, so this is exact.
    """
    tokens: Counter[str] = Counter()
    for sample in samples:
        tokens[sample.rollout] += sample.trained_tokens
    return [replace(s, advantages=s.advantages * (s.trained_tokens / tokens[s.rollout])) for s in samples]


def fill_up(samples: Sequence[RowSample], *, multiple: int) -> list[RowSample]:
    """Append copies without a trained token until the number of rows is a multiple; they change no sum."""
    missing = -len(samples) % multiple
    return [*samples, *(replace(samples[-1], mask=torch.zeros_like(samples[-1].mask)) for _ in range(missing))]


def micro_batched(
    samples: Sequence[RowSample], *, rows: int | None, tokens: int, device: torch.device, **options: Any
) -> TensorDict:
    """Return a batch on a device that VERL cuts into micro-batches of `rows` rows, or of at most `tokens` tokens.

    VERL refuses a budget below the longest row, so that a row beyond it comes alone.
    """
    sizes: dict[str, Any] = {
        "use_dynamic_bsz": rows is None,
        "max_token_len_per_gpu": max(tokens, *(len(s.ids) for s in samples)),
    }
    if rows is not None:
        samples = fill_up(samples, multiple=rows)
        sizes["micro_batch_size_per_gpu"] = rows
    return cast("Any", batch(samples, **sizes, **options)).to(device)


def batch(samples: Sequence[RowSample], **options: Any) -> TensorDict:
    """Return rows as VERL's engine reads them, ragged; `options` are VERL's settings for this batch."""
    tensors: dict[str, Tensor] = {
        "input_ids": ragged([s.ids for s in samples]),
        "position_ids": ragged([torch.arange(len(s.ids)) for s in samples]),
        "prompts": ragged([s.ids[: s.prompt] for s in samples]),
        "responses": ragged([s.ids[s.prompt :] for s in samples]),
        "response_mask": ragged([s.mask.long() for s in samples]),
        "loss_mask": ragged([s.mask.long() for s in samples]),
        "advantages": ragged([s.advantages for s in samples]),
        "old_log_probs": ragged([s.behaviour if s.old is None else s.old for s in samples]),
        "temperature": torch.tensor([s.temperature for s in samples], dtype=torch.float32),
    }
    for name, found in {
        "ref_log_prob": [s.reference for s in samples if s.reference is not None],
        "values": [s.values for s in samples if s.values is not None],
        "returns": [s.returns for s in samples if s.returns is not None],
    }.items():
        if len(found) == len(samples):
            tensors[name] = ragged(found)
    if "is_threshold" in options:
        threshold = options.pop("is_threshold")
        tensors["rollout_is_weights"] = ragged([importance(s, threshold) for s in samples])
    return verl_part("verl.utils.tensordict_utils:get_tensordict")(tensor_dict=tensors, non_tensor_dict=options)


def responses(found: Any, samples: Sequence[RowSample]) -> list[Tensor]:
    """Return what a model said before each token of the responses, [R] per sample on the CPU, of jagged [T] rows."""
    values, offsets = found.values().float().cpu(), integers(found.offsets())
    return [values[start + s.prompt - 1 : start + len(s.ids) - 1] for s, start in zip(samples, offsets, strict=False)]


def importance(sample: RowSample, threshold: float) -> Tensor:
    """Truncated importance weights of the engine's over the recorded probabilities, [R]."""
    old_R = sample.behaviour if sample.old is None else sample.old
    return torch.exp(old_R - sample.behaviour).clamp(max=threshold)
