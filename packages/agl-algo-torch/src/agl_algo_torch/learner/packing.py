"""Runs several rows as a single long row, without padding, in models that allow it.

Only attention lets the tokens of different rows affect each other. transformers looks attention functions up by name:
the one registered here cuts queries, keys and values at the ends of the rows and gives each row to torch's own causal
attention. This costs as much as the rows alone and needs no mask; a block-diagonal mask would grow with the square of
all tokens. Position ids count from 0 in every row.

`pack` tries a model out: rows that are packed must give the same states as rows that run alone. Models that mix tokens
in other ways (state-space layers, sliding windows, positions that cannot be set) get padded rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from agl_algo_torch.learner.model import computed_dtype, computing
from agl_algo_torch.learner.scoring import bare, trunk
from agl_algo_torch.learner.typed_torch import split_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

_PACKED = "agl_packs_rows"
"""Name of an attribute that is true for a model that accepts packed rows."""

_ATTENTION = "agl_rows"
"""Name under which this module registers its attention function in transformers."""


def packs_rows(model: nn.Module) -> bool:
    """Return true if `pack` has found that the model accepts packed rows."""
    return getattr(model, _PACKED, False)


@torch.no_grad()
def pack(model: nn.Module) -> str:
    """Prepare a Hugging Face causal LM for packed rows; returns `""`, or a notice to show if that is impossible.

    Passes over other inputs give the same outputs as before. A model that cannot take packed rows is left unchanged. So
    is one on a GPU: there the attention of each row is started by itself, and an H100 trained 1.4 times as fast with
    padded rows.
    """
    base = bare(model)
    if next(model.parameters()).device.type == "cuda":
        return ""
    is_packed = _is_plain(base) and _takes(base, model)
    setattr(model, _PACKED, is_packed)
    if is_packed:
        return ""
    return (
        f"the rows of {type(base).__name__} cannot be packed, because its attention is not the ordinary causal one, so "
        "each forward pass pads them to its longest row and token_budget counts the padding"
    )


def packed_inputs(ids_N: Tensor, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the model inputs for a pass over packed rows; `ids_N` has all tokens, `lengths` the rows' lengths."""
    positions_N = torch.cat([torch.arange(length, device=ids_N.device) for length in lengths])
    # transformers passes a mask of four dimensions on as it is, instead of making one of [N, N]; `_attention` ignores
    # it.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids_N.device)
    return {
        "input_ids": ids_N[None],
        "position_ids": positions_N[None],
        "attention_mask": no_mask,
        "agl_lengths": tuple(lengths),
        "use_cache": False,
    }


def _is_plain(base: Any) -> bool:
    """Return true if every layer uses torch's attention over all earlier tokens."""
    if not hasattr(base, "config") or _attention_of(base) not in ("sdpa", _ATTENTION):
        return False
    # Imported here, because it imports transformers, which takes seconds, and a check of settings needs neither.
    from agl_algo_torch.serving.kvcache import has_sliding_window

    config: Any = base.config.get_text_config()
    return not has_sliding_window(base) and getattr(config, "attention_chunk_size", None) is None


def _attention_of(base: Any) -> str:
    """Return the name of the attention function of the language model."""
    return base.config.get_text_config()._attn_implementation


def _set_attention(base: Any, name: str) -> None:
    """Set the attention function of the language model; a vision tower keeps its own, which sees whole pictures."""
    has_tower = base.config.get_text_config() is not base.config
    base.set_attn_implementation({"text_config": name} if has_tower else name)


def _takes(base: Any, model: nn.Module) -> bool:
    """Install the attention function, and return true if packed rows give the same states as separate rows.

    If they do not, the model's own attention is restored.
    """
    _register()
    before = _attention_of(base)
    _set_attention(base, _ATTENTION)
    try:
        is_taken = _attention_of(base) == _ATTENTION and _agrees(model)
    except (TypeError, ValueError, RuntimeError):  # the model takes no position ids, or none of our arguments
        is_taken = False
    if not is_taken:
        _set_attention(base, before)
    return is_taken


def _agrees(model: nn.Module) -> bool:
    device = next(model.parameters()).device
    network, vocabulary = trunk(model), bare(model).config.get_text_config().vocab_size
    rows = [torch.arange(start, start + size, device=device) % vocabulary for start, size in ((1, 5), (2, 7), (1, 3))]
    with computing(model):
        packed_N_H = network(**packed_inputs(torch.cat(rows), [len(row) for row in rows]))[0]
        alone = [network(input_ids=row[None], use_cache=False)[0] for row in rows]
    expected_N_H = torch.cat(alone)
    # If rows affect one another, the difference is as large as the states themselves. A master gives float32 states
    # that it computed in half precision, where a product may round differently for another number of rows.
    tolerance = 1e-4 if computed_dtype(model) == torch.float32 else 5e-2
    scale = float(expected_N_H.float().abs().max())
    return float((packed_N_H - expected_N_H).float().abs().max()) <= tolerance * scale


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    cast("Any", AttentionInterface).register(_ATTENTION, _attention)
    cast("Any", AttentionMaskInterface).register(_ATTENTION, cast("Any", masking_utils).sdpa_mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    agl_lengths: Sequence[int] = (),
    **options: Any,
) -> tuple[Tensor, None]:
    """Apply transformers' attention to each packed row separately; without `agl_lengths`, to the whole batch as usual.

    With `agl_lengths` queries, keys and values are [1, heads, N, head_dim], and the result is [1, N, heads, head_dim].
    """
    from transformers.integrations import sdpa_attention

    whole: Callable[..., tuple[Tensor, None]] = cast("Any", sdpa_attention).sdpa_attention_forward
    if not agl_lengths:
        return whole(module, query, key, value, attention_mask, **options)
    rows = zip(*(split_sizes(part, agl_lengths, dim=2) for part in (query, key, value)), strict=True)
    return torch.cat([whole(module, q, k, v, None, **options)[0] for q, k, v in rows], dim=1), None
