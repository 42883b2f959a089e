"""Writes the memory and the time of a step on a named device for people."""

from textwrap import wrap

from agl_inspect.forecast import DeviceForecast, Memory
from agl_inspect.text import visible

_WIDTH = 80
_LABEL = 30
_FULL = 0.9
"""Share of a device's memory from which there is little room for what is not counted."""


def on_device(found: DeviceForecast) -> list[str]:
    """Return the lines of a forecast."""
    model, device, memory = found.model, found.device, found.memory
    head = (
        f"on {device.title}, for {model.name} with {_count(found.weights)} weights: computed from the rates that its "
        "maker publishes, not measured"
    )
    lines = ["", *_wrapped(head), *_wrapped(_setting(found), indent="  ")]
    lines += [_row(name, _bytes(size)) for name, size in _parts(memory) if size]
    lines.append(_row("in all", _bytes(memory.training + memory.serving), f"of {_bytes(device.memory)}"))
    lines += _wrapped(_verdict(found), indent="  ")
    efficiency = found.efficiency
    lines += [
        _row("rollouts take", seconds(found.collect_s), f"prompts {seconds(found.prefill_s)} of it"),
        _row("updates take", seconds(found.update_s)),
        _row("a token of an answer", f"{found.token_s * 1e3:.2g} ms"),
    ]
    supposed = (
        f"at {efficiency.training:.0%} of the arithmetic in training, {efficiency.prefill:.0%} in reading prompts, and "
        f"{efficiency.decoding:.0%} of the memory's bandwidth in writing answers; tools and the agent itself take what "
        "they took"
    )
    return [*lines, *_wrapped(supposed, indent="  ")]


def _setting(found: DeviceForecast) -> str:
    training = found.training
    tuned = f"LoRA of rank {training.lora_rank}" if training.lora_rank else "all weights train"
    kept = "with gradient checkpointing" if training.gradient_checkpointing else "without gradient checkpointing"
    supposed = "; its shape is that of a usual one" if found.model.is_supposed else ""
    return f"{tuned}, {training.dtype}, {kept}, passes of {found.memory.longest:,} tokens{supposed}"


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
    """Return whether it fits, and what would make it fit."""
    memory, limit = found.memory, found.device.memory
    if memory.training + memory.serving <= _FULL * limit:
        return "trainer and server fit beside each other"
    if memory.training + memory.serving <= limit:
        return f"trainer and server fill more than {_FULL:.0%} of it, which leaves little room for what is not counted"
    if memory.training <= _FULL * limit and memory.serving <= _FULL * limit:
        return "trainer and server fit on a device each, not on one"
    states = memory.weights + memory.gradients + memory.optimizer
    changes = [
        ('dtype = "bfloat16"', found.training.dtype == "float32"),
        ("gradient_checkpointing", not found.training.gradient_checkpointing and memory.activations > 0.2 * limit),
        ("lora_rank", not found.training.lora_rank and states > 0.5 * limit),
        ("a smaller token_budget", found.training.gradient_checkpointing and memory.activations > 0.2 * limit),
    ]
    named = [name for name, helps in changes if helps]
    what = "the trainer" if memory.training > _FULL * limit else "the server"
    helps = f"{' or '.join(named)} would help" if named else "a smaller model, or several devices that share it"
    return f"{what} does not fit; {helps}"


def _row(name: str, value: str, note: str = "") -> str:
    return f"  {name:<{_LABEL}}{value:>10}  {note}".rstrip()


def _wrapped(text: str, *, indent: str = "") -> list[str]:
    return wrap(visible(text), _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _bytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def seconds(value: float) -> str:
    """Return a duration for people."""
    if value < 90:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"
