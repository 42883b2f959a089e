"""The tutorials for authors of plugins work as written: files are made, distributions built, commands run.

The pages are ``plugin.md`` and ``tracer.md``.
"""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

BUILD = "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"
PROGRAMS = {"agl": ["agl"], "pytest": ["pytest", "-q", "-p", "no:cacheprovider"]}


class Tutorial:
    """A page that makes a distribution of one module.

    Attributes:
        module: The distribution's module.
        most: Lines of code that the module may have.
        files: The page's files by name, in order.
        steps: Its commands, each with what it prints.
    """

    def __init__(self, page: str, *, module: str, most: int) -> None:
        text = (Path(__file__).parents[2] / "docs" / "tutorial" / page).read_text(encoding="utf-8")
        self.module, self.most = module, most
        self.files: dict[str, str] = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', text, re.DOTALL))
        self.steps: list[tuple[str, str]] = [
            step
            for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
            for step in re.findall(r"^\$ ([^\n]+)\n((?:(?!\$ )[^\n]*\n)*)", block, re.MULTILINE)
        ]


TUTORIALS = {
    "plugin": Tutorial("plugin.md", module="agl_contains", most=18),
    "tracer": Tutorial("tracer.md", module="agl_tinyflow", most=40),
}


@pytest.fixture(params=TUTORIALS.values(), ids=TUTORIALS)
def tutorial(request: pytest.FixtureRequest) -> Tutorial:
    return request.param


def words(text: str) -> str:
    return " ".join(text.split())


def in_shell(command: str) -> list[str]:
    """The words of a command line of a tutorial."""
    return [part[0] or part[1] for part in re.findall(r'"([^"]*)"|(\S+)', command)]


@pytest.fixture
def folder(tutorial: Tutorial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tutorial's folder with all of its files, and the built distribution on the path of children."""
    work = tmp_path / tutorial.module
    work.mkdir()
    for name, content in tutorial.files.items():
        (work / name).write_text(content, encoding="utf-8")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=work, check=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    for name in ("AGL_STORE", "AGL_DISABLED_PLUGINS", "AGL_PLUGINS_STRICT"):
        monkeypatch.delenv(name, raising=False)
    return work


def test_plugin_is_as_short_as_promised(tutorial: Tutorial):
    code = [line for line in tutorial.files[f"{tutorial.module}.py"].splitlines() if line.strip()]
    assert len(code) <= tutorial.most
    assert 9 == len(tutorial.files["pyproject.toml"].splitlines())


def test_plugin_uses_public_names_only(tutorial: Tutorial):
    imports = re.findall(r"^ *from (agl\S*) import (.+)$", tutorial.files[f"{tutorial.module}.py"], re.MULTILINE)
    assert imports
    for module, names in imports:
        public = __import__(module, fromlist=["__all__"]).__all__
        private = [name for name in names.split(", ") if name not in public and not find_spec(f"{module}.{name}")]
        assert {module: []} == {module: private}


def test_entry_point_names_the_module(tutorial: Tutorial):
    name = tutorial.module.removeprefix("agl_")
    assert {name: tutorial.module} == tomllib.loads(tutorial.files["pyproject.toml"])["project"]["entry-points"]["agl"]
    assert {"tasks.jsonl", "experiment.toml", f"test_{name}.py"} < set(tutorial.files)


def test_commands_print_what_the_tutorial_shows(tutorial: Tutorial, folder: Path):
    assert "pip install --editable ." == tutorial.steps[0][0]
    assert f"pytest test_{tutorial.module.removeprefix('agl_')}.py" == tutorial.steps[-1][0]
    for command, expected in tutorial.steps[1:]:
        program, *args = in_shell(command)
        line = [sys.executable, "-P", "-m", *PROGRAMS[program], *args]
        done = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=300)
        output = words(done.stdout + done.stderr)
        assert "Traceback" not in output, output
        assert program == "agl" or 0 == done.returncode, output
        for part in expected.splitlines():
            assert words(part) in output, f"{command}: {output}"
