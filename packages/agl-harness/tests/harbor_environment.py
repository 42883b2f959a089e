"""A Harbor environment without a container: a folder on this machine, isolated with bubblewrap.

It runs in the Python that has ``harbor``, and imports nothing from agl.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult


class FolderEnvironment(BaseEnvironment):
    """An environment whose root folder is ``folder/SESSION``, with this machine's programs read-only."""

    def __init__(self, *args: Any, folder: str, bubblewrap: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._root = Path(folder, self.session_id)
        self._bubblewrap = bubblewrap

    @staticmethod
    def type() -> str:
        return "folder"

    def _validate_definition(self) -> None:
        if not self.task_env_config.docker_image and not (self.environment_dir / "Dockerfile").is_file():
            raise FileNotFoundError("there is no Dockerfile")

    async def start(self, force_build: bool) -> None:
        self._root.mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        if delete:
            shutil.rmtree(self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copy2(source_path, self._place(target_path), follow_symlinks=False)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._place(target_dir), symlinks=True, dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy2(self._place(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._place(source_dir), target_dir, symlinks=True, dirs_exist_ok=True)

    def _place(self, path: str) -> Path:
        """Return the path on this machine, following links as a program in the environment would."""
        found = self._root
        for part in Path(path).parts[1:]:
            found = found / part
            if found.is_symlink():
                target = found.readlink()
                found = self._root / target.relative_to("/") if target.is_absolute() else found.parent / target
        return found

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        shown = [option for name in ("/usr", "/etc") for option in ("--ro-bind", name, name)]
        for name in ("bin", "sbin", "lib", "lib64"):
            link = Path("/", name)
            if link.is_symlink():
                shown += ["--symlink", str(link.readlink()), str(link)]
            elif link.is_dir():
                shown += ["--ro-bind", str(link), str(link)]
        words = [self._bubblewrap, "--bind", str(self._root), "/", *shown, "--dev", "/dev", "--proc", "/proc"]
        process = await asyncio.create_subprocess_exec(
            *(*words, "--chdir", cwd or "/", "--", "/bin/sh", "-c", command),
            env={"PATH": os.defpath, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_sec):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return ExecResult(
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
            return_code=process.returncode or 0,
        )
