"""An installation around a PostgreSQL server that is killed too.

Trainer, workers and one writer open the database themselves; another writer goes through ``agl serve``.
"""

import importlib.util
import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from .installation import Installation
from .programs import Program

SERVER = Path(__file__).parents[1] / "packages" / "agl-store-postgres" / "tests" / "conftest.py"


def server_module() -> ModuleType:
    """The module with the PostgreSQL server of the store's own tests."""
    spec = importlib.util.spec_from_file_location("agl_postgres_server", SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class DatabaseServer(Protocol):
    """A PostgreSQL server that can be killed."""

    def answers(self) -> bool:
        """Return true if it answers; starts it where it does not run."""
        ...

    def children(self) -> list[int]:
        """The ids of its processes but the first."""
        ...

    def kill(self) -> None:
        """``kill -9`` of all its processes."""
        ...


@dataclass
class Database(Program):
    """The server of the database."""

    server: DatabaseServer | None = None
    is_up: bool = False

    def begin(self, host: str = "") -> None:
        """Start it."""
        del host
        self.is_up = True

    def is_alive(self) -> bool:
        """Return true unless it was killed."""
        return self.is_up

    def works(self) -> bool:
        """Return true once it answers; until then it is started again and again."""
        assert self.server is not None
        return self.server.answers()

    def is_done(self) -> bool:
        """Return false: it is needed to the end."""
        return False

    def ended_by_itself(self) -> bool:
        """Return false: it would be started again."""
        return False

    def kill(self) -> list[tuple[int, str]]:
        """``kill -9`` of all its processes."""
        assert self.server is not None
        self.server.kill()
        self.is_up = False
        return []


class DatabaseProcess(Database):
    """One process of the server, after whose death it ends all others and recovers."""

    def begin(self, host: str = "") -> None:
        """Do nothing: the server starts its processes."""
        del host
        self.is_up = True

    def works(self) -> bool:
        """Return true if there is something to kill."""
        assert self.server is not None
        return bool(self.server.children())

    def kill(self) -> list[tuple[int, str]]:
        """``kill -9`` of one process."""
        assert self.server is not None
        with suppress(ProcessLookupError, IndexError):  # the server ended meanwhile
            os.kill(random.choice(self.server.children()), signal.SIGKILL)
        self.is_up = False
        return []


@dataclass
class PostgresInstallation(Installation):
    """A PostgreSQL server that the trainer, two workers and a writer use, and ``agl serve`` for another writer."""

    server: DatabaseServer | None = None

    @property
    def used(self) -> str:
        """The database's URL."""
        return self.served

    def programs(self) -> list[Program]:
        """Every program, the database first."""
        known = {
            "start": self._serve,
            "server": self.server,
            "moves": False,
            "is_kept": True,
            "log": self._log("postgres"),
            "sign": "",
        }
        return [
            Database("PostgreSQL", lives_s=10 * self.pace, **known),
            DatabaseProcess("process of PostgreSQL", lives_s=10 * self.pace, **known),
            *super().programs(),
            self._writer("writer on PostgreSQL", self.served),
        ]
