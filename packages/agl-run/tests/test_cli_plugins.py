"""The ``agl`` command: its options, and ``agl plugins``."""

import errno
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import click
import pytest
from click.testing import CliRunner

import agl
from agl.hints import pip_install
from agl_inspect.terminal.program import cli

TOY = """
from agl import CommandEntry, RewardEntry, TracerEntry, hookimpl

@hookimpl
def agl_rewards():
    yield RewardEntry(name="toy", factory="agl_toy_framework:Reward", summary="a toy")

@hookimpl
def agl_tracers():
    yield TracerEntry(name="toyframe", factory="agl_toy_framework:Tracer")

@hookimpl
def agl_commands():
    yield CommandEntry(name="hello", factory="agl_toy_cli:hello", summary="say hello")
    yield CommandEntry(name="built", factory="agl_toy_cli:make", summary="made by a function")
    yield CommandEntry(name="fails", factory="agl_toy_cli:fails", summary="raises")
    yield CommandEntry(name="evil", factory="agl_toy_cli:evil", summary="raises what an agent said")
    yield CommandEntry(name="waits", factory="agl_toy_cli:waits", summary="is interrupted")
"""
COMMANDS = """
import click
from agl import ConfigError
from agl_inspect.terminal.opening import pass_manager

@click.command()
@pass_manager
def hello(manager):
    click.echo(f"hello with {len(manager.status())} plugins")

def make():
    return click.Command("built", callback=lambda: click.echo("built"))

@click.command()
def evil():
    raise ConfigError("an agent said " + chr(27) + "[2J")

@click.command()
def fails():
    raise ConfigError("the setting 'x' is wrong in a.toml; write 'y'")

@click.command()
def waits():
    raise KeyboardInterrupt
"""


@pytest.fixture
def toy(install_plugin, site):
    install_plugin("agl-toy", TOY, entry="toy")
    (site / "agl_toy_framework.py").write_text("raise RuntimeError('framework imported')\n", encoding="utf-8")
    (site / "agl_toy_cli.py").write_text(COMMANDS, encoding="utf-8")


def invoke(*args: str):
    return CliRunner().invoke(cli, args, catch_exceptions=False)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "agl", *args], capture_output=True, text=True, timeout=60)


def test_help_lists_commands_of_plugins_without_importing_them(toy):
    result = invoke("--help")
    assert 0 == result.exit_code
    assert "say hello" in result.output
    assert "plugins" in result.output
    assert "agl_toy_cli" not in sys.modules


def test_command_of_a_plugin_runs(toy):
    assert invoke("hello").output.startswith("hello with ")
    assert "built\n" == invoke("built").output


def test_no_plugins_leaves_them_out(toy):
    assert "say hello" not in invoke("--no-plugins", "--help").output
    result = invoke("--no-plugins", "hello")
    assert 2 == result.exit_code
    assert "there is no command 'hello'" in result.output


def test_version():
    assert f"agl, version {agl.__version__}\n" == invoke("--version").output


def test_mistyped_command_gets_the_close_match():
    result = invoke("plugin")
    assert 2 == result.exit_code
    assert "did you mean 'plugins'?" in result.stderr


@pytest.mark.skipif(find_spec("agl_gateway") is not None, reason="agl-gateway is installed here")
def test_command_of_a_missing_package_gets_the_install_line():
    assert f"run: {pip_install('agl-gateway')}" in invoke("--no-plugins", "serve").stderr


def test_error_is_one_paragraph_and_debug_gives_the_traceback(toy):
    result = invoke("fails")
    assert 1 == result.exit_code
    assert "Error: the setting 'x' is wrong in a.toml; write 'y'\n" == result.stderr
    debug = invoke("--debug", "fails")
    assert 1 == debug.exit_code
    assert "Traceback" in debug.stderr
    assert debug.stderr.endswith(result.stderr)


def test_traceback_shows_control_characters_of_an_error_and_obeys_none(toy):
    debug = invoke("--debug", "evil")
    assert 1 == debug.exit_code
    assert "Traceback" in debug.stderr
    assert "\x1b" not in debug.stderr
    assert 2 == debug.stderr.count(r"an agent said \x1b[2J")


def test_interrupted_command_ends_as_shells_expect(toy):
    result = invoke("waits")
    assert 130 == result.exit_code
    assert "\nstopped\n" == result.stderr


def test_plugins_list_shows_plugins_and_imports_no_framework(toy):
    code = (
        "import sys\nfrom agl_inspect.terminal.program import main\nsys.argv = ['agl', 'plugins', 'list']\n"
        "try: main()\nexcept SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'agl_toy_framework', 'agl_toy_cli', 'torch', 'httpx', 'sqlite3', 'opentelemetry.sdk'}\n"
        "bad = heavy & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert 0 == done.returncode, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("toy "))
    assert ["toy", "agl-toy", "1.0", "loaded"] == line.split()[:4]
    assert "reward toy" in line


def test_plugins_list_as_json(toy):
    found = {status["name"]: status for status in json.loads(invoke("plugins", "list", "--json").output)}
    assert "agl-toy" == found["toy"]["distribution"]
    assert "command hello" in found["toy"]["components"]
    assert "loaded" == found["core"]["state"]


def test_plugins_show_gives_factories(toy):
    output = invoke("plugins", "show", "toy").output
    assert "agl-toy 1.0" in output
    assert "agl_toy_framework:Reward" in output
    found = json.loads(invoke("plugins", "show", "agl-toy", "--json").output)
    assert {"component": "reward toy", "factory": "agl_toy_framework:Reward", "summary": "a toy"} in found["components"]


@pytest.mark.parametrize(("name", "hint"), [("toi", "did you mean 'toy'?"), ("elsewhere", "there are: core")])
def test_plugins_show_of_an_unknown_plugin_names_the_closest_or_all(toy, name, hint):
    result = invoke("plugins", "show", name)
    assert 1 == result.exit_code
    assert hint in result.stderr


def test_plugins_check_names_what_does_not_import(toy):
    result = invoke("plugins", "check", "toy")
    assert 1 == result.exit_code
    assert "the reward 'toy' cannot be built" in result.output
    assert "framework imported" in result.output
    assert "command 'hello'" not in result.output
    findings = json.loads(invoke("plugins", "check", "toy", "--json").output)
    assert {"reward toy", "tracer toyframe"} == {finding["component"] for finding in findings}


SLOW = """
from agl import RewardEntry, hookimpl

@hookimpl
def agl_rewards():
    yield RewardEntry(name="slow", factory="agl_slow_reward:make")
"""


def test_plugins_check_names_the_component_that_is_still_being_imported(install_plugin, site, monkeypatch):
    monkeypatch.setattr("agl_inspect.cli.plugins.SLOW_S", 0.01)
    install_plugin("agl-slow", SLOW, entry="slow")
    (site / "agl_slow_reward.py").write_text("import time\ntime.sleep(0.3)\nmake = int\n")
    assert "still importing the reward 'slow' ...\n" == invoke("plugins", "check", "slow").stderr


def test_plugins_check_of_sound_plugins_says_so(install_plugin):
    install_plugin("agl-fine", "from agl import hookimpl\n", entry="fine")
    result = invoke("plugins", "check", "fine")
    assert (result.exit_code, result.output) == (0, "1 plugin with 0 components: all well\n")


def test_plugins_check_tells_a_disabled_name_that_nobody_has(monkeypatch):
    monkeypatch.setenv("AGL_DISABLED_PLUGINS", "tpyo")
    result = invoke("plugins", "check")
    assert 1 == result.exit_code
    assert "AGL_DISABLED_PLUGINS names 'tpyo'" in result.output


def test_every_command_of_the_core_is_a_click_command():
    manager = agl.PluginManager()
    for entry in manager.entries("command"):
        assert isinstance(manager.resolve(entry), click.Command), entry.name


def cpu_of(*words: str) -> float:
    """Return the least CPU seconds of a program in five runs."""
    taken: list[float] = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        after = os.times()
        taken.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(taken)


def test_help_costs_little_more_than_its_libraries():
    libraries = cpu_of("-c", "import asyncio, click, msgspec, packaging.requirements, pluggy, rich.table")
    assert cpu_of("-m", "agl", "--help") <= 2.5 * libraries


def test_component_whose_extra_is_not_installed_is_named_and_not_wrong(install_plugin, site):
    source = TOY.replace("agl_toy_framework", "agl_toy_part").replace("agl_toy_cli:", "json:")
    requires = ("agl-core>=0.1,<0.2", "agl-toy-absent>=1; extra == 'absent'")
    install_plugin("agl-toy", source.partition("@hookimpl\ndef agl_commands")[0], entry="toy", requires=requires)
    (site / "agl_toy_part.py").write_text("import agl_toy_absent\n", encoding="utf-8")

    result = invoke("plugins", "check", "toy")

    assert 0 == result.exit_code
    assert "toy: optional: the reward 'toy' needs the Python module" in result.output
    assert "pip install 'agl-toy[absent]'" in result.output
    assert "all well" in result.output


class Fills:
    @agl.hookimpl
    def agl_commands(self) -> list[agl.CommandEntry]:
        def fill() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def wait() -> None:
            raise TimeoutError

        return [
            agl.CommandEntry(name=act.__name__, factory=click.Command(act.__name__, callback=act))
            for act in (fill, wait)
        ]


def test_full_disk_is_one_line_of_any_command() -> None:
    manager = agl.PluginManager()
    manager.register(Fills(), name="fills")
    done = CliRunner().invoke(cli, ["fill"], obj=manager, prog_name="agl")
    assert 1 == done.exit_code
    assert done.stderr.startswith(
        "Error: the operating system refused: [Errno 28] No space left on device; correct that"
    )


def test_error_of_a_socket_without_a_number_is_not_called_the_systems() -> None:
    manager = agl.PluginManager()
    manager.register(Fills(), name="fills")
    assert isinstance(CliRunner().invoke(cli, ["wait"], obj=manager, prog_name="agl").exception, TimeoutError)


@pytest.mark.parametrize(("code", "status"), [("", 0), ("2", 2), ("'text'", 1)])
def test_command_ends_although_a_thread_runs_on(code: str, status: int) -> None:
    program = (
        "import sys, threading, time\nfrom agl_inspect.terminal import program\nprogram.PATIENCE_S = 0.1\n"
        "threading.Thread(target=time.sleep, args=(300,), name='forever').start()\n"
        f"program.cli = lambda **_: sys.exit({code})\nprogram.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (status, True) == (done.returncode, "stops threads that still run: forever" in done.stderr), done.stderr
