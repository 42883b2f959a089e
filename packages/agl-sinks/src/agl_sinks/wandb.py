"""The sink that writes a run to Weights & Biases, online or offline; a resumed experiment continues the same run."""

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from agl.contracts import SinkOutcome, SinkRow, SinkRun, SinkTable
from agl.errors import ExportError
from agl.schemas import Json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wandb import Run

EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 130}

PLACE = "agl_place"
"""Key in the run's history and summary for the greatest ``place`` among the rows written so far."""

FLUSH_S = 2.0
"""Seconds after which the library ``wandb`` writes the buffer to the file."""


class WandbSink:
    """Writes a run of the library ``wandb``, with a step axis for each algorithm.

    Args:
        project: The project; by default ``$WANDB_PROJECT``, or else the experiment's name.
        entity: The user or team; by default the library's default.
        group: The group of the run; by default the experiment's name.
        mode: ``online``, ``offline`` or ``disabled``; by default ``$WANDB_MODE``, or else ``online``.
        dir: The folder in which the library creates its folder ``wandb``; by default the experiment's work directory.
        tags: Tags of the run.
        settings: Fields of ``wandb.Settings`` by name, such as ``{ init_timeout = 30 }``. They override this sink's
            settings, with which no data about the machine, the program and its output is sent.
    """

    def __init__(
        self,
        *,
        project: str = "",
        entity: str = "",
        group: str = "",
        mode: Literal["", "online", "offline", "disabled"] = "",
        dir: str = "",
        tags: tuple[str, ...] = (),
        settings: dict[str, Json] | None = None,
    ) -> None:
        self._project, self._entity, self._group, self._mode = project, entity, group, mode
        self._dir, self._tags, self._settings = dir, tags, settings or {}
        self._run: Run | None = None
        self._next = 0
        self._had, self._place = -1, -1
        self._seen: set[tuple[str, int]] = set()
        self._destination = "W&B"

    @property
    def destination(self) -> str:
        """The address of the run; in the mode ``offline``, its folder."""
        return self._destination

    def begin(self, run: SinkRun) -> None:
        """Create the run, or continue the run with the same id; an offline run continues in a new folder."""
        import wandb

        if self._run is not None:
            self._leave()
        mode = self._mode or str(wandb.setup().settings.mode)
        if mode == "online" and not wandb.login(prompt=False):
            raise ExportError(
                "there is no key of W&B, neither in WANDB_API_KEY nor from `wandb login`; set one, or set "
                'mode = "offline" to write files that `wandb sync` sends later'
            )
        folder = self._dir or run.folder
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK):  # the library would silently use a temporary folder
            raise ExportError(f"the folder {folder} cannot be written; give another one as dir")
        self._run = wandb.init(
            id=run.id,
            name=run.name,
            project=self._project or os.environ.get("WANDB_PROJECT") or run.experiment,
            entity=self._entity or None,
            group=self._group or run.experiment,
            mode=mode,  # pyright: ignore[reportArgumentType]  # also the library's older names of modes
            dir=folder,
            config=dict(run.config),
            tags=list(self._tags),
            resume="allow",
            settings=wandb.Settings(**{**_quiet(), **self._settings}),
        )
        self._run.define_metric(PLACE, hidden=True)
        self._next = self._run.starting_step
        summary: Any = self._run.summary
        self._had = self._place = int(summary.get(PLACE, self._next - 1))  # older releases wrote no place
        self._seen.clear()
        self._destination = str(self._run.url if mode == "online" else self._run.settings.sync_dir)

    def log(self, rows: list[SinkRow]) -> None:
        """Write each row to the run's history, at its place or after it; rows that the server has are left out.

        The library drops rows before its last step. A number that a step gets late is therefore written after newer
        steps. The library's last step then does not show which rows the server has, so each row also records the
        greatest place so far.
        """
        run = self._begun()
        for algorithm in dict.fromkeys(row.algorithm for row in rows):
            run.define_metric(f"{algorithm}/*", step_metric=f"{algorithm}/step")
        for row in rows:
            key = (row.algorithm, row.step)
            if row.place > self._had or key in self._seen:
                step, self._place = max(self._next, row.place), max(self._place, row.place)
                run.log({**row.named(), PLACE: self._place}, step=step, commit=True)
                self._next = step + 1
            self._seen.add(key)

    def show(self, tables: list[SinkTable]) -> None:
        """Write the tables as W&B tables into the run's summary, which keeps the newest version of each."""
        import wandb

        summary: Any = self._begun().summary
        for table in tables:
            data: list[Iterable[Any]] = [list(row) for row in table.rows]
            summary[table.name] = wandb.Table(columns=list(table.columns), data=data, allow_mixed_types=True)

    def end(self, end: SinkOutcome) -> None:
        """Write the summary and finish the run; waits until it is uploaded."""
        run = self._begun()
        summary: Any = run.summary
        summary.update({"status": end.status, **end.summary})
        run.finish(exit_code=EXIT_CODES[end.status])
        self._run = None

    def _leave(self) -> None:
        """Finish a run that an error interrupted; if the library's service is gone, the next run starts a new one."""
        import wandb

        run, self._run = self._begun(), None
        try:
            run.finish(exit_code=EXIT_CODES["stopped"])
        except ConnectionError:  # the service is gone, and with it every run of this process
            with suppress(ConnectionError):
                wandb.teardown()

    def _begun(self) -> "Run":
        if self._run is None:
            raise ExportError("the run has not begun")
        return self._run


def _quiet() -> dict[str, Any]:
    """Return settings with which the library sends only the given values, and leaves output and other runs alone."""
    return {
        "console": "off",
        "disable_code": True,
        "disable_git": True,
        "quiet": True,
        "reinit": "create_new",
        "silent": True,
        "x_disable_machine_info": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_save_requirements": False,
        "x_transaction_log_flush_interval": FLUSH_S,
    }
