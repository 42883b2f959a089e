"""The plugin tutorial works as written: its files are made, its distribution is built and its commands are run."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

TUTORIAL = (Path(__file__).parents[2] / "docs" / "tutorial" / "plugin.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', TUTORIAL, re.DOTALL))
STEPS = [
    (command, expected)
    for block in re.findall(r"```console\n(.*?)```", TUTORIAL, re.DOTALL)
    for command, expected in re.findall(r"^\$ ([^\n]+)\n((?:(?!\$ )[^\n]*\n)*)", block, re.MULTILINE)
]
BUILD = "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"


def words(text: str) -> str:
    return " ".join(text.split())


def in_shell(command: str) -> list[str]:
    """The words of a command line of the tutorial."""
    return [part[0] or part[1] for part in re.findall(r'"([^"]*)"|(\S+)', command)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tutorial's folder with all of its files, and the built distribution on the path of children."""
    work = tmp_path / "contains"
    work.mkdir()
    for name, content in FILES.items():
        (work / name).write_text(content, encoding="utf-8")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=work, check=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    for name in ("AGL_STORE", "AGL_DISABLED_PLUGINS", "AGL_PLUGINS_STRICT"):
        monkeypatch.delenv(name, raising=False)
    return work


def test_plugin_is_as_short_as_promised():
    code = [line for line in FILES["agl_contains.py"].splitlines() if line.strip()]
    assert len(code) <= 18
    assert 9 == len(FILES["pyproject.toml"].splitlines())


def test_declared_files_are_readable():
    assert {"contains": "agl_contains"} == tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"]["agl"]
    assert ["pyproject.toml", "agl_contains.py", "echo.py", "tasks.jsonl", "experiment.toml", "test_contains.py"] == (
        list(FILES)
    )


def test_commands_print_what_the_tutorial_shows(folder):
    assert "pip install --editable ." == STEPS[0][0]
    for command, expected in STEPS[1:]:
        program, *args = in_shell(command)
        assert program == "agl"
        done = subprocess.run(
            [sys.executable, "-P", "-m", "agl", *args], capture_output=True, text=True, cwd=folder, timeout=120
        )
        output = words(done.stdout + done.stderr)
        assert "Traceback" not in output, output
        for line in expected.splitlines():
            assert words(line) in output, f"{command}: {output}"


def test_conformance_of_the_tutorials_plugin(folder):
    pytest.importorskip("agl_testing", reason="agl-testing is not installed")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_contains.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "passed" in done.stdout
