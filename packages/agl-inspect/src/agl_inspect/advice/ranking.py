"""Ranks the parameters of past runs by a fitted model, and proposes the next run, with Optuna and scikit-learn.

- Importance is fANOVA (Hutter, Hoos and Leyton-Brown 2014, "An Efficient Approach for Assessing Hyperparameter
  Importance"): the share of the variance of a random forest's predictions that a parameter causes by itself. The
  reported share is the mean over forests of several seeds, and its interval comes from forests on resampled runs.
- The shares of a forest add up to one whether or not anything matters. So each parameter is tested by itself: how
  often do as good fits (a parabola through the ranks of its values, or a mean for each choice) arise when the rewards
  are dealt to the runs at random? The p-values are corrected for the number of parameters after Holm (1979).
- The next run is the proposal of a tree-structured Parzen estimator (Bergstra et al. 2011), within the values that
  were tried.
"""

import logging
import math
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import msgspec

from agl.contracts import ExperimentRecord, Store
from agl.errors import ConfigError
from agl.schemas import Record
from agl_inspect.advice.past_runs import History, PastRun
from agl_inspect.records.shelf import Shelf, run_key

FEWEST = 8
"""Smallest number of runs to which a model is fitted."""

SIGNIFICANT = 0.05
"""A parameter counts as significant if its corrected p-value is at most this."""

_SEEDS = 4
_RESAMPLES = 20
_TREES = 16
_PERMUTATIONS = 4000
_ASKED = 50
"""The most proposals that are requested in search of one that no run has tried."""

_MISSING = "not set"
_NULL = "null"
_LOG_RANGE = 10.0
"""A parameter is modelled on a logarithmic scale if its largest value is at least this many times the smallest."""


class Parameter(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A parameter in which runs differ.

    Attributes:
        name: The key that ``--set`` takes.
        tried: A description of the values that runs had.
        importance: Share of the variance of the forest's predictions that the parameter causes by itself, 0 to 1.
        low: Lower end of the importance's 90 % interval over resampled runs.
        high: Upper end of the importance's 90 % interval over resampled runs.
        chance: Probability that chance gives as good a fit, corrected for the number of parameters.
        is_clear: True if the parameter is significant: ``chance`` is at most ``SIGNIFICANT``.
    """

    name: str
    tried: str
    importance: float
    low: float
    high: float
    chance: float
    is_clear: bool


class Fit(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The ranked parameters of comparable runs, and a proposal for the next run.

    Attributes:
        agent: The agent of the runs.
        runs: The runs, from which all numbers here are computed.
        unfinished: Number of runs of the same kind that have not ended, and therefore do not count.
        missing: Number of further runs that a fit needs; 0 if there are enough.
        best: The run with the highest reward, ``None`` without runs.
        parameters: The parameters, the significant ones first, then by importance; empty if no model was fitted.
        next: The proposed values as JSON, by key; ``None`` for a key to leave out; empty if nothing is proposed.
        notes: Remarks on the ranking, each a sentence.
    """

    agent: str
    runs: list[PastRun]
    unfinished: int
    missing: int
    best: PastRun | None
    parameters: list[Parameter]
    next: dict[str, str | None]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class _Dimension:
    """A parameter in the form that the model uses; ``texts`` and ``numbers`` have one item per run.

    ``kind`` is ``int`` or ``float`` if all values are numbers, else ``choice``. ``texts`` are the values as JSON,
    ``None`` for a run that did not set the parameter. ``numbers`` are the values as numbers, and empty for a choice.
    """

    name: str
    kind: Literal["int", "float", "choice"]
    texts: Sequence[str | None]
    numbers: Sequence[float | None]

    @property
    def has_gaps(self) -> bool:
        return self.kind != "choice" and None in self.texts

    @property
    def known(self) -> list[float]:
        return [value for value in self.numbers if value is not None]

    @property
    def is_log(self) -> bool:
        return min(self.known) > 0 and max(self.known) >= _LOG_RANGE * min(self.known)

    @property
    def is_known(self) -> bool:
        """True if every value of the parameter is stored as JSON; long or secret values are stored as digests."""
        return all(text is None or _is_json(text) for text in self.texts)

    @property
    def flag(self) -> str:
        """Name of an additional parameter of the model, which is true in runs that set this parameter."""
        return f"{self.name} is set"

    @property
    def choices(self) -> list[str]:
        return sorted({text or _MISSING for text in self.texts})

    def is_edge(self, place: int) -> bool:
        """Return true if the run with index ``place`` has the smallest or the largest number that was tried."""
        return self.kind != "choice" and self.numbers[place] in (min(self.known), max(self.known))

    @property
    def words(self) -> str:
        """A description of the values that were tried."""
        gaps = f", or {_MISSING}" if self.has_gaps else ""
        if self.kind != "choice":
            return f"{min(self.known):g} to {max(self.known):g}{gaps}"
        shown = [shown_value(text) for text in self.choices]
        return ", ".join(shown) if len(shown) <= 4 else f"{', '.join(shown[:3])} and {len(shown) - 3} more"


def fit(history: History) -> Fit:
    """Rank the parameters of a history, and propose the next run; the same history gives the same answer.

    Raises:
        ConfigError: A model is to be fitted, and Optuna or scikit-learn is not installed.
    """
    runs = [run for run in history.runs if math.isfinite(run.mean)]
    missing = max(0, FEWEST - len(runs))
    dimensions = [] if missing else list(_dimensions(runs))
    scores = [run.mean for run in runs]
    notes = _notes(runs, dimensions) if not missing else []
    parameters: list[Parameter] = []
    proposed: dict[str, str | None] = {}
    if dimensions and min(scores) < max(scores):
        optuna = _optuna()
        with _quiet(optuna):
            parameters = _ranked(optuna, dimensions, scores)
            proposed = _proposed(optuna, dimensions, scores)
        notes += _judged(parameters, dimensions, proposed, scores.index(max(scores)))
    return Fit(
        agent=history.kind.agent,
        runs=runs,
        unfinished=history.unfinished,
        missing=missing,
        best=max(runs, key=lambda run: run.mean, default=None),
        parameters=parameters,
        next=proposed,
        notes=notes,
    )


def shown_value(text: str | None) -> str:
    """Format a parameter's value for people; a digest is cut to its first characters."""
    if text is None:
        return _MISSING
    return text.strip('"') if _is_json(text) else f"{text[:14]}…"


def _optuna() -> Any:  # untyped here, so that type checkers need no optional package
    try:
        import_module("sklearn")
        return import_module("optuna")
    except ImportError as error:
        raise ConfigError(
            f"fitting a model to runs needs Optuna and scikit-learn ({error}); run: pip install 'agl-inspect[suggest]'"
        ) from error


@contextmanager
def _quiet(optuna: Any) -> Generator[None]:
    """Silence Optuna's logs and warnings, and restore its log level afterwards."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _dimensions(runs: Sequence[PastRun]) -> Iterator[_Dimension]:
    """Yield a dimension for each parameter in which the runs differ."""
    for name in sorted({name for run in runs for name in run.values}):
        found = [run.values.get(name) for run in runs]
        texts = [None if text == _NULL else text for text in found]
        if len(set(texts)) == 1:
            continue
        numbers = [None if text is None else _number(text) for text in texts]
        is_number = all(number is not None for number, text in zip(numbers, texts, strict=True) if text is not None)
        if not is_number or len(set(numbers) - {None}) < 2:
            yield _Dimension(name=name, kind="choice", texts=texts, numbers=())
        else:
            is_int = all(isinstance(number, int) for number in numbers if number is not None)
            yield _Dimension(name=name, kind="int" if is_int else "float", texts=texts, numbers=numbers)


def _number(text: str) -> float | None:
    """Return the number in a JSON text; ``None`` for other values, and for numbers of at least 2**53."""
    try:
        value = msgspec.json.decode(text, type=int | float)
    except msgspec.DecodeError:
        return None
    return value if abs(value) < 2**53 else None


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def _ranked(optuna: Any, dimensions: Sequence[_Dimension], scores: Sequence[float]) -> list[Parameter]:
    """Return the parameters with their importances, significant ones first, then by importance."""
    numpy: Any = import_module("numpy")
    random = numpy.random.default_rng(len(scores))
    every = range(len(scores))
    shares = [_shares(optuna, dimensions, scores, every, seed=seed) for seed in range(_SEEDS)]
    resampled = [
        _shares(optuna, dimensions, scores, [int(place) for place in random.integers(0, len(scores), len(scores))])
        for _ in range(_RESAMPLES)
    ]
    chances = _corrected([_chance(numpy, dimension, scores) for dimension in dimensions])
    found: list[Parameter] = []
    for dimension, chance in zip(dimensions, chances, strict=True):
        importance = numpy.mean([share[dimension.name] for share in shares if share])
        low, high = numpy.quantile([share[dimension.name] for share in resampled if share], [0.05, 0.95])
        found.append(
            Parameter(
                name=dimension.name,
                tried=dimension.words,
                importance=round(float(importance), 4),
                low=round(float(min(low, importance)), 4),
                high=round(float(max(high, importance)), 4),
                chance=round(chance, 4),
                is_clear=chance <= SIGNIFICANT,
            )
        )
    return sorted(found, key=lambda each: (not each.is_clear, -each.importance, each.name))


def _shares(
    optuna: Any, dimensions: Sequence[_Dimension], scores: Sequence[float], places: Sequence[int], *, seed: int = 0
) -> dict[str, float]:
    """Return each parameter's importance over the runs with the indices ``places``; empty if no forest can be grown."""
    if len({scores[place] for place in places}) == 1:
        return {}
    study = optuna.create_study(direction="maximize")
    space = _space(optuna, dimensions)
    for place in places:
        values = {name: value for each in dimensions for name, value in _values(each, place, fills=True).items()}
        study.add_trial(optuna.trial.create_trial(params=values, distributions=space, value=scores[place]))
    evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=_TREES, seed=seed)
    try:
        found: Mapping[str, Any] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except RuntimeError:  # no tree of the forest splits
        return {}
    return {each.name: float(found.get(each.name, 0.0) + found.get(each.flag, 0.0)) for each in dimensions}


def _space(optuna: Any, dimensions: Sequence[_Dimension]) -> dict[str, Any]:
    """Return Optuna's search space: one distribution per parameter, within the values that runs have tried."""
    kinds = optuna.distributions
    space: dict[str, Any] = {}
    for each in dimensions:
        if each.kind == "choice":
            space[each.name] = kinds.CategoricalDistribution(each.choices)
            continue
        kind = kinds.IntDistribution if each.kind == "int" else kinds.FloatDistribution
        space[each.name] = kind(min(each.known), max(each.known), log=each.is_log)
        if each.has_gaps:
            space[each.flag] = kinds.CategoricalDistribution([False, True])
    return space


def _values(dimension: _Dimension, place: int, *, fills: bool = False) -> dict[str, Any]:
    """Return one run's value of a parameter for Optuna; with ``fills``, a missing number becomes the median."""
    text = dimension.texts[place]
    if dimension.kind == "choice":
        return {dimension.name: text or _MISSING}
    number = dimension.numbers[place]
    flag = {dimension.flag: number is not None} if dimension.has_gaps else {}
    if number is None:
        middle = sorted(dimension.known)[len(dimension.known) // 2]
        return {dimension.name: middle, **flag} if fills else flag
    return {dimension.name: number, **flag}


def _chance(numpy: Any, dimension: _Dimension, scores: Sequence[float]) -> float:
    """Return the p-value of a parameter: how often shuffled rewards fit the parameter at least as well."""
    columns = numpy.array(_columns(numpy, dimension), dtype=float).T
    columns = columns - columns.mean(axis=0)
    basis, sizes, _ = numpy.linalg.svd(columns, full_matrices=False)
    basis = basis[:, sizes > 1e-9 * max(1.0, sizes.max())]
    values = numpy.array(scores) - numpy.mean(scores)
    random = numpy.random.default_rng(len(scores))
    dealt = random.permuted(numpy.tile(values, (_PERMUTATIONS, 1)), axis=1)
    own = float(((basis.T @ values) ** 2).sum())
    by_chance = ((dealt @ basis) ** 2).sum(axis=1)
    return float((1 + (by_chance >= own * (1 - 1e-9)).sum()) / (1 + _PERMUTATIONS))


def _columns(numpy: Any, dimension: _Dimension) -> list[list[float]]:
    """Return the columns of a parameter for a regression.

    A choice has one column per value. A number has its rank, the square of the rank, and whether it is set.
    """
    if dimension.kind == "choice":
        texts = [text or _MISSING for text in dimension.texts]
        return [[float(text == choice) for text in texts] for choice in dimension.choices]
    order = sorted(set(dimension.known))
    middle = (len(order) - 1) / 2
    ranks = [0.0 if number is None else order.index(number) - middle for number in dimension.numbers]
    return [ranks, [rank**2 for rank in ranks], [float(number is not None) for number in dimension.numbers]]


def _corrected(chances: Sequence[float]) -> list[float]:
    """Return p-values corrected after Holm for the number of tests, in the same order."""
    corrected = [0.0] * len(chances)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(chances)), key=lambda place: chances[place])):
        highest = max(highest, min(1.0, (len(chances) - rank) * chances[place]))
        corrected[place] = highest
    return corrected


def _proposed(optuna: Any, dimensions: Sequence[_Dimension], scores: Sequence[float]) -> dict[str, str | None]:
    """Propose values that no run has tried; empty if none are found, or if only digests of values are stored."""
    chosen = [each for each in dimensions if each.is_known]
    if not chosen:
        return {}
    sampler = optuna.samplers.TPESampler(n_startup_trials=0, seed=len(scores))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    space = _space(optuna, chosen)
    for place, score in enumerate(scores):
        values = {name: value for each in chosen for name, value in _values(each, place).items()}
        own = {name: space[name] for name in values}
        study.add_trial(optuna.trial.create_trial(params=values, distributions=own, value=score))
    tried = [{each.name: each.texts[place] for each in chosen} for place in range(len(scores))]
    for _ in range(_ASKED):
        asked: Mapping[str, Any] = study.ask(space).params
        found = {each.name: _text(each, asked) for each in chosen}
        if found not in tried:
            return found
    return {}


def _text(dimension: _Dimension, asked: Mapping[str, Any]) -> str | None:
    """Return the proposed value of a parameter as JSON, floats with three digits; ``None`` to leave it out."""
    value = asked[dimension.name]
    if dimension.kind == "choice":
        return None if value == _MISSING and None in dimension.texts else value
    if dimension.has_gaps and not asked[dimension.flag]:
        return None
    if dimension.kind == "int":
        return str(value)
    rounded = float(f"{value:.3g}")
    return repr(min(max(rounded, min(dimension.known)), max(dimension.known)))


def _notes(runs: Sequence[PastRun], dimensions: Sequence[_Dimension]) -> list[str]:
    if not dimensions:
        return ["the runs differ in no parameter, so there is nothing to rank: change one with --set"]
    if len({run.mean for run in runs}) == 1:
        return ["all runs reached the same reward, so there is nothing to rank"]
    return []


def _judged(
    parameters: Sequence[Parameter],
    dimensions: Sequence[_Dimension],
    proposed: Mapping[str, str | None],
    best: int,
) -> list[str]:
    """Return remarks about how far the ranking can be trusted; ``best`` is the index of the best run."""
    notes: list[str] = []
    if not any(each.is_clear for each in parameters):
        notes.append(
            "no parameter stands out from chance: the importances are noise, and the proposal explores; run more, or "
            "repeat these runs with other seeds"
        )
    clear = {each.name for each in parameters if each.is_clear}
    notes += [_at_the_edge(each, best) for each in dimensions if each.name in clear and each.is_edge(best)]
    hidden = [each.name for each in dimensions if not each.is_known]
    if hidden:
        notes.append(f"{', '.join(hidden)}: only digests of the values are stored, so no value is proposed")
    if not proposed and len(hidden) < len(dimensions):
        notes.append("every combination of the values was tried, so no next run is proposed")
    return notes


def _at_the_edge(dimension: _Dimension, place: int) -> str:
    which = "largest" if dimension.numbers[place] == max(dimension.known) else "smallest"
    further = "larger" if which == "largest" else "smaller"
    return (
        f"the best run has the {which} {dimension.name} that was tried; a {further} one may be better still, and is "
        "not proposed, because nothing is known about it"
    )


class DatedFit(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A fit, and the time at which it was made, in Unix seconds."""

    time: float
    fit: Fit


async def add_fit(store: Store, record: ExperimentRecord, found: Fit) -> None:
    """Save a fit under the run for which it was requested; an earlier fit of that run is replaced."""
    await _shelf(record).add(store, {"": DatedFit(time=time.time(), fit=found)})


async def read_fits(store: Store, records: Sequence[ExperimentRecord]) -> list[DatedFit]:
    """Return the fits that are saved under ``records``, newest first; of fits with a run in common, only the newest."""
    found = [kept for record in records if (kept := await _shelf(record).get(store))]
    shown: list[DatedFit] = []
    for kept in sorted(found, key=lambda each: -each.time):
        runs = _names(kept)
        if not any(runs & _names(other) for other in shown):
            shown.append(kept)
    return shown


def _shelf(record: ExperimentRecord) -> Shelf[DatedFit]:
    return Shelf(DatedFit, run_key(record.name, record.run, "fit"))


def _names(kept: DatedFit) -> set[tuple[str, int]]:
    return {(run.experiment, run.run) for run in kept.fit.runs}
