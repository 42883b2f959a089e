"""Formats a forecast as a report of at most 80 columns; only commands may be longer, because they are not broken."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from textwrap import wrap

from agl.hints import count_of
from agl_inspect.forecast.costs import DeviceForecast, Memory
from agl_inspect.forecast.faults import Fault
from agl_inspect.forecast.fitting import FULL
from agl_inspect.forecast.queueing import Spread
from agl_inspect.forecast.silence import NEARLY
from agl_inspect.stores import MEMORY, command
from agl_inspect.text import visible
from agl_run.forecast.report import AlgorithmForecast, RolloutSize, RunForecast

_WIDTH = 80
_SURE = 0.1
"""If a rollout's tokens are more uncertain than this share, the report says how to make them more certain."""

_LABEL = 18
_COLUMN = 10


def as_lines(report: RunForecast, *, store_url: str = "") -> list[str]:
    """Return the lines of a forecast's report; ``store_url`` is used in the commands that it proposes."""
    lines = _wrapped(f"{report.experiment}: {_origin(report)}")
    known: list[RolloutSize] = []
    stepping = [forecast for forecast in report.algorithms if forecast.shape is not None]
    for forecast in report.algorithms:
        same = [other.algorithm for other in report.algorithms if other.rollout == forecast.rollout]
        lines += _rollout(forecast, same) if forecast.rollout not in known else []
        known.append(forecast.rollout)
        lines += _step(forecast, report)
        lines += on_device(forecast.on_device) if forecast.on_device is not None else []
        lines += _groups(forecast) if forecast in (stepping or report.algorithms[:1]) else []
    faults = list(report.faults)
    for forecast in report.algorithms:
        faults += [fault for fault in forecast.faults if fault not in faults]
    lines.append("")
    if not faults:
        return [*lines, "no fault found in the recorded rollouts"]
    lines.append(f"{count_of(len(faults), 'fault')} found:")
    return lines + [line for fault in faults for line in _fault(fault, store_url)]


def _origin(report: RunForecast) -> str:
    source = report.source
    made = f"run {source.run}" if source.run else "a trial"
    until = datetime.fromtimestamp(source.until, UTC).strftime("%Y-%m-%d %H:%M")
    tasks = count_of(source.tasks, "task")
    return f"{count_of(source.rollouts, 'rollout')} of {tasks}, from {made} that ran until {until} UTC"


def _rollout(forecast: AlgorithmForecast, algorithms: Sequence[str]) -> list[str]:
    whose = f"a rollout, as {' and '.join(algorithms)} would train on it" if forecast.algorithm else "a rollout"
    lines = ["", whose, _row("", ("mean", "median", "90 %", "most"))]
    size = forecast.rollout
    lines += [_spread(name, spread, _number) for name, spread in _sizes(size)]
    lines += [_spread(name, spread, _short) for name, spread in _times(size)]
    reward = "no reward" if forecast.reward is None else f"mean reward {forecast.reward:.3g}"
    return [*lines, f"  {forecast.trained_share:.0%} can be trained on, {reward}"]


def _sizes(size: RolloutSize) -> list[tuple[str, Spread]]:
    tokens = [("prompt tokens", size.prompt_tokens), ("answer tokens", size.response_tokens)]
    rows = [("rows", size.rows), ("row tokens", size.row_tokens), ("trained tokens", size.trained_tokens)]
    return [("model calls", size.calls), *tokens, *(rows if size.rows.most else []), ("longest context", size.context)]


def _times(size: RolloutSize) -> list[tuple[str, Spread]]:
    tools = [("  in tools", size.tool_s)] if size.tool_s.most else []
    return [("seconds", size.seconds), ("  in model calls", size.model_s), *tools, ("  in the rest", size.rest_s)]


def _spread(name: str, spread: Spread, text: Callable[[float], str]) -> str:
    return _row(name, list(map(text, (spread.mean, spread.median, spread.p90, spread.most))))


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<{_LABEL}}{''.join(f'{cell:>{_COLUMN}}' for cell in cells)}".rstrip()


def _step(forecast: AlgorithmForecast, report: RunForecast) -> list[str]:
    shape, step = forecast.shape, forecast.step
    if step is None:
        return ["", *_wrapped(_no_step(forecast))]
    head = (
        f"all of {forecast.algorithm}: at most {count_of(step.rollouts, 'rollout')}, without the waits between their "
        "batches and the algorithm's own model calls"
    )
    if shape is not None:
        rollouts = f"{count_of(shape.tasks, 'task')} x {shape.samples} = {count_of(shape.rollouts, 'rollout')}"
        head = f"a step of {forecast.algorithm}: {rollouts}"
    lines = ["", *_wrapped(head)]
    tokens = [("trained tokens", step.trained_tokens), ("row tokens", step.row_tokens), ("rows", step.rows)]
    seen = [("prompt tokens", step.prompt_tokens), ("answer tokens", step.response_tokens)]
    for name, spread in [*(tokens if step.rows.most else []), *seen]:
        lines.append(
            f"  {name:<{_LABEL}}{_number(spread.mean):>{_COLUMN}}  from {_number(spread.p10)} to {_number(spread.p90)}"
        )
    if forecast.gradient_share is not None and step.rows.most:
        tokens = forecast.gradient_share * step.trained_tokens.mean
        lines.insert(3, f"  {'with a gradient':<{_LABEL}}{_number(tokens):>{_COLUMN}}  in groups that are not silent")
    collect = f"  {'rollouts take':<{_LABEL}}{seconds(step.collect_s.mean):>{_COLUMN}}"
    lines.append(
        f"{collect}  from {seconds(step.collect_s.p10)} to {seconds(step.collect_s.p90)}, {step.concurrency} at once"
    )
    if forecast.update_s is not None:
        basis = "as the run logged it" if forecast.update_basis == "logged" else "measured here, on random rows"
        lines.append(f"  {'updates take':<{_LABEL}}{seconds(forecast.update_s):>{_COLUMN}}  {basis}")
    whole = step.collect_s.mean + (forecast.update_s or 0.0)
    if shape is not None and shape.steps:
        what = "" if forecast.update_s is not None else ", without the updates"
        lines.append(f"  {f'{shape.steps} steps take':<{_LABEL}}{seconds(whole * shape.steps):>{_COLUMN}}{what}")
    return [*lines, *_slowest(forecast), *_few_tasks(forecast, report), *_caution(report)]


def _no_step(forecast: AlgorithmForecast) -> str:
    if not forecast.algorithm:
        return "no algorithm: nothing is trained, so there are no steps"
    if forecast.steps:
        return f"all of {forecast.algorithm}: {count_of(forecast.steps, 'step')}, no rollouts"
    return (
        f"a step of {forecast.algorithm}: not known, because it collects no rollouts, or has neither a method "
        "step_size or run_size nor the parameters tasks_per_step and group_size"
    )


def _slowest(forecast: AlgorithmForecast) -> list[str]:
    if not forecast.parts:
        return []
    first, *others = (f"{part.name} {part.share:.0%}" for part in forecast.parts if part.share >= 0.005)
    return _wrapped(f"slowest: {', then '.join([first, *others])}", indent="  ")


def _few_tasks(forecast: AlgorithmForecast, report: RunForecast) -> list[str]:
    if forecast.uncertainty is None:
        return []
    sure = f"the tokens are sure to within {forecast.uncertainty:.{0 if forecast.uncertainty >= 0.095 else 1}%}"
    if forecast.uncertainty < _SURE:
        return _wrapped(f"{sure} (95 % interval over the tasks)", indent="  ")
    return _wrapped(
        f"{sure} only, for the tasks differ and {report.source.tasks} of them were run; --run with more --tasks or "
        "--seconds makes them surer",
        indent="  ",
    )


def _caution(report: RunForecast) -> list[str]:
    planned, recorded = report.concurrency, report.recorded_at_once
    if not planned or not recorded or 0.5 <= planned / recorded <= 2:
        return []
    return _wrapped(
        f"the rollouts were recorded with {recorded:.1f} at once on average; with {planned} the model's server may "
        "answer at another pace, which this forecast does not know",
        indent="  ",
    )


def _groups(forecast: AlgorithmForecast) -> list[str]:
    if not forecast.silent:
        return []
    lines = ["", "groups whose rollouts all get one reward teach nothing; to expect:"]
    lines.append(_row("group size", [str(one.size) for one in forecast.silent]))
    lines.append(
        _row("silent groups", [f"{g.silent_share:.0%}{'*' if g.basis == 'model' else ''}" for g in forecast.silent])
    )
    if forecast.shape is not None:
        lines.append(_row("with a gradient", ["" if g.groups is None else f"{g.groups:.1f}" for g in forecast.silent]))
        lines.append(f"  of the groups that {forecast.shape.rollouts} rollouts make")
    if any(one.basis == "model" for one in forecast.silent):
        lines += _wrapped(
            "* by a model of how the tasks differ (beta-binomial), for no task was run so often; the others are "
            "counted among the rollouts of each task, without bias",
            indent="  ",
        )
    return lines + _advice(forecast)


def _advice(forecast: AlgorithmForecast) -> list[str]:
    if forecast.shape is None:
        return []
    if forecast.best_size is None:
        return _wrapped("no group size gives a gradient: see the tasks and the reward first", indent="  ")
    kept = f"the largest one that keeps {NEARLY:.0%} of the most groups with a gradient"
    own = (
        "as the file has it"
        if forecast.best_size == forecast.shape.samples
        else f"the file has {forecast.shape.samples}"
    )
    return _wrapped(f"proposed for as many rollouts: group size {forecast.best_size}, {kept}; {own}", indent="  ")


def _fault(fault: Fault, store_url: str) -> list[str]:
    is_kept = bool(fault.example) and not store_url.startswith(MEMORY)
    shown = command("show", fault.example, store_url=store_url) if is_kept else ""
    lines = [*_wrapped(f"{fault.evidence}  [{fault.rule}]", indent="  "), *_wrapped(fault.change, indent="    ")]
    return [*lines, f"    {shown}"] if shown else lines  # whole, so that it can be pasted


def _wrapped(text: str, *, indent: str = "") -> list[str]:
    return wrap(visible(text), _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.1f}"


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.001 else "0"


_DEVICE_LABEL = 30


def on_device(found: DeviceForecast) -> list[str]:
    """Return the report's lines about a step's costs on a device."""
    model, device, memory = found.model, found.device, found.memory
    head = (
        f"on {device.title}, for {model.name} with {_count(found.weights)} weights: computed from the rates that its "
        "maker publishes, not measured"
    )
    lines = ["", *_wrapped(head), *_wrapped(_setting(found), indent="  ")]
    lines += [_device_row(name, _bytes(size)) for name, size in _parts(memory) if size]
    lines.append(_device_row("in all", _bytes(memory.training + memory.serving), f"of {_bytes(device.memory)}"))
    lines += _wrapped(_verdict(found), indent="  ")
    efficiency = found.efficiency
    lines += [
        _device_row("rollouts take", seconds(found.collect_s), f"prompts {seconds(found.prefill_s)} of it"),
        _device_row("updates take", seconds(found.update_s)),
        _device_row("a token of an answer", f"{found.token_s * 1e3:.2g} ms"),
    ]
    supposed = (
        f"at {efficiency.training:.0%} of the arithmetic in training, {efficiency.prefill:.0%} in reading prompts, and "
        f"{efficiency.decoding:.0%} of the memory's bandwidth in writing answers; tools and the agent itself take what "
        "they took"
    )
    return [*lines, *_wrapped(supposed, indent="  ")]


def _setting(found: DeviceForecast) -> str:
    training = found.training
    base = " on a base in 4 bits" if training.is_quantized else ""
    tuned = f"LoRA of rank {training.lora_rank}{base}" if training.lora_rank else "all weights train"
    kept = "with gradient checkpointing" if training.gradient_checkpointing else "without gradient checkpointing"
    supposed = "; its shape is that of a usual one" if found.model.is_supposed else ""
    moments = ", moments in 8 bits" if training.moments == "8bit" else ""
    return f"{tuned}, {training.dtype}{moments}, {kept}, passes of {found.memory.longest:,} tokens{supposed}"


def _parts(memory: Memory) -> list[tuple[str, float]]:
    return [
        ("weights in training", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("reference", memory.reference),
        ("what a pass keeps", memory.activations),
        ("weights of the server", memory.served),
        ("keys and values", memory.kv_cache),
    ]


def _verdict(found: DeviceForecast) -> str:
    """Say whether trainer and server fit on the device, and the cheapest change with which they fit."""
    memory, limit = found.memory, found.device.memory
    whole = memory.training + memory.serving
    if whole <= FULL * limit:
        return "trainer and server fit side by side"
    head = "trainer and server do not fit"
    if whole <= limit:
        head = f"trainer and server fill more than {FULL:.0%} of it, which leaves little room for what is not counted"
    elif max(memory.training, memory.serving) <= FULL * limit:
        head = "trainer and server fit on a device each, not on one"
    if not found.changes:
        return f"{head}; no known change is enough: take a smaller model"
    return f"{head}; the cheapest change with which they fit: {', '.join(found.changes)}"


def _device_row(name: str, value: str, note: str = "") -> str:
    return f"  {name:<{_DEVICE_LABEL}}{value:>10}  {note}".rstrip()


def _bytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def seconds(value: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if value < 90:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"
