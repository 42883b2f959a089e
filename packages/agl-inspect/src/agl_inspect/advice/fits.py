"""Keeps in the store what a model found about the parameters of runs, for the console and for later."""

import time
from collections.abc import Sequence

import msgspec

from agl.contracts import ExperimentRecord, Store
from agl.schemas import Record
from agl_inspect.advice.ranking import Fit
from agl_inspect.records.state import run_key

_PART = "fit"


class KeptFit(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A fit, and when it was made in Unix seconds."""

    time: float
    fit: Fit


async def keep_fit(store: Store, record: ExperimentRecord, found: Fit) -> None:
    """Keep a fit with the run from which it was asked for, in place of the one before."""
    kept = KeptFit(time=time.time(), fit=found)
    await store.save_state({run_key(record.name, record.run, _PART): msgspec.json.encode(kept)})


async def read_fits(store: Store, records: Sequence[ExperimentRecord]) -> list[KeptFit]:
    """Return the fits that were kept with runs, the newest one for each set of comparable runs, newest first."""
    found: list[KeptFit] = []
    for record in records:
        key = run_key(record.name, record.run, _PART)
        data = (await store.load_state(key)).get(key)
        found += [] if data is None else [msgspec.json.decode(data, type=KeptFit)]
    shown: list[KeptFit] = []
    for kept in sorted(found, key=lambda each: -each.time):
        runs = _names(kept)
        if not any(runs & _names(other) for other in shown):
            shown.append(kept)
    return shown


def _names(kept: KeptFit) -> set[tuple[str, int]]:
    return {(run.experiment, run.run) for run in kept.fit.runs}
