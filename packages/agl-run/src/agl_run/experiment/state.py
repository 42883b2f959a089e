"""What an experiment remembers between processes: one small record, one state per algorithm, and a ledger.

Everything is written together after each step, so a crash repeats at most the step in flight and the ledger always
agrees with the state.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from agl.contracts import Store
from agl.errors import AglError
from agl.schemas import Json, Record

PREFIX = "experiment/"


class ExperimentState(Record, frozen=True, kw_only=True):
    """An experiment between two steps.

    Attributes:
        run: Counts fresh starts, from 1; part of every rollout's id.
        status: ``finished`` once every algorithm is.
        live: The live version of every resource.
        turn: Steps taken by all algorithms together.
        owner: Worker name of the process that runs or ran it.
    """

    run: int = 1
    status: Literal["running", "finished"] = "running"
    live: dict[str, str] = {}
    turn: int = 0
    owner: str = ""


class AlgorithmState(Record, frozen=True, kw_only=True):
    """An algorithm between two steps."""

    step: int = 0
    is_finished: bool = False
    stop_reason: str = ""
    state: dict[str, Json] = {}


def experiment_key(name: str) -> str:
    """Where an experiment's record is kept."""
    return f"{PREFIX}{name}/experiment"


def algorithm_key(name: str, run: int, label: str) -> str:
    """Where an algorithm's state is kept."""
    return f"{PREFIX}{name}/{run}/algorithm/{label}"


def ledger_key(name: str, run: int, label: str, step: int = 0) -> str:
    """Where the ids of the rollouts that a step trained are kept; the prefix of all for step 0."""
    return f"{PREFIX}{name}/{run}/trained/{label}/" + (f"{step:08d}" if step else "")


async def load_experiment(store: Store, name: str) -> ExperimentState | None:
    """The experiment's record, ``None`` if it never ran."""
    key = experiment_key(name)
    data = (await store.load_state(key)).get(key)
    return None if data is None else msgspec.json.decode(data, type=ExperimentState)


async def load_algorithm(store: Store, name: str, run: int, label: str) -> AlgorithmState | None:
    """An algorithm's state, ``None`` before its first step."""
    key = algorithm_key(name, run, label)
    data = (await store.load_state(key)).get(key)
    return None if data is None else msgspec.json.decode(data, type=AlgorithmState)


async def trained_rollouts(store: Store, name: str, run: int, label: str) -> set[str]:
    """Ids of all rollouts that an algorithm trained on."""
    entries = await store.load_state(ledger_key(name, run, label))
    return {rollout_id for data in entries.values() for rollout_id in msgspec.json.decode(data, type=list[str])}


async def save(
    store: Store,
    name: str,
    experiment: ExperimentState,
    algorithms: Mapping[str, AlgorithmState] | None = None,
    trained: Mapping[tuple[str, int], Iterable[str]] | None = None,
) -> None:
    """Write everything in one transaction; ``trained`` maps (label, step) to rollout ids."""
    states = {experiment_key(name): msgspec.json.encode(experiment)}
    for label, state in (algorithms or {}).items():
        states[algorithm_key(name, experiment.run, label)] = msgspec.json.encode(state)
    for (label, step), ids in (trained or {}).items():
        if step < 1:
            raise AglError(f"a step counts from 1, not {step}")
        states[ledger_key(name, experiment.run, label, step)] = msgspec.json.encode(list(ids))
    await store.save_state(states)


async def unfinished_experiments(store: Store) -> set[str]:
    """Names of the experiments that may still be resumed, whose rollouts must therefore be kept."""
    states = await store.load_state(PREFIX)
    return {
        key.removeprefix(PREFIX).removesuffix("/experiment")
        for key, data in states.items()
        if key.endswith("/experiment") and msgspec.json.decode(data, type=ExperimentState).status == "running"
    }
