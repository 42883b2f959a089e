"""Runs the code blocks of a page in order, as a reader would: files are written, commands are run, Python is executed.

What the language of a block says is done with it:

- ``python``: executed, all blocks of a page in one namespace; ``await`` at the top level works.
- any language with ``title="NAME"``: written to that file; TOML and JSON lines are parsed first.
- ``toml``: parsed, and read as an experiment, on top of a minimal one where it is only a part.
- ``console``: every line after ``$`` is run; what follows it must occur in the output, and ``...`` stands for anything.
  A command that ends in ``&`` runs until the page is done.
  ``pip install .`` builds a wheel of the page's folder and installs it for the commands after it, and so does
  ``pip install --editable .``; what it depends on is already here, and other installations are left out.
- ``text``: nothing.

The ports that the pages use are replaced by free ones, so that pages can be tested on a busy machine.
"""

import ast
import asyncio
import contextlib
import inspect
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agl_run import parse_config

BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
COMMAND = re.compile(r"^\$ ([^\n]+)\n((?:(?!\$ )[^\n]*\n)*)", re.MULTILINE)
PORTS = ("8000", "4747")
PROGRAMS = {
    "agl": [sys.executable, "-P", "-m", "agl"],
    "python": [sys.executable],
    "pytest": [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
    "npm": ["npm"],
    "curl": ["curl"],
}
CHECKOUT = Path(__file__).parents[2]
COMMAND_S = 300
"""Seconds that a command may take; most take one or two, and a busy machine may need many times that."""

INSTALL = ("pip install .", "pip install --editable .")
BUILD = [sys.executable, "-c", "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"]
NOT_RUN = ("pip install ", "python3 -m pip install nox uv && python3 -m nox -s ")
"""Commands that fetch packages; the nox sessions themselves are run by the project's continuous integration."""

MINIMAL: dict[str, Any] = {"experiment": {"agent": "agent:solve"}}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block: its language, its title if it is a file, its text, its heading, and where it stands."""

    language: str
    title: str
    text: str
    section: str
    where: str


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in BLOCK.finditer(text):
        title = re.search(r'title="([^"]+)"', match[2])
        line = text.count("\n", 0, match.start()) + 1
        section = ["", *HEADING.findall(text, 0, match.start())][-1]
        found.append(
            Block(
                language=match[1],
                title=title[1] if title else "",
                text=match[3],
                section=section,
                where=f"{page.name}:{line}",
            )
        )
    return found


class PageRunner:
    """Runs blocks in the current folder; one for each page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._namespace: dict[str, Any] = {"__name__": "page"}
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self._running: list[subprocess.Popen[str]] = []
        self._wheels, self._site = folder / ".wheels", folder / ".site"

    def run(self, block: Block) -> None:
        """Run or check one block; fails the test with the place of the block."""
        text = self._with_ports(block.text)
        if block.title:
            self._write(block, text)
        elif block.language == "python":
            self._execute(block, text)
        elif block.language == "toml":
            check_toml(block, text)
        elif block.language == "console":
            self._commands(block, text)
        elif block.language != "text":
            pytest.fail(f"{block.where}: no rule for a block of language {block.language!r}")

    def check(self, block: Block) -> None:
        """Read one block without running it, for pages that need more than is installed here."""
        if block.title or block.language in ("toml", "text"):
            self.run(block)
        elif block.language == "python":
            compile(block.text, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        else:
            assert block.language == "console", f"{block.where}: no rule for a block of language {block.language!r}"
            assert COMMAND.search(block.text), f"{block.where}: a console block needs lines that start with '$ '"

    def close(self) -> None:
        """End what runs in the background."""
        for process in self._running:
            process.terminate()
            process.communicate(timeout=30)

    def _with_ports(self, text: str) -> str:
        for port, free in self._ports.items():
            text = re.sub(rf"(?<=:|=| ){port}\b", free, text)
        return text

    def _write(self, block: Block, text: str) -> None:
        if block.language == "toml":
            check_toml(block, text)
        elif block.language == "json":
            for line in text.splitlines():
                json.loads(line)
        elif block.language == "python":
            compile(text, block.title, "exec")
        path = self._folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _execute(self, block: Block, text: str) -> None:
        code = compile(text, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, self._namespace))
        else:
            exec(code, self._namespace)

    def _commands(self, block: Block, text: str) -> None:
        found = COMMAND.findall(text)
        assert found, f"{block.where}: a console block needs lines that start with '$ '"
        for command, expected in found:
            if command in INSTALL:
                self._install(block)
            if command.startswith(NOT_RUN):
                continue
            output = self._command(block, command)
            for line in expected.splitlines():
                pattern = ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
                assert re.search(pattern, output), f"{block.where}: $ {command}\nlacks {line!r} in:\n{output}"

    def _command(self, block: Block, command: str) -> str:
        words, environment = split_command(command)
        assert words[0] in PROGRAMS, f"{block.where}: cannot run {words[0]!r}"
        is_background = words[-1] == "&"
        line = [*PROGRAMS[words[0]], *(words[1:-1] if is_background else words[1:])]
        settings: dict[str, Any] = {"cwd": self._folder, "env": self._environment(environment), "text": True}
        if is_background:
            return self._start(line, settings)
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_S, **settings)
        is_expected = "Traceback" in block.text
        assert is_expected or "Traceback" not in done.stdout, f"{block.where}: $ {command}\n{done.stdout}"
        assert done.returncode == 0 or "Error:" in block.text or ": failed, " in block.text, (
            f"{block.where}: $ {command}\n{done.stdout}"
        )
        return " ".join(done.stdout.split())

    def _install(self, block: Block) -> None:
        """Install the distribution in the folder, in place of the one that was installed before."""
        for folder in (self._wheels, self._site):
            shutil.rmtree(folder, ignore_errors=True)
        self._wheels.mkdir()
        self._must(block, [*BUILD, str(self._wheels)])
        (wheel,) = self._wheels.glob("*.whl")
        self._must(block, [*installer(), "-q", "--no-deps", "--target", str(self._site), str(wheel)])

    def _must(self, block: Block, line: list[str]) -> None:
        done = subprocess.run(line, cwd=self._folder, capture_output=True, text=True, timeout=COMMAND_S)
        assert done.returncode == 0, f"{block.where}: $ {INSTALL[0]}\n{done.stdout}{done.stderr}"

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment of a command, which finds the page's own distribution and the checkout's ``worlds``."""
        paths = [str(self._site), str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}

    def _start(self, line: list[str], settings: dict[str, Any]) -> str:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, **settings)
        self._running.append(process)
        assert process.stdout is not None
        return " ".join(process.stdout.readline().split())


def installer() -> list[str]:
    """The command that installs wheels: pip, or uv in an environment without pip."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip", "install"]
    return ["uv", "pip", "install", "--python", sys.executable]


def check_toml(block: Block, text: str) -> None:
    """TOML is valid, and an experiment or a part of one is accepted; a project and a table of harnesses are none."""
    data = tomllib.loads(text)
    is_table = all(isinstance(section, dict) and "command" in section for section in data.values())
    if "project" not in data and not is_table:
        section = {**MINIMAL["experiment"], **data.get("experiment", {})}
        parse_config({**data, "experiment": section}, source=block.where)


def split_command(command: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command line and the variables that it sets in front; ``$NAME`` is the environment's."""
    words = [os.path.expandvars(word) for word in shlex.split(command)]
    environment: dict[str, str] = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    return words, environment


def free_ports(count: int) -> list[str]:
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(item.getsockname()[1]) for item in sockets]
    for item in sockets:
        item.close()
    return ports


@pytest.fixture
def run_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs a page's blocks in an empty folder, or only checks them; modules that they import are forgotten.

    The folder lies outside of pytest's own: each start of pytest closes that one to other users, and a database that
    root starts runs as one of them.
    """
    with tempfile.TemporaryDirectory(prefix="agl-page-") as folder, contextlib.chdir(folder):
        yield from _run_page_in(Path(folder).resolve(), monkeypatch)


def _run_page_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.syspath_prepend(str(folder))
    for name in ("AGL_STORE", "AGL_TOKEN", "OPENAI_BASE_URL", "AGL_PLUGINS_STRICT", "AGL_DISABLED_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    modules, runner = set(sys.modules), PageRunner(folder)

    def run(page: Path, *, is_run: bool = True, sections: Collection[str] = ()) -> None:
        for block in blocks_of(page):
            if not sections or block.section in sections:
                (runner.run if is_run else runner.check)(block)

    yield run
    runner.close()
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
