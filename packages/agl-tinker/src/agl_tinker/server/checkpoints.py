"""The saved weights and states of a server, in one folder, under Tinker's paths.

``tinker://RUN/weights/NAME`` is a state from which training continues, and ``tinker://RUN/sampler_weights/NAME`` is
weights for sampling. Both outlive the server. A checkpoint is written to a folder of another name and then renamed, so
an existing one is always complete. Weights that were saved without a name belong to a sampling client; only the newest
ones of a run are kept.
"""

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agl.errors import ConfigError
from agl_tinker.server.problems import RefusedError

Kind = Literal["weights", "sampler_weights"]
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", re.ASCII)
_RUN = re.compile(r"[A-Za-z0-9-]+:train:[0-9]+", re.ASCII)
UNNAMED = "unnamed-"
_KEPT = 16


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A saved state of training, or saved weights for sampling."""

    run: str
    kind: Kind
    name: str
    folder: Path

    @property
    def path(self) -> str:
        """The checkpoint's path in Tinker's form, ``tinker://RUN/KIND/NAME``."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def created(self) -> float:
        """The time at which the checkpoint was written, in Unix seconds."""
        return self.folder.stat().st_mtime


class Checkpoints:
    """The checkpoints below a folder, which is created; raises :class:`ConfigError` if it cannot be created."""

    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder {root} for checkpoints cannot be made ({error}); choose another --folder"
            ) from error

    def new(self, run: str, kind: Kind, name: str, *, overwrite: bool = False) -> Checkpoint:
        """Return the checkpoint to be written under a name.

        Raises:
            RefusedError: The name is not allowed, or is taken and ``overwrite`` is false.
        """
        if not _NAME.fullmatch(name) or name.startswith(UNNAMED):
            raise RefusedError(
                f"The name {name[:200]!r} cannot be given to a checkpoint; use up to 128 letters, digits, '.', '_' and "
                f"'-', not '.' or {UNNAMED!r} at the beginning."
            )
        found = self._at(run, kind, name)
        if found.folder.exists() and not overwrite:
            raise RefusedError(f"The checkpoint {found.path} exists; save under another name.")
        return found

    def unnamed(self, run: str) -> Checkpoint:
        """Return a new checkpoint of weights for a sampling client, and remove the oldest ones if there are many."""
        folder = self._at(run, "sampler_weights", UNNAMED).folder.parent
        old = sorted(folder.glob(f"{UNNAMED}*"), key=lambda path: path.stat().st_mtime)
        for path in old[: max(0, len(old) - _KEPT + 1)]:
            shutil.rmtree(path, ignore_errors=True)
        return self._at(run, "sampler_weights", f"{UNNAMED}{time.time_ns():x}")

    def find(self, path: str, kind: Kind) -> Checkpoint:
        """Return the checkpoint of a kind at ``tinker://...``; raises :class:`RefusedError` if it does not exist."""
        run, _, rest = path.removeprefix("tinker://").partition("/")
        found_kind, _, name = rest.partition("/")
        is_path = path.startswith("tinker://") and _RUN.fullmatch(run) and _NAME.fullmatch(name)
        if not is_path or found_kind not in ("weights", "sampler_weights"):
            raise RefusedError(f"{path[:200]!r} is not the path of a checkpoint; write tinker://RUN/{kind}/NAME.")
        if found_kind != kind:
            use = "training continues from weights" if kind == "weights" else "one samples from sampler_weights"
            raise RefusedError(f"{path!r} holds {found_kind}, and {use}: save them, and give that path.")
        found = self._at(run, kind, name)
        if not found.folder.is_dir():
            raise RefusedError(f"There is no checkpoint {path!r} on this server.", status=404)
        return found

    def of(self, run: str) -> list[Checkpoint]:
        """Return the named checkpoints of a run, oldest first."""
        if not _RUN.fullmatch(run):
            return []
        kinds: tuple[Kind, ...] = ("weights", "sampler_weights")
        found = [
            self._at(run, kind, place.name)
            for kind in kinds
            for place in self._at(run, kind, UNNAMED).folder.parent.glob("[!.]*")
            if not place.name.startswith(UNNAMED)
        ]
        return sorted(found, key=lambda one: one.created)

    def remove(self, one: Checkpoint) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(one.folder, ignore_errors=True)

    def _at(self, run: str, kind: Kind, name: str) -> Checkpoint:
        return Checkpoint(run=run, kind=kind, name=name, folder=self._root / run.replace(":", "_") / kind / name)
