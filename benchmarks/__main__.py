"""``python -m benchmarks [NAME ...] [--quick] [--strict]``: run the benchmarks and print one table.

Every ``bench_*`` module has ``run(*, quick: bool) -> list[Figure]``, and is run in a process of its own. A bar that
is missed is named in the table; it makes the exit status 1 only with ``--strict``. A benchmark that breaks always does.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import msgspec

from benchmarks._harness import Figure, table

HERE = Path(__file__).parent


def names() -> list[str]:
    """The benchmarks that there are, without ``bench_``."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def measure(name: str, *, quick: bool) -> list[Figure]:
    """One benchmark's figures, from a process of its own; raises ``CalledProcessError`` when it breaks."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks", name, "--write", str(result)]
        subprocess.run([*command, *(["--quick"] if quick else [])], check=True, cwd=HERE.parent)
        return msgspec.json.decode(result.read_bytes(), type=list[Figure])


def measure_all(chosen: Sequence[str], *, quick: bool) -> tuple[list[Figure], list[str]]:
    """The figures of all benchmarks and the names of those that broke, with a line of progress for each."""
    figures: list[Figure] = []
    broken: list[str] = []
    for position, name in enumerate(chosen, start=1):
        print(f"[{position}/{len(chosen)}] {name} ...", flush=True)
        started = time.perf_counter()
        try:
            found = measure(name, quick=quick)
        except subprocess.CalledProcessError as error:
            broken.append(name)
            print(f"    broke with exit status {error.returncode}", flush=True)
            continue
        figures += found
        missed = sum(not figure.is_met for figure in found)
        print(f"    {len(found)} figures, {missed} missed, {time.perf_counter() - started:.0f} s", flush=True)
    return figures, broken


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="small and few runs: a look, not a measurement")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the figures of one benchmark as JSON")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in names():
            near = get_close_matches(name, names(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names())}"
            parser.error(f"there is no benchmark {name!r}; {hint}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    if options.write:
        figures = import_module(f"benchmarks.bench_{options.names[0]}").run(quick=options.quick)
        options.write.write_bytes(msgspec.json.encode(figures))
        return 0
    figures, broken = measure_all(options.names or names(), quick=options.quick)
    print(f"\n{table(figures)}\n")
    missed = [figure.name for figure in figures if not figure.is_met]
    print(f"{len(figures)} figures, {len(missed)} bars missed{': ' if missed else ''}{', '.join(missed)}")
    if broken:
        print(f"broken: {', '.join(broken)}", file=sys.stderr)
    return int(bool(broken) or (options.strict and bool(missed)))


if __name__ == "__main__":
    sys.exit(main())
