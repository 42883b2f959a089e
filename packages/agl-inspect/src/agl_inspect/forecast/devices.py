"""The devices that a plan computes memory and time for: what their makers publish.

Rates are those of dense matrix products in bfloat16, without the doubling by sparsity that some sheets print.
"""

import os

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Record


class Device(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A device.

    Attributes:
        name: Its name, as ``--device`` takes it.
        title: Its whole name.
        memory: Bytes.
        bandwidth: Bytes per second of its memory.
        flops: Operations per second of dense products in bfloat16.
        source: The document that the figures are from.
    """

    name: str
    title: str
    memory: float
    bandwidth: float
    flops: float
    source: str


_GB, _TB, _TFLOPS = 1e9, 1e12, 1e12


def _nvidia(name: str, title: str, memory: float, bandwidth: float, flops: float) -> Device:
    return Device(
        name=name,
        title=f"NVIDIA {title}",
        memory=memory * _GB,
        bandwidth=bandwidth * _GB,
        flops=flops * _TFLOPS,
        source=f"NVIDIA, data sheet of the {title}",
    )


DEVICES = (
    _nvidia("h100", "H100 SXM", 80, 3350, 989.5),
    _nvidia("h100-pcie", "H100 PCIe", 80, 2000, 756),
    _nvidia("h200", "H200 SXM", 141, 4800, 989.5),
    _nvidia("b200", "B200 SXM", 180, 8000, 2250),
    _nvidia("a100-80", "A100 80 GB SXM", 80, 2039, 312),
    _nvidia("a100-40", "A100 40 GB SXM", 40, 1555, 312),
    _nvidia("l40s", "L40S", 48, 864, 362),
    _nvidia("l4", "L4", 24, 300, 121),
    _nvidia("a10", "A10", 24, 600, 125),
    _nvidia("rtx4090", "GeForce RTX 4090", 24, 1008, 165.2),
    Device(
        name="mi300x",
        title="AMD Instinct MI300X",
        memory=192 * _GB,
        bandwidth=5.3 * _TB,
        flops=1307.4 * _TFLOPS,
        source="AMD, data sheet of the Instinct MI300X",
    ),
)
"""The devices by falling likelihood; ``cpu`` is the machine that plans."""

_CORE_FLOPS = 3e10
_CORE_BANDWIDTH = 5e9


def device_of(name: str) -> Device:
    """Return a device by its name, upper or lower case; ``cpu`` is this machine.

    Raises:
        ConfigError: There is no such device.
    """
    known = {device.name: device for device in DEVICES}
    if name.lower() == "cpu":
        return _cpu()
    if name.lower() not in known:
        names = [*known, "cpu"]
        kinds = [each for each in names if each.startswith(name.lower())]
        hint = _all(kinds) if kinds else did_you_mean(name.lower(), names, otherwise=_all(names))
        raise ConfigError(f"--device {name!r} is not in the table of devices; {hint}")
    return known[name.lower()]


def _all(names: list[str]) -> str:
    return f"there are {', '.join(names)}"


def _cpu() -> Device:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device(
        name="cpu",
        title=f"this machine, {cores} core{'' if cores == 1 else 's'}",
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        bandwidth=cores * _CORE_BANDWIDTH,
        flops=cores * _CORE_FLOPS,
        source="the system's memory; a rough 30 GFLOP/s and 5 GB/s for each core",
    )
