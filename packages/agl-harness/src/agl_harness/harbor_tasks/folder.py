"""Reads Harbor's task folders: an instruction, the environment's files, hidden tests, and limits.

https://harborframework.com/docs/task-format describes the format. This module reads tasks with one step for Linux. If a
task needs something that a sandbox without container images cannot provide, :func:`lacks_of` lists it, so that nothing
is dropped silently.
"""

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import msgspec

from agl.errors import ConfigError
from agl.schemas import Record
from agl_harness.harbor_tasks.dockerfile import Image, read_dockerfile
from agl_harness.sandboxes.contract import bytes_of

PREFIX = "harbor:"
"""The prefix that marks the name of a Harbor task folder in ``train``, ``val`` and ``workspace``."""

CONFIG, INSTRUCTION, ENVIRONMENT, TESTS, SOLUTION = "task.toml", "instruction.md", "environment", "tests", "solution"
TEST_SCRIPT, SOLUTION_SCRIPT = "test.sh", "solve.sh"

MAX_TEXT = 1 << 20
"""Largest size of an instruction, a ``task.toml`` or a Dockerfile, in bytes."""

Lack = Literal["build", "image", "services", "network", "gpus", "user", "mcp", "healthcheck", "collect", "variables"]
"""The kinds of needs of a task that only a sandbox with container images can meet."""

_MEANINGS: dict[Lack, str] = {
    "build": "its Dockerfile installs or downloads something",
    "image": "it is made of an image, and has no Dockerfile",
    "services": "it has services of its own, in docker-compose.yaml",
    "network": "it limits the network, and the gateway is reached by it",
    "gpus": "it wants GPUs or TPUs",
    "user": "it names a user that commands run as",
    "mcp": "it brings MCP servers or skills for the agent",
    "healthcheck": "it waits for a health check",
    "collect": "it collects files with commands of its own",
    "variables": "it asks for variables of this machine",
}

_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SYSTEM = frozenset(
    f"/{name}"
    for name in (
        *("", "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr", "var"),
        *("logs", "tests"),
    )
)

"""Folders of the machine that cannot be a task's working directory."""

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class _Section(Record, frozen=True, kw_only=True):
    network_mode: Literal["public", "no-network", "allowlist"] = "public"
    allow_internet: bool | None = None
    docker_image: str | None = None
    os: str = "linux"
    cpus: Amount | None = None
    memory_mb: Amount | None = None
    memory: str | None = None
    gpus: Amount | None = None
    tpu: Any = None
    mcp_servers: list[Any] = []
    skills_dir: str | None = None
    healthcheck: Any = None
    env: dict[str, str] = {}
    workdir: str | None = None


class _Agent(Record, frozen=True, kw_only=True):
    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: str | None = None


class _Verifier(Record, frozen=True, kw_only=True):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: str | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _Section | None = None
    collect: list[Any] = []


class _Solution(Record, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class _Config(Record, frozen=True, kw_only=True):
    """The contents of ``task.toml``; unknown keys, which newer versions may have, are ignored."""

    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Section = _Section()
    solution: _Solution = _Solution()
    artifacts: list[Any] = []
    steps: list[Any] | None = None


class TaskFolder(Record, frozen=True, kw_only=True):
    """A task of Harbor.

    Attributes:
        folder: The task's folder.
        workdir: The absolute path in which the agent and the tests work; ``""`` if the task names none.
        image: The settings in the task's Dockerfile.
        agent_s: Time limit of the agent in seconds; ``None`` for no limit.
        verifier_s: Time limit of the tests in seconds.
        memory: Memory limit in bytes; 0 for no limit.
        cpus: Number of CPUs; 0 for no limit.
        environment: Variables of agent and tests; a value ``${NAME}`` is taken from this machine's variables.
        verifier_environment: Further variables of the tests.
        solution_environment: Further variables of the solution.
        is_separate: True if the tests run in a separate sandbox, which gets only the artifacts.
        artifacts: Absolute paths of the files and folders that a separate test sandbox gets.
        test_image: The settings in the Dockerfile of separate tests; ``None`` if they have no Dockerfile.
        lacks: Needs that a sandbox without container images cannot meet, each with the line or key that states it.
    """

    folder: Path
    workdir: str
    image: Image
    agent_s: float | None
    verifier_s: float
    memory: int
    cpus: float
    environment: dict[str, str]
    verifier_environment: dict[str, str]
    solution_environment: dict[str, str]
    is_separate: bool
    artifacts: tuple[str, ...]
    test_image: Image | None
    lacks: dict[Lack, str]


def load_task(folder: Path) -> TaskFolder:
    """Read a task folder.

    Raises:
        ConfigError: The folder is not a task, the task has several steps or another system than Linux, or a link
            leads out of the folder.
    """
    config = _config(folder)
    if config.steps:
        raise ConfigError(f"the task {folder} has steps, and tasks of one step can be run; split it, or leave it out")
    if config.environment.os.lower() != "linux":
        raise ConfigError(
            f"the task {folder} is for {config.environment.os}, and tasks for linux can be run; leave it out"
        )
    for name in (INSTRUCTION, ENVIRONMENT, TESTS, f"{TESTS}/{TEST_SCRIPT}", SOLUTION):
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{folder / name} leads out of the task's folder by a link; put the file itself there")
    environment = config.environment
    if not (folder / TESTS / TEST_SCRIPT).is_file():
        raise ConfigError(f"the task {folder} has no {TESTS}/{TEST_SCRIPT}; write one that writes a reward")
    image = _image(folder / ENVIRONMENT)
    verifier = config.verifier
    is_separate = (verifier.environment_mode or ("separate" if verifier.environment else "shared")) == "separate"
    test_image = _image(folder / TESTS) if is_separate and (folder / TESTS / "Dockerfile").is_file() else None
    return TaskFolder(
        folder=folder,
        workdir=environment.workdir or image.workdir,
        image=image,
        agent_s=config.agent.timeout_sec,
        verifier_s=verifier.timeout_sec,
        memory=_memory(environment, folder),
        cpus=environment.cpus or 0,
        environment=environment.env,
        verifier_environment=verifier.env,
        solution_environment=config.solution.env,
        is_separate=is_separate,
        artifacts=tuple(_artifacts(config.artifacts)),
        test_image=test_image,
        lacks=_lacks(folder, config, image, test_image),
    )


def instruction_of(folder: Path) -> str:
    """Return a task's instruction without its leading canary lines, by which tasks are found in training data."""
    lines = _text(folder / INSTRUCTION).split("\n")
    while lines and (_CANARY.match(lines[0].strip()) or not lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines)


def check_workdir(task: TaskFolder) -> None:
    """Raise :class:`ConfigError` if a task names no working directory, or one that is a folder of the system."""
    if not task.workdir:
        raise ConfigError(
            f"the task {task.folder} names no working directory; write WORKDIR /app into its Dockerfile, or workdir "
            f'= "/app" into [environment] of its {CONFIG}'
        )
    path = PurePosixPath(task.workdir)
    if not path.is_absolute() or ".." in path.parts or str(path) in _SYSTEM or path.parts[1] in ("proc", "dev", "sys"):
        raise ConfigError(
            f"the task {task.folder} works in {task.workdir!r}, which is this machine's own folder; name another one, "
            "such as /app"
        )


def lacks_of(task: TaskFolder, *, without: Sequence[str]) -> dict[Lack, str]:
    """Return a task's needs that a sandbox without images cannot meet, except for those in ``without``."""
    return {lack: line for lack, line in task.lacks.items() if lack not in without}


def describe(lack: Lack, line: str) -> str:
    """Describe a need that a sandbox cannot meet, for people."""
    return f"{_MEANINGS[lack]} ({line[:80]})"


LACKS: tuple[Lack, ...] = tuple(_MEANINGS)


def filled_variables(variables: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """Replace values such as ``${NAME}`` and ``${NAME:-default}``; leaves out variables that get no value."""
    found: dict[str, str] = {}
    for name, text in variables.items():
        match = _TEMPLATE.fullmatch(text)
        if match is None:
            found[name] = text
        elif match[1] in given or ":-" in text:
            found[name] = given.get(match[1], match[2])
    return found


def _lacks(folder: Path, config: _Config, image: Image, test_image: Image | None) -> dict[Lack, str]:
    environment, verifier = config.environment, config.verifier
    own = verifier.environment or _Section()
    lines = (*image.lacks, *(test_image.lacks if test_image else ()))
    asked = [
        match[1]
        for value in (*environment.env.values(), *verifier.env.values())
        if (match := _TEMPLATE.fullmatch(value)) is not None and ":-" not in value
    ]
    modes = (environment.network_mode, own.network_mode, config.agent.network_mode, verifier.network_mode)
    limited = [mode for mode in modes if mode not in (None, "public")]
    has_no_build = not (folder / ENVIRONMENT / "Dockerfile").is_file()
    users = [str(user) for user in (image.user, config.agent.user, verifier.user) if user]
    found: dict[Lack, str] = {
        "build": lines[0] if lines else "",
        "image": (environment.docker_image or "") if has_no_build else "",
        "services": "docker-compose.yaml" if (folder / ENVIRONMENT / "docker-compose.yaml").is_file() else "",
        "network": f"network_mode = {limited[0]!r}" if limited else "",
        "gpus": f"gpus = {environment.gpus:g}" if environment.gpus else ("tpu" if environment.tpu else ""),
        "user": f"user {users[0]}" if users and users[0] not in ("root", "0") else "",
        "mcp": "mcp_servers" if environment.mcp_servers else (environment.skills_dir or ""),
        "healthcheck": "[environment.healthcheck]" if environment.healthcheck else "",
        "collect": "[[verifier.collect]]" if verifier.collect else "",
        "variables": f"${{{asked[0]}}}" if asked else "",
    }
    if environment.allow_internet is False and not found["network"]:
        found["network"] = "allow_internet = false"
    return {lack: line for lack, line in found.items() if line}


def _config(folder: Path) -> _Config:
    try:
        data = tomllib.loads(_text(folder / CONFIG))
        return msgspec.convert(data, _Config, strict=True)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{folder / CONFIG} is not valid TOML: {error}; correct that line") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}; correct that key") from None


def _image(folder: Path) -> Image:
    file = folder / "Dockerfile"
    if not file.is_file():
        return Image()
    if not file.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{file} leads out of its folder by a link; put the file itself there")
    return read_dockerfile(_text(file), name=str(file))


def _memory(environment: _Section, folder: Path) -> int:
    if environment.memory_mb is not None:
        return int(environment.memory_mb * (1 << 20))
    try:
        return bytes_of(environment.memory or "")
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from None


def _artifacts(entries: Sequence[Any]) -> list[str]:
    """Return the absolute source paths of a task's artifacts, starting with ``/logs/artifacts``."""
    sources: list[Any] = [entry.get("source") if hasattr(entry, "get") else entry for entry in entries]
    for source in sources:
        if not isinstance(source, str) or not source.startswith("/") or ".." in PurePosixPath(source).parts:
            raise ConfigError(f"the artifact {source!r} of a task is not an absolute path, such as /app/out.txt")
    return list(dict.fromkeys(["/logs/artifacts", *(os.path.normpath(source) for source in sources)]))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_TEXT + 1)
        if len(data) > MAX_TEXT:
            raise ConfigError(f"{file} has more than {MAX_TEXT:,} bytes; shorten it")
        return data.decode()
    except FileNotFoundError:
        raise ConfigError(
            f"the task {file.parent} has no {file.name}; add it, or name a folder of Harbor tasks"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; make it a text file in UTF-8") from None
