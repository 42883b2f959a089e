"""Lists, shows and compares versions of resources: text, lineage, labels, scores, rewards and trials."""

import difflib
import re
import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import replace

from agl.contracts import RolloutQuery, Store
from agl.errors import NotFoundError
from agl.hints import count_of, did_you_mean
from agl.schemas import JsonResource, PromptTemplate, Record, Resource, ResourceVersion, Rollout
from agl_inspect.records import labels
from agl_inspect.records.names import ORIGIN, PROMPT_TRIAL, ROUND, TRIAL, group_id_of
from agl_inspect.records.shelf import Shelf
from agl_inspect.records.splits import SERVED, unit_of
from agl_inspect.records.state import unsaved
from agl_inspect.records.validations import BEST
from agl_inspect.searches import Candidate, candidates_of, owner_of
from agl_inspect.statistics import Comparison, compare_tasks, interval, need_both
from agl_inspect.terminal.query import COUNTED, is_counted, pages, rewards_of
from agl_inspect.text import ends

_MANY = 1000

_ROUND = re.compile(rf".+{ROUND}\d+")

LEAST_TASKS = 9
"""The number of common validation tasks from which only these count: fewer cannot give a verdict."""


class ListedVersion(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A version in a list.

    Attributes:
        why: The decision of the prompt search that made the version, with the reason.
        origin: The algorithm and step that made the version, ``agl resources try``, or the experiment whose file it is
            from; ``""`` if unknown.
        tried: A text about the trial rollouts that ran with the version, such as ``2 rollouts of sums-dev``.
        is_saved: False for weights that were served from memory and never written.
    """

    version: ResourceVersion
    labels: list[str]
    score: str
    why: str = ""
    origin: str = ""
    tried: str = ""
    is_saved: bool = True

    @property
    def is_only_tried(self) -> bool:
        """True if the version was only tried by an algorithm or ``agl resources try``, and no label points at it."""
        return bool(self.version.metadata.get("candidate")) and not self.labels


class ShownVersion(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A version with its history.

    Attributes:
        labels: The labels that point at the version.
        ancestors: The names of the versions from which this one descends, its parent first.
        candidate: The candidate of a prompt search that became the version, ``None`` if it has another origin.
        chosen: The reason why the resource's bare name means this version, such as ``live in sums``; ``""`` if the
            version was named.
        is_saved: False for weights that were served from memory and never written.
    """

    version: ResourceVersion
    labels: list[str]
    ancestors: list[str]
    candidate: Candidate | None = None
    chosen: str = ""
    is_saved: bool = True


class Arm(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A version in a comparison, with the rewards of finished rollouts that ran with it.

    Attributes:
        units: The rewards by what is independent: the user, else the conversation, else a digest of the task.
        ended: The time at which the first rollout of each unit ended, in Unix seconds.
        validated: The rewards of the version's validation rollouts, by a digest of the task.
    """

    version: str
    units: dict[str, list[float]]
    ended: dict[str, float] = {}
    validated: dict[str, list[float]] = {}

    @property
    def rewards(self) -> list[float]:
        """All rewards, unit by unit."""
        return [reward for rewards in self.units.values() for reward in rewards]

    @property
    def summary(self) -> str:
        """The mean reward of the version with its 95 % interval."""
        if not self.rewards:
            return "no finished rollout with a reward ran with it"
        low, high = interval(self.rewards)
        return f"mean {fmean(self.rewards):.4f}{ends(low, high, '.4f')} over {count_of(len(self.rewards), 'rollout')}"


async def list_versions(
    store: Store, name: str | None, *, has_candidates: bool, has_trials: bool = True
) -> list[ListedVersion]:
    """List all versions of ``name`` in order of publication; without a name, the :func:`current` one of each resource.

    Versions that were only tried are left out, unless ``has_candidates`` is true or a label points at them. With
    ``has_trials``, the trials of a named resource are counted, which reads all their rollouts. Raises
    :class:`NotFoundError` if the named resource has no version.
    """
    versions = await store.resources(name)
    if name is not None and not versions:
        raise NotFoundError("resource", name, await _known(store, name))
    names = dict.fromkeys(v.name for v in versions)
    pointing = {n: await labels.labels_of(store, n) for n in names}
    if name is None:
        versions = [(await current(store, each))[0] for each in names]
    kept = [v for v in versions if has_candidates or not _is_only_tried(v, pointing[v.name])]
    scores = {
        (score.name, score.version): f"{score.mean:.3f}{ends(score.low, score.high)} n={score.n} ({score.how})"
        for n in names
        for score in await store.scores(n)
    }
    tried = [] if name is None else await candidates_of(store, name)
    trials = await _trials(store, name, kept) if name is not None and has_trials else {}
    lost = await unsaved(store, kept)
    found: list[ListedVersion] = []
    for v in kept:
        score = scores.get((v.name, v.version), "")
        owner = owner_of(v, tried)
        why = f"{owner.decision}: {owner.why}".removesuffix(": ") if owner and owner.parents else ""
        found.append(
            ListedVersion(
                version=v,
                labels=_pointing(pointing[v.name], v.version),
                score=score,
                why=why,
                origin=origin_of(v),
                tried=trials.get(v.version, ""),
                is_saved=(v.name, v.version) not in lost,
            )
        )
    return found


def origin_of(version: ResourceVersion) -> str:
    """Return a version's origin: an algorithm with its step, ``agl resources try``, or the experiment of its file.

    The origin is ``""`` if it is unknown.
    """
    if version.algorithm:
        return f"{version.algorithm} step {version.step}"
    if version.metadata.get("origin") == ORIGIN:
        return ORIGIN
    return f"the experiment {version.metadata['experiment']}" if is_of_file(version) else ""


def is_of_file(version: ResourceVersion) -> bool:
    """Return true if the version was taken from an experiment's file."""
    is_made = bool(version.algorithm) or version.metadata.get("origin") == ORIGIN
    return bool(version.metadata.get("experiment")) and not is_made


def _is_only_tried(version: ResourceVersion, names: dict[str, str]) -> bool:
    return bool(version.metadata.get("candidate")) and version.version not in names.values()


async def current(store: Store, name: str) -> tuple[ResourceVersion, str]:
    """Return the version that a resource's bare name means, and the reason as text.

    This is the first that exists of:

    1. the newest version, if a person published it, or promoted it after agl resources try;
    2. the version that gateways serve to the largest share of the traffic, see :class:`ServedSplit`;
    3. the newest version that is live in an experiment, where trials, replays and the rounds of ``agl learn`` do not
       count: nobody has accepted their versions;
    4. the version with the label ``best``;
    5. the newest version.

    Weights that were never saved and versions that were only tried count only if there are no others.

    Raises:
        NotFoundError: The resource has no version.
    """
    versions = await store.resources(name)
    if not versions:
        raise NotFoundError("resource", name, await _known(store, name))
    names, lost = await labels.labels_of(store, name), await unsaved(store, versions)
    saved = [v for v in versions if (name, v.version) not in lost]
    published = [v for v in saved if not _is_only_tried(v, names)] or saved or versions
    newest, best = published[-1], [v for v in published if v.version == names.get(BEST)]
    if origin_of(newest) in ("", ORIGIN):
        return newest, "the newest, published by hand"
    in_use = [await _served(store, name), await _live(store, name)]
    for reasons in in_use:
        for version in reversed(published):
            if version.version in reasons:
                return version, reasons[version.version]
    return (best[0], "labelled best") if best else (newest, "the newest")


async def _served(store: Store, name: str) -> dict[str, str]:
    """Return the version with the largest share of the served traffic, if there is one, with this as the reason."""
    split = await SERVED.get(store)
    if split is None:
        return {}
    label = max(split.shares, key=split.shares.__getitem__)
    version = split.versions.get(label, {}).get(name)
    return {version: f"served as {label}"} if version else {}


async def _live(store: Store, name: str) -> dict[str, str]:
    """Return the versions that are live in the experiments that people began, each with this as the reason."""
    # Records of trials and replays name no agent.
    began = [each for each in await store.experiments() if each.agent and not _ROUND.fullmatch(each.name)]
    return {record.live[name]: f"live in {record.name}" for record in began if name in record.live}


async def _trials(store: Store, name: str, versions: Sequence[ResourceVersion]) -> dict[str, str]:
    """Describe for each version how many rollouts of ``agl dev`` and ``agl resources try`` ran with it."""
    experiments = {record.name for record in await store.experiments()}
    named = {str(v.metadata["experiment"]) for v in versions if "experiment" in v.metadata}
    experiments |= {each.removesuffix(TRIAL).removesuffix(PROMPT_TRIAL) for each in named}
    counts: Counter[tuple[str, str]] = Counter()
    for trial in sorted(f"{experiment}{suffix}" for experiment in experiments for suffix in (TRIAL, PROMPT_TRIAL)):
        async for page in pages(store, RolloutQuery(experiment=trial, limit=_MANY)):
            counts.update((rollout.resources[name], trial) for rollout in page if name in rollout.resources)
    found: dict[str, list[str]] = {}
    for (version, trial), count in counts.items():
        found.setdefault(version, []).append(f"{count_of(count, 'rollout')} of {trial}")
    return {version: ", ".join(words) for version, words in found.items()}


async def shown(store: Store, name: str, which: str | None) -> ShownVersion:
    """Return the version that ``which`` names by version, label or candidate id; by default the :func:`current` one.

    Raises :class:`NotFoundError` if the resource or the version does not exist.
    """
    names = await labels.labels_of(store, name)
    versions = {v.version: v for v in await store.resources(name)}
    if not versions:
        raise NotFoundError("resource", name, await _known(store, name))
    chosen = ""
    if which is None:
        default, chosen = await current(store, name)
        which = default.version
    wanted = names.get(which, which)
    tried = await candidates_of(store, name)
    if wanted not in versions:
        wanted = next((c.versions.get(name, wanted) for c in reversed(tried) if c.id == wanted), wanted)
    if wanted not in versions:
        labelled = f" and the labels {', '.join(sorted(names))}" if names else ""
        hint = f"the resource has {count_of(len(versions), 'version')}{labelled}; see agl resources list {name}"
        hint = did_you_mean(wanted, [*names, *versions], otherwise=hint)
        raise NotFoundError("version", f"{name}@{wanted}", hint)
    version = versions[wanted]
    ancestors: list[str] = []
    while version.parent in versions and version.parent not in ancestors and len(ancestors) < _MANY:
        version = versions[version.parent]
        ancestors.append(version.version)
    return ShownVersion(
        version=versions[wanted],
        labels=_pointing(names, wanted),
        ancestors=ancestors,
        candidate=owner_of(versions[wanted], tried),
        chosen=chosen,
        is_saved=not await unsaved(store, [versions[wanted]]),
    )


async def arms(store: Store, name: str, versions: Sequence[str], *, experiment: str | None) -> list[Arm]:
    """Collect, for each version, the rewards of finished rollouts and conversations, in the order in which they ended.

    A failure counts as 0.
    """
    found: list[tuple[Rollout, float]] = []
    async for page in pages(store, RolloutQuery(experiment=experiment, status=COUNTED, limit=_MANY)):
        ours = [r.rollout_id for r in page if is_counted(r) and r.resources.get(name, "") in versions]
        scored = [each async for each in rewards_of(store, ours)]
        found += [(r, reward or 0.0) for r, reward in scored if reward is not None or r.status == "failed"]
    found.sort(key=lambda each: _end(each[0]))
    return [_arm(version, [each for each in found if each[0].resources[name] == version]) for version in versions]


def _end(rollout: Rollout) -> float:
    return rollout.finished_at or rollout.started_at or 0.0  # a conversation may not have ended


def _arm(version: str, found: Sequence[tuple[Rollout, float]]) -> Arm:
    units: dict[str, list[float]] = {}
    ended: dict[str, float] = {}
    validated: dict[str, list[float]] = {}
    for rollout, reward in found:
        unit = unit_of(rollout)
        unit = group_id_of(rollout.task) if unit == rollout.rollout_id else unit
        units.setdefault(unit, []).append(reward)
        ended.setdefault(unit, _end(rollout))
        if rollout.mode == "val":
            validated.setdefault(group_id_of(rollout.task), []).append(reward)
    return Arm(version=version, units=units, ended=ended, validated=validated)


def resource_text(resource: Resource) -> str:
    """Return the text of a prompt; for any other resource, its indented JSON."""
    if isinstance(resource, PromptTemplate):
        return resource.template
    value: Any = resource.value if isinstance(resource, JsonResource) else resource
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def diff_versions(old: ResourceVersion, new: ResourceVersion) -> list[str]:
    """Return a unified diff of two versions; empty if they are equal."""
    texts = resource_text(old.resource), resource_text(new.resource)
    before, after = (text.splitlines() for text in texts)
    lines = list(difflib.unified_diff(before, after, old.version, new.version, lineterm="", n=3))
    if lines or old.resource == new.resource:
        return lines
    kinds = f"{_kind(old.resource)} and {_kind(new.resource)}"
    unseen = f"their kind alone, {kinds}" if texts[0] == texts[1] else "line breaks alone, which no line shows"
    return [f"--- {old.version}", f"+++ {new.version}", f"they differ in {unseen}"]


def _kind(resource: Resource) -> str:
    name = type(resource).__name__
    return f"{name} ({resource.engine})" if isinstance(resource, PromptTemplate) else name


def _pointing(names: dict[str, str], version: str) -> list[str]:
    return sorted(label for label, pointed in names.items() if pointed == version)


async def _known(store: Store, name: str) -> str:
    names = sorted(version.name for version in await store.resources())
    there = f"there are {', '.join(names)}" if names else "no resource is published in this store"
    return did_you_mean(name, names, otherwise=there)


def compare_arms(
    old: Arm, new: Arm, *, error: float = 0.025, gain: float = 0.0, span: float | None = None
) -> tuple[Comparison, tuple[Arm, Arm], str]:
    """Compare two versions by their rewards; ``error`` is that of each direction.

    With at least `LEAST_TASKS` validation tasks in common, only these tasks count. Otherwise all rollouts count: a user
    or a task enters once, by its mean, and is compared with itself if both versions have it. Each other one is paired
    with the newest one of the other version that has no partner yet.

    Returns:
        The comparison, both arms reduced to the rewards that count in it, and a note on the pairing.

    Raises:
        ConfigError: A version has no rewards.
    """
    need_both(old.rewards, new.rewards)
    tasks = [task for task in old.validated if task in new.validated]
    if is_by_task := len(tasks) >= LEAST_TASKS:
        samples = [{task: arm.validated[task] for task in tasks} for arm in (old, new)]
    else:
        pairs = _pairs(old, new)
        samples = [
            {str(n): arm.units[pair[side]] for n, pair in enumerate(pairs)} for side, arm in enumerate((old, new))
        ]
    found = compare_tasks(*samples, error=error, gain=gain, span=span)
    counted = [Arm(version=arm.version, units=sample) for arm, sample in zip((old, new), samples, strict=True)]
    note = "" if is_by_task else f"not paired by task: {count_of(len(tasks), 'validation task')} in both"
    left = [len(arm.rewards) - len(own.rewards) for arm, own in zip((old, new), counted, strict=True)]
    if any(left):
        note += f"{'; ' if note else ''}left out: {left[0]:,} and {count_of(left[1], 'rollout')}"
    return found if is_by_task else replace(found, paired_tasks=0), (counted[0], counted[1]), note


def _pairs(old: Arm, new: Arm) -> list[tuple[str, str]]:
    """Return the pairs of units in the order in which they were complete; it does not depend on the rewards."""
    arms = (old, new)
    pairs = [(unit, unit) for unit in old.units if unit in new.units]
    others = [(arm.ended[unit], side, unit) for side, arm in enumerate(arms) for unit in arm.units]
    waiting: tuple[list[str], list[str]] = ([], [])
    for _, side, unit in sorted(each for each in others if each[2] not in arms[1 - each[1]].units):
        if waiting[1 - side]:
            partner = waiting[1 - side].pop()
            pairs.append((partner, unit) if side else (unit, partner))
        else:
            waiting[side].append(unit)
    return pairs


class TrialScore(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A version in a trial, measured by itself and against the trial's baseline.

    Attributes:
        version: The version.
        mean: Mean over tasks of the version's rewards, ``None`` without rewards.
        low: Lower end of the 95 % interval of ``mean`` over tasks; ``None`` for fewer than two tasks.
        high: Upper end of the 95 % interval of ``mean`` over tasks; ``None`` for fewer than two tasks.
        tasks: Number of tasks on which the version has a reward.
        comparison: The version against the baseline, paired by task; ``None`` for the baseline itself, and if no task
            has rewards of both.
    """

    version: str
    mean: float | None
    low: float | None
    high: float | None
    tasks: int
    comparison: Comparison | None = None


class Trial(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A finished trial of several versions.

    Attributes:
        time: End of the trial in Unix seconds.
        experiment: The experiment under which the trial's rollouts are recorded.
        source: A description of the tasks, such as ``20 of 40 validation tasks``.
        scores: The versions; the first is the baseline.
    """

    time: float
    experiment: str
    resource: str
    source: str
    scores: list[TrialScore]


async def add_trial(store: Store, *, experiment: str, resource: str, source: str, scores: Sequence[TrialScore]) -> None:
    """Save a trial of a resource; earlier trials stay."""
    now = time.time()
    kept = Trial(time=now, experiment=experiment, resource=resource, source=source, scores=list(scores))
    await _trials_of(resource).add(store, {f"{now:017.6f}": kept})


async def read_trials(store: Store, resource: str) -> list[Trial]:
    """Return the trials of a resource, newest first."""
    return sorted((await _trials_of(resource).read(store)).values(), key=lambda trial: -trial.time)


def _trials_of(resource: str) -> Shelf[Trial]:
    return Shelf(Trial, f"trial/{resource}/")
