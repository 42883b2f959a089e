"""Importance weights and rejection by VERL's keys: VERL's own numbers, and the updates of agl-algo-torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl_algo_verl.losses.correction import OPTIONS, Correction, corrected, correction_metrics
from agl_algo_verl.rows.rows import RowSample
from agl_algo_verl.settings.ray import read_ray_settings
from agl_algo_verl.settings.settings import read_settings
from agl_objectives.importance import Importance

from .test_equality import draw, pad, rows
from .test_inproc import train
from .test_losses import MICRO, Update, by_torch, by_verl, other, policy, policy_objective, update_of
from .world import World, config

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["other", "policy"]

HOME = "algorithm.rollout_correction"


def correction(**keys: Any) -> Correction:
    """Return the correction that VERL's keys of this group describe."""
    return read_settings(config(**{f"{HOME}.{name}": value for name, value in keys.items()}))[0].correction


def samples_of(masks: list[list[bool]], old_B_R: torch.Tensor, behaviour_B_R: torch.Tensor) -> list[RowSample]:
    """Return one rollout, of a single row, for each mask."""
    return [
        RowSample(
            rollout=f"r{index}",
            group=0,
            ids=torch.zeros(len(mask) + 1, dtype=torch.int64),
            mask=torch.tensor(mask),
            advantages=torch.ones(len(mask)),
            behaviour=behaviour_B_R[index, : len(mask)],
            old=old_B_R[index, : len(mask)],
            temperature=1.0,
        )
        for index, mask in enumerate(masks)
    ]


THRESHOLDS = {"k1": "0.5_1.6", "k2": "0.3", "k3": "0.4"}
SEVERAL = "token_k1, seq_mean_k3,seq_max_k2"


@pytest.mark.parametrize("option", [*OPTIONS, SEVERAL])
@settings(max_examples=15)
@given(masks=rows, seed=st.integers(0, 2**31))
def test_rejected_tokens_are_those_of_verls_function(option: str, masks: list[list[bool]], seed: int) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    old_B_R, away_B_R = draw(masks, seed, torch.float64, count=2)
    behaviour_B_R = old_B_R + 0.6 * away_B_R
    mask_B_R = pad([torch.tensor(mask) for mask in masks])
    threshold = "0.5_1.6,0.3,0.9" if option == SEVERAL else THRESHOLDS[option[-2:]]
    theirs, _ = compute_rollout_rejection_mask(
        old_B_R - behaviour_B_R, mask_B_R.double(), rollout_rs=option, rollout_rs_threshold=threshold
    )
    found = corrected(
        samples_of(masks, old_B_R, behaviour_B_R), correction(rollout_rs=option, rollout_rs_threshold=threshold)
    )
    for row, kept_R in zip(found, theirs.bool(), strict=True):
        assert kept_R[: len(row.mask)].tolist() == row.kept.tolist()
    expected = 1.0 - float(theirs.sum()) / float(mask_B_R.sum())
    shares = correction_metrics(found, correction(rollout_rs=option, rollout_rs_threshold=threshold))
    assert expected == pytest.approx(shares["rejected_share"], abs=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.5, "1.5", "0.6_1.5"])
@settings(max_examples=15)
@given(masks=rows, seed=st.integers(0, 2**31))
def test_weights_are_those_of_verls_function(level: str, threshold: Any, masks: list[list[bool]], seed: int) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    old_B_R, away_B_R = draw(masks, seed, torch.float64, count=2)
    behaviour_B_R = old_B_R + 0.4 * away_B_R
    mask_B_R = pad([torch.tensor(mask) for mask in masks])
    chosen = correction(rollout_is=level, rollout_is_threshold=threshold)
    drawn = corrected(samples_of(masks, old_B_R, behaviour_B_R), chosen)
    assume(any(bool(row.importance.any()) for row in drawn if row.importance is not None))  # else VERL divides by zero
    theirs, metrics = compute_rollout_correction_weights(
        old_B_R - behaviour_B_R, mask_B_R.double(), rollout_is=level, rollout_is_threshold=threshold
    )
    for row, weight_R in zip(drawn, theirs, strict=True):
        assert row.importance is not None
        torch.testing.assert_close(weight_R[: len(row.mask)], row.importance, atol=1e-12, rtol=1e-12)
    share = correction_metrics(drawn, chosen)["effective_share"]
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(share, rel=1e-6)


@settings(max_examples=15)
@given(masks=rows, seed=st.integers(0, 2**31))
def test_weights_over_their_mean_are_those_of_verls_function(masks: list[list[bool]], seed: int) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    old_B_R, away_B_R = draw(masks, seed, torch.float64, count=2)
    behaviour_B_R = old_B_R + 0.4 * away_B_R
    mask_B_R = pad([torch.tensor(mask) for mask in masks])
    theirs, _ = compute_rollout_correction_weights(
        old_B_R - behaviour_B_R, mask_B_R.double(), rollout_is="sequence", rollout_is_batch_normalize=True
    )
    chosen = correction(rollout_is="sequence", rollout_is_batch_normalize=True)
    for row, weight_R in zip(corrected(samples_of(masks, old_B_R, behaviour_B_R), chosen), theirs, strict=True):
        assert row.importance is not None
        torch.testing.assert_close(weight_R[: len(row.mask)], row.importance, atol=1e-7, rtol=1e-7)


IMPORTANCE: dict[str, tuple[dict[str, Any], Importance]] = {
    "token": ({"rollout_is": "token", "rollout_is_threshold": 1.2}, Importance(cap=1.2)),
    "icepop": (
        {"rollout_is": "token", "rollout_is_threshold": "0.7_1.4"},
        Importance(cap=1.4, floor=0.7, mode="mask"),
    ),
    "sequence": ({"rollout_is": "sequence", "rollout_is_threshold": 1.3}, Importance(cap=1.3, level="sequence")),
    "normalised": (
        {"rollout_is": "sequence", "rollout_is_threshold": "0.1_9.0", "rollout_is_batch_normalize": True},
        Importance(cap=9.0, floor=0.1, level="sequence", mode="mask", is_normalised=True),
    ),
}


def weighed(update: Update, importance: Importance) -> Update:
    """Return the update with the importance weights that agl-algo-torch computes over whole rollouts."""
    objective = policy_objective(importance=importance)
    found = objective._with_importance(update.torch) if importance.needs_rollouts else update.torch
    return replace(update, torch=found)


@pytest.mark.parametrize(
    ("name", "loss", "micro"),
    [
        *((name, "ppo-clip", "tokens") for name in IMPORTANCE),
        ("token", "dro", "rows"),
        ("icepop", "verls", "tokens"),
        ("normalised", "verls", "rows"),
    ],
)
def test_updates_are_those_of_the_torch_engine(
    name: str, loss: str, micro: str, policy: Any, other: Any, model_dir: Path
) -> None:
    keys, importance = IMPORTANCE[name]
    update = weighed(update_of(policy, other, seed=5), importance)
    params: dict[str, Any] = {"beta": 0.3} if loss == "dro" else {"clip_low": 0.2, "clip_high": 0.2}
    own = "ppo-clip" if loss == "verls" else loss
    expected = by_torch(update, policy, budget=20, loss=own, loss_params=params, importance=importance)
    chosen = {"actor.clip_ratio_c": 1e9} if loss == "verls" else {"loss": loss, "loss_params": params}
    update = replace(update, verl=corrected(update.verl, correction(**keys)))
    value, gradient, _ = by_verl(update, model_dir, **chosen, **MICRO[micro])
    assert expected[0] == pytest.approx(value, abs=1e-6)
    assert any(bool(values.any()) for values in gradient.values())
    for part, values in expected[1].items():
        torch.testing.assert_close(values, gradient[part], atol=1e-6, rtol=1e-6, msg=part)


@pytest.mark.parametrize("loss", ["ppo-clip", "gspo", "verls"])
def test_rejected_tokens_have_no_part_in_the_loss_and_stay_in_its_denominator(
    loss: str, policy: Any, other: Any, model_dir: Path
) -> None:
    update = update_of(policy, other, seed=6)
    found = corrected(update.verl, correction(rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4"))
    rejected = sum(row.trained_tokens - row.kept_tokens for row in found)
    total = sum(row.trained_tokens for row in found)
    assert 0 < rejected < total
    masked: list[Any] = []
    for row, verl_row in zip(update.torch, found, strict=True):
        mask = torch.cat([torch.zeros(len(row.ids) - len(verl_row.mask), dtype=torch.bool), verl_row.kept])
        masked.append(replace(row, mask=mask, advantages=row.advantages * mask))
    masked = [row for row in masked if row.trained_tokens]
    own = {"loss": "gspo"} if loss == "gspo" else {"loss": "ppo-clip", "loss_params": {"clip_high": 0.2}}
    options: dict[str, Any] = {"loss_params": {}, "aggregation": "token", **own}
    value, expected = by_torch(replace(update, torch=masked), policy, budget=20, **options)
    share = (total - rejected) / total  # of the tokens that the mean is over
    keys: dict[str, Any] = {"actor.clip_ratio_c": 1e9} if loss == "verls" else own
    keys = {**keys, "actor.loss_agg_mode": "token-mean", **MICRO["tokens"]}
    whole, gradient, _ = by_verl(replace(update, verl=found), model_dir, **keys)
    assert value * share == pytest.approx(whole, abs=1e-6)
    for part, values in expected.items():
        torch.testing.assert_close(values * share, gradient[part], atol=1e-6, rtol=1e-6, msg=part)


def test_weights_and_rejection_are_taken_over_all_rows_of_a_rollout(policy: Any, other: Any) -> None:
    update = update_of(policy, other, seed=7)
    found = corrected(update.verl, correction(rollout_is="sequence", rollout_is_threshold=1e9))
    for rollout in "abc":
        rows_of = [row for row in found if row.rollout == rollout]
        log = sum(float((row.old - row.behaviour)[row.mask].sum()) for row in rows_of if row.old is not None)
        weights = {float(w) for row in rows_of if row.importance is not None for w in row.importance[row.mask]}
        assert [pytest.approx(torch.tensor(log).exp().item(), rel=1e-4)] * len(weights) == list(weights)
    chosen = correction(rollout_rs="seq_max_k2", rollout_rs_threshold=0.3)
    for rollout in "abc":
        parts = [row for row in corrected(update.verl, chosen) if row.rollout == rollout]
        assert len({row.kept_tokens == 0 for row in parts}) == 1


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"rollout_is": "sequence"}, "effective_share"),
        ({"rollout_is": "token", "rollout_is_threshold": "0.9_1.1"}, "tis_masked"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": 1.0}, "rejected_share"),
        ({"bypass_mode": True}, "clipped_low"),
    ],
    ids=str,
)
def test_training_reports_what_it_corrected(keys: dict[str, Any], name: str, model_dir: Path, tmp_path: Path) -> None:
    settings = {f"{HOME}.{key}": value for key, value in keys.items()} | {"trainer.total_training_steps": 1}
    (metrics,), _ = train(tmp_path, model_dir, World(rows=2, bias=0.3), **settings)
    assert name in metrics
    assert metrics["logprob_gap"] == pytest.approx(0.0 if "bypass_mode" in keys else 0.3, abs=1e-4)
    if name == "tis_masked":
        assert 1.0 == metrics[name]
        assert 1.0 == metrics["updates_skipped"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0}, r"'token_k4', which VERL does not know; did you"),
        ({"rollout_rs": "token_k2"}, r"rollout_rs_threshold = None; give at least one option"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_1.0"}, r"'0\.1_1\.0' for token_k2; give one upper"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, r"'0\.5' for token_k1; give an upper bound above 1"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,1"}, r"one for each"),
        ({"rollout_rs_threshold": 1.0}, r"rollout_rs_threshold = 1\.0: it is ignored without rollout_rs"),
        ({"rollout_is": "token", "rollout_is_threshold": "many"}, r"rollout_is_threshold has 'many'; give a number"),
        ({"rollout_is": "token", "rollout_is_threshold": "5.0_0.5"}, r"'5\.0_0\.5'; give a number above 0, or two"),
        ({"rollout_is_batch_normalize": True}, r"ignored without rollout_is"),
        ({"rollout_is": "token", "bypass_mode": True}, r"nothing to correct"),
        ({"bypass_mode": True, "loss_type": "reinforce"}, r"loss_type = 'reinforce'.*cispo"),
    ],
    ids=str,
)
def test_corrections_that_mean_nothing_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        correction(**keys)


def test_a_critic_and_the_cluster_refuse_what_they_cannot_correct() -> None:
    rejects = {f"{HOME}.rollout_rs": "token_k2", f"{HOME}.rollout_rs_threshold": 1.0}
    with pytest.raises(ConfigError, match=r"rollout_rs = 'token_k2': it would leave tokens out of the sums"):
        read_settings(config(**rejects, **{"algorithm.adv_estimator": "gae"}))
    with pytest.raises(ConfigError, match=r"always the engine's"):
        read_ray_settings(config(**{f"{HOME}.bypass_mode": True, "rollout.name": "agl_hf"}))
