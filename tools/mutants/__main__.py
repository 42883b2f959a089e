"""``python -m tools.mutants [--again] [--show] [MODULE ...]``: mutate the heart, and report what no test noticed.

All modules of ``heart.toml`` by default, from nothing. ``--again`` keeps what an earlier run found and tries only what
survived, for the time in which tests are written; ``--show`` runs nothing and reports the last run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.mutants._report import GOAL
from tools.mutants._results import read_report
from tools.mutants._stage import STAGE, Heart, prepare, read_heart


def options_of(arguments: Sequence[str] | None, heart: Heart) -> argparse.Namespace:
    """The arguments, checked."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(heart.modules)}")
    parser.add_argument("--again", action="store_true", help="try only what survived the last run")
    parser.add_argument("--show", action="store_true", help="run nothing, report the last run")
    options = parser.parse_args(arguments)
    if unknown := set(options.modules) - heart.modules.keys():
        parser.error(f"unknown modules {sorted(unknown)}; there are {', '.join(heart.modules)}")
    return options


def run(names: Sequence[str]) -> None:
    """Run mutmut in the stage, on all mutants or on those that ``names`` match."""
    environment = {**os.environ, "AGL_PLUGINS_STRICT": "1"}
    program = Path(sys.executable).with_name("mutmut")
    done = subprocess.run([program, "run", *names], cwd=STAGE, env=environment)
    if done.returncode:
        raise SystemExit(f"mutmut ended with status {done.returncode}; what it needs is in {STAGE}")


def patterns_of(heart: Heart, modules: Sequence[str]) -> list[str]:
    """Return mutmut's patterns that select the mutants of modules."""
    dotted = [heart.in_stage(name).removeprefix("src/").removesuffix(".py").replace("/", ".") for name in modules]
    return [f"{name}.x*" for name in dotted]


def survivors_of(heart: Heart, modules: Sequence[str]) -> list[str]:
    """The mutants that survived the last run, by mutmut's names."""
    found = read_report(heart).survivors()
    return [mutant.name for mutant in found if not modules or mutant.module in modules]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; 1 when too few mutants were noticed."""
    heart = read_heart()
    options = options_of(arguments, heart)
    started = time.monotonic()
    if not options.show:
        if not options.again:
            shutil.rmtree(STAGE, ignore_errors=True)
        names = survivors_of(heart, options.modules) if options.again else patterns_of(heart, options.modules)
        prepare(heart)
        run(names)
    report = read_report(heart)
    for mutant in report.survivors():
        print(f"\n{mutant.name}: {mutant.status}\n  - {mutant.was}\n  + {mutant.now}")
    print(f"\n{report.table()}\n\n{time.monotonic() - started:.0f} s; the goal is {GOAL:.0%} of what changes something")
    wrong = [] if options.modules or options.again else report.wrong_entries()
    print("\n".join(wrong))
    return 0 if options.modules or options.again or report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
