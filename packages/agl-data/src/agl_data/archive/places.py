"""Access to a folder on any backend of fsspec: a disk, S3, Google Cloud Storage, Azure and others.

A file appears whole or not at all: on a disk it is renamed into place once written, and an object store shows an upload
only once it has ended.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from agl.errors import AglError, ConfigError, StoreError
from agl.urls import shown_url

T = TypeVar("T")

_fsspec: Any = import_module("fsspec")  # untyped

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""The pip package of each object store's backend, by URL scheme."""


class Place:
    """A folder at a URL or path.

    Args:
        url: The folder, which need not exist. Its backend reads credentials and options from its usual environment
            variables.

    Raises:
        ConfigError: No backend handles the URL, or the backend's package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.shown = shown_url(url)
        self._fs, root = _open(url, self.shown)
        self._root = root.rstrip("/")
        self._is_disk: bool = "file" in self._fs.protocol

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file; ``None`` if it does not exist."""
        with self._reaching(f"read {name!r}"):
            try:
                path = self._path(name)
                return bytes(self._fs.cat_file(path)) if self._is_file(path) else None
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, replacing an existing one."""
        self._put(name, lambda target: self._fs.pipe_file(target, data))

    def put(self, name: str, source: Path) -> None:
        """Copy a local file to the folder, replacing an existing file."""
        self._put(name, lambda target: self._fs.put_file(str(source), target))

    def _put(self, name: str, write: Callable[[str], None]) -> None:
        """Let the backend write a file; on a disk, write a temporary file, flush it, and rename it into place."""
        with self._reaching(f"write {name!r}"):
            if not self._is_disk:
                write(self._path(name))
                return
            final = Path(self._path(name))
            final.parent.mkdir(parents=True, exist_ok=True)
            path = final.with_name(f".{final.name}.{os.getpid()}")
            try:
                write(str(path))
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
                path.replace(final)
            finally:
                path.unlink(missing_ok=True)

    def fetch(self, name: str, target: Path) -> bool:
        """Copy a file of the folder to a local file; return false if it does not exist."""
        with self._reaching(f"read {name!r}"):
            try:
                path = self._path(name)
                if not self._is_file(path):
                    return False
                self._fs.get_file(path, str(target))
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return False
            return True

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, sorted; empty if the folder does not exist.

        Raises:
            ConfigError: The path is a file.
        """
        with self._reaching("list the folder"):
            path = self._path(folder)
            self._fs.invalidate_cache()
            try:
                found: list[str] = self._fs.ls(path, detail=False)
            except FileNotFoundError:
                return []
            except NotADirectoryError:
                found = [path]
            if found and {each.rstrip("/") for each in found} == {path} and self._fs.isfile(path):
                raise ConfigError(f"{self.shown} is a file, and an archive is a folder; name a folder")
            return sorted(each.rstrip("/").rpartition("/")[2] for each in found if each.rstrip("/") != path)

    def remove(self, name: str) -> None:
        """Remove a file; does nothing if it does not exist."""
        with self._reaching(f"remove {name!r}"):
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def _path(self, name: str) -> str:
        """Return the path of a file of this folder; names may come from the files of the archive itself."""
        path = f"{self._root}/{name}" if name else self._root or "/"
        is_out = bool({"..", "."} & set(name.split("/"))) or name.startswith("/") or "\\" in name or "\0" in name
        # A link in the folder leads out of it as well.
        if is_out or (self._is_disk and not Path(path).resolve().is_relative_to(Path(self._root or "/").resolve())):
            raise StoreError(f"{name!r} leads out of the archive {self.shown}; the archive was changed: do not use it")
        return path

    def _is_file(self, path: str) -> bool:
        # Opening a named pipe on a disk would wait for its writer.
        return not self._is_disk or os.path.isfile(path)

    @contextmanager
    def _reaching(self, what: str) -> Generator[None]:
        try:
            yield
        except AglError:
            raise
        except Exception as error:  # a backend raises errors of its own library
            reason = str(error) or type(error).__name__
            raise StoreError(
                f"cannot {what} in the archive {self.shown}: {reason}; mend that, such as the folder's rights or the "
                "backend's credentials, and repeat the command, which goes on where it stopped"
            ) from error


def _open(url: str, shown: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0] if "://" in url else ""
    try:
        return _fsspec.core.url_to_fs(url)
    except ImportError as error:
        install = f"pip install {_PACKAGES[scheme]}" if scheme in _PACKAGES else f"install what it asks for: {error}"
        raise ConfigError(f"the archive {shown} needs a package that is not installed; {install}") from error
    except ValueError as error:
        raise ConfigError(
            f"{shown} is not the address of an archive: {error}; name a folder, or a URL such as s3://BUCKET/FOLDER, "
            "gs://BUCKET/FOLDER or az://CONTAINER/FOLDER"
        ) from error
