"""Tests that every backend of sandboxes passes: subclass, and override one fixture.

```text
class TestMine(SandboxConformance):
    @pytest.fixture
    def sandboxes(self, tmp_path):
        return MySandboxes(base=tmp_path)
```

The tests run only ``sh`` and the usual small tools in a sandbox.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError
from agl_harness.sandboxes.contract import (
    Finished,
    Limits,
    ManagedSandboxes,
    PathError,
    Sandbox,
    SandboxError,
    TaskSandboxes,
)

__all__ = ["SandboxConformance"]

_ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath), "GIVEN": "by the test"}
_LARGE = 9 << 20


class SandboxConformance:
    """Tests the contract of :class:`agl_harness.Sandboxes`."""

    @pytest.fixture
    def sandboxes(self) -> Any:
        """Return the backend; override this fixture. Each test starts and closes the backend."""
        raise NotImplementedError

    def run(self, sandboxes: Any, work: Callable[[Sandbox], Awaitable[Any]]) -> Any:
        """Run a test's work on a new sandbox."""

        async def main() -> Any:
            async with _started(sandboxes):
                sandbox = await sandboxes.create("one")
                try:
                    return await work(sandbox)
                finally:
                    await sandbox.close()

        return asyncio.run(main())

    def test_command_gets_what_it_is_given_and_its_failure_is_an_answer(self, sandboxes: Any) -> None:
        script = "pwd; cat; echo $GIVEN; echo wrong >&2; exit 3"

        async def work(sandbox: Sandbox) -> Finished:
            return await sh(sandbox, script, stdin=b"hello\n")

        done = self.run(sandboxes, work)
        assert (3, "") == (done.code, done.exceeded)
        assert ["workspace", "hello", "by the test"] == [line.rpartition("/")[2] for line in done.output.splitlines()]
        assert "wrong" in done.errors

    def test_files_and_links_go_in_and_out(self, sandboxes: Any, tmp_path: Path) -> None:
        given, taken = tmp_path / "given", tmp_path / "taken"
        (given / "deep" / "empty").mkdir(parents=True)
        (given / "deep" / "a.txt").write_text("given")
        (given / "link").symlink_to("deep/a.txt")

        async def work(sandbox: Sandbox) -> None:
            await sandbox.upload(given, "workspace")
            await sandbox.upload(given / "deep" / "a.txt", "workspace/other/b.txt")
            await sandbox.write("workspace/new/c.txt", b"\0written\xff")
            assert b"\0written\xff" == await sandbox.read("workspace/new/c.txt")
            assert b"given" == await sandbox.read("workspace/link")
            done = await sh(sandbox, "[ -L link ] && [ -d deep/empty ] && cat link other/b.txt")
            assert "givengiven" == done.output
            await sandbox.download("workspace", taken)
            await sandbox.download("workspace/deep/a.txt", taken / "one" / "file")

        self.run(sandboxes, work)
        assert "given" == (taken / "deep" / "a.txt").read_text() == (taken / "one" / "file").read_text()
        assert b"\0written\xff" == (taken / "new" / "c.txt").read_bytes()
        assert (taken / "link").is_symlink()

    def test_large_file_survives_both_ways(self, sandboxes: Any, tmp_path: Path) -> None:
        data = os.urandom(1 << 20) * (_LARGE >> 20)
        (tmp_path / "large").write_bytes(data)

        async def work(sandbox: Sandbox) -> None:
            await sandbox.upload(tmp_path / "large", "workspace/large")
            assert str(_LARGE) == (await sh(sandbox, "wc -c < large")).output.strip()
            await sandbox.download("workspace/large", tmp_path / "back")

        self.run(sandboxes, work)
        assert data == (tmp_path / "back").read_bytes()

    @pytest.mark.parametrize("path", ["../x", "/etc/passwd", "workspace/../../x", "workspace/out/hosts", "a\0b"])
    def test_path_that_leads_out_is_refused(self, sandboxes: Any, tmp_path: Path, path: str) -> None:
        (tmp_path / "file").write_text("x")

        async def work(sandbox: Sandbox) -> None:
            await sh(sandbox, "ln -s /etc out")
            with pytest.raises(PathError, match="leads out of the sandbox"):
                await sandbox.write(path, b"x")
            with pytest.raises(PathError):
                await sandbox.read(path)
            with pytest.raises(PathError):
                await sandbox.upload(tmp_path / "file", path)
            with pytest.raises(PathError):
                await sandbox.download(path, tmp_path / "taken")

        self.run(sandboxes, work)

    def test_what_is_missing_is_no_failure_of_the_sandbox(self, sandboxes: Any, tmp_path: Path) -> None:
        async def work(sandbox: Sandbox) -> None:
            with pytest.raises(FileNotFoundError):
                await sandbox.read("workspace/nothing")
            with pytest.raises(FileNotFoundError):
                await sandbox.download("workspace/nothing", tmp_path / "nothing")
            await sh(sandbox, "mkfifo pipe")
            with pytest.raises(FileNotFoundError):
                await sandbox.read("workspace/pipe")
            with pytest.raises(FileNotFoundError):
                await sandbox.download("workspace/pipe", tmp_path / "pipe")
            with pytest.raises(FileNotFoundError, match="no program 'no-such-program'"):
                await sandbox.exec(["no-such-program"], environment=_ENVIRONMENT)

        self.run(sandboxes, work)

    def test_command_beyond_its_time_is_stopped(self, sandboxes: Any) -> None:
        async def work(sandbox: Sandbox) -> Finished:
            return await sh(sandbox, "sleep 600", limits=Limits(seconds=0.5))

        done = self.run(sandboxes, work)
        assert ("seconds", -9, "0.5 s") == (done.exceeded, done.code, done.detail)

    def test_everything_that_a_command_started_ends_with_it(self, sandboxes: Any) -> None:
        forks = "(setsid sh -c 'while :; do echo x >> count; sleep 0.05; done' >/dev/null 2>&1 &); sleep 0.3"

        async def work(sandbox: Sandbox) -> None:
            await sh(sandbox, forks)
            before = await sandbox.read("workspace/count")
            await asyncio.sleep(0.3)
            assert before == await sandbox.read("workspace/count")

        self.run(sandboxes, work)

    def test_command_that_is_cancelled_stops(self, sandboxes: Any) -> None:
        async def work(sandbox: Sandbox) -> None:
            endless = asyncio.create_task(sh(sandbox, "while :; do echo x >> count; sleep 0.05; done"))
            async with asyncio.timeout(60):
                while not (await sh(sandbox, "[ -e count ] && echo yes")).output:
                    await asyncio.sleep(0.05)
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            async with asyncio.timeout(60):
                while await sandbox.read("workspace/count") != (await _later(sandbox)):
                    pass

        self.run(sandboxes, work)

    def test_own_folders_are_there_at_its_root(self, sandboxes: Any) -> None:
        async def work(sandbox: Sandbox) -> None:
            for name in ("home", "tmp", "workspace"):
                done = await sh(sandbox, f"echo {name} > {sandbox.root / name}/file")
                assert 0 == done.code, done.errors
                assert f"{name}\n".encode() == await sandbox.read(f"{name}/file")

        self.run(sandboxes, work)

    def test_sandboxes_share_nothing_and_work_at_once(self, sandboxes: Any) -> None:
        async def main() -> list[Finished]:
            async with _started(sandboxes):
                made: list[Sandbox] = await asyncio.gather(*(sandboxes.create(f"box-{number}") for number in range(3)))
                done = await asyncio.gather(*(sh(box, "echo x >> mine; cat mine; sleep 0.2") for box in made))
                await asyncio.gather(*(box.close() for box in made))
                return done

        assert ["x\n", "x\n", "x\n"] == [done.output for done in asyncio.run(main())]

    def test_address_finds_a_sandbox_again_until_it_is_closed(self, sandboxes: Any) -> None:
        async def work(sandbox: Sandbox) -> None:
            await sandbox.write("workspace/kept", b"kept")
            address = sandbox.address
            again = await sandboxes.attach(address)
            assert b"kept" == await again.read("workspace/kept")
            await sandbox.close()
            await sandbox.close()
            with pytest.raises(SandboxError):
                await sandbox.exec(["true"], environment=_ENVIRONMENT)
            with pytest.raises(SandboxError):
                await sandboxes.attach(address)

        self.run(sandboxes, work)

    def test_programs_find_a_task_s_folders_at_absolute_paths(self, sandboxes: Any, tmp_path: Path) -> None:
        if not isinstance(sandboxes, TaskSandboxes):
            pytest.skip("it makes no sandboxes for tasks")
        for name, text in {"task.toml": "", "environment/Dockerfile": "FROM scratch\nWORKDIR /app/src\n"}.items():
            (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "task" / name).write_text(text)
        places = {"workspace": "/app", "tests": "/tests", "places/one": "/agl-conformance/data"}

        backend: Any = sandboxes

        async def main() -> Finished:
            async with _started(backend):
                try:
                    sandbox: Sandbox = await backend.create_for("task", task=tmp_path / "task", places=places)
                except ConfigError as error:
                    pytest.skip(str(error))
                try:
                    for name in ("workspace/src/a", "tests/b", "places/one/c"):
                        await sandbox.write(name, f"{name}\n".encode())
                    again = await backend.attach(sandbox.address)
                    return await sh(again, "pwd; cat a /tests/b /agl-conformance/data/c", folder="workspace/src")
                finally:
                    await sandbox.close()

        done = asyncio.run(main())
        assert "/app/src\nworkspace/src/a\ntests/b\nplaces/one/c\n" == done.output, done.errors


async def sh(sandbox: Sandbox, script: str, **options: Any) -> Finished:
    """Run a shell script in a sandbox."""
    return await sandbox.exec(["sh", "-c", script], environment=_ENVIRONMENT, **options)


async def _later(sandbox: Sandbox) -> bytes:
    await asyncio.sleep(0.3)
    return await sandbox.read("workspace/count")


@contextlib.asynccontextmanager
async def _started(sandboxes: Any) -> AsyncGenerator[None]:
    if isinstance(sandboxes, ManagedSandboxes):
        await sandboxes.start()
    try:
        yield
    finally:
        if isinstance(sandboxes, ManagedSandboxes):
            await sandboxes.close()
