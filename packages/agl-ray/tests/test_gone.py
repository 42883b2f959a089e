"""Runs whose Ray cluster ends, or whose node is lost."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from agl_ray.cluster import until_gone
from agl_testing.waiting import wait_until

START = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"

STARTS = 4


class Node:
    """The processes of a Ray head node on this machine, in a separate folder."""

    def __init__(self, *words: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="agl-"))  # a socket's path must be short
        self._log = self._folder / "log"
        limits = ["--num-cpus=2", f"--object-store-memory={100 << 20}", f"--temp-dir={self._folder}"]
        light = ["--include-log-monitor=false", "--no-monitor", "--include-dashboard=false"]
        first = [sys.executable, "-c", START, "start", "--block", "--head", "--node-ip-address=127.0.0.1"]
        self._command = [*first, *limits, *light, *words]
        self._process = self._begin()

    def start(self) -> None:
        """Start the head node; try again, since on a busy machine the processes may at first be too slow for Ray."""
        for _ in range(STARTS):
            wait_until(lambda: self._is_up() or self._process.poll() is not None, within_s=300)
            if self._is_up():
                return
            self._process = self._begin()
        raise AssertionError(self.output())

    def _begin(self) -> subprocess.Popen[bytes]:
        variables = {**os.environ, "RAY_memory_monitor_refresh_ms": "0"}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # Ray starts slowly without bytecode
        with self._log.open("wb") as log:
            return subprocess.Popen(self._command, env=variables, stdout=log, stderr=log)

    def _is_up(self) -> bool:
        return "Ray runtime started" in self.output()

    @property
    def pid(self) -> int:
        """The id of the process ``ray start``, which watches the other processes."""
        return self._process.pid

    def output(self) -> str:
        return self._log.read_text()

    def processes(self, name: str = "") -> list[int]:
        """Return the ids of those processes of the head node whose command contains ``name``."""
        words = ["ps", "-e", "-ww", "-o", "pid=,ppid=,args="]
        listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        found = {self._process.pid: "ray start"}
        for line in listed.splitlines():  # in the order of their ids, children after their parents
            pid, parent, command = line.split(None, 2)
            if int(parent) in found:
                found[int(pid)] = command
        return [pid for pid, command in list(found.items()) if name in command]

    def kill(self) -> None:
        """Kill all processes of the node with ``kill -9``; calling it again does nothing."""
        for pid in self.processes() if self._process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture
def start_head() -> Iterator[Callable[[int], Node]]:
    """Return a function that starts the head node of a cluster at a port."""
    started: list[Node] = []

    def start(port: int) -> Node:
        started.append(Node(f"--port={port}"))
        started[-1].start()
        return started[-1]

    yield start
    for node in started:
        node.kill()


def _run(given: Any, port: int, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "agl", "run", str(given.file), "--ray", f"127.0.0.1:{port}", *words],
        cwd=given.file.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_head_that_no_longer_listens_has_ended_and_one_that_is_silent_is_gone_later() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as waiting:
        head = f"127.0.0.1:{server.getsockname()[1]}"
        for _ in range(3):  # more than wait to be accepted; the kernel answers no further ones
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        assert "its head has not answered for 0.5 s" == asyncio.run(until_gone(head, silence_s=0.5))
    assert "its head has ended" == asyncio.run(until_gone(head))


async def _watch_a_head_that_another_one_replaces() -> str:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        return await asyncio.wait_for(until_gone(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), 60)


def test_head_that_another_one_replaces_at_once_has_ended() -> None:
    assert "its head has ended" == asyncio.run(_watch_a_head_that_another_one_replaces())


def test_run_whose_cluster_ends_says_how_to_go_on_and_another_cluster_does(
    start_head: Callable[[int], Node], experiment: Any, tmp_path: Path
) -> None:
    port = _free_port()
    first, given = start_head(port), experiment(tmp_path, tasks=4, seconds=2.0)
    process = _run(given, port)
    wait_until(lambda: given.processes or process.poll() is not None)
    first.kill()
    output, _ = process.communicate(timeout=120)
    assert f":{port} is gone: its head has ended. Every finished step is kept" in output
    assert "--resume" in output
    assert 1 == process.returncode
    start_head(port)
    again = _run(given, port, "--resume")
    output, _ = again.communicate(timeout=300)
    assert 0 == again.returncode, output


def test_run_whose_node_ends_says_how_to_go_on(
    start_head: Callable[[int], Node], experiment: Any, tmp_path: Path
) -> None:
    port = _free_port()
    head, given = start_head(port), experiment(tmp_path, tasks=4, seconds=60.0)
    process = _run(given, port)
    wait_until(lambda: given.processes or process.poll() is not None)
    os.kill(head.pid, signal.SIGSTOP)  # else it ends the head with the node
    os.kill(head.processes("raylet/raylet ")[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert "this machine is no longer a node of the Ray cluster" in output
    assert "--resume" in output
    assert 1 == process.returncode
