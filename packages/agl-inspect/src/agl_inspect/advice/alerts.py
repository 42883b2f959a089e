"""Keeps in the store what a run found out about itself, for the systems that it is told to."""

import time
from typing import Literal

import msgspec

from agl.contracts import Store
from agl.schemas import Record
from agl_inspect.advice.suggestions import Suggestion
from agl_inspect.records.state import run_key

AlertKind = Literal["suggestion", "collapse"]
"""What raised an alert."""


class Alert(Record, frozen=True, kw_only=True):
    """A finding of a rule in a run, kept once.

    Attributes:
        kind: ``collapse`` if the run acted upon it, else ``suggestion``.
        time: Unix seconds at which it was found first.
        found: The finding.
    """

    kind: AlertKind
    time: float
    found: Suggestion


async def keep_alert(store: Store, name: str, run: int, kind: AlertKind, found: Suggestion, *, key: str) -> bool:
    """Keep an alert unless the run has one under this key; returns true if it is new."""
    place = run_key(name, run, f"alerts/{found.rule}/{key}")
    if place in await store.load_state(place):
        return False
    alert = Alert(kind=kind, time=time.time(), found=found)
    await store.save_state({place: msgspec.json.encode(alert)})
    return True


async def read_alerts(store: Store, name: str, run: int) -> list[Alert]:
    """Return the alerts of a run, first to last."""
    found = await store.load_state(run_key(name, run, "alerts/"))
    return sorted((msgspec.json.decode(data, type=Alert) for data in found.values()), key=lambda alert: alert.time)
