"""Rules for every package: one version, one bound on the core, types, a light plugin module."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMES = [package.name for package in PACKAGES]
ALLOWED_IN_PLUGIN = {"agl", "__future__", *sys.stdlib_module_names}


def project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def test_all_packages_have_one_version() -> None:
    assert 1 == len({project(package)["version"] for package in PACKAGES})


@pytest.mark.parametrize("package", PACKAGES, ids=NAMES)
def test_package_is_named_typed_described_and_licensed(package: Path) -> None:
    module = package.name.replace("-", "_") if package.name != "agl-core" else "agl"
    data = project(package)

    assert package.name == data["name"]
    assert (package / "src" / module / "py.typed").is_file()
    assert "Apache-2.0" == data["license"]
    assert (package / "README.md").read_text().startswith(f"# {package.name}\n")
    assert ">=3.11" == data["requires-python"].split(",")[0]


@pytest.mark.parametrize("package", [p for p in PACKAGES if p.name != "agl-core"], ids=lambda p: p.name)
def test_plugin_is_bound_to_its_minor_version_of_the_core(package: Path) -> None:
    data = project(package)
    major, minor, _ = data["version"].split(".")

    ours = [line for line in data["dependencies"] if re.match(r"agl-(core|run)\b", line)]
    bound = rf"agl-(core(\[otel\])?|run)>={major}\.{minor},<{major}\.{int(minor) + 1}"
    assert ours
    assert all(re.fullmatch(bound, line) for line in ours), ours
    assert any(line.startswith("agl-core") for line in ours)


@pytest.mark.parametrize("package", PACKAGES, ids=NAMES)
def test_plugin_module_imports_only_the_core_and_the_standard_library(package: Path) -> None:
    for module in project(package).get("entry-points", {}).get("agl", {}).values():
        tree = ast.parse((package / "src" / Path(*module.split("."))).with_suffix(".py").read_text())
        roots = {
            name.split(".")[0]
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert roots <= ALLOWED_IN_PLUGIN | {module.split(".")[0]}


def test_no_committed_file_names_a_machine_or_carries_an_unfinished_mark() -> None:
    parts = (
        r"(?<![\w.])/(ro" + r"ot|wo" + r"rk|ho" + r"me)/\w",
        r"\bTO" + r"DO\b",
        r"\bFIX" + r"ME\b",
        r"py" + r"pi\.org",
    )
    marks = re.compile("|".join(parts))
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [
        f"{name}:{number}: {line.strip()[:80]}"
        for name in listing.splitlines()
        if (ROOT / name).suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".svg", ".cfg", ""}
        and (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), start=1)
        if marks.search(line)
    ]
    assert [] == found


def test_no_committed_file_is_a_link() -> None:
    listing = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [] == [line for line in listing.splitlines() if line.startswith("120000")]  # checkouts on Windows break them
