"""Runs several rows as a single long row, without padding, in models that allow it.

Only attention lets the tokens of different rows affect each other. transformers looks attention functions up by name:
the one registered here gives each row its own causal attention. This costs as much as the rows alone and needs no mask;
a block-diagonal mask would grow with the square of all tokens. Position ids count from 0 in every row.

On a GPU in half precision, one kernel computes all rows (`varlen_attn`, torch 2.11). Elsewhere queries, keys and values
are cut at the ends of the rows, and torch's ordinary attention runs once per row.

`pack` tries a model out: rows that are packed must give the same states as rows that run alone. Models that mix tokens
in other ways (state-space layers, sliding windows, positions that cannot be set) get padded rows.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from agl_algo_torch.learner.model import computing
from agl_algo_torch.learner.scoring import bare, trunk
from agl_algo_torch.learner.typed_torch import split_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

_PACKED = "agl_packs_rows"
"""Name of an attribute that is true for a model that accepts packed rows."""

_ATTENTION = "agl_rows"
"""Name under which this module registers its attention function in transformers."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The lengths of B packed rows, and their borders among the tokens, [B + 1], on the tokens' device."""

    lengths: tuple[int, ...]
    ends: Tensor


def packs_rows(model: nn.Module) -> bool:
    """Return true if `pack` has found that the model accepts packed rows."""
    return getattr(model, _PACKED, False)


@torch.no_grad()
def pack(model: nn.Module) -> str:
    """Prepare a Hugging Face causal LM for packed rows; returns `""`, or a notice to show if that is impossible.

    Passes over other inputs give the same outputs as before. A model that cannot take packed rows is left unchanged.
    """
    base = bare(model)
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
    device = ids_N.device
    positions_N = torch.cat([torch.arange(length) for length in lengths]).to(device)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    # transformers passes a mask of four dimensions on as it is, instead of making one of [N, N]; `_attention` ignores
    # it.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    return {
        "input_ids": ids_N[None],
        "position_ids": positions_N[None],
        "attention_mask": no_mask,
        "agl_rows": _Rows(tuple(lengths), ends),
        "use_cache": False,
    }


def _is_plain(base: Any) -> bool:
    """Return true if every layer uses torch's attention over all earlier tokens."""
    config: Any = getattr(base, "config", None)
    if config is None or config._attn_implementation not in ("sdpa", _ATTENTION):
        return False
    # Imported here, because it imports transformers, which takes seconds, and a check of settings needs neither.
    from agl_algo_torch.serving.kvcache import has_sliding_window

    return not has_sliding_window(base) and getattr(config.get_text_config(), "attention_chunk_size", None) is None


def _takes(base: Any, model: nn.Module) -> bool:
    """Install the attention function, and return true if packed rows give the same states as separate rows.

    If they do not, the model's own attention is restored.
    """
    _register()
    before = base.config._attn_implementation
    base.set_attn_implementation(_ATTENTION)
    try:
        is_taken = base.config._attn_implementation == _ATTENTION and _agrees(model)
    except (TypeError, ValueError, RuntimeError):  # the model takes no position ids, or none of our arguments
        is_taken = False
    if not is_taken:
        base.set_attn_implementation(before)
    return is_taken


def _agrees(model: nn.Module) -> bool:
    device = next(model.parameters()).device
    network, vocabulary = trunk(model), bare(model).config.get_text_config().vocab_size
    rows = [torch.arange(start, start + size, device=device) % vocabulary for start, size in ((1, 5), (2, 7), (1, 3))]
    with computing(model):
        packed_N_H = network(**packed_inputs(torch.cat(rows), [len(row) for row in rows]))[0]
        alone = [network(input_ids=row[None], use_cache=False)[0] for row in rows]
    expected_N_H = torch.cat(alone)
    # If rows affect one another, the difference is as large as the states themselves.
    tolerance = 1e-4 if expected_N_H.dtype == torch.float32 else 2e-2
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
    agl_rows: _Rows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Apply transformers' attention to each packed row separately; without `agl_rows`, to the whole batch as usual.

    With `agl_rows` queries, keys and values are [1, heads, N, head_dim], and the result is [1, N, heads, head_dim].
    """
    from transformers.integrations import sdpa_attention

    whole: Callable[..., tuple[Tensor, None]] = cast("Any", sdpa_attention).sdpa_attention_forward
    if agl_rows is None:
        return whole(module, query, key, value, attention_mask, **options)
    at_once = _varlen()
    if at_once is not None and _suits(query, value):
        # Rotary embeddings leave float32 under autocast, which does not know this kernel; values are never rotated.
        q, k, v = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))  # [N, heads, head_dim]
        ends, longest = agl_rows.ends, max(agl_rows.lengths)
        causal = {"scale": options.get("scaling"), "window_size": (-1, 0)}
        return at_once(q, k, v, ends, ends, longest, longest, **causal)[None], None
    rows = zip(*(split_sizes(part, agl_rows.lengths, dim=2) for part in (query, key, value)), strict=True)
    return torch.cat([whole(module, q, k, v, None, **options)[0] for q, k, v in rows], dim=1), None


def _suits(query: Tensor, value: Tensor) -> bool:
    """Return true if the kernel for rows of different lengths takes these tensors."""
    size = value.shape[-1]
    return value.is_cuda and value.element_size() == 2 and query.shape[-1] == size <= 256 and size % 8 == 0


@cache
def _varlen() -> Callable[..., Tensor] | None:
    """Return torch's attention over rows of different lengths, with fewer heads for keys; None before torch 2.11."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known:
        return None
    shared: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
    return partial(cast("Any", varlen_attn), **shared)
