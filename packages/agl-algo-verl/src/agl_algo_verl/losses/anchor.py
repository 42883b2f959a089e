"""Holds agents that share the weights in training, but are not trained themselves, near where they began.

An update on one agent's calls changes the answers of every agent with the same weights. So each update adds to its loss

    anchor_coef * mean over tokens of k3,    k3 = exp(d) - d - 1,    d = log pi_ref(y_t) - log pi(y_t)

over the tokens that the other agents' calls sampled in the rollouts of the update (`loss_worker.anchored`). pi_ref is
the policy from which training was opened. The anchor is the same as in `grpo` and `ppo` of agl-algo-torch.

Each such call is a separate row without a trained token, so that it contributes to no other term, count or total.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agl_algo_verl.rows.rows import RowSample
from agl_algo_verl.typed import from_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agl.schemas import Episode, Transition
    from agl_algo_verl.settings.settings import VerlSettings


def held_rows(
    groups: Sequence[Sequence[Episode]], *, policy: str, settings: VerlSettings
) -> tuple[list[RowSample], dict[str, float]]:
    """Return a row for each call that the policy answered for an untrained agent, and metrics to log.

    If `anchor_coef` is 0, no row is returned. Calls longer than the configured lengths are left out and counted.
    """
    if not settings.anchor_coef:
        return [], {}
    data, rows, too_long = settings.data, list[RowSample](), 0
    calls = [(place, call) for place, group in enumerate(groups) for each in group for call in each.transitions]
    for place, call in calls:
        if not _is_held(call, policy):
            continue
        row = _row(call, group=place)
        if row.prompt > data.max_prompt_length or len(row.mask) > data.max_response_length:
            too_long += 1
        else:
            rows.append(row)
    return rows, {"anchor_too_long": float(too_long)} if too_long else {}


def _is_held(call: Transition, policy: str) -> bool:
    """Return true if the policy answered the call with token ids, but its agent is not selected for training."""
    return call.reject == "not_selected" and call.policy == policy and bool(call.prompt_ids and call.response_ids)


def _row(call: Transition, *, group: int) -> RowSample:
    length = len(call.response_ids) // 4  # packed as int32
    return RowSample(
        rollout=call.rollout_id,
        group=group,
        ids=from_bytes(call.prompt_ids + call.response_ids, "<i4").long(),
        mask=torch.zeros(length, dtype=torch.bool),
        advantages=torch.zeros(length),
        behaviour=torch.zeros(length),  # the anchor does not read it
        temperature=call.temperature or 1.0,
        held=torch.ones(length, dtype=torch.bool),
    )
