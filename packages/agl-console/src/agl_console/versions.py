"""The views of versions: all prompts, skills, tools and weights; and one resource's tree, with a diff and its labels.

A store returns all versions of a resource at once. A page shows the newest ``VERSIONS`` of them, and compares texts of
up to ``DIFFED`` characters.
"""

import math
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import Literal

from agl.contracts import ExperimentRecord, LabelMove, Store, VersionScore
from agl.errors import NotFoundError
from agl.hints import did_you_mean
from agl.schemas import LLM, PromptTemplate, Record, Resource, ResourceVersion, Weights
from agl_console.figures import Figure
from agl_console.learning import reward_figure
from agl_inspect.records.learning import LearningRecords, learners
from agl_inspect.rollouts.tree import LONGEST, Text
from agl_inspect.stores import command
from agl_inspect.versions import (
    ListedVersion,
    Trial,
    TrialScore,
    current,
    diff_versions,
    list_versions,
    read_trials,
    resource_text,
)

VERSIONS = 200
"""The most versions on a page."""

DIFFED = 100_000
"""The most characters of a text that is compared; it may have a tenth as many lines."""

COMPARED = 1000
"""The most words of two lines that are compared word by word."""

EXPLAINED, CHANGED = 20, 8
"""The most versions whose changes are in the table, and the most lines of each."""

MOVES = 100
"""The most moves of labels on a page."""

TRIALS = 3
"""The most trials of a version on a page."""

DEEPEST = 12
"""The most levels of indentation, one per branch; deeper rows are indented as far as this level."""


class NoFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The page has no parameters."""


class VersionsFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page.

    Attributes:
        version: The version or label to show; by default the one that the resource's name means.
        against: The version or label to compare it with; by default its parent.
        tried: ``yes`` to include versions that an algorithm or ``agl resources try`` only tried.
        before: The oldest version on the previous page.
    """

    version: str = ""
    against: str = ""
    tried: Literal["", "yes"] = ""
    before: str = ""


class ResourceRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A resource, with the version that its name means and the version with the highest score."""

    name: str
    kind: str
    version: str
    origin: str
    created_at: float
    labels: dict[str, str]
    best: VersionScore | None


class ResourcesView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """All resources in the order of their names."""

    resources: list[ResourceRow]


class TriedScore(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A trial's score of a version, paired by task with the trial's first version.

    Attributes:
        source: A description of the tasks.
        against: The trial's first version; ``""`` if this is the first version itself.
    """

    time: float
    source: str
    against: str
    score: TrialScore


class VersionRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A version in the tree.

    Attributes:
        depth: The number of branches between this version and the line that leads to the newest version.
        origin: The algorithm and step that made the version, or the experiment that began with it; ``""`` for a person.
        experiment: The experiment that published the version; ``""`` if unknown.
        score: The measured score; ``None`` if the version was never measured.
        trials: The newest trials' scores of the version, newest first.
        claimed: The score that an algorithm stored with the version, as text.
        why: The decision of the search that made the version.
        live: Experiments in which the version is live.
        stage: The stage that a learner's candidate with this version has reached; ``""`` for other versions.
        is_tried: True if an algorithm or ``agl resources try`` only tried the version.
        gain: The score less that of the parent; ``None`` unless both were measured.
        changed: The lines that differ from the parent's text, for the newest measured versions.
    """

    version: str
    parent: str
    depth: int
    origin: str
    experiment: str
    created_at: float
    labels: list[str]
    score: VersionScore | None
    trials: list[TriedScore]
    claimed: str
    why: str
    live: list[str]
    stage: str
    is_tried: bool
    gain: "Gain | None"
    changed: list["DiffLine"]


class Gain(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The difference of two scores with its 95 % interval, as of independent means (Newcombe, 1998, method 10)."""

    difference: float
    low: float
    high: float


def gain_of(score: VersionScore | None, before: VersionScore | None) -> Gain | None:
    """Return how much higher a score is than that of the version before; ``None`` unless both were measured."""
    if score is None or before is None:
        return None
    apart = score.mean - before.mean
    return Gain(
        difference=apart,
        low=apart - math.hypot(score.mean - score.low, before.high - before.mean),
        high=apart + math.hypot(score.high - score.mean, before.mean - before.low),
    )


class DiffLine(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A line of a unified diff; ``kind`` is ``added``, ``removed``, ``place`` or ``same``."""

    kind: str
    parts: list["DiffPart"]


class DiffPart(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A part of a line; ``is_changed`` is true for words that the line's counterpart lacks."""

    text: str
    is_changed: bool = False


class VersionsView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The versions of one resource, with one of them shown in full.

    Attributes:
        kind: ``prompt``, ``weights``, ``model`` or ``data``.
        versions: The newest versions as a tree, each branch below the version at which it begins.
        total: The number of versions that the filter selects.
        shown: The version that is shown.
        text: The text of that version.
        curve: The rewards of the run that made the shown weights; ``None`` for other kinds, or without rewards.
        against: The version it is compared with; ``""`` for none.
        diff: The difference; empty if the texts are equal.
        is_too_long: True if the texts are too long to compare.
        trial: The command that compares the version with the live one, or with an edit of itself if it is live;
            ``FILE`` stands for the experiment's file. ``""`` for models and weights, which have no text.
        moves: Moves of labels, the newest first.
        next: The query of the page with older versions; empty on the last.
    """

    name: str
    kind: str
    filters: dict[str, str]
    versions: list[VersionRow]
    total: int
    shown: VersionRow
    text: Text
    curve: Figure | None
    against: str
    diff: list[DiffLine]
    is_too_long: bool
    trial: str
    moves: list[LabelMove]
    next: dict[str, str]


async def resources_view(store: Store, chosen: NoFilter) -> ResourcesView:
    """Read all resources, sorted by name."""
    every = sorted(await list_versions(store, None, has_candidates=True), key=lambda item: item.version.name)
    return ResourcesView(resources=[await _resource(store, item) for item in every])


async def versions_view(store: Store, name: str, chosen: VersionsFilter) -> VersionsView:
    """Read the versions of a resource.

    Raises:
        NotFoundError: The resource, version or label does not exist.
    """
    every = await list_versions(store, name, has_candidates=True, has_trials=False)
    labels = {move.label: move.version for move in await store.labels(name)}
    known = {item.version.version: item for item in every}
    published = [item for item in every if not item.is_only_tried] or every
    listed = every if chosen.tried else published
    page = _page(listed, _found(name, chosen.before, labels, known))
    shown = known[_found(name, chosen.version, labels, known) or (await current(store, name))[0].version]
    parent = shown.version.parent if shown.version.parent in known else ""
    against = _found(name, chosen.against, labels, known) or parent
    is_too_long, diff = difference(known[against].version, shown.version) if against else (False, [])
    text = resource_text(shown.version.resource)
    records = await store.experiments()
    scores = {score.version: score for score in await store.scores(name)}
    stages = await _stages(store, name)
    origins = _Origins(records, scores, trials_by_version(await read_trials(store, name)), stages, known)
    row = origins.row(shown, 0)
    makers = [each for each in records if each.name == row.experiment and isinstance(shown.version.resource, Weights)]
    filters = {field: getattr(chosen, field) for field in ("version", "against", "tried")}
    filters = {field: value for field, value in filters.items() if value}
    return VersionsView(
        name=name,
        kind=kind_of(shown.version.resource),
        filters=filters,
        versions=[origins.row(item, depth) for depth, item in in_tree(page)],
        total=len(listed),
        shown=row,
        text=Text(label=shown.version.version, text=text[:LONGEST], length=len(text)),
        curve=await reward_figure(store, makers[0], row.version) if makers else None,
        against=against,
        diff=diff,
        is_too_long=is_too_long,
        trial=_trial(shown.version, is_live=any(record.live.get(name) == shown.version.version for record in records)),
        moves=await _moves(store, name, list(labels)),
        next={**filters, "before": page[0].version.version} if page[0] is not listed[0] else {},
    )


def trials_by_version(trials: Sequence[Trial]) -> dict[str, list[TriedScore]]:
    """Return the newest trials' scores by version; ``trials`` are ordered newest first."""
    found: dict[str, list[TriedScore]] = {}
    for trial in trials:
        baseline = trial.scores[0].version
        for place, score in enumerate(trial.scores):
            rows = found.setdefault(score.version, [])
            if len(rows) < TRIALS:
                against = baseline if place else ""
                rows.append(TriedScore(time=trial.time, source=trial.source, against=against, score=score))
    return found


async def _stages(store: Store, name: str) -> dict[str, str]:
    """Return the stages of all learners' candidates by their version of a resource."""
    return {
        each.versions[name]: each.stage
        for learner in await learners(store)
        for each in (await LearningRecords(learner).candidates.read(store)).values()
        if name in each.versions
    }


def kind_of(resource: Resource) -> str:
    """Return the kind of a resource: ``prompt``, ``weights``, ``model`` or ``data``."""
    if isinstance(resource, PromptTemplate):
        return "prompt"
    if isinstance(resource, Weights):
        return "weights"
    return "model" if isinstance(resource, LLM) else "data"


def in_tree(versions: Sequence[ListedVersion]) -> list[tuple[int, ListedVersion]]:
    """Return versions with depths: children below parents, the line to the newest version last.

    On that line a version has the depth of its parent; every other child begins a branch.
    """
    known = {item.version.version for item in versions}
    children: dict[str, list[ListedVersion]] = {}
    newest: dict[str, int] = {}
    for place, item in reversed(list(enumerate(versions))):
        version = item.version
        is_below = version.parent in known and version.parent != version.version
        children.setdefault(version.parent if is_below else "", []).append(item)
        newest[version.version] = max(newest.get(version.version, 0), place)
        newest[version.parent] = max(newest.get(version.parent, 0), newest[version.version])
    waiting = [(0, item) for item in children.pop("", [])]
    ordered: list[tuple[int, ListedVersion]] = []
    while waiting:
        depth, item = waiting.pop()
        ordered.append((min(depth, DEEPEST), item))
        below = sorted(children.pop(item.version.version, []), key=lambda child: -newest[child.version.version])
        waiting += [(depth + (number > 0), child) for number, child in enumerate(below)]
    return ordered + [(0, item) for left in children.values() for item in left]  # versions whose parents form a circle


class _Origins:
    """The origins, scores and trials of a resource's versions, as far as they are known."""

    def __init__(
        self,
        experiments: Sequence[ExperimentRecord],
        scores: Mapping[str, VersionScore],
        trials: Mapping[str, list[TriedScore]],
        stages: Mapping[str, str],
        known: Mapping[str, ListedVersion],
    ) -> None:
        self._experiments = experiments
        self._scores, self._trials, self._stages, self._known = scores, trials, stages, known
        self._explained = [name for name in known if name in scores or name in trials][-EXPLAINED:]

    def row(self, item: ListedVersion, depth: int) -> VersionRow:
        """Return the row of a version."""
        version = item.version
        score = self._scores.get(version.version)
        live = [record.name for record in self._experiments if record.live.get(version.name) == version.version]
        return VersionRow(
            version=version.version,
            parent=version.parent,
            depth=depth,
            origin=item.origin,
            experiment=self._experiment(version),
            created_at=version.created_at,
            labels=item.labels,
            score=score,
            trials=self._trials.get(version.version, []),
            claimed="" if score else item.score,
            why=item.why,
            live=live,
            stage=self._stages.get(version.version, ""),
            is_tried=item.is_only_tried,
            gain=gain_of(score, self._scores.get(version.parent)),
            changed=self._changed(version),
        )

    def _changed(self, version: ResourceVersion) -> list[DiffLine]:
        parent = self._known.get(version.parent)
        if parent is None or version.version not in self._explained or isinstance(version.resource, LLM | Weights):
            return []
        _, lines = difference(parent.version, version)
        return [line for line in lines if line.kind in ("added", "removed")][:CHANGED]

    def _experiment(self, version: ResourceVersion) -> str:
        """Return the experiment that published a version, by the metadata or by the prefix of the version's name."""
        named = version.metadata.get("experiment")
        if isinstance(named, str) or not version.algorithm:
            return named if isinstance(named, str) else ""
        made = (
            record.name
            for record in self._experiments
            if re.match(f"{re.escape(record.name)}-[0-9]+-{re.escape(version.algorithm)}-", version.version)
        )
        return next(made, "")


def _trial(version: ResourceVersion, *, is_live: bool) -> str:
    """Return the command that tries a version, or an edit of it if it is live; ``""`` for models and weights."""
    if isinstance(version.resource, LLM | Weights):
        return ""
    return command(
        "resources", "try", "FILE", version.name, "--version", version.version, *(["--edit"] if is_live else [])
    )


async def _resource(store: Store, item: ListedVersion) -> ResourceRow:
    version = item.version
    scores = await store.scores(version.name)
    return ResourceRow(
        name=version.name,
        kind=kind_of(version.resource),
        version=version.version,
        origin=item.origin,
        created_at=version.created_at,
        labels={move.label: move.version for move in await store.labels(version.name)},
        best=max(scores, key=lambda score: score.mean, default=None),
    )


def _found(name: str, wanted: str, labels: Mapping[str, str], known: Mapping[str, ListedVersion]) -> str:
    """Return the version that ``wanted`` names, directly or by a label; ``""`` if ``wanted`` is empty."""
    version = labels.get(wanted, wanted)
    if version and version not in known:
        there = did_you_mean(wanted, [*labels, *known], otherwise=f"/versions/{name} lists all")
        raise NotFoundError("version", f"{name}@{wanted}", there)
    return version


def _page(listed: Sequence[ListedVersion], before: str) -> Sequence[ListedVersion]:
    """Return one page of versions: the newest, or those that precede the version ``before``."""
    places = [place for place, item in enumerate(listed) if item.version.version == before]
    end = places[0] if places else len(listed)
    return listed[max(0, end - VERSIONS) : end] or listed[:1]


def difference(old: ResourceVersion, new: ResourceVersion) -> tuple[bool, list[DiffLine]]:
    """Return true if two texts are too long to compare, and their difference."""
    texts = [resource_text(version.resource) for version in (old, new)]
    if any(len(text) > DIFFED or text.count("\n") > DIFFED // 10 for text in texts):
        return True, []
    return False, _by_words(diff_versions(old, new)[2:])


_KINDS = {"+": "added", "-": "removed", "@": "place"}
_WORDS = re.compile(r"\s+|\w+|\W")


def _by_words(lines: Sequence[str]) -> list[DiffLine]:
    """Mark the words that differ between removed lines and as many added lines that follow them."""
    parts = [[DiffPart(text=line)] for line in lines]
    start = 0
    for kind, run in groupby(lines, key=lambda line: line[:1]):
        end = start + len(list(run))
        size = end - start
        if kind == "-" and all(line[:1] == "+" for line in lines[end : end + size]) and len(lines) >= end + size:
            for at in range(start, end):
                parts[at], parts[at + size] = _changed(lines[at], lines[at + size])
        start = end
    return [DiffLine(kind=_KINDS.get(line[:1], "same"), parts=own) for line, own in zip(lines, parts, strict=True)]


def _changed(old: str, new: str) -> tuple[list[DiffPart], list[DiffPart]]:
    """Return the parts of two lines; lines that are long or have little in common are left whole."""
    before, after = _WORDS.findall(old[1:]), _WORDS.findall(new[1:])
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    if len(before) + len(after) > COMPARED or matcher.ratio() < 0.4:
        return [DiffPart(text=old)], [DiffPart(text=new)]
    found = [DiffPart(text="-")], [DiffPart(text="+")]
    for kind, *ends in matcher.get_opcodes():
        for side, words, (low, high) in zip(found, (before, after), (ends[:2], ends[2:]), strict=True):
            if high > low:
                side.append(DiffPart(text="".join(words[low:high]), is_changed=kind != "equal"))
    return found


async def _moves(store: Store, name: str, labels: Sequence[str]) -> list[LabelMove]:
    moves = [move for label in labels for move in await store.label_moves(name, label)]
    return sorted(moves, key=lambda move: move.moved_at, reverse=True)[:MOVES]
