"""The cost of starting: importing agl and its names, finding plugins, printing help. Children of a bare interpreter.

The time of an interpreter that imports nothing is taken in the same run and subtracted from every import.
"""

import subprocess
import sys
from collections.abc import Iterable

from benchmarks._harness import Case, Figure, interleave, table

_BAR = 2.0
"""``import agl`` may cost this many times what ``import opentelemetry.sdk.trace`` costs."""

_CODE = {
    "nothing": "pass",
    "import opentelemetry.sdk.trace": "import opentelemetry.sdk.trace",
    "import agl": "import agl",
    "import agl, then hookimpl, emit_reward, Rollout": "import agl; agl.hookimpl; agl.emit_reward; agl.Rollout",
    "import agl, then LitAgent and Trainer": "import agl; agl.LitAgent; agl.Trainer",
    "PluginManager.from_environment()": "import agl; agl.PluginManager.from_environment()",
}


def figures(*, repeats: int = 9) -> Iterable[Figure]:
    """Milliseconds of wall time, medians of ``repeats`` children each."""
    cases = {name: child("-c", code) for name, code in _CODE.items()}
    found = interleave({**cases, "agl --help": child("-m", "agl", "--help")}, repeats=repeats)
    bare = found["nothing"].wall_s
    baseline = (found["import opentelemetry.sdk.trace"].wall_s - bare) * 1e3
    for name in list(_CODE)[2:]:
        yield Figure(
            name=name,
            value=(found[name].wall_s - bare) * 1e3,
            unit="ms",
            bar=_BAR * baseline if name == "import agl" else None,
            better="lower",
            baseline=baseline,
            baseline_name="import opentelemetry.sdk.trace",
        )
    yield Figure(
        name="agl --help, the whole process",
        value=found["agl --help"].wall_s * 1e3,
        unit="ms",
        bar=500.0,
        better="lower",
        baseline=bare * 1e3,
        baseline_name="an interpreter that does nothing",
    )


def child(*arguments: str) -> Case:
    def run() -> int:
        # Without a timeout: with one, Python polls for the end of the child every 50 ms.
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return 1

    return run


def run(*, quick: bool) -> list[Figure]:
    """Every figure."""
    return list(figures(repeats=3 if quick else 9))


if __name__ == "__main__":
    print(table(run(quick=False)))
