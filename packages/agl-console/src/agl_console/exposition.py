"""The findings of rules in runs, in Prometheus' text format."""

import time

from agl.contracts import Store
from agl_inspect.advice import read_alerts

RECENT_S = 3600.0
"""Seconds for which a finding is shown."""

_NAME = "agl_run_finding_time_seconds"
_HEAD = (
    f"# HELP {_NAME} When a rule found something in a run that has not ended, or the run acted upon a collapse.\n"
    f"# TYPE {_NAME} gauge\n"
)


async def findings_text(store: Store) -> str:
    """Return the findings of the last hour in unfinished runs, with the Unix time of each as its value.

    A rule that found something more than once has one line, with the newest time: Prometheus takes no series twice.
    """
    now = time.time()
    found: dict[str, float] = {}
    for record in await store.experiments():
        if record.status == "finished":
            continue
        for alert in await read_alerts(store, record.name, record.run):
            if now - alert.time < RECENT_S:
                labels = {
                    "experiment": record.name,
                    "run": str(record.run),
                    "algorithm": alert.found.algorithm,
                    "rule": alert.found.rule,
                    "kind": alert.kind,
                }
                shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
                found[shown] = alert.time
    return _HEAD + "".join(f"{_NAME}{{{labels}}} {at:.3f}\n" for labels, at in found.items())


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
