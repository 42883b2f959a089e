"""Networks of their own for programs of this machine: a namespace for each, joined by bridges in a further one.

Needs root. Links can be cut, and made slow and lossy as far as the kernel knows how.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

PREFIX = "10.213"
"""The first half of every address; the networks are in namespaces of their own, so that it meets no other."""

NEWNET = 0x40000000
"""The kind of namespace that ``setns`` is to enter."""

HUB = "hub"
"""The machine with the bridges, which has the address 1 on each network."""


def ip(*words: str) -> None:
    """Run ``ip``; raises :class:`OSError` with what it said."""
    run("ip", *words)


def run(*words: str) -> None:
    """Run a program; raises :class:`OSError` with what it said of an error."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def forbidden() -> str:
    """Return why this kernel or this user makes no networks; ``""`` where it makes them."""
    if shutil.which("ip") is None:
        return "there is no program ip"
    name = f"agl-{os.getpid()}-probe"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "bridge0", "type", "bridge")
        ip("-n", name, "link", "add", "left", "type", "veth", "peer", "name", "right")
    except OSError as error:
        return str(error)
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


def enter(namespace: str) -> None:
    """Let this thread, and the threads and processes that it starts, use a namespace's network.

    Args:
        namespace: Its name, or the path of one of the files below ``/proc`` that stand for namespaces.
    """
    with Path("/run/netns", namespace).open("rb") as opened:
        if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of {namespace}")


@dataclass
class Networks:
    """Bridges with a namespace for each machine.

    Attributes:
        names: Names of the networks, of at most 12 characters.
        addresses: By (machine, network), the machine's address there.
    """

    names: tuple[str, ...]
    addresses: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    _prefix: str = field(default_factory=lambda: f"agl-{os.getpid()}")
    _machines: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    _wires: "subprocess.Popen[bytes] | None" = None

    def open(self) -> None:
        """Make the bridges."""
        self._make(HUB)
        for number, name in enumerate(self.names):
            ip("-n", self.namespace(HUB), "link", "add", name, "type", "bridge")
            ip("-n", self.namespace(HUB), "address", "add", f"{PREFIX}.{number}.1/24", "dev", name)
            ip("-n", self.namespace(HUB), "link", "set", name, "up")
            self.addresses[HUB, name] = f"{PREFIX}.{number}.1"

    def join(self, machine: str, networks: Iterable[str]) -> None:
        """Make a machine with an address on some of the networks."""
        self._make(machine)
        for name in networks:
            number, place = self.names.index(name), len(self._machines)
            port = f"m{place}n{number}"
            link = ["link", "add", port, "type", "veth", "peer", "name", name, "netns", self.namespace(machine)]
            ip("-n", self.namespace(HUB), *link)
            ip("-n", self.namespace(HUB), "link", "set", port, "master", name, "up")
            self._machines[machine].append(port)
            self.addresses[machine, name] = f"{PREFIX}.{number}.{place}"
            ip("-n", self.namespace(machine), "address", "add", f"{PREFIX}.{number}.{place}/24", "dev", name)
            ip("-n", self.namespace(machine), "link", "set", name, "up")

    def namespace(self, machine: str) -> str:
        """Return the name of a machine's namespace."""
        return f"{self._prefix}-{machine}"

    def inside(self, machine: str) -> list[str]:
        """Return the words before a command that runs it on a machine."""
        return ["ip", "netns", "exec", self.namespace(machine)]

    def processes(self, machine: str) -> list[int]:
        """Return the processes that use a machine's network."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace(machine)], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split() if int(pid) != os.getpid()]

    def cut(self, machine: str) -> None:
        """Unplug a machine: what it sends and what it is sent is lost without a word to either side."""
        self._plug(machine, "down")

    def heal(self, machine: str) -> None:
        """Plug a machine in again."""
        self._plug(machine, "up")

    def slow_down(self, *, delay_ms: int, loss: float) -> str:
        """Let every machine's packets take longer and get lost at times; returns by what means, or why it cannot be.

        ``tc`` does both where the kernel has netem. Elsewhere a program carries the packets, see :mod:`tools.wires`; it
        replaces the machines' links, so call this before anything uses them.
        """
        try:
            for machine, name in self._links():
                root = ("qdisc", "add", "dev", name, "root", "netem")
                run("tc", "-n", self.namespace(machine), *root, "delay", f"{delay_ms}ms", "loss", f"{loss:.2%}")
        except OSError as error:
            why = str(error).splitlines()[-1]
        else:
            return f"netem: {delay_ms} ms and {loss:.1%} of the packets"
        try:
            self._lay_wires(delay_ms / 1000, loss)
        except OSError as error:
            return f"no delay and no loss: {why}; {error}"
        return f"a program: {delay_ms} ms and {loss:.1%} of the packets, for this kernel lacks netem ({why})"

    def _links(self) -> list[tuple[str, str]]:
        """Return the machine and the network of every link."""
        return [(machine, name) for machine, name in self.addresses if machine != HUB]

    def _lay_wires(self, delay_s: float, loss: float) -> None:
        """Put a wire in the place of every link."""
        if not Path("/dev/net/tun").exists():
            raise OSError("there is no /dev/net/tun for wires")
        ends: list[str] = []
        for machine, name in self._links():
            port = next(port for port in self._machines[machine] if port.endswith(f"n{self.names.index(name)}"))
            ip("-n", self.namespace(HUB), "link", "del", port)
            for place, device in ((machine, name), (HUB, port)):
                ip("-n", self.namespace(place), "tuntap", "add", "dev", device, "mode", "tap")
                ends.append(f"{self.namespace(place)}:{device}")
            ip("-n", self.namespace(HUB), "link", "set", port, "master", name, "up")
            ip("-n", self.namespace(machine), "address", "add", f"{self.addresses[machine, name]}/24", "dev", name)
            ip("-n", self.namespace(machine), "link", "set", name, "up")
        words = [sys.executable, "-m", "tools.wires", str(delay_s), str(loss), *ends]
        self._wires = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._wires.stdout is None or not self._wires.stdout.readline():
            raise OSError("the program that carries packets ended")

    def close(self) -> None:
        """End what still runs on the machines, and remove them and the bridges; idempotent."""
        for machine in self._machines:
            for pid in self.processes(machine):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self._wires is not None:
            self._wires.communicate()
            self._wires = None
        for machine in self._machines:
            subprocess.run(["ip", "netns", "del", self.namespace(machine)], capture_output=True)
        self._machines.clear()

    def _plug(self, machine: str, state: str) -> None:
        for port in self._machines[machine]:
            ip("-n", self.namespace(HUB), "link", "set", port, state)

    def _make(self, machine: str) -> None:
        ip("netns", "add", self.namespace(machine))
        self._machines[machine] = []
        ip("-n", self.namespace(machine), "link", "set", "lo", "up")
