"""The stored state of an experiment: its record, one state per algorithm, and a ledger.

Everything is written together after each step, so a crash repeats at most the step in flight and the ledger always
agrees with the state.
"""

from collections.abc import Mapping, Sequence

import msgspec

from agl.contracts import ExperimentRecord, Store, Trained
from agl.schemas import Json, Record


class AlgorithmState(Record, frozen=True, kw_only=True):
    """The state of an algorithm between two steps.

    ``settings`` are those of its last step, see :func:`~agl_run.config.settings.training_settings`.
    """

    step: int = 0
    is_finished: bool = False
    stop_reason: str = ""
    state: dict[str, Json] = {}
    settings: dict[str, str] = {}


def run_key(name: str, run: int, what: str) -> str:
    """Return the key of a part of a run's state in the store."""
    return f"experiment/{name}/{run}/{what}"


def algorithm_key(name: str, run: int, algorithm: str) -> str:
    """Return the key of an algorithm's state in the store."""
    return run_key(name, run, f"algorithm/{algorithm}")


async def load_experiment(store: Store, name: str) -> ExperimentRecord | None:
    """Load the experiment's record, ``None`` if it never ran."""
    return next(iter(await store.experiments(name)), None)


async def load_algorithm(store: Store, name: str, run: int, algorithm: str) -> AlgorithmState | None:
    """Load an algorithm's state, ``None`` before its first step."""
    key = algorithm_key(name, run, algorithm)
    data = (await store.load_state(key)).get(key)
    return None if data is None else msgspec.json.decode(data, type=AlgorithmState)


async def load_settings(store: Store, record: ExperimentRecord) -> dict[str, str]:
    """Load the settings of a run's algorithms as of their last steps, by ``ALGORITHM.SETTING``."""
    prefix = algorithm_key(record.name, record.run, "")
    states = {
        key.removeprefix(prefix): msgspec.json.decode(data, type=AlgorithmState)
        for key, data in (await store.load_state(prefix)).items()
    }
    return {f"{name}.{key}": text for name, state in states.items() for key, text in state.settings.items()}


async def trained_rollouts(store: Store, name: str, run: int, algorithm: str) -> set[str]:
    """Load the ids of all rollouts that an algorithm trained on."""
    return set(await store.trained(name, run=run, algorithm=algorithm))


def last_versions(name: str, run: int, versions: Mapping[str, str]) -> dict[str, bytes]:
    """Return what remembers the versions of the last step, by key: at the end others may be live."""
    return {run_key(name, run, "last"): msgspec.json.encode(dict(versions))}


async def load_last_versions(store: Store, record: ExperimentRecord) -> dict[str, str]:
    """Load the versions of a finished experiment's last step, from which it continues."""
    key = run_key(record.name, record.run, "last")
    data = (await store.load_state(key)).get(key)
    return record.live if data is None else msgspec.json.decode(data, type=dict[str, str])


async def save_progress(
    store: Store,
    experiment: ExperimentRecord,
    algorithms: Mapping[str, AlgorithmState] | None = None,
    trained: Mapping[tuple[str, int], Sequence[str]] | None = None,
    others: Mapping[str, bytes] | None = None,
) -> None:
    """Write everything in one transaction; ``trained`` maps (algorithm, step) to rollout ids, ``others`` are by key."""
    states = {
        algorithm_key(experiment.name, experiment.run, algorithm): msgspec.json.encode(state)
        for algorithm, state in (algorithms or {}).items()
    }
    ledger = [
        Trained(experiment=experiment.name, run=experiment.run, algorithm=algorithm, step=step, rollout_ids=tuple(ids))
        for (algorithm, step), ids in (trained or {}).items()
    ]
    await store.save_state({**states, **(others or {})}, experiment=experiment, trained=ledger)


async def unfinished_experiments(store: Store) -> set[str]:
    """Load the names of the experiments that can still be resumed, whose rollouts must be kept."""
    return {record.name for record in await store.experiments() if record.status == "running"}
