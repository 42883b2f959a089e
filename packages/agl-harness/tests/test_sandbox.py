"""Local sandboxes: the contract's methods, isolation, limits, and cleaning up after killed processes."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from agl.errors import ConfigError, RunError
from agl_harness import Limits, PathError, SandboxError
from agl_harness.conformance import SandboxConformance
from agl_harness.runner import HarnessRunner
from agl_harness.sandboxes.backends import build_sandboxes
from agl_harness.sandboxes.isolation import bubblewrap, find_isolation
from agl_harness.sandboxes.local import LocalSandbox, LocalSandboxes
from agl_run import AgentSpec
from agl_testing.waiting import wait_until

from .conftest import wait

WORKS = bool(find_isolation("auto").program)
NO_BUBBLEWRAP = "bubblewrap does not work here"
KINDS = ("none", pytest.param("bwrap", marks=pytest.mark.skipif(not WORKS, reason=NO_BUBBLEWRAP)))

HOLD = 'import time; x = b"1" * (60 << 20); time.sleep(600)'

ENVIRONMENT = {"PATH": os.environ["PATH"]}


@pytest.fixture(params=KINDS)
def sandboxes(request: pytest.FixtureRequest, tmp_path: Path) -> LocalSandboxes:
    """A backend with plain processes, and another with bubblewrap."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "answer").write_text("42")
    return LocalSandboxes(base=tmp_path / "boxes", hidden=[tmp_path / "secret"], isolation=request.param)


class TestConformance(SandboxConformance):
    @pytest.fixture(params=KINDS)
    def sandboxes(self, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
        return LocalSandboxes(base=tmp_path / "boxes", isolation=request.param)


def run(sandboxes: LocalSandboxes, script: str, **options: Any) -> Any:
    """Run a shell script in a new sandbox, and return the result."""

    async def work() -> Any:
        sandbox = await sandboxes.create("one")
        try:
            return await sandbox.exec(["sh", "-c", script], environment=ENVIRONMENT, **options)
        finally:
            await sandbox.close()

    return wait(work)


def test_command_runs_in_its_workspace_with_what_it_is_given(sandboxes: LocalSandboxes) -> None:
    done = run(sandboxes, "pwd; cat; echo wrong >&2; exit 3", stdin=b"hello")
    assert (3, "") == (done.code, done.exceeded)
    assert done.output.endswith("boxes/one/workspace\nhello")
    assert "wrong\n" == done.errors


def test_files_go_in_and_out(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    (tmp_path / "given" / "deep").mkdir(parents=True)
    (tmp_path / "given" / "deep" / "a.txt").write_text("given")
    (tmp_path / "given" / "link").symlink_to("deep/a.txt")
    os.mkfifo(tmp_path / "given" / "pipe")

    async def work() -> None:
        sandbox = await sandboxes.create("one")
        await sandbox.upload(tmp_path / "given", "workspace")
        await sandbox.write("workspace/deep/b.txt", b"written")
        assert b"given" == await sandbox.read("workspace/link")
        copy = await sandbox.snapshot()
        await sandbox.write("workspace/deep/b.txt", b"changed")
        assert b"written" == await copy.read("workspace/deep/b.txt")
        await sandbox.download("workspace/deep", tmp_path / "taken")
        again = await sandboxes.attach(sandbox.address)
        assert b"changed" == await again.read("workspace/deep/b.txt")
        await copy.close()
        await sandbox.close()
        await sandbox.close()

    wait(work)
    assert {"a.txt", "b.txt"} == {path.name for path in (tmp_path / "taken").iterdir()}
    assert [] == list((tmp_path / "boxes").iterdir())


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "workspace/../../x", "workspace/out/x", "workspace/file", "a\0b"]
)
def test_path_that_leads_out_is_refused(sandboxes: LocalSandboxes, tmp_path: Path, path: str) -> None:
    (tmp_path / "outside").mkdir()

    async def work() -> None:
        sandbox = await sandboxes.create("one")
        (Path(sandbox.address) / "workspace" / "out").symlink_to(tmp_path / "outside")
        (Path(sandbox.address) / "workspace" / "file").symlink_to(tmp_path / "outside" / "new")
        with pytest.raises(PathError, match="leads out of the sandbox"):
            await sandbox.write(path, b"")
        with pytest.raises(PathError):
            await sandbox.read(path)
        with pytest.raises(PathError):
            await sandbox.upload(tmp_path / "secret", path)

    wait(work)
    assert [] == list((tmp_path / "outside").iterdir())


@pytest.mark.skipif(not WORKS, reason=NO_BUBBLEWRAP)
def test_bubblewrap_hides_and_protects_what_is_not_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "answer").write_text("42")
    boxes = LocalSandboxes(base=tmp_path / "secret" / "boxes", hidden=[tmp_path / "secret"], isolation="bwrap")
    other = f"{Path(__file__).parent}/from-the-sandbox"
    script = f"cat {tmp_path}/secret/answer; echo x > {other}; echo x > {tmp_path}/x; ps -e | wc -l"
    done = run(boxes, f"{script}; echo in > inside; cat inside")
    assert "No such file" in done.errors
    assert "Read-only" in done.errors or "nonexistent" in done.errors  # a checkout below /tmp is not there at all
    assert not Path(other).exists()
    assert not (tmp_path / "x").exists()
    assert int(done.output.split()[0]) < 10
    assert "in" == done.output.split()[-1]


@pytest.mark.skipif(not WORKS, reason=NO_BUBBLEWRAP)
def test_command_cannot_make_its_sandbox_look_dead(tmp_path: Path) -> None:
    boxes = LocalSandboxes(base=tmp_path / "boxes", isolation="bwrap")
    done = run(boxes, "cd ..; rm -rf tmp/* tmp/.[!.]* .[!.]*; ls -l /proc/self/fd /proc/1/fd | grep -c boxes; true")
    assert (0, "0\n") == (done.code, done.output)


@pytest.mark.skipif(not WORKS, reason=NO_BUBBLEWRAP)
def test_hidden_folder_is_hidden_when_it_is_named_by_a_link() -> None:
    with TemporaryDirectory(dir="/var/tmp") as folder:
        _check_hidden_by_link(Path(folder, "real"), Path(folder, "link"))


def _check_hidden_by_link(real: Path, link: Path) -> None:
    (real / "tools").mkdir(parents=True)
    (real / "answer").write_text("42")
    (real / "tools" / "tool").write_text("#!/bin/sh\necho tool\n")
    (real / "tools" / "tool").chmod(0o755)
    link.symlink_to(real)
    boxes = LocalSandboxes(base=link / "boxes", hidden=[link, Path("/")], readable=[link / "tools"], isolation="bwrap")
    done = run(boxes, f"cat {link}/answer {real}/answer; {link}/tools/tool; {real}/tools/tool; echo x > y; cat y")
    assert "tool\ntool\nx\n" == done.output, done.errors
    assert 2 == done.errors.count("No such file")


@pytest.mark.skipif(not WORKS, reason=NO_BUBBLEWRAP)
def test_sandbox_of_a_task_is_not_entered_without_bubblewrap(tmp_path: Path) -> None:
    async def work() -> None:
        boxes = LocalSandboxes(base=tmp_path / "boxes")
        sandbox = await boxes.create_for("one", task=tmp_path / "task", places={"tests": "/tests"})
        with pytest.raises(ConfigError, match='cannot make them, because isolation is "none"'):
            await LocalSandboxes(base=tmp_path / "boxes", isolation="none").attach(sandbox.address)
        await sandbox.close()

    wait(work)


@pytest.mark.skipif(not WORKS, reason=NO_BUBBLEWRAP)
def test_sandboxes_do_not_see_each_other() -> None:
    async def work(boxes: LocalSandboxes) -> None:
        one, two = await boxes.create("one"), await boxes.create("two")
        await one.write("workspace/file", b"x")
        done = await two.exec(["ls", str(Path(one.address).parent), one.address], environment=ENVIRONMENT)
        assert "two\n" in done.output
        assert "No such file" in done.errors

    with TemporaryDirectory(dir="/var/tmp") as folder:
        wait(lambda: work(LocalSandboxes(base=Path(folder), isolation="bwrap")))


@pytest.mark.skipif(not WORKS, reason=NO_BUBBLEWRAP)
def test_programs_of_a_home_folder_are_seen_and_its_secrets_are_not() -> None:
    with TemporaryDirectory(dir="/var/tmp") as folder:
        _check_home(Path(folder))


def _check_home(home: Path) -> None:
    local = home / ".local"
    programs = ("share/tools/tool", "state/agl/harnesses/mine/bin/mine", "bin/scripted")
    secrets = (".local/share/keys/key", ".local/state/agl/secret", ".local/secret", "work/secret/answer")
    for path, text in {
        **{local / name: "#!/bin/sh\necho $0 | sed 's,.*/,,'\n" for name in programs},
        **{home / name: "42" for name in secrets},
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (local / "bin" / "tool").symlink_to("../share/tools/tool")
    (home / "work" / "bin").mkdir()
    hidden = [home, local / "state" / "agl", home / "work" / "secret"]
    boxes = LocalSandboxes(base=home / "boxes", hidden=hidden, isolation="bwrap")
    entries = [local / "bin", local / "state" / "agl" / "harnesses" / "mine" / "bin", home / "work" / "bin"]
    path = os.pathsep.join([*map(str, entries), os.environ["PATH"]])

    async def work() -> Any:
        sandbox = await boxes.create("one")
        script = f"tool; scripted; mine; grep -rl 42 {home}; ls {home}/work"
        return await sandbox.exec(["sh", "-c", script], environment={"PATH": path})

    done = wait(work)
    assert "tool\nscripted\nmine\nbin\nsecret\n" == done.output, done.errors


def test_python_of_agl_is_found_though_its_folder_is_hidden(tmp_path: Path) -> None:
    boxes = LocalSandboxes(base=tmp_path / "boxes", hidden=[Path(sys.prefix).parent, Path.home()])

    async def work() -> Any:
        sandbox = await boxes.create("one")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return await sandbox.exec(["python", "-c", "import msgspec; print('found')"], environment={"PATH": path})

    assert "found\n" == wait(work).output


def test_everything_that_a_command_started_ends_with_it(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    done = run(sandboxes, f"(setsid sh -c 'exec -a {tmp_path.name}-left sleep 600' &) ; sleep 0.2; echo over")
    assert "over\n" == done.output
    wait_until(lambda: not any(f"{tmp_path.name}-left" in line for line in _commands()))


def _commands() -> list[str]:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("script", "limits", "exceeded"),
    [
        ("sleep 600", Limits(seconds=0.5), "seconds"),
        (f"for i in 1 2 3; do {sys.executable} -c '{HOLD}' & done; wait", Limits(memory=128 << 20), "memory"),
        ("for i in 1 2 3 4 5 6 7 8 9; do sleep 600 & done; wait", Limits(processes=6), "processes"),
    ],
)
def test_command_is_stopped_beyond_its_limits(
    sandboxes: LocalSandboxes, script: str, limits: Limits, exceeded: str
) -> None:
    done = run(sandboxes, script, limits=limits)
    assert (exceeded, -9) == (done.exceeded, done.code)
    assert done.detail


@pytest.mark.skipif(not WORKS, reason=NO_BUBBLEWRAP)
@pytest.mark.parametrize("folder", ["/tmp", str(Path.home())])
def test_files_in_memory_count_as_memory(tmp_path: Path, folder: str) -> None:
    boxes = LocalSandboxes(base=tmp_path / "boxes", hidden=[Path.home()], isolation="bwrap")
    done = run(boxes, f"head -c 200000000 /dev/zero > {folder}/file; sleep 60", limits=Limits(memory=128 << 20))
    assert "memory" == done.exceeded


def test_one_process_gets_no_more_memory_than_all_may_use(sandboxes: LocalSandboxes) -> None:
    done = run(sandboxes, f"{sys.executable} -c \"b'1' * (200 << 20)\"", limits=Limits(memory=128 << 20))
    assert "MemoryError" in done.errors


def test_missing_program_is_no_failure_of_the_sandbox(sandboxes: LocalSandboxes) -> None:
    async def work() -> None:
        sandbox = await sandboxes.create("one")
        with pytest.raises(FileNotFoundError, match="no program 'no-such-program'"):
            await sandbox.exec(["no-such-program"], environment=ENVIRONMENT)

    wait(work)


def test_sandbox_that_is_gone_is_named(sandboxes: LocalSandboxes) -> None:
    async def work() -> None:
        sandbox = await sandboxes.create("one")
        address = sandbox.address
        await sandbox.close()
        with pytest.raises(SandboxError, match="is gone"):
            await sandbox.exec(["true"], environment=ENVIRONMENT)
        with pytest.raises(SandboxError, match="is gone"):
            await sandboxes.attach(address)

    wait(work)


def test_bubblewrap_that_breaks_is_a_dead_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin" / "bwrap"
    broken.parent.mkdir()
    broken.write_text(
        f'#!/bin/sh\n[ -e {tmp_path}/tried ] || {{ : > {tmp_path}/tried; exit 0; }}\necho "bwrap: no" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="bubblewrap could not start 'sh': bwrap: no"):
        run(LocalSandboxes(base=tmp_path / "boxes", isolation="bwrap"), "echo hello")


def test_isolation_that_is_asked_for_is_not_silently_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text('#!/bin/sh\necho "bwrap: No permissions to create new namespace" >&2; exit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert str(broken) == bubblewrap()
    with pytest.raises(ConfigError, match=r"does not work here \(No permissions.*isolation = \"auto\""):
        find_isolation("bwrap")
    assert "hidden tests" in find_isolation("auto").warning
    assert 0 == run(LocalSandboxes(base=tmp_path / "boxes"), "true").code
    assert ["No permissions" in record.message for record in caplog.records] == [True]


def test_sandbox_of_a_killed_process_is_removed_and_a_kept_one_is_not(tmp_path: Path) -> None:
    script = f"""
import asyncio, os
from pathlib import Path
from agl_harness.sandboxes.local import LocalSandboxes

async def main():
    boxes = LocalSandboxes(base=Path({str(tmp_path)!r}), isolation="none")
    await (await boxes.create("kept")).keep()
    await boxes.create("left")
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    assert -9 == subprocess.run([sys.executable, "-c", script], check=False).returncode

    async def work() -> LocalSandbox:
        return await boxes.create("mine")

    boxes = LocalSandboxes(base=tmp_path, isolation="none")
    mine = wait(work)
    assert {"kept", "left", "mine"} == {path.name for path in tmp_path.iterdir() if path.is_dir()}
    boxes.remove_abandoned()
    assert {"kept", "mine"} == {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert ["kept"] == [path.name for path in boxes.kept()]
    boxes.prune(0)
    assert ["mine"] == [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert mine.address == str(tmp_path / "mine")


def test_folder_that_is_deeper_than_python_goes_is_removed(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    dig = "import os\nfor _ in range(1500):\n os.mkdir('d')\n os.chdir('d')"

    async def work() -> None:
        sandbox = await sandboxes.create("one")
        done = await sandbox.exec([sys.executable, "-c", dig], environment=ENVIRONMENT)
        assert 0 == done.code, done.errors
        await sandbox.exec(["chmod", "a-rwx", "d/d/d"], environment=ENVIRONMENT)
        with pytest.raises(RunError, match="is too deep to be copied"):
            await sandbox.snapshot()
        await sandbox.close()

    wait(work)
    assert [] == list((tmp_path / "boxes").iterdir())


UNREADABLE = """
import asyncio, concurrent.futures.thread, os, sys
from pathlib import Path
from agl_harness.sandboxes.local import LocalSandboxes

async def main():
    boxes = LocalSandboxes(base=Path(sys.argv[1]), isolation="none")
    box = await boxes.create("one")
    await box.write("workspace/deep/file", b"file")
    workspace = Path(box.address, "workspace")
    (workspace / "deep" / "file").chmod(0)
    (workspace / "deep").chmod(0)
    copy = await box.snapshot()
    print(await copy.read("workspace/deep/file"))
    await copy.close()
    await box.close()

if os.getuid() == 0:
    os.setuid(65534)
asyncio.run(main())
"""


def test_workspace_that_a_harness_made_unreadable_is_copied() -> None:
    with TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o777)
        words = [sys.executable, "-c", UNREADABLE, f"{folder}/boxes"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert "b'file'\n" == done.stdout, done.stderr
        assert [] == list(Path(folder, "boxes").iterdir())


def test_cancelled_command_is_stopped(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    async def work() -> None:
        sandbox = await sandboxes.create("one")
        task = asyncio.create_task(sandbox.exec(["sh", "-c", "echo > begun; sleep 600"], environment=ENVIRONMENT))
        while not (Path(sandbox.address) / "workspace" / "begun").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(str(tmp_path) in line and "sleep 600" in line for line in _commands())

    wait(work)


class HalfBackend:
    """Creates sandboxes and cannot find them again."""

    async def create(self, name: str) -> LocalSandbox:
        raise SandboxError(name)


def half_backend(**_: object) -> HalfBackend:
    """Build the backend as a function does, which shows its methods only when it is called."""
    return HalfBackend()


@pytest.mark.parametrize("name", ["HalfBackend", "half_backend"])
def test_backend_without_a_method_of_its_contract_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"the sandbox '[\w.-]+:{name}' lacks create or attach, the methods of"):
        build_sandboxes(f"{__name__}:{name}", base=tmp_path, hidden=[])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unlicensed:X", "'unlicensed' raised ValueError when it was imported: no licence (at unlicensed.py:1)"),
        ("unlicensed:", "the sandbox 'unlicensed:' names no attribute of a module; write 'module:attribute'"),
        ("local:", "the sandbox 'local:' names no attribute of a module; write 'module:attribute'"),
        ("nowhere:X", "no module 'nowhere' for the sandbox"),
    ],
)
def test_check_of_an_experiment_says_why_a_backend_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    (tmp_path / "unlicensed.py").write_text("raise ValueError('no licence')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(says)):
        HarnessRunner.check(AgentSpec(harness="codex", folder=str(tmp_path)), params={"sandbox": name})


def test_check_of_an_experiment_refuses_a_backend_without_a_method(tmp_path: Path) -> None:
    agent = AgentSpec(harness="codex", folder=str(tmp_path))
    with pytest.raises(ConfigError, match="lacks create or attach"):
        HarnessRunner.check(agent, params={"sandbox": f"{__name__}:HalfBackend"})
