"""VERL's training worker with a loss of agl-objectives, or with updates of whole rollouts.

It trains in one process and in the workers of a cluster alike.

The name of the loss and its parameters travel in VERL's own configuration, as the text of `policy_loss.loss_mode`; for
VERL's own names the loss is VERL's. The loss of an update is

    sum_t w_t c_t loss_t / W  -  entropy_coeff * sum_t w_t H_t / W  +  kl_loss_coef * sum_t w_t KL_t / W

over its trained tokens and, if agents that share the weights are held (`losses/anchor.py`),

    + anchor_coef * sum_u k3_u / U

over their U tokens in the update; the second term is also added to VERL's own losses. w_t and W come with the rows,
because only agl knows which rows belong to one rollout. c_t is VERL's `rollout_is_weights`, if configured. FSDP takes
the mean of gradients over D ranks, so each rank's part is multiplied by D. Micro-batches add up.

A loss that compares tokens of several rows (`SurveyedLoss`) gets all tokens of the update beforehand: one more forward
pass, whose log-probabilities every rank sends to all others.

VERL cuts a step into updates after a number of rows, through the middle of a rollout. On a cluster the rows name their
update instead, as agl cut them, and a mean over sequences is a mean over the rollouts of the update. Every rank takes
part in every update, so a rank without a row of an update joins with a row that has no token, trained or held. An
update without a gradient (`ray/completion.py`) is skipped, because momentum would still move the weights.

Axes: B rows of a micro-batch, R tokens of the longest response, M trained tokens.
"""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from agl_algo_verl.losses.choice import PREFIX
from agl_algo_verl.losses.metrics import COUNTS
from agl_algo_verl.privates import use_rate_of_schedule, with_own_settings, without_update
from agl_algo_verl.ray.completion import SILENT, UPDATE
from agl_algo_verl.ray.schedule import found_schedule
from agl_algo_verl.rows.batches import per_row
from agl_algo_verl.typed import integers, ragged, verl_part
from agl_objectives.contract import SurveyedLoss, TokenBatch
from agl_objectives.kl import kl_estimate
from agl_objectives.registry import checked_terms, find_loss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tensordict import TensorDict
    from torch import Tensor

    from agl_objectives.registry import FoundLoss

WEIGHT, TOTAL, ROLLOUT, ROW = "agl_weight", "agl_total", "agl_rollout", "agl_row"
"""Batch fields with one number per row: weight w_t of its tokens, total W, number of its rollout, its own number."""

UPDATES, ROLLOUTS = "agl_updates", "agl_rollouts"
"""Batch fields: the number of updates in the step, and the number of rollouts in the row's update."""

ANCHOR, START, ANCHOR_COEF = "agl_anchor", "agl_start", "agl_anchor_coef"
"""Batch fields of held rows: 1 / U at each token and log pi_ref, ragged with [R] per row; and the anchor's weight."""

LIMIT = 20.0
"""Largest absolute value of a log-ratio, as in VERL."""

FOUND = "agl_found_"
"""Prefix of the batch fields with the results of a loss's survey; ragged, one vector [R] per row."""


def loss_of(mode: str) -> FoundLoss | None:
    """Return the loss of agl-objectives that a `loss_mode` names; None for VERL's own names."""
    if not mode.startswith(PREFIX):
        return None
    # The name travels as text, because VERL's configuration passes nothing else to its workers.
    named = json.loads(mode.removeprefix(PREFIX))
    return find_loss(named["loss"], named["params"])


class LossWorker(TrainingWorker):
    """VERL's `TrainingWorker`, whose policy may have a loss of agl-objectives."""

    _found: FoundLoss | None = None
    _moves_schedule = True
    _place = 0  # of the update in its step

    def set_loss_fn(self, loss_fn: Any) -> None:
        """Set the loss that the configuration in VERL's `ppo_loss` names, with the anchor's term for held rows."""
        config: Any = loss_fn.keywords["config"]
        policy = getattr(config, "policy_loss", None)
        self.loss_fn = loss_fn
        if policy is None:  # a critic has none
            return
        # None for `vanilla` and `gspo`, which remain VERL's own functions.
        self._found = loss_of(policy.loss_mode)
        # VERL's own loss, with the metrics that our losses report as well.
        own = partial(counted, loss_fn, config)
        if self._found is not None:
            own = partial(policy_loss, config=config, found=self._found)
        # The anchor's term comes last; it is 0 if no row is held.
        self.loss_fn = partial(anchored, own)

    def train_mini_batch(self, data: TensorDict) -> Any:
        """Do the updates to which the rows belong, once per epoch; a step with a single update is left to VERL."""
        # With a single update, VERL makes the mini-batch, which then has all rows.
        count = int(per_row(data, UPDATES)[0]) if UPDATES in cast("Any", data) else 1
        self._place = 0
        if count == 1:
            return super().train_mini_batch(data)
        pop: Any = verl_part("verl.utils.tensordict_utils:pop")
        # mu of PPO: how often each update is made. VERL would repeat the whole batch instead.
        epochs = int(pop(data, key="epochs", default=1))
        # VERL averages the list of a metric over the updates of a step.
        merged: dict[str, list[Any]] = {}
        for index in range(epochs * count):
            self._moves_schedule = index + 1 == epochs * count  # schedules count steps, so only the last update does
            self._place = index % count
            output: Any = super().train_mini_batch(self._update(data, self._place))
            found: Any = {} if output is None else verl_part("verl.utils.tensordict_utils:get")(output, "metrics")
            for name, values in found.items():
                merged.setdefault(name, []).extend(values)
        get_tensordict: Any = verl_part("verl.utils.tensordict_utils:get_tensordict")
        return get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": merged}) if merged else None

    def _update(self, data: TensorDict, number: int) -> TensorDict:
        """Return this rank's rows of update `number` as one of VERL's mini-batches."""
        # This rank's rows of the update; the other ranks have the rest.
        places = (per_row(data, UPDATE) == number).nonzero()[:, 0]
        select: Any = verl_part("verl.utils.tensordict_utils:index_select_tensor_dict")
        part: Any = select(data, places if len(places) else torch.tensor([0]))
        for name in () if len(places) else ("response_mask", "loss_mask", ANCHOR):
            if name in part:
                part[name] = ragged([torch.zeros_like(values_R) for values_R in _field(part, name).unbind()])
        # VERL counts its mini-batch over all ranks.
        rows = part.shape[0] * cast("Any", self).engine.get_data_parallel_size()  # VERL divides by the ranks again
        verl_part("verl.utils.tensordict_utils:assign_non_tensor")(
            part, mini_batch_size=rows, epochs=1, global_batch_size=int(per_row(part, ROLLOUTS)[0])
        )
        return part

    def train_batch(self, data: TensorDict) -> Any:
        """Do one update, after the survey if the loss has one.

        If the update has no gradient, only its passes run; weights and moments stay.
        """
        if not self._moves_schedule:
            verl_part("verl.utils.tensordict_utils:assign_non_tensor")(data, update_lr_scheduler=False)
        if self._found is not None and isinstance(self._found.call, SurveyedLoss):
            data = self._surveyed(data, self._found.call)
        silent: Any = verl_part("verl.utils.tensordict_utils:get")(data, SILENT, default=())
        is_silent = self._place in silent
        with warnings.catch_warnings():  # torch expects an update before each move, and VERL may have skipped the first
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)`")
            with without_update(cast("Any", self).engine) if is_silent else nullcontext():
                return super().train_batch(data)

    def _surveyed(self, data: TensorDict, loss: SurveyedLoss) -> TensorDict:
        """Return the batch with the results of the loss's survey, which reads the update's tokens on all ranks."""
        asked = cast("Any", data.copy())
        verl_part("verl.utils.tensordict_utils:assign_non_tensor")(asked, compute_loss=False, calculate_entropy=False)
        # log pi before the update; the survey compares it over all tokens of the update.
        answer: Any = self.infer_batch(asked)  # None on the ranks that share a row's tokens with another one
        own: dict[int, TokenBatch] = {}
        if answer is not None:
            logp_B_R = no_padding_2_padding(answer["log_probs"].to(_field(data, "responses").device), data).float()
            # Keyed by the row's number, so that all ranks use one order.
            own = by_row(tokens_of(data, logp_B_R))
        # Every rank computes the same result: the survey is a function of all tokens.
        found = surveyed_rows(_of_all_ranks(own), loss)
        surveyed = cast("Any", data.copy())
        lengths = integers(_field(data, "responses").offsets().diff())
        for name, parts in found.items():
            surveyed[FOUND + name] = _ragged_rows(parts, data, lengths=lengths)
        return surveyed


on_every_rank: Any = verl_part("verl.single_controller.base.decorator:register")(
    dispatch_mode=verl_part("verl.single_controller.base.decorator:Dispatch").ONE_TO_ALL
)
"""Decorator that lets VERL's trainer call a worker's method on all ranks at once."""


class _OfCluster:
    """Mixin for a cluster's training worker: it uses the run's schedule and settings instead of a checkpoint's."""

    _role = "policy"

    @on_every_rank
    def reset(self) -> None:
        """Load the model, with a schedule over all steps of the run, at the run's current position."""
        schedule = found_schedule()
        if schedule is not None:
            cast("Any", self).optimizer_config.total_training_steps = schedule.steps
        cast("Any", super()).reset()
        self._move()

    @on_every_rank
    def load_checkpoint(self, local_path: Any, hdfs_path: Any = None, del_local_after_load: bool = False) -> None:
        """Load weights, moments and random state from a checkpoint; learning rates and settings stay as configured."""
        with with_own_settings(cast("Any", self).engine):
            cast("Any", super()).load_checkpoint(local_path, hdfs_path, del_local_after_load)
        self._move()

    def _move(self) -> None:
        """Move the learning-rate schedule to the run's position."""
        schedule = found_schedule()
        if schedule is not None:
            use_rate_of_schedule(cast("Any", self).engine, place=getattr(schedule, self._role))


class ClusterWorker(_OfCluster, LossWorker):
    """A `LossWorker` on a cluster."""


class ClusterCritic(_OfCluster, TrainingWorker):
    """VERL's own worker for the critic on a cluster, which makes one update per step."""

    _role = "critic"


def policy_loss(
    config: Any, model_output: Any, data: TensorDict, dp_group: Any = None, *, found: FoundLoss
) -> tuple[Tensor, dict[str, Any]]:
    """Return a micro-batch's contribution to the update's loss, a scalar with gradient, and metrics.

    It replaces VERL's `ppo_loss` and has the same arguments; the module's docstring gives the formula. Raises
    ConfigError unless the loss returns one number per token.
    """
    del dp_group  # the weights of the rows are those of the whole update
    fields: Any = data
    logp_B_R = no_padding_2_padding(model_output["log_probs"], data)
    entropy = model_output.get("entropy", None)
    mask_B_R = _padded(data, "response_mask").bool()
    # H_t of the trained tokens, with gradient.
    entropy_M = None if entropy is None else no_padding_2_padding(entropy, data)[mask_B_R]
    tokens = tokens_of(data, logp_B_R)
    # Losses read entropies without their gradient; the bonus below uses the gradient.
    tokens = replace(tokens, entropy_M=None if entropy_M is None else entropy_M.detach())
    # loss_t of every trained token, [M].
    terms = checked_terms(found.entry.name, found.call(tokens), tokens.logp_M)
    loss_M = terms.loss_M
    if "rollout_is_weights" in fields:
        # c_t, the importance weight of the correction.
        loss_M = loss_M * _padded(data, "rollout_is_weights")[mask_B_R]
    share_M = tokens.weight_M / _per_token(data, TOTAL, mask_B_R) * float(fields["dp_size"])  # D w_t / W
    # sum_t w_t c_t loss_t / W of this micro-batch; micro-batches and ranks add up.
    loss = (share_M * loss_M).sum()
    metrics: dict[str, Any] = {"actor/pg_loss": _summed(loss)}
    if entropy_M is not None:
        bonus = (share_M * entropy_M).sum()
        # - entropy_coeff * sum_t w_t H_t / W
        loss = loss - config.entropy_coeff * bonus
        metrics["actor/entropy_loss"] = _summed(bonus)
    if config.use_kl_loss:
        # log pi_ref of the frozen reference.
        reference_M = _padded(data, "ref_log_prob")[mask_B_R]
        kl_penalty = verl_part("verl.trainer.ppo.core_algos:kl_penalty")
        kl = (share_M * kl_penalty(tokens.logp_M, reference_M, kl_penalty=config.kl_loss_type)).sum()
        # + kl_loss_coef * sum_t w_t KL_t / W, by VERL's estimate of the KL.
        loss = loss + config.kl_loss_coef * kl
        metrics |= {"kl_loss": _summed(kl), "kl_coef": config.kl_loss_coef}
    # D / M: metrics are means over the update's tokens, which VERL averages over ranks.
    per_token = float(fields["dp_size"]) / max(1, int(fields["batch_num_tokens"]))
    # -log rho_t; its mean is the k1 estimate of KL(pi_old || pi).
    away_M = (tokens.old_M - tokens.logp_M).detach()
    counts = {COUNTS + name: value for name, value in terms.counts.items()} | {"actor/ppo_kl": float(away_M.sum())}
    summed = {name: _summed(value * per_token) for name, value in counts.items()}
    return loss, metrics | summed | {"ratio_max": _peak(-away_M)}


def counted(
    loss_fn: Any, config: Any, model_output: Any, data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """Return VERL's own loss `loss_fn` for a micro-batch, with the metrics that losses of agl-objectives report.

    VERL's means over the tokens of a micro-batch become parts of a mean over the update's tokens, because micro-batches
    differ in size, and one with held rows only has no trained token.
    """
    loss, metrics = loss_fn(model_output=model_output, data=data, dp_group=dp_group)
    mask_B_R = _padded(data, "response_mask").bool()
    with torch.no_grad():
        log_B_R = no_padding_2_padding(model_output["log_probs"], data) - _padded(data, "old_log_probs")
        away_M, peak = log_B_R[mask_B_R], _peak(log_B_R[mask_B_R])
        advantages_M = _padded(data, "advantages")[mask_B_R]
        if config.policy_loss.loss_mode == "gspo":
            # log s of GSPO: the mean of log rho_t over the row's trained tokens, the same value at each of them.
            length_B = mask_B_R.sum(dim=1, keepdim=True).clamp(min=1)
            away_M = ((log_B_R * mask_B_R).sum(dim=1, keepdim=True) / length_B).expand(mask_B_R.shape)[mask_B_R]
        # rho_t, or s of GSPO.
        ratio_M = away_M.clamp(-LIMIT, LIMIT).exp()
        # Clipped below: a bad token that has already become unlikely has no gradient.
        low = (ratio_M < 1.0 - config.clip_ratio_low) & (advantages_M < 0)
        # Clipped above: a good token that has already become likely has no gradient.
        high = (ratio_M > 1.0 + config.clip_ratio_high) & (advantages_M > 0)
    per_token = float(cast("Any", data)["dp_size"]) / max(1, int(cast("Any", data)["batch_num_tokens"]))
    means = [name for name, value in metrics.items() if getattr(value, "aggregation", None) is AggregationType.MEAN]
    exact = {name: _summed(metrics[name].aggregate() * len(away_M) * per_token) for name in means}
    counts = {"clipped_low": int(low.sum()), "clipped_high": int(high.sum())}
    own = {COUNTS + name: _summed(count * per_token) for name, count in counts.items()}
    return loss, {**metrics, **exact, **own, "ratio_max": peak}


def anchored(loss_fn: Any, model_output: Any, data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """Return a micro-batch's contribution to the loss `loss_fn` plus the anchor's term, with the metrics of both."""
    loss, metrics = loss_fn(model_output=model_output, data=data, dp_group=dp_group)
    fields: Any = data
    if ANCHOR not in fields:
        return loss, metrics
    # 1 / U at the held tokens, 0 elsewhere.
    share_B_R = _padded(data, ANCHOR)
    held_B_R = share_B_R > 0
    logp_M = no_padding_2_padding(model_output["log_probs"], data)[held_B_R]
    # k3 = exp(d) - d - 1 with d = log pi_ref - log pi; it is never negative.
    kl_M = kl_estimate(logp_M, _padded(data, START)[held_B_R], kind="k3")
    kl = (share_B_R[held_B_R] * kl_M).sum() * float(fields["dp_size"])  # D k3 / U
    return loss + float(fields[ANCHOR_COEF]) * kl, {**metrics, "anchor_kl": _summed(kl)}


def tokens_of(data: TensorDict, logp_B_R: Tensor) -> TokenBatch:
    """Return the trained tokens of the batch in the form that losses take, with the results of a survey."""
    mask_B_R = _padded(data, "response_mask").bool()
    fields = [str(name) for name in cast("Any", data).keys()]  # noqa: SIM118 - a batch iterates over its rows
    names = [name for name in fields if name.startswith(FOUND)]
    return TokenBatch(
        logp_M=logp_B_R[mask_B_R],
        old_M=_padded(data, "old_log_probs")[mask_B_R],
        behaviour_M=_padded(data, "rollout_log_probs")[mask_B_R],
        advantages_M=_padded(data, "advantages")[mask_B_R],
        weight_M=_per_token(data, WEIGHT, mask_B_R),
        row_M=_per_token(data, ROW, mask_B_R),
        rollout_M=_per_token(data, ROLLOUT, mask_B_R),
        extras={name.removeprefix(FOUND): _padded(data, name)[mask_B_R] for name in names},
    )


def by_row(tokens: TokenBatch) -> dict[int, TokenBatch]:
    """Split tokens by row; returns the tokens of each row that has any, by row number, on the CPU without gradient."""
    # The tokens of a row are adjacent, so each run of equal numbers is a row.
    numbers, counts = cast("Any", torch).unique_consecutive(tokens.row_M, return_counts=True)
    sizes = integers(counts)
    split: list[Sequence[Tensor]] = [getattr(tokens, name).detach().cpu().split(sizes) for name in _VECTORS]
    parts = [_of_vectors([values[place] for values in split]) for place in range(len(sizes))]
    return dict(zip(integers(numbers), parts, strict=True))


def surveyed_rows(rows: Mapping[int, TokenBatch], loss: SurveyedLoss) -> dict[str, dict[int, Tensor]]:
    """Return the results of the loss's survey over all rows, by name and row number, with one number per token."""
    order = sorted(rows)  # the same on every rank, however rows were dealt out
    if not order:
        return {}
    # All M tokens of the update, row by row.
    whole = _of_vectors([torch.cat([getattr(rows[row], name) for row in order]) for name in _VECTORS])
    sizes = [len(rows[row].logp_M) for row in order]
    found: Mapping[str, Any] = loss.survey(whole)
    return {name: dict(zip(order, values_M.split(sizes), strict=True)) for name, values_M in found.items()}


_VECTORS = ("logp_M", "old_M", "behaviour_M", "advantages_M", "weight_M", "row_M", "rollout_M")


def _of_vectors(values: Sequence[Tensor]) -> TokenBatch:
    return TokenBatch(**cast("Any", dict(zip(_VECTORS, values, strict=True))))


def _of_all_ranks(own: dict[int, TokenBatch]) -> dict[int, TokenBatch]:
    """Return the rows of all ranks, by row number; every rank must call this."""
    distributed = cast("Any", torch.distributed)
    parts: list[Any] = [None] * distributed.get_world_size()
    # Objects, because ranks have different numbers of rows.
    distributed.all_gather_object(parts, own)
    return {row: tokens for part in parts for row, tokens in part.items()}


def _ragged_rows(parts: Mapping[int, Tensor], data: TensorDict, *, lengths: Sequence[int]) -> Tensor:
    """Return values of trained tokens, given by row number, as one vector per row of the batch, with 0 elsewhere."""
    mask = _field(data, "response_mask")
    rows: list[Tensor] = []
    for number, mask_R, length in zip(integers(per_row(data, ROW)), mask.unbind(), lengths, strict=True):
        # [R]; untrained positions stay 0 and are never read.
        values_R = torch.zeros(length, device=mask_R.device)
        # A row that pads a batch is a copy of another row, without a trained token.
        if bool(mask_R.any()):
            values_R[mask_R[:length].bool()] = parts[number].to(values_R)
        rows.append(values_R)
    return ragged(rows)


def _field(data: TensorDict, name: str) -> Any:
    return cast("Any", data)[name]


def _padded(data: TensorDict, name: str) -> Tensor:
    """Return a ragged field as [B, R], with 0 in the padding."""
    values = _field(data, name)
    return values.to_padded_tensor(0.0 if values.is_floating_point() else 0) if values.is_nested else values


def _per_token(data: TensorDict, name: str, mask_B_R: Tensor) -> Tensor:
    """Return a field with one number per row, repeated for each trained token, [M]."""
    return per_row(data, name)[:, None].expand(mask_B_R.shape)[mask_B_R]


def _peak(log_M: Tensor) -> Any:
    """Return the largest ratio as a metric; 0 without tokens."""
    value = float(log_M.detach().max().clamp(max=LIMIT).exp()) if len(log_M) else 0.0
    return Metric(value=value, aggregation=AggregationType.MAX)


def _summed(value: Tensor | float) -> Any:
    """Return a metric that is summed over micro-batches."""
    return Metric(value=value, aggregation=AggregationType.SUM)
