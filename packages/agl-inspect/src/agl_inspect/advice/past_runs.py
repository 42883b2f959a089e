"""Reads the parameters and results of past runs, and finds the runs that can be compared.

Two runs can be compared if they have the same agent, training tasks, validation tasks and rewards, and algorithms of
the same names and kinds. The result of a run is the mean reward of its best validation, because the run hands out the
versions of that validation. Some differences go unnoticed: changes of the agent's code, because an agent is identified
by its name alone, and settings that are missing from an algorithm's state, such as the text of the first prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agl.contracts import ExperimentRecord, Store
from agl.schemas import Record
from agl_inspect.records.state import states_of_run
from agl_inspect.records.validations import Validation, read_validations
from agl_inspect.statistics import interval

_OF_SCORE = ("reward", "experiment.reward_weights", "experiment.trust_agent_rewards")
"""Settings that decide which reward a rollout gets; runs that differ in them have incomparable scores."""

_NO_PARAMETERS = ("use", "policy", "experiment.seed")
"""Settings that are not ranked as parameters: an algorithm's kind, the name of its policy, and the seed."""

_OWN = ("tunes", "agents", "source")
"""Settings that an experiment file has directly in an algorithm's table; all others are below ``params``."""


class PastRun(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A run that ended, with its result.

    Attributes:
        turn: Number of steps that all algorithms together had taken before the best validation.
        mean: Mean reward of the best validation.
        low: Lower end of the 95 % interval of ``mean`` over tasks; ``None`` for a single task.
        high: Upper end of the 95 % interval of ``mean`` over tasks; ``None`` for a single task.
        tasks: Number of validation tasks.
        values: The run's parameters as JSON, by the key that ``--set`` takes.
    """

    experiment: str
    run: int
    turn: int
    mean: float
    low: float | None
    high: float | None
    tasks: int
    values: dict[str, str]

    @property
    def name(self) -> str:
        """The run's name, such as ``sums-3`` or ``sums, run 2``."""
        return self.experiment if self.run == 1 else f"{self.experiment}, run {self.run}"


class Kind(Record, frozen=True, kw_only=True):
    """The properties that must be equal in runs that are compared.

    Attributes:
        agent: The agent's name.
        train: Digest of the training tasks.
        val: Digest of the validation tasks.
        rewards: The settings that decide which reward a rollout gets.
        algorithms: The kind of each algorithm, by the algorithm's name.
    """

    agent: str
    train: str
    val: str
    rewards: dict[str, str]
    algorithms: dict[str, str]


class History(Record, frozen=True, kw_only=True):
    """The runs that can be compared with each other.

    Attributes:
        kind: The properties that the runs share.
        runs: The runs that have ended and were validated, in order of their names.
        unfinished: Number of runs of the same kind that have not ended.
    """

    kind: Kind
    runs: tuple[PastRun, ...]
    unfinished: int = 0


async def history_of(store: Store, experiment: str) -> History | None:
    """Read the runs that are comparable with an experiment's newest run; ``None`` if it has no validation."""
    records = sorted(await store.experiments(), key=lambda record: record.name)
    own = next((record for record in records if record.name == experiment), None)
    found = None if own is None else await _read(store, own, own.run)
    return None if found is None else await runs_of_kind(store, found[0], records)


async def runs_of_kind(store: Store, kind: Kind, records: Sequence[ExperimentRecord] | None = None) -> History:
    """Read all runs of a kind; ``records`` limits the search to these experiments."""
    runs: list[PastRun] = []
    unfinished = 0
    for record in sorted(await store.experiments(), key=lambda each: each.name) if records is None else records:
        for number in range(1, record.run + 1):
            read = await _read(store, record, number)
            if read is None or read[0] != kind:
                continue
            if read[1] is None:
                unfinished += 1
            else:
                runs.append(read[1])
    return History(kind=kind, runs=tuple(runs), unfinished=unfinished)


def parameters_of(settings: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the parameters of a run's algorithms, by the key that ``--set`` takes.

    ``settings`` are the values as JSON, by algorithm and then by the name of the setting.
    """
    found: dict[str, str] = {}
    for algorithm, values in settings.items():
        for name, text in values.items():
            if name not in _NO_PARAMETERS and not _decides_scores(name):
                found[_key(algorithm, name)] = text
    return found


def _decides_scores(name: str) -> bool:
    return any(name == setting or name.startswith(f"{setting}.") for setting in _OF_SCORE)


def _key(algorithm: str, name: str) -> str:
    first, _, rest = name.partition(".")
    if first == "experiment":
        return name
    if first == "policy":
        return f"policy.{rest.removesuffix('.model')}.params.model"
    if first == "credit":
        return f"algorithm.{algorithm}.credit.{rest if rest == 'use' else f'params.{rest}'}"
    return f"algorithm.{algorithm}.{name}" if name in _OWN else f"algorithm.{algorithm}.params.{name}"


async def _read(store: Store, record: ExperimentRecord, run: int) -> tuple[Kind, PastRun | None] | None:
    """Return the kind of a run, and the run with its result, or ``None`` in its place if it has not ended.

    Returns ``None`` alone if the run has no step or no validation.
    """
    states = await states_of_run(record.name, run).read(store)
    settings = {name: state.settings for name, state in sorted(states.items()) if state.settings}
    validations = await read_validations(store, record.name, run) if settings else []
    if not validations:
        return None
    last = validations[-1]
    kind = kind_of(settings, agent=last.agent or record.agent, train=last.train, val=last.tasks)
    is_over = len(settings) == len(states) and all(state.is_finished for state in states.values())
    return kind, _past(record.name, run, validations, settings) if is_over else None


def _past(name: str, run: int, validations: Sequence[Validation], settings: Mapping[str, Mapping[str, str]]) -> PastRun:
    comparable = [one for one in validations if one.tasks == validations[-1].tasks]
    best = max(comparable, key=lambda one: (one.mean, one.turn))
    count = len(best.rewards)
    low, high = interval(best.rewards) if count > 1 else (None, None)
    values = parameters_of(settings)
    return PastRun(
        experiment=name, run=run, turn=best.turn, mean=best.mean, low=low, high=high, tasks=count, values=values
    )


def kind_of(settings: Mapping[str, Mapping[str, str]], *, agent: str, train: str, val: str) -> Kind:
    """Return the kind of a run from its settings, by algorithm and name, and the digests of its tasks."""
    every: dict[str, Any] = {name: text for values in settings.values() for name, text in values.items()}
    rewards = {name: text for name, text in every.items() if _decides_scores(name)}
    algorithms = {algorithm: values.get("use", "").strip('"') for algorithm, values in settings.items()}
    return Kind(agent=agent, train=train, val=val, rewards=rewards, algorithms=algorithms)
