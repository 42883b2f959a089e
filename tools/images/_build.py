"""Images by buildah with chroot isolation, on a base of the system's packages: no daemon, no registry.

A store of images of its own keeps this apart from what somebody else builds here.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BASE = "localhost/agl-python"
PYTHON = ("python3", "python3-venv", "python-is-python3", "ca-certificates")
TORCH_CPU = "https://download.pytorch.org/whl/cpu"
PROGRAMS = ("buildah", "mmdebstrap", "ip")
DATABASE = ("postgresql", "python-is-python3")


def call(*words: str | Path, folder: Path | None = None) -> str:
    """Run a program and return what it printed; what it said of an error is part of the exception."""
    done = subprocess.run([str(word) for word in words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(str(word) for word in words[:6])} ... failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image as it was built.

    Attributes:
        root: Its files, to be mounted read-only.
        environment: Its variables.
        user: Its user as numbers, ``UID:GID``; ``""`` for root.
        folder: The folder in which it works.
        command: What it runs.
        size: Its bytes.
    """

    root: Path
    environment: Mapping[str, str]
    user: str
    folder: str
    command: tuple[str, ...]
    size: int


@dataclass
class Images:
    """Builds images in a folder.

    Attributes:
        folder: What lasts: the bases and the layers.
        suite: Name of the distribution's release, such as ``bookworm``.
    """

    folder: Path
    suite: str
    _mounted: list[str] = field(default_factory=list[str])

    def base(self, tag: str, packages: Sequence[str]) -> None:
        """Make an image of the system's packages, unless there is one."""
        if self._buildah("images", "--quiet", "--filter", f"reference={tag}").strip():
            return
        archive = self.folder / "base.tar"
        hook = 'touch "$1/etc/hosts"'
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}"]
        call(*command, f"--customize-hook={hook}", self.suite, archive)
        container = self._buildah("from", "scratch").strip()
        self._buildah("add", "--quiet", container, str(archive), "/")
        self._buildah("commit", "--quiet", "--rm", container, tag)
        archive.unlink()

    def database(self, tag: str) -> None:
        """Make the image that stands in for PostgreSQL's."""
        self.base(f"{tag}-packages", DATABASE)
        container = self._buildah("from", f"{tag}-packages").strip()
        self._buildah("copy", "--quiet", "--chmod", "755", container, str(HERE / "postgres.sh"), "/postgres.sh")
        root = Path(self._buildah("mount", container).strip())
        programs = max((root / "usr" / "lib" / "postgresql").glob("*/bin"))
        users = (root / "etc" / "passwd").read_text(encoding="utf-8").splitlines()
        user = next(line.split(":")[2:4] for line in users if line.startswith("postgres:"))
        data = "/var/lib/postgresql/data"
        self._buildah("run", "--isolation", "chroot", container, "--", "install", "-d", "-o", "postgres", data)
        variables = (f"PATH=/{programs.relative_to(root)}:/usr/bin:/bin", f"PGDATA={data}", "PGHOST=/tmp")
        given = [word for variable in variables for word in ("--env", variable)]
        given += ["--workingdir", "/", "--user", ":".join(user), "--cmd", "/postgres.sh"]
        self._buildah("config", *given, container)
        self._buildah("commit", "--quiet", "--rm", container, tag)

    def build(self, target: str, *, project: Path, tag: str) -> None:
        """Build a target of the Dockerfile as its first lines say, from the wheels in the project's folder."""
        conf = self.folder / "pip.conf"
        conf.write_text("[global]\nno-index = true\n")
        self._buildah(
            *("build", "--isolation", "chroot", "--layers", "--quiet", "--format", "docker"),
            *("--secret", f"id=pip,src={conf}", "--build-arg", f"PYTHON_IMAGE={BASE}"),
            *("--file", "deploy/Dockerfile", "--ignorefile", "deploy/Dockerfile.dockerignore"),
            *("--target", target, "--tag", tag, "."),
            folder=project,
        )

    def open(self, tag: str) -> Image:
        """Mount an image."""
        container = self._buildah("from", "--pull-never", tag).strip()
        self._mounted.append(container)
        root = Path(self._buildah("mount", container).strip())
        found: dict[str, Any] = json.loads(self._buildah("inspect", "--type", "image", tag))
        config: dict[str, Any] = found["Docker"]["config"]
        listed = json.loads(self._buildah("images", "--json", "--filter", f"reference={tag}"))
        return Image(
            root=root,
            environment=dict(entry.split("=", 1) for entry in config.get("Env") or ()),
            user=config.get("User") or "",
            folder=config.get("WorkingDir") or "/",
            command=tuple(config.get("Cmd") or ()),
            size=_bytes(listed[0]["size"]),
        )

    def close(self) -> None:
        """Take back what was mounted, and remove what no image needs any more; the images stay."""
        for container in self._mounted:
            self._buildah("rm", container)
        self._mounted.clear()
        self._buildah("rmi", "--prune")

    def _buildah(self, *words: str, folder: Path | None = None) -> str:
        own = self.folder / "storage"
        return call("buildah", "--root", own / "root", "--runroot", own / "run", *words, folder=folder)


def _bytes(size: str) -> int:
    """Return the bytes of a size such as ``183 MB``."""
    number, unit = size.split()
    return int(float(number) * {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[unit.upper()])


def wheels(project: Path, own: Sequence[str]) -> None:
    """Build the wheels that no index has with the command that ``agl deploy`` names, and download the others.

    Pins are complete, so none is looked at for what else it needs. The wheel of torch is the one for CPUs.
    """
    folder = project / "deploy" / "wheels"
    call(sys.executable, *own[1:], folder=project)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder]
    pinned = {
        line for file in (project / "deploy" / "requirements").iterdir() for line in file.read_text().splitlines()
    }
    released = sorted(line for line in pinned if line and "#" not in line)
    call(*pip, "--retries", "1", "--extra-index-url", TORCH_CPU, *(line for line in released if is_torch(line)))
    call(*pip, *(line for line in released if not is_torch(line)))


def is_torch(line: str) -> bool:
    """Return true for the pin of torch."""
    return line.startswith("torch==")


def missing() -> list[str]:
    """Return the programs that are needed and not here."""
    return [name for name in PROGRAMS if shutil.which(name) is None]
