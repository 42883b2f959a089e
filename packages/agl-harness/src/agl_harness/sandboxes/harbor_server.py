"""A server at a Unix socket that creates Harbor's environments for another program, and runs commands in them.

It runs in a Python that has the package ``harbor``, which needs 3.12, and imports nothing from agl. A connection
carries one request and one response, each a line of JSON. Closing a connection early cancels its request. When its
standard input closes, the server ends all environments and exits.
"""

import asyncio
import json
import logging
import os
import shlex
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

MARK = "AGL_COMMAND"
"""Environment variable that marks every process that a command started."""

NO_PROGRAM = "agl-no-program"

_LIMIT = 64 << 20
_HEAD, _TAIL = 16_000, 64_000
"""Numbers of characters that are kept from the start and from the end of a command's output."""

_SHORT_S = 60

_KILL = (
    "for place in /proc/[0-9]*; do "
    'if tr "\\0" "\\n" < "$place/environ" 2>/dev/null | grep -qx "{mark}"; then '
    'kill -9 "${{place#/proc/}}" 2>/dev/null; fi; done; true'
)


class Missing(Exception):  # noqa: N818  # the response calls the error "missing"
    """A file or a program does not exist."""


class Server:
    """Holds Harbor's environments, by sandbox name.

    Args:
        settings: ``environment``, Harbor's name for a type of environment or ``module:class``, ``kwargs`` for the
            class, and ``image`` for sandboxes without a task.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._open: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="agl-harbor-")

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request, and return the response."""
        do = request.pop("do")
        if do == "create":
            return await self._create(**request)
        name = request.pop("name")
        if do == "close":
            environment = self._open.pop(name, None)
            if environment is not None:
                await environment.stop(delete=True)
            return {}
        if name not in self._open:
            raise RuntimeError(f"the sandbox {name} is gone")
        environment = self._open[name]
        if do == "attach":
            return {}
        if do == "exec":
            return await self._exec(environment, **request)
        return await self._transfer(environment, do, **request)

    async def close(self) -> None:
        """End all environments."""
        left, self._open = list(self._open.values()), {}
        await asyncio.gather(*(environment.stop(delete=True) for environment in left), return_exceptions=True)
        self._folder.cleanup()

    async def _create(self, *, name: str, task: str, purpose: str, folders: list[str], links: dict[str, str]) -> Any:
        environment = self._environment(name, task, purpose)
        try:
            await environment.start(force_build=False)
            lines = [f"mkdir -p {shlex.join(folders)}"]
            lines += [f"ln -sfn {shlex.quote(target)} {shlex.quote(link)}" for link, target in links.items()]
            done = await environment.exec(" && ".join(lines), timeout_sec=_SHORT_S)
            if done.return_code != 0:
                raise RuntimeError(f"its folders cannot be made: {done.stderr or done.stdout}")
        except BaseException:
            await environment.stop(delete=True)
            raise
        self._open[name] = environment
        return {}

    def _environment(self, name: str, task: str, purpose: str) -> Any:
        """Create an environment with Harbor's factory."""
        configs = import_module("harbor.models.task.config")
        trials = import_module("harbor.models.trial.config")
        paths = import_module("harbor.models.trial.paths").TrialPaths(Path(self._folder.name, name))
        paths.mkdir()
        kind = self._settings["environment"]
        given = {"import_path": kind} if ":" in kind else {"type": kind}
        chosen = trials.EnvironmentConfig(**given, kwargs=self._settings.get("kwargs", {}))
        label, folder, config, uploads = self._definition(configs, task, purpose)
        return import_module("harbor.environments.factory").EnvironmentFactory.create_environment_from_config(
            config=chosen,
            environment_dir=folder,
            environment_name=label,
            session_id=name,
            trial_paths=paths,
            task_env_config=config,
            logger=logging.getLogger("harbor"),
            enable_environment_dir_upload=uploads,
        )

    def _definition(self, configs: Any, task: str, purpose: str) -> tuple[str, Path, Any, bool]:
        if not task:
            empty = Path(self._folder.name, "empty")
            empty.mkdir(exist_ok=True)
            return "agl", empty, configs.EnvironmentConfig(docker_image=self._settings["image"]), False
        place = Path(task)
        config = configs.TaskConfig.model_validate_toml((place / "task.toml").read_text(encoding="utf-8"))
        if purpose == "tests" and (place / "tests" / "Dockerfile").is_file():
            own = config.verifier.environment or config.environment
            return place.name, place / "tests", own.model_copy(update={"docker_image": None}), False
        return place.name, place / "environment", config.environment, True

    async def _exec(
        self, environment: Any, *, words: list[str], cwd: str, env: dict[str, str], stdin: str, seconds: float | None
    ) -> dict[str, Any]:
        mark = uuid4().hex
        program = shlex.quote(words[0])
        check = f"command -v {program} >/dev/null 2>&1 || {{ echo {NO_PROGRAM}-{mark} >&2; exit 127; }}"
        inner = f"{check}; {shlex.join(words)}{f' < {shlex.quote(stdin)}' if stdin else ' < /dev/null'}"
        command = f"sh -c {shlex.quote(inner)}"
        try:
            async with asyncio.timeout(seconds):
                done = await environment.exec(command, cwd=cwd, env={**env, MARK: mark})
        except TimeoutError:
            return {"code": -9, "output": "", "errors": "", "exceeded": "seconds", "detail": f"{seconds:g} s"}
        finally:
            kill = _KILL.format(mark=f"{MARK}={mark}")
            await asyncio.shield(environment.exec(f"sh -c {shlex.quote(kill)}", timeout_sec=_SHORT_S))
        if f"{NO_PROGRAM}-{mark}" in f"{done.stderr}{done.stdout}":
            raise Missing(f"there is no program {words[0]!r}")
        return {"code": done.return_code, "output": _cut(done.stdout or ""), "errors": _cut(done.stderr or "")}

    async def _transfer(self, environment: Any, do: str, *, source: str, target: str) -> dict[str, Any]:
        if do == "upload":
            parent = target if Path(source).is_dir() else os.path.dirname(target)
            await environment.exec(f"mkdir -p {shlex.quote(parent)}", timeout_sec=_SHORT_S)
            if Path(source).is_dir():
                await environment.upload_dir(source, target)
            else:
                await environment.upload_file(source, target)
            return {}
        if await environment.is_dir(source):
            Path(target).mkdir(parents=True, exist_ok=True)
            await environment.download_dir(source, target)
        elif await environment.is_file(source):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            await environment.download_file(source, target)
        else:
            raise Missing(f"there is no file {source!r}")
        return {}


def _cut(text: str) -> str:
    left_out = len(text) - _HEAD - _TAIL
    if left_out <= 0:
        return text
    return f"{text[:_HEAD]}\n[{left_out} characters left out]\n{text[-_TAIL:]}"


async def _serve(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    line = await reader.readline()
    if not line:
        writer.close()
        return
    work = asyncio.create_task(server.answer(json.loads(line)))
    gone = asyncio.create_task(reader.read())
    await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
    (result,) = await asyncio.gather(work, return_exceptions=True)
    gone.cancel()
    if isinstance(result, BaseException):
        kind = "missing" if isinstance(result, Missing) else "dead"
        result = {"error": f"{type(result).__name__}: {result}" if kind == "dead" else str(result), "kind": kind}
    writer.write(json.dumps(result).encode() + b"\n")
    try:
        await writer.drain()
    except ConnectionError:
        return
    finally:
        writer.close()


async def main(socket: str, settings: dict[str, Any]) -> None:
    """Serve until standard input closes."""
    server = Server(settings)
    listening = await asyncio.start_unix_server(lambda r, w: _serve(server, r, w), socket, limit=_LIMIT)
    print("ready", flush=True)  # the client waits for this line
    try:
        await asyncio.to_thread(sys.stdin.buffer.read)
    finally:
        listening.close()
        await server.close()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    import_module("harbor.environments.factory")
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
