"""Makes the forecast of a run from recorded rollouts, as a record that programs read and the terminal report shows."""

import random
from collections.abc import Sequence
from statistics import median

from agl.algorithms import AlgorithmConfig
from agl.contracts import Metric
from agl.schemas import Record
from agl_inspect.forecast.costs import Device, DeviceForecast, Recorded, StepShape, forecast_on
from agl_inspect.forecast.faults import Examined, Fault, faults_in, faults_of_tasks
from agl_inspect.forecast.models import ModelShape
from agl_inspect.forecast.observed import Observed
from agl_inspect.forecast.queueing import Spread, StepForecast, at_once, forecast, spread_of, uncertainty_of
from agl_inspect.forecast.silence import SilentShare, best_size, loud_groups, silent_shares
from agl_run.forecast.recorded import Material, Source
from agl_run.forecast.step_size import compares_groups, measured_update, run_size_of, settable_of, shape_of, training_of
from agl_run.plan import Plan

_STEPS = 5
"""How many of the last logged steps are used for times."""


class RolloutSize(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The distribution over the recorded rollouts of each measure.

    Attributes:
        seconds: Time of all attempts of a rollout; the sum of ``model_s``, ``tool_s`` and ``rest_s``.
        model_s: Time in model calls.
        tool_s: Time in tools, without model calls that the tools make.
        rest_s: All other time.
        context: Tokens of the longest prompt with its answer, or of the longest row.
    """

    calls: Spread
    rows: Spread
    prompt_tokens: Spread
    response_tokens: Spread
    row_tokens: Spread
    trained_tokens: Spread
    context: Spread
    seconds: Spread
    model_s: Spread
    tool_s: Spread
    rest_s: Spread


class GroupSize(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A possible group size, and the groups that a step would have with it.

    Attributes:
        size: Rollouts per group.
        silent_share: The expected share of silent groups.
        basis: ``counted`` among the recorded rollouts of a task, or computed by a ``model`` for larger groups.
        groups: Groups with a gradient in a step of the same number of rollouts; ``None`` if the step's size is
            unknown.
    """

    size: int
    silent_share: float
    basis: str
    groups: float | None = None


class Part(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An activity that takes time in a step, such as model calls, with its seconds and its share of the whole."""

    name: str
    seconds: float
    share: float


class AlgorithmForecast(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The forecast for one algorithm.

    Attributes:
        algorithm: The algorithm's name; ``""`` in an experiment without algorithms.
        rollout: The measures of the rollouts as the algorithm would train on them.
        trained_share: Share of the rollouts on which the algorithm would train.
        reward: Mean reward of those rollouts; ``None`` if there are none.
        shape: The size of a step; ``None`` if it is not known.
        step: The forecast of a step; if ``shape`` is ``None``, that of all rollouts of a run, if their number is known.
        steps: Steps of a run, if ``shape`` is ``None``; 0 if not known.
        uncertainty: Half the 95 % interval of the mean tokens of a rollout, as a share of that mean; ``None`` if only
            one task was run.
        gradient_share: Expected share of a step's groups that have a gradient; ``None`` if it is not known, or if
            the rollouts of a task are not compared.
        update_s: Seconds of a step's updates; ``None`` if they are not known.
        update_basis: The source of ``update_s``: ``logged`` by the run's last steps, ``measured`` on this machine on
            random rows of the recorded lengths, or ``""``.
        parts: The parts of a step's time, the longest first.
        silent: The expected shares of silent groups by group size; empty if no task was run twice, or if the rollouts
            of a task are not compared.
        best_size: The proposed group size; ``None`` if no size gives a gradient.
        faults: The faults that the recordings show.
        on_device: Memory and time of a step on the named device; ``None`` if no device is named.
    """

    algorithm: str
    rollout: RolloutSize
    trained_share: float
    reward: float | None
    shape: StepShape | None
    step: StepForecast | None
    steps: int
    uncertainty: float | None
    gradient_share: float | None
    update_s: float | None
    update_basis: str
    parts: list[Part]
    silent: list[GroupSize]
    best_size: int | None
    faults: list[Fault]
    on_device: DeviceForecast | None = None


class RunForecast(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The forecast of an experiment.

    Attributes:
        experiment: The experiment's name.
        source: The origin of the rollouts.
        concurrency: Rollouts that the experiment runs at once; 0 if workers run them all.
        recorded_at_once: Mean number of rollouts that ran at once when they were recorded.
        algorithms: The forecasts for the algorithms.
        faults: The faults of the experiment's tasks.
    """

    experiment: str
    source: Source
    concurrency: int
    recorded_at_once: float
    algorithms: list[AlgorithmForecast]
    faults: list[Fault]


async def make_report(
    plan: Plan, material: Material, *, target: tuple[Device, ModelShape] | None = None
) -> RunForecast:
    """Make an experiment's forecast from recorded rollouts; ``target`` adds the costs for a device and a model."""
    configs: dict[str, AlgorithmConfig | None] = {config.name: config for config in plan.config.algorithm}
    observed = next(iter(material.observed.values()))
    beside = at_once(observed)
    concurrency = plan.config.runner.concurrency or max(1, round(beside))
    return RunForecast(
        experiment=plan.name,
        source=material.source,
        concurrency=plan.config.runner.concurrency,
        recorded_at_once=beside,
        algorithms=[
            await _algorithm(plan, configs.get(name), material, concurrency, target) for name in material.observed
        ],
        faults=faults_of_tasks(plan.train, plan.val),
    )


async def _algorithm(
    plan: Plan,
    config: AlgorithmConfig | None,
    material: Material,
    concurrency: int,
    target: tuple[Device, ModelShape] | None,
) -> AlgorithmForecast:
    rollouts = material.observed[config.name if config else ""]
    shape = await shape_of(plan, config) if config is not None else None
    most, steps = (0, 0) if config is None or shape is not None else await run_size_of(plan, config)
    tasks, samples = (shape.tasks, shape.samples) if shape else (most, 1)
    step = forecast(rollouts, tasks=tasks, samples=samples, concurrency=concurrency) if tasks else None
    groups: dict[str, list[float]] = {}
    for one in rollouts:
        if one.trains is not None:
            groups.setdefault(one.group_id, []).append(one.trains)
    rewards = [reward for group in groups.values() for reward in group]
    compared = list(groups.values()) if config is None or compares_groups(plan, config, shape) else []
    shares = silent_shares(compared)
    own = silent_shares(compared, [shape.samples]) if shape else []
    # A group whose rewards are all equal has no advantage, and so no gradient.
    gradient_share = 1 - own[0].share if own else None
    update_s = _logged_update_s(material.metrics, config.name if config else "")
    basis = "logged" if update_s is not None else ""
    if config is not None and shape is not None and update_s is None:
        update_s = await _measured(plan, config, material, shape, 1.0 if gradient_share is None else gradient_share)
        basis = "measured" if update_s is not None else ""
    best = best_size(shares, rollouts=shape.rollouts, tasks=len(plan.train)) if shape else None
    recorded = (
        shape
        and step
        and Recorded(
            rollouts=rollouts,
            shape=shape,
            step=step,
            concurrency=concurrency,
            gradient_share=1.0 if gradient_share is None else gradient_share,
        )
    )
    examined = Examined(
        rollouts=rollouts,
        needs_token_ids=config is not None and plan.entry(config).needs_token_ids,
        token_budget=shape.token_budget if shape else 0,
    )
    return AlgorithmForecast(
        algorithm=config.name if config else "",
        rollout=_size(rollouts),
        trained_share=len(rewards) / len(rollouts),
        reward=sum(rewards) / len(rewards) if rewards else None,
        shape=shape,
        step=step,
        steps=steps,
        uncertainty=uncertainty_of(rollouts, tasks=len(plan.train)),
        gradient_share=gradient_share,
        update_s=update_s,
        update_basis=basis,
        parts=_parts(rollouts, step, update_s),
        silent=[_group(share, shape) for share in shares],
        best_size=best.size if best else None,
        faults=faults_in(examined),
        on_device=_on_device(plan, config, recorded, target),
    )


def _on_device(
    plan: Plan,
    config: AlgorithmConfig | None,
    recorded: Recorded | None,
    target: tuple[Device, ModelShape] | None,
) -> DeviceForecast | None:
    """Return a step's costs on the target device; ``None`` without a target or for an algorithm without tokens."""
    if config is None or recorded is None or target is None or not plan.entry(config).needs_token_ids:
        return None
    return forecast_on(*target, training_of(plan, config), recorded, settable=settable_of(plan, config))


async def _measured(
    plan: Plan, config: AlgorithmConfig, material: Material, shape: StepShape, share: float
) -> float | None:
    """Measure the seconds of a step's updates on random rows of the recorded lengths; ``None`` if impossible."""
    weights = material.weights.get(config.tunes[0]) if config.tunes else None
    # A fixed seed: the same recordings give the same forecast.
    drawn = random.Random(0).choices(material.observed[config.name], k=max(1, round(shape.rollouts * share)))
    rows = [
        (one.row_tokens // one.rows, one.trained_tokens // one.rows)
        for one in drawn
        for _ in range(one.rows)
        if one.trains is not None
    ]
    return None if weights is None or not share else await measured_update(plan, config, weights, rows)


def _size(rollouts: Sequence[Observed]) -> RolloutSize:
    rest = spread_of(max(0.0, one.seconds - one.model_s - one.tool_s) for one in rollouts)
    names = [name for name in RolloutSize.__struct_fields__ if name != "rest_s"]
    return RolloutSize(rest_s=rest, **{name: spread_of(getattr(one, name) for one in rollouts) for name in names})


def _group(share: SilentShare, shape: StepShape | None) -> GroupSize:
    groups = loud_groups(share, rollouts=shape.rollouts) if shape else None
    return GroupSize(size=share.size, silent_share=share.share, basis=share.basis, groups=groups)


def _parts(rollouts: Sequence[Observed], step: StepForecast | None, update_s: float | None) -> list[Part]:
    """Return the activities that take a step's time, longest first; if the step is unknown, those of a rollout."""
    seconds = sum(one.seconds for one in rollouts)
    if not seconds:
        return []
    model, tools = sum(one.model_s for one in rollouts), sum(one.tool_s for one in rollouts)
    # Rollouts run side by side, so their parts are scaled to the time that passes.
    scale = (step.collect_s.mean if step else seconds / len(rollouts)) / seconds
    rest = max(0.0, seconds - model - tools)
    parts = {"model calls": model * scale, "tools": tools * scale, "the rest of the rollouts": rest * scale}
    if step and update_s is not None:
        parts["updates"] = update_s
    whole = sum(parts.values())
    found = [Part(name=name, seconds=part, share=part / whole) for name, part in parts.items()]
    return sorted(found, key=lambda part: -part.seconds)


def _logged_update_s(metrics: Sequence[Metric], algorithm: str) -> float | None:
    """Return the median of ``update_s`` over the last steps that logged it; ``None`` if it was never logged."""
    found = [one for one in metrics if one.algorithm == algorithm and one.name == "update_s"]
    last = sorted(found, key=lambda one: one.step)[-_STEPS:]
    return median(one.value for one in last) if last else None
