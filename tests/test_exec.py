"""``agl exec``: any program is recorded once, with its output and exit status passed through."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agl_inspect.terminal.program import cli
from agl_testing.model_server import ScriptedModelServer
from agl_testing.plugins import PluginFolder

from .programs import alive

StartAgl = Callable[..., Any]

PROGRAM = """
import sys, openai
client = openai.OpenAI({where} max_retries=0)
text = client.chat.completions.create(model="m", messages=[{{"role": "user", "content": "what is 4?"}}])
print(text.choices[0].message.content)
sys.exit(3)
"""


def record(agl: StartAgl, folder: Path, *words: str) -> tuple[int, str, str]:
    process = agl("exec", *words, cwd=folder)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("how", ["upstream", "upstream and a URL of its own", "a URL of its own"])
def test_program_is_recorded_whichever_way_it_finds_its_model(
    agl: StartAgl, tmp_path: Path, server: ScriptedModelServer, how: str
) -> None:
    where = f"base_url={server.base_url!r}," if "URL" in how else ""
    upstream = ("--upstream", server.base_url) if "upstream" in how else ()

    code, out, err = record(agl, tmp_path, *upstream, "--", sys.executable, "-c", PROGRAM.format(where=where))

    assert (3, "4\n") == (code, out)
    assert "agl: recorded 1 model call" in err, err
    spans = read("show", "latest", folder=tmp_path)["spans"]
    assert ["m"] == [span["call"]["model"] for span in spans if span.get("call")]


def read(*words: str, folder: Path) -> Any:
    """What a command prints as JSON about the store in ``folder``."""
    done = CliRunner().invoke(cli, [*words, "--json", "--store", f"sqlite:///{folder}/runs/agl.db"])
    assert 0 == done.exit_code, done.output
    return json.loads(done.stdout)


def latest(folder: Path) -> Any:
    return read("show", "latest", folder=folder)["rollout"]


CANNOT_START = {
    "no-such-program-at-all": "cannot start 'no-such-program-at-all': no such program was found; the command",
    "./notes.txt": "cannot start './notes.txt': it may not be executed (chmod +x); the command goes after --",
    "./broken": "cannot start './broken': [Errno 8] Exec format error",
}


def test_program_that_cannot_start_is_a_readable_error_and_leaves_no_rollout(agl: StartAgl, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no program")
    (tmp_path / "broken").write_bytes(b"\x7fELF and nothing more")
    (tmp_path / "broken").chmod(0o755)
    record(agl, tmp_path, "--", sys.executable, "-c", "pass")
    before = latest(tmp_path)

    for program, message in CANNOT_START.items():
        code, _, err = record(agl, tmp_path, "--", program)
        assert 1 == code
        assert message in err
        assert "Traceback" not in err
    assert [before] == [row["rollout"] for row in read("runs", folder=tmp_path)]


def test_wrong_upstream_of_the_environment_is_reported_with_its_variable() -> None:
    done = CliRunner().invoke(cli, ["exec", "--", "true"], env={"OPENAI_BASE_URL": "http://h/v1?key=1"})
    assert (1, True) == (done.exit_code, done.stderr.startswith("Error: OPENAI_BASE_URL 'http")), done.stderr


def test_program_that_does_not_exist_makes_no_store(agl: StartAgl, tmp_path: Path) -> None:
    record(agl, tmp_path, "--", "no-such-program-at-all")

    assert not (tmp_path / "runs").exists()


def test_program_without_a_call_is_recorded_and_says_what_to_check(agl: StartAgl, tmp_path: Path) -> None:
    code, _, err = record(agl, tmp_path, "--", sys.executable, "-c", "pass")

    assert 0 == code
    assert "no model call was seen" in err


PAST_THE_RECORD = """
import agl
with agl.operation("chat", **{"gen_ai.operation.name": "chat", "agl.client": "pigeon.ChatPigeon"}):
    pass
"""


def test_calls_that_the_programs_framework_saw_and_that_were_not_recorded_are_reported(
    agl: StartAgl, tmp_path: Path
) -> None:
    code, _, err = record(agl, tmp_path, "--", sys.executable, "-c", PAST_THE_RECORD)

    assert 0 == code
    assert (
        "agl: noticed 1 model call that was not recorded, made by pigeon.ChatPigeon (1). "
        "A Python program is recorded where its clients use httpx"
    ) in err
    assert "no model call was seen" not in err


OF_AGENTS = """
from opentelemetry import trace
with trace.get_tracer("shop").start_as_current_span("work", attributes={"gen_ai.operation.name": "invoke_agent"}):
    pass
"""


def test_named_tracer_records_the_agents_of_the_program(agl: StartAgl, tmp_path: Path) -> None:
    program = ("--", sys.executable, "-c", OF_AGENTS)
    found = []
    for words in ((), ("--tracer", "otel")):
        assert 0 == record(agl, tmp_path, *words, *program)[0]
        found.append("work" in [span["name"] for span in read("show", "latest", folder=tmp_path)["spans"]])
    assert [False, True] == found

    code, _, err = record(agl, tmp_path, "--tracer", "otle", *program)
    assert (1, True) == (code, "no tracer is named 'otle' (did you mean 'otel'?" in err), err


CALLS_IN_SPAN = """
from opentelemetry import trace
with trace.get_tracer("shop").start_as_current_span("work", attributes={{"gen_ai.operation.name": "invoke_agent"}}):
    {call}
"""


def test_call_belongs_to_the_agent_that_the_named_tracer_sees(
    agl: StartAgl, tmp_path: Path, server: ScriptedModelServer
) -> None:
    call = (
        f"import openai; openai.OpenAI(base_url={server.base_url!r}, api_key='k')"
        ".chat.completions.create(model='small', messages=[{'role': 'user', 'content': 'hi'}])"
    )
    program = ("--", sys.executable, "-c", CALLS_IN_SPAN.format(call=call))

    code, _, err = record(agl, tmp_path, "--tracer", "otel", *program)

    assert 0 == code, err
    spans = {span["name"]: span for span in read("show", "latest", folder=tmp_path)["spans"]}
    assert spans["work"]["span_id"] == spans["chat small"]["parent_id"]
    assert "outside of the framework's spans" not in err


FALLS = """
import agl
from agl.contracts import TracerEntry

class Falls:
    def install(self):
        raise KeyError("no key")

    def uninstall(self): ...
    def current_span_id(self): ...
    def worker_env(self): return {}
    def flush(self, timeout_s): ...

@agl.hookimpl
def agl_tracers():
    yield TracerEntry(name="falls", factory=Falls)
"""


def test_tracer_that_raises_does_not_end_the_recording(
    agl: StartAgl,
    tmp_path: Path,
    server: ScriptedModelServer,
    agl_plugins: PluginFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agl_plugins.install(FALLS, name="falls")
    monkeypatch.setenv("PYTHONPATH", agl_plugins.environment["PYTHONPATH"])
    program = ("--", sys.executable, "-c", PROGRAM.format(where=f"base_url={server.base_url!r},"))

    code, _, err = record(agl, tmp_path, "--tracer", "falls", *program)

    assert 3 == code
    assert "agl: recorded 1 model call" in err, err
    assert "agl: the tracer 'falls' could not be installed: KeyError: 'no key', at " in err


FAMILY = """
import os, subprocess, sys, time
waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
children = [subprocess.Popen(waiting), subprocess.Popen(waiting, start_new_session=True)]
with open("pids.new", "w") as file:
    file.write(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))))
os.rename("pids.new", "pids")
time.sleep(60)
"""
"""A program with a child of its own, and another one in a session of its own."""


def until(condition: Callable[[], object], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")


@needs_proc
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_program_that_is_interrupted_ends_with_its_descendants_and_settles_its_attempt(
    agl: StartAgl, tmp_path: Path, number: signal.Signals, name: str
) -> None:
    process = agl("exec", "--", sys.executable, "-c", FAMILY, cwd=tmp_path)
    until((tmp_path / "pids").exists, seconds=30)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]

    process.send_signal(number)
    _, err = process.communicate(timeout=60)

    assert 128 + number == process.returncode
    assert 1 == len(err.splitlines()), err
    assert err.startswith(f"agl: stopped by {name} after "), err
    assert [] == alive(pids)
    assert "failed" == latest(tmp_path)["status"]


@needs_proc
def test_program_ends_with_its_descendants_when_agl_is_killed(agl: StartAgl, tmp_path: Path) -> None:
    process = agl("exec", "--", sys.executable, "-c", FAMILY, cwd=tmp_path)
    until((tmp_path / "pids").exists, seconds=30)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]

    os.kill(process.pid, signal.SIGKILL)

    until(lambda: not alive(pids), seconds=40)
    process.communicate(timeout=60)


def test_program_beyond_its_time_is_stopped_and_its_record_says_so(agl: StartAgl, tmp_path: Path) -> None:
    code, _, err = record(agl, tmp_path, "--timeout", "0.5", "--", sys.executable, "-c", "import time; time.sleep(60)")

    assert 124 == code
    assert "agl: stopped after 0.5 s" in err
    assert "Error" not in err
    assert "failed" == latest(tmp_path)["status"]


@pytest.mark.skipif(sys.platform == "win32", reason="ends a process by a signal")
def test_program_that_a_signal_kills_has_the_exit_status_of_a_shell(agl: StartAgl, tmp_path: Path) -> None:
    code, _, err = record(agl, tmp_path, "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 15)")

    assert 143 == code, err
