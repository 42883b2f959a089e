"""Reads what mutmut found, from the files that it leaves in the stage."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import chdir
from pathlib import Path

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

from tools.mutants._report import NOTICED, Mutant, Report, read_equivalents
from tools.mutants._stage import STAGE, Heart


def read_report(heart: Heart) -> Report:
    """The report on the last run."""
    equivalents = read_equivalents()
    mutants = read_mutants(heart, told_of={where for where, _ in equivalents})
    return Report([mutant for mutant in mutants if mutant.status != "not checked"], equivalents)


def read_mutants(heart: Heart, *, told_of: Collection[str] = ()) -> list[Mutant]:
    """All mutants, as the last run left them.

    Mutants that were noticed come without their change, which takes a while to find, except those in ``told_of``.
    """
    with chdir(STAGE):
        found = [_mutants_of(name, Path(heart.in_stage(name)), told_of) for name in heart.modules]
        return [mutant for mutants in found for mutant in mutants]


def _mutants_of(module: str, path: Path, told_of: Collection[str]) -> Iterator[Mutant]:
    data = SourceFileMutationData(path=path)
    data.load()
    for name, code in data.exit_code_by_key.items():
        where, status = f"{module}.{_function_of(name)}", status_by_exit_code[code]
        is_told = status not in NOTICED or where in told_of
        lines = get_diff_for_mutant(name, path=path).splitlines()[3:] if is_told else []
        yield Mutant(
            name=name,
            module=module,
            where=where,
            was=_changed(lines, "-"),
            now=_changed(lines, "+"),
            status=status,
        )


def _function_of(name: str) -> str:
    """``Class.method`` or ``function``, from mutmut's name of a mutant."""
    mangled = name.rpartition(".")[2].partition("__mutmut_")[0]
    return mangled.removeprefix("xǁ").replace("ǁ", ".") if mangled.startswith("xǁ") else mangled.removeprefix("x_")


def _changed(lines: Sequence[str], sign: str) -> str:
    return "\n".join(line[1:].strip() for line in lines if line.startswith(sign))
