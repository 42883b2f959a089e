"""Reads the candidates of prompt searches from algorithms' states: decisions, reasons, and costs.

Any algorithm can be such a search. Its state must have ``lineage``, a list of candidates, and ``journal``, which maps
a candidate's id to the rest of its fields.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from agl.contracts import ExperimentRecord, Store
from agl.hints import count_of
from agl.schemas import Record, ResourceVersion
from agl_inspect.text import ends

_DECISIONS = {"pool": "accepted", "proposed": "undecided", "rejected": "refused", "beaten": "beaten"}

COLUMNS = (
    "candidate",
    "from",
    "how",
    "step",
    "decision",
    "why",
    "rollouts",
    "tokens",
    "questions",
    "their tokens",
    "money",
)


class Interval(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A mean with its 95 % interval over ``n`` tasks or pairs."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def words(self) -> str:
        """The mean, the interval and the number of values, in one line."""
        return f"{self.mean:.3f}{ends(self.low, self.high)} n={self.n}"


class Check(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The outcome of one check or race of a candidate by a search.

    Attributes:
        name: The name of the check or race.
        rival: The id of the candidate to beat.
        score: The candidate's mean reward.
        rival_score: The rival's mean reward on the same tasks.
        gain: The mean difference of candidate and rival, paired by task.
        reason: The search's own explanation.
    """

    name: str
    has_passed: bool
    step: int
    rival: str = ""
    score: float | None = None
    rival_score: float | None = None
    gain: Interval | None = None
    reason: str = ""

    @property
    def words(self) -> str:
        """The outcome of the check in one line."""
        parts = [f"{'passed' if self.has_passed else 'failed'} {self.name}"]
        if self.score is not None and self.rival_score is not None:
            parts.append(f"{self.score:.3f} against {self.rival_score:.3f} of {self.rival}")
        if (gain := self.gain) is not None:
            parts.append(f"{gain.mean:+.3f}{ends(gain.low, gain.high, '+.3f')} on {count_of(gain.n, 'pair')}")
        return ": ".join([parts[0], ", ".join([*parts[1:], *([self.reason] if self.reason else [])])]).rstrip(": ")


class Spending(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The cost of rollouts, or of ``calls`` of the optimiser's model, in tokens and money."""

    rollouts: int = 0
    calls: int = 0
    tokens: int = 0
    money: float = 0.0


class Candidate(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A candidate of a prompt search, as the search records it.

    Attributes:
        evidence: Ids of the rollouts that the search's critic saw before it proposed the candidate.
        published: Versions that made the candidate's text live.
    """

    id: str
    experiment: str = ""
    run: int = 1
    algorithm: str = ""
    parents: tuple[str, ...] = ()
    operator: str = "seed"
    step: int = 0
    status: str = "proposed"
    reason: str = ""
    critique: str = ""
    texts: dict[str, str] = {}
    versions: dict[str, str] = {}
    published: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    scores: dict[str, Interval] = {}
    agent: Spending = Spending()
    optimizer: Spending = Spending()

    @property
    def decision(self) -> str:
        """The decision about the candidate, such as ``accepted``."""
        return "first prompt" if not self.parents else _DECISIONS.get(self.status, self.status)

    @property
    def why(self) -> str:
        """The reason for the decision: the search's explanation, or else the outcome of the last check."""
        return self.reason or (self.checks[-1].words if self.checks else "")

    @property
    def money(self) -> float:
        """The money spent on the candidate's rollouts and on the optimiser's model; 0 without prices."""
        return self.agent.money + self.optimizer.money

    @property
    def row(self) -> tuple[str, ...]:
        """The candidate's row in a table with the columns ``COLUMNS``."""
        names = (self.id, ", ".join(self.parents) or "-", self.operator, str(self.step), self.decision, self.why or "-")
        counts = (self.agent.rollouts, self.agent.tokens, self.optimizer.calls, self.optimizer.tokens)
        return (*names, *map(str, counts), f"{self.money:.4g}")

    def lines(self) -> Iterator[str]:
        """Yield all facts about the candidate, one per line."""
        made = f"{self.operator} of {', '.join(self.parents)}, step {self.step}" if self.parents else "the first prompt"
        yield f"candidate {self.id} ({made}): {f'{self.decision}: {self.why}'.rstrip(': ')}"
        if self.evidence:
            yield f"from the rollouts: {', '.join(self.evidence)}"
        if self.critique:
            yield f"critique: {textwrap.shorten(self.critique, 1200, placeholder='…')}"
        yield from (f"step {check.step}: {check.words}" for check in self.checks)
        yield from (f"score on {how}: {score.words}" for how, score in self.scores.items())
        yield (
            f"cost: {count_of(self.agent.rollouts, 'rollout')} of the agent with {self.agent.tokens} tokens, "
            f"{count_of(self.optimizer.calls, 'question')} to the optimiser's model with {self.optimizer.tokens} tokens"
            f"{f', {self.money:.4g} in money' if self.money else ''}"
        )


class Search(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A prompt search: one algorithm in one run of an experiment.

    Attributes:
        candidates: All candidates in order of proposal, whichever resource they changed.
        winner: Id of the last candidate that was proven better than the first one; until then, of the first one.
        spent: The whole cost, including answers that gave no candidate and the trainer's validations.
        stop_reason: The reason why the search ended; ``""`` while it runs.
    """

    experiment: str
    run: int
    algorithm: str
    candidates: list[Candidate]
    winner: str = ""
    spent: Spending = Spending()
    stop_reason: str = ""

    def changed(self, name: str) -> list[Candidate]:
        """Return the first candidate, and all candidates that changed the resource's text from their first parent's."""
        known = {candidate.id: candidate for candidate in self.candidates}
        parents = [known.get((*candidate.parents, "")[0]) for candidate in self.candidates]
        pairs = zip(self.candidates, parents, strict=True)
        return [c for c, parent in pairs if parent is None or c.texts[name] != parent.texts[name]]


async def searches_of(store: Store, name: str) -> list[Search]:
    """Return the searches that tuned a resource, in order of experiment and run."""
    versions = await store.resources(name)
    found = [search for record in await store.experiments() for search in await searches_in(store, record)]
    return [
        msgspec.structs.replace(search, candidates=[_published(c, versions) for c in search.candidates])
        for search in sorted(found, key=lambda search: (search.experiment, search.run))
        if any(name in candidate.texts for candidate in search.candidates)
    ]


async def candidates_of(store: Store, name: str) -> list[Candidate]:
    """Return the candidates of all searches that changed the text of a resource, in order of search and proposal."""
    return [candidate for search in await searches_of(store, name) for candidate in search.changed(name)]


def owner_of(version: ResourceVersion, candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate that became this version; ``None`` if the version is not from a search."""
    for candidate in candidates:
        if version.version in (candidate.versions.get(version.name), *candidate.published):
            return candidate
    return None


class _Saved(Record, frozen=True, kw_only=True):
    """The part of an algorithm's saved state that this module reads."""

    stop_reason: str = ""
    state: dict[str, msgspec.Raw] = {}


class _Progress(Record, frozen=True, kw_only=True):
    """The part of a search's progress that this module reads."""

    winner: str = ""


async def searches_in(store: Store, experiment: ExperimentRecord) -> list[Search]:
    """Return the searches in all runs of an experiment; ``published`` of their candidates is empty."""
    found: list[Search] = []
    for key, data in (await store.load_state(f"experiment/{experiment.name}/")).items():
        run, _, algorithm = key.removeprefix(f"experiment/{experiment.name}/").partition("/algorithm/")
        if not run.isdigit() or not algorithm:  # not the state of an algorithm
            continue
        saved = msgspec.json.decode(data, type=_Saved)
        if {"lineage", "journal"} <= saved.state.keys():
            search = Search(
                experiment=experiment.name,
                run=int(run),
                algorithm=algorithm,
                candidates=[],
                winner=msgspec.json.decode(saved.state.get("progress", b"{}"), type=_Progress).winner,
                spent=msgspec.json.decode(saved.state.get("spent", b"{}"), type=Spending),
                stop_reason=saved.stop_reason,
            )
            found.append(msgspec.structs.replace(search, candidates=_candidates(saved.state, search)))
    return found


def _candidates(state: Mapping[str, msgspec.Raw], search: Search) -> list[Candidate]:
    """Decode the candidates in a state: each row of the lineage, joined with its entry in the journal."""
    place = {"experiment": search.experiment, "run": search.run, "algorithm": search.algorithm}
    journal = msgspec.json.decode(state["journal"], type=dict[str, dict[str, msgspec.Raw]])
    rows = msgspec.json.decode(state["lineage"], type=list[dict[str, msgspec.Raw]])
    joined = [{**row, **journal.get(msgspec.json.decode(row["id"], type=str), {}), **place} for row in rows]
    return msgspec.json.decode(msgspec.json.encode(joined), type=list[Candidate])


def _published(candidate: Candidate, versions: Sequence[ResourceVersion]) -> Candidate:
    prefix = f"{candidate.experiment}-{candidate.run}-{candidate.algorithm}-"
    own = [v for v in versions if v.metadata.get("candidate_id") == candidate.id and v.version.startswith(prefix)]
    live = tuple(v.version for v in own if not v.metadata.get("candidate"))
    return msgspec.structs.replace(candidate, published=live)
