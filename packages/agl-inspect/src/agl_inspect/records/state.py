"""Saves the state of an experiment: its record, each algorithm's state, and the ledger of trained rollouts.

After each step all of it is written in one transaction, so that a crash repeats at most the step in flight, and the
ledger always agrees with the states. The states contain the algorithms' settings, from which commands that read no
experiment file learn the rules for rewards and calls.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from agl.contracts import ExperimentRecord, Store, Trained
from agl.episodes import EpisodeOptions, ScoreOptions, Verdict
from agl.schemas import Json, Record, ResourceVersion
from agl_inspect.records.names import FORKS, PROMPT_TRIAL, TRIAL
from agl_inspect.records.shelf import Shelf, run_key


class AlgorithmState(Record, frozen=True, kw_only=True):
    """The state of an algorithm between two steps.

    ``settings`` are the algorithm's settings in its last step; see
    :func:`~agl_run.config.training_settings.training_settings`.
    """

    step: int = 0
    is_finished: bool = False
    stop_reason: str = ""
    state: dict[str, Json] = {}
    settings: dict[str, str] = {}


def states_of_run(name: str, run: int) -> Shelf[AlgorithmState]:
    """Return the shelf that holds the state of each algorithm of a run, by the algorithm's name."""
    return Shelf(AlgorithmState, run_key(name, run, "algorithm/"))


async def load_experiment(store: Store, name: str) -> ExperimentRecord | None:
    """Load the record of an experiment; ``None`` if the experiment never ran."""
    return next(iter(await store.experiments(name)), None)


async def load_algorithm(store: Store, name: str, run: int, algorithm: str) -> AlgorithmState | None:
    """Load an algorithm's state; ``None`` before the algorithm's first step."""
    return await states_of_run(name, run).get(store, algorithm)


async def load_settings(store: Store, record: ExperimentRecord) -> dict[str, str]:
    """Load the settings of a run's algorithms in their last steps, by ``ALGORITHM.SETTING``."""
    states = await states_of_run(record.name, record.run).read(store)
    return {f"{name}.{key}": text for name, state in states.items() for key, text in state.settings.items()}


async def trained_rollouts(store: Store, name: str, run: int, algorithm: str) -> set[str]:
    """Load the ids of all rollouts that an algorithm trained on."""
    return set(await store.trained(name, run=run, algorithm=algorithm))


def last_versions(name: str, run: int) -> Shelf[dict[str, str]]:
    """Return the shelf whose only record maps each resource to its version after the last step.

    At the end of a run other versions may be live.
    """
    return Shelf(dict[str, str], run_key(name, run, "last"))


async def load_last_versions(store: Store, record: ExperimentRecord) -> dict[str, str]:
    """Load the versions from which a finished experiment continues: those of the last step, else the live ones."""
    return await last_versions(record.name, record.run).get(store) or record.live


async def save_progress(
    store: Store,
    experiment: ExperimentRecord,
    algorithms: Mapping[str, AlgorithmState] | None = None,
    trained: Mapping[tuple[str, int], Sequence[str]] | None = None,
    others: Mapping[str, bytes] | None = None,
) -> None:
    """Write the record and the states of an experiment in one transaction.

    Args:
        store: The store.
        experiment: The experiment's record.
        algorithms: States by the name of the algorithm.
        trained: New entries of the ledger: ids of the rollouts that a step trained on, by (algorithm, step).
        others: Further encoded states by key.
    """
    states = states_of_run(experiment.name, experiment.run).states(algorithms or {})
    ledger = [
        Trained(experiment=experiment.name, run=experiment.run, algorithm=algorithm, step=step, rollout_ids=tuple(ids))
        for (algorithm, step), ids in (trained or {}).items()
    ]
    await store.save_state({**states, **(others or {})}, experiment=experiment, trained=ledger)


async def unfinished_experiments(store: Store) -> set[str]:
    """Load the names of experiments that can be resumed, whose rollouts therefore have to stay."""
    return {record.name for record in await store.experiments() if record.status == "running"}


DEFERRED = "deferred"
"""Metadata key of a version whose weights were not saved when it was published; it names experiment and run."""


def deferral(experiment: str, run: int) -> dict[str, Json]:
    """Return the metadata for a version whose weights are not saved when it is published."""
    return {DEFERRED: {"experiment": experiment, "run": run}}


def saved_marks(experiment: str, run: int, versions: Iterable[ResourceVersion]) -> dict[str, bytes]:
    """Return states, by key, that record that the weights of deferred versions have been saved."""
    return {_mark(experiment, run, each.name, each.version): b"1" for each in versions if DEFERRED in each.metadata}


async def unsaved(store: Store, versions: Iterable[ResourceVersion]) -> set[tuple[str, str]]:
    """Return ``(name, version)`` of each given version whose weights have not been saved."""
    found = [each for each in versions if DEFERRED in each.metadata]
    folders = {_mark(*_place(each), each.name, "") for each in found}
    marks = {key for folder in folders for key in await store.load_state(folder)}
    return {(each.name, each.version) for each in found if _mark(*_place(each), each.name, each.version) not in marks}


def _place(version: ResourceVersion) -> tuple[str, int]:
    place: Any = version.metadata[DEFERRED]
    return str(place["experiment"]), int(place["run"])


def _mark(experiment: str, run: int, name: str, version: str) -> str:
    return run_key(experiment, run, f"saved/{name}/{version}")


_SECTION = ".experiment."
_WEIGHTS = "reward_weights."


async def rules_of(store: Store, experiment: str) -> EpisodeOptions:
    """Return an experiment's rules for rewards and calls in its last steps; the defaults if it never ran.

    The dry runs, trials and forks of an experiment have the experiment's rules.
    """
    origins = [experiment.removesuffix(suffix) for suffix in (TRIAL, PROMPT_TRIAL, FORKS)]
    for name in dict.fromkeys([experiment, *origins]):
        record = await load_experiment(store, name) if name else None
        if record is not None:
            return _rules(await load_settings(store, record))
    return EpisodeOptions()


def _rules(settings: Mapping[str, str]) -> EpisodeOptions:
    """Parse the rules from settings, whose keys are ``ALGORITHM.experiment.KEY`` and whose values are JSON."""
    section = {key.partition(_SECTION)[2]: text for key, text in settings.items() if _SECTION in key}
    weights = {key.removeprefix(_WEIGHTS): text for key, text in section.items() if key.startswith(_WEIGHTS)}
    return EpisodeOptions(
        score=ScoreOptions(
            weights={name: msgspec.json.decode(text, type=float) for name, text in weights.items()},
            trust_agent=section.get("trust_agent_rewards") == "true",
        ),
        unseen=_verdict(section.get("unseen_calls"), otherwise=EpisodeOptions().unseen),
        unattributed=_verdict(section.get("unattributed_calls"), otherwise=EpisodeOptions().unattributed),
    )


def _verdict(text: str | None, *, otherwise: Verdict) -> Verdict:
    if text is None:
        return otherwise
    return "accept" if text == '"accept"' else "drop"
