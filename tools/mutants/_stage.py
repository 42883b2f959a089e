"""A folder in which mutmut runs: copies of the sources and of the tests, and its settings.

mutmut takes one tree whose modules are named after their paths; this repository has one tree for each package. Files
that did not change keep their time, so that mutmut only makes again what it has to.
"""

import filecmp
import json
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
STAGE = ROOT / ".nox" / "mutated"  # .nox/mutants is the environment of the session

CONFTEST = """
from hypothesis import Phase

PHASES = [Phase.explicit, Phase.generate]
settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=PHASES)
settings.load_profile("mutants")
"""
"""After the repository's own: draws the same examples in every run, and makes no failing one smaller."""


class Heart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The modules to mutate and the tests that must notice; paths from the repository's root."""

    packages: list[str]
    tests: list[str]
    modules: dict[str, str]

    def in_stage(self, name: str) -> str:
        """The path of a module in the stage."""
        return f"src/{self.modules[name].partition('/src/')[2]}"


def read_heart() -> Heart:
    """``heart.toml``, checked."""
    text = Path(__file__).with_name("heart.toml").read_text(encoding="utf-8")
    heart = msgspec.convert(tomllib.loads(text), Heart)
    for path in (*heart.modules.values(), *heart.tests):
        if not (ROOT / path).is_file():
            raise SystemExit(f"heart.toml names {path}, which does not exist")
    return heart


def prepare(heart: Heart) -> None:
    """Bring the stage up to date."""
    wanted = dict(_sources(heart)) | dict(_tests(heart))
    for target, source in wanted.items():
        _copy(source, STAGE / target)
    for file in [path for part in ("src", "tests") for path in (STAGE / part).rglob("*.py")]:
        if str(file.relative_to(STAGE)) not in wanted:
            file.unlink()
    _write(STAGE / "tests" / "conftest.py", (ROOT / "conftest.py").read_text(encoding="utf-8") + CONFTEST)
    _write(STAGE / "pyproject.toml", _settings(heart))


def _sources(heart: Heart) -> Iterator[tuple[str, Path]]:
    for package in heart.packages:
        folder = ROOT / "packages" / package / "src"
        for file in folder.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield f"src/{file.relative_to(folder)}", file


def _tests(heart: Heart) -> Iterator[tuple[str, Path]]:
    """The tests, the conftest of each folder, and the spans that they share."""
    yield "tests/cases.py", ROOT / "tests" / "cases.py"
    for path in map(Path, heart.tests):
        folder = f"tests/{path.parts[1]}"
        yield f"{folder}/{path.name}", ROOT / path
        if (ROOT / path).with_name("conftest.py").is_file():
            yield f"{folder}/conftest.py", (ROOT / path).with_name("conftest.py")


def _copy(source: Path, target: Path) -> None:
    if not (target.is_file() and filecmp.cmp(source, target, shallow=False)):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _write(target: Path, text: str) -> None:
    if not (target.is_file() and target.read_text(encoding="utf-8") == text):
        target.write_text(text, encoding="utf-8")


def _settings(heart: Heart) -> str:
    with (ROOT / "pyproject.toml").open("rb") as file:
        own = tomllib.load(file)["tool"]["pytest"]["ini_options"]
    pytest = {**own, "addopts": f"{own['addopts']} -p no:cacheprovider -p no:xdist"}
    mutmut = {
        "source_paths": ["src"],
        "only_mutate": [heart.in_stage(name) for name in heart.modules],
        "do_not_mutate_patterns": [
            r"raise \w+\(",
            r"\bcast\(",
        ],  # the wording of errors, and what only type checkers read
        "pytest_add_cli_args_test_selection": ["tests"],
        "pytest_add_cli_args": ["-k", "not forest_time_"],
        "timeout_multiplier": 8.0,
        "use_git_change_detection": False,
    }
    return "\n".join([*_table("tool.pytest.ini_options", pytest), "", *_table("tool.mutmut", mutmut), ""])


def _table(name: str, values: Mapping[str, object]) -> Iterable[str]:
    """A table of TOML; JSON's strings, numbers, booleans and lists are TOML's too."""
    return [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
