"""The way of a candidate, from its proposal to its end: a state machine whose whole state is in the store.

    replay      old and new versions run on held-out conversations; ends with a proof that the new ones are better
    approval    waits for a person, if `approve` says so
    canary      a growing share of the units gets the candidate; ends at evidence of harm, or with the promotion
    watch       the candidate serves all units but a hold-back, which keeps the versions before
    suspicion   the rewards have fallen: half of the units get the versions before, until the cause is clear

Only a replay can show that a candidate is better; canary and watch guard against harm that a replay cannot see. A tick
counts the conversations that have settled, and moves the candidates. Units, state, decisions and the split that
gateways serve are saved in one transaction, so a learner that is killed continues where it was, and no gateway ever
serves half of a promotion. The labels follow the split; if a person moves a label, the split follows the person.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

from msgspec.structs import replace

from agl.contracts import Store
from agl.errors import AglError, ConfigError, StoreError
from agl_inspect.learning import (
    decision_of,
    first_unit,
    mean_pair,
    shows_harm,
)
from agl_inspect.records.labels import labels_of, move
from agl_inspect.records.learning import (
    GateRules,
    LearnerControl,
    LearnerState,
    LearningCandidate,
    LearningRecords,
    Move,
    ReplayPair,
    ServedUnit,
    Stage,
    entry_name,
)
from agl_inspect.records.splits import HOSTED, SERVED, HostedVersions, Pins, ServedSplit
from agl_learn.contracts import Conversation, Proposal, Proposer, Replayer, Traffic
from agl_learn.fall import FallDetector
from agl_learn.users import limit_per_user
from agl_learn.way import Way, doubt, harm_in, harm_words, serves, title_of
from agl_run import LearnSettings

CANDIDATE = "candidate"
HOLDBACK = "holdback"

FAILING = 0.2
"""The gain in the replay from which a canary begins at its last share: the served versions are plainly failing."""

ENOUGH = 50
"""Pairs after which a replay without a gain ends; fewer pairs say too little about a small gain."""

UNEASY = 4.0
"""Odds of harm above which a share does not grow."""

_APART = 3
"""Between two conversations of a unit that are looked at for a fall, there are those of this many other units."""

_LATELY = 20
"""The number of conversations in which units are counted: fewer than `_APART` others cannot come between."""

_BATCH = 200

_REMEMBERED, _COMPARED = 4, 10
"""Multiples of `memory`: conversations from which a round chooses its tasks, and in which users are compared."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts around a learner.

    Attributes:
        traffic: Reads served conversations.
        proposer: Runs the algorithms.
        replayer: Runs versions on recorded conversations.
        contradicting: Names the users whose feedback contradicts the others, with the reason, from conversations and
            the versions that are on trial.
        clock: Returns Unix seconds.
        say: Prints a line for a person.
    """

    traffic: Traffic
    proposer: Proposer
    replayer: Replayer
    contradicting: Callable[[Sequence[Conversation], Sequence[Mapping[str, str]]], Mapping[str, str]]
    clock: Callable[[], float]
    say: Callable[[str], None]


class Learner:
    """Moves candidates through their stages.

    Args:
        store: The store; writes must be fenced by the learner's lease.
        name: The learner's name.
        settings: The learner's settings.
        settle_s: Seconds that feedback may take, and the window in which the conversations of a unit count.
        parts: The parts around it.
        weights: The resources in ``settings.tunes`` that are weights, which a host has to serve.

    Attributes:
        state: The state as saved.
        split: The split that gateways serve.
    """

    state: LearnerState
    split: ServedSplit

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        settings: LearnSettings,
        settle_s: float,
        parts: Parts,
        weights: Sequence[str] = (),
    ) -> None:
        self._store, self._settings, self._settle_s, self._parts = store, settings, settle_s, parts
        self._weights, self._awaited = weights, ("", "")
        self.records = LearningRecords(name)
        self._ways: dict[str, Way] = {}
        self._work: asyncio.Task[None] | None = None
        self._proposals: list[Proposal] | None = None
        self._fall = FallDetector()
        self._heard: deque[str] = deque(maxlen=_LATELY)
        self._tried: list[dict[str, str]] = []
        self._unsaved: dict[str, bytes] = {}
        self._is_state_saved = True
        self._is_serving = False

    async def start(self, *, versions: Mapping[str, str]) -> None:
        """Load the state, or begin with these served versions, once a host serves their weights.

        Raises:
            ConfigError: Another learner serves the split of the store.
        """
        self.state = await self.records.state.get(self._store) or LearnerState()
        found = await SERVED.get(self._store)
        label = self._settings.label
        if found is not None and found.learner not in ("", self.records.name):
            raise ConfigError(
                f"the learner {found.learner!r} serves this store already; give each learner its own store"
            )
        known = found if found is not None and label in found.versions else None
        split = known or ServedSplit(shares={label: 1.0}, versions={label: {}})
        pins = {arm: {**versions, **own} for arm, own in split.versions.items()}
        self.split = replace(split, versions=pins)
        candidates = await self.records.candidates.read(self._store)
        self._tried = [each.versions for each in candidates.values()]
        for identity in (self.state.current, self.state.watched):
            if identity:
                way = await Way.load(self._store, self.records, candidates[identity])
                way.rated_at_pair = self.state.rated
                self._ways[identity] = way
        for way in list(self._ways.values()) if known is None else ():
            self._leave_ended_split(way)
        counted = self.state.after_value, self.state.after
        for each in reversed(await self._history()):
            if (each.started_at, each.rollout_id) <= counted:
                self._look_for_fall(each)
        await self._begin_serving()

    async def _begin_serving(self) -> None:
        """Serve the split as soon as its weights are hosted; until then gateways serve what they served before."""
        if await self._are_hosted(self._settings.label, *self.split.versions.values()):
            self._is_serving = True
            self._set_split(self.split.shares, self.split.versions, salt=self.split.salt)
        await self._save()

    def _leave_ended_split(self, way: Way) -> None:
        """End the canary or the watch of a candidate whose split a person has ended."""
        if way.stage == "canary":
            self._end(way, "withdrawn", "its split was ended by a person")
        elif way.candidate.id == self.state.watched:
            self._accept(way)

    async def tick(self) -> None:
        """Count what has settled, move the candidates, and start what is due."""
        control = await self.records.control.get(self._store) or LearnerControl()
        await self._follow_labels()
        if not self._is_serving:
            await self._begin_serving()
        if not self._is_serving:
            return
        await self._obey(control)
        await self._end_unservable()
        await self._count_settled(control)
        await self._advance(control)
        await self._follow_labels()

    @property
    def is_busy(self) -> bool:
        """Whether a round of training or a replay runs in the background."""
        return self._work is not None

    async def finish_work(self) -> None:
        """Wait until the round of training or the replay that runs in the background has ended."""
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)

    async def stop(self) -> None:
        """Stop what runs in the background; it is continued after the next start."""
        if self._work is not None:
            self._work.cancel()
            await self.finish_work()

    # Conversations become units, and units evidence.

    async def _count_settled(self, control: LearnerControl) -> None:
        now = self._parts.clock()
        while True:
            page = await self._parts.traffic.settled(
                after=self.state.after, after_value=self.state.after_value, now=now, limit=_BATCH
            )
            for conversation in page.conversations:
                self._count(conversation)
                self._close_units(conversation.started_at)
                self._judge_served(control)
            if page.is_last:
                self._close_units(now - self._settle_s)
                self._judge_served(control)
            if page.after != self.state.after:
                self._set(replace(self.state, after=page.after, after_value=page.after_value))
            await self._save()
            if page.is_last:
                return

    def _count(self, conversation: Conversation) -> None:
        rated = self.state.rated + (conversation.reward is not None)
        self._set(replace(self.state, rated=rated))
        self._look_for_fall(conversation)
        way = self._ways.get(conversation.salt)
        if way is None or way.stage == "replay" or conversation.reward is None:
            return
        unit = self._unit(conversation)
        if unit in way.counted:
            way.answers += way.is_at_share(conversation.started_at) and serves(conversation, way.candidate.versions)
        if conversation.user in self.state.excluded or unit in way.counted:
            return
        found = self.state.open.get(unit)
        if found is None or found.candidate != way.candidate.id:
            self.state.open.pop(unit, None)  # units stay in the order in which they began
            found = self._opened(unit, conversation, way.candidate)
        if found.is_new != serves(conversation, way.candidate.versions):
            return  # the unit changed its arm when the share grew, and only its first arm counts
        guards = {name: found.guards.get(name, 0.0) + value for name, value in way.guards(conversation).items()}
        added = replace(
            found,
            reward=found.reward + conversation.reward,
            guards=guards,
            rollouts=[*found.rollouts, conversation.rollout_id],
        )
        self.state.open[unit] = added
        self._set(self.state)

    def _look_for_fall(self, conversation: Conversation) -> None:
        """Notice that the rewards of the served versions have fallen."""
        served = self.split.versions[self._settings.label]
        is_excluded = conversation.user in self.state.excluded
        if conversation.reward is None or is_excluded or not serves(conversation, served):
            return
        unit = self._unit(conversation)
        others = max(0, min(_APART, len(set(self._heard)) - 1))
        if unit in islice(reversed(self._heard), others):
            return  # otherwise one of many users could raise an alarm
        self._heard.append(unit)
        self._fall.add(conversation.reward, at=conversation.started_at, kind=conversation.kind)
        if not self._fall.has_fallen:
            return
        self._set(replace(self.state, changed_at=self._fall.since))
        self._fall = FallDetector()
        self._parts.say("the rewards of the served versions have fallen")
        way = self._ways.get(self.state.watched)
        if way is not None and way.stage == "watch":
            reason = "the rewards have fallen; half of the units get the versions before"
            self._enter(way, "suspicion", share=0.5, reason=reason)

    def _unit(self, conversation: Conversation) -> str:
        return conversation.unit(self._settings.unit)

    def _opened(self, unit: str, conversation: Conversation, candidate: LearningCandidate) -> ServedUnit:
        is_new = serves(conversation, candidate.versions)
        return ServedUnit(
            unit=unit,
            candidate=candidate.id,
            kind=conversation.kind,
            is_new=is_new,
            share=conversation.share if is_new else 1 - conversation.share,
            reward=0.0,
            at=conversation.started_at,
        )

    def _close_units(self, until: float) -> None:
        """Count the units whose window has ended: a unit enters once, with the means of its window."""
        while self.state.open and next(iter(self.state.open.values())).at + self._settle_s <= until:
            found = self.state.open.pop(next(iter(self.state.open)))
            self._set(self.state)
            n = len(found.rollouts)
            means = replace(
                found, reward=found.reward / n, guards={name: total / n for name, total in found.guards.items()}
            )
            way = self._ways.get(found.candidate)
            if way is not None:
                number = way.add_unit(means)
                self._unsaved |= self.records.units(found.candidate).states({entry_name(number): means})

    # Candidates that are served

    def _judge_served(self, control: LearnerControl) -> None:
        for way in list(self._ways.values()):
            if way.stage == "canary":
                self._judge_canary(way, control)
            elif way.stage in ("watch", "suspicion"):
                self._judge_watch(way)

    def _judge_canary(self, way: Way, control: LearnerControl) -> None:
        harmful = next((name for name, gate in way.gates.items() if shows_harm(gate)), "")
        if harmful:
            self._end(way, "withdrawn", f"{title_of(harmful)}: {way.gates[harmful].words}", gate=harmful)
            return
        shares, gate = self._settings.gate.canary.share, way.gates["canary"]
        units = self._settings.gate.canary.units
        is_due = way.served_at_share() >= units or way.answers >= 2 * units  # the same few users may come again
        if control.is_paused or not is_due or gate.evidence_of_harm > UNEASY:
            return
        higher = [share for share in shares if share > way.candidate.share]
        if higher:
            self._enter(way, "canary", share=higher[0], reason=f"no harm so far: {harm_words(gate)}")
        else:
            self._promote(way)

    def _promote(self, way: Way) -> None:
        holdback, gate = self._settings.gate.holdback, way.gates["canary"]
        self._decide(way, "canary")
        self._set(replace(self.state, current="", watched=way.candidate.id))
        reason = f"promoted, no harm in the canary: {harm_words(gate)}"
        if holdback:
            self._enter(way, "watch", share=1 - holdback, reason=reason)
        else:
            self._record(way, "watch", share=1.0, reason=reason)
            self._serve_alone(way.candidate.versions)
            self._accept(way)

    def _judge_watch(self, way: Way) -> None:
        gate = way.gates[way.stage]
        if shows_harm(gate):
            self._end(way, "rolled back", f"worse than the versions before: {gate.words}", gate=way.stage)
        elif gate.verdict == "undecidable" and gate.mean < 0:
            reason = f"the rewards have fallen, and the versions before seem to be better: {gate.words}"
            self._end(way, "rolled back", reason, gate=way.stage)
        elif way.stage == "suspicion" and gate.verdict != "open":
            self._decide(way, way.stage)
            reason = f"the new versions are not the cause of the fall: {gate.words}"
            self._enter(way, "watch", share=1 - self._settings.gate.holdback, reason=reason)

    def _accept(self, way: Way) -> None:
        if way.stage in way.gates:
            self._decide(way, way.stage)
        self._record(way, "accepted", share=1.0, reason="no harm while it was watched, and the next candidate follows")
        self._set(replace(self.state, watched=""))
        del self._ways[way.candidate.id]

    def _end(self, way: Way, stage: Stage, reason: str, *, gate: str = "") -> None:
        """End a candidate: from now on all units get the versions before."""
        if gate:
            self._decide(way, gate)
        was_served = way.stage in ("canary", "watch", "suspicion")
        self._record(way, stage, share=0.0, reason=reason)
        del self._ways[way.candidate.id]
        if way.candidate.id == self.state.current:
            self._set(replace(self.state, current=""))
        else:
            self._set(replace(self.state, watched=""))
            if current := self._ways.get(self.state.current):
                self._end(current, "withdrawn", f"it was compared with {way.candidate.id}, which is gone")
        if was_served:
            self._serve_alone(way.candidate.baseline)

    def _serve_alone(self, versions: Mapping[str, str]) -> None:
        label = self._settings.label
        pins: Pins = {label: {**self.split.versions[label], **versions}}
        self._set_split({label: 1.0}, pins, salt="")

    # Candidates that are not served yet

    async def _advance(self, control: LearnerControl) -> None:
        if self._work is not None and self._work.done():
            self._work, ended = None, self._work
            await ended
        if self._proposals is not None:
            await self._take_proposal()
        way = self._ways.get(self.state.current)
        if way is None:
            if not control.is_paused and not self.state.is_learning:
                await self._take_label()
            await self._propose(control)
        elif control.is_paused:
            return
        elif way.stage == "replay":
            await self._continue_replay(way)
        elif way.stage == "approval" and way.candidate.id in control.approved and await self._is_hosted(way):
            await self._begin_canary(way, "a person approved it")

    async def _obey(self, control: LearnerControl) -> None:
        """End the candidates that a person rejected."""
        for way in list(self._ways.values()):
            reason = control.rejected.get(way.candidate.id)
            if reason is not None and way.candidate.id in self._ways:
                self._end(way, self._last_stage(way), f"rejected by a person: {reason}")
        await self._save()

    async def _end_unservable(self) -> None:
        """End the candidates whose weights the host cannot serve, such as after a loss of their files."""
        for way in list(self._ways.values()):
            for name, version in self._weights_of(way).items():
                problem = (await self._hosted(name)).problems.get(version)
                if problem and way.candidate.id in self._ways:
                    stage = "refused" if way.stage in ("replay", "approval") else self._last_stage(way)
                    self._end(way, stage, f"{name}@{version} cannot be served: {problem}")
        await self._save()

    async def _is_hosted(self, way: Way) -> bool:
        return await self._are_hosted(way.candidate.id, way.candidate.versions)

    async def _are_hosted(self, what: str, *arms: Mapping[str, str]) -> bool:
        """Return whether a host serves the weights of these arms, or gateways their versions; if not, say so once."""
        split = await SERVED.get(self._store)
        for name in self._weights:
            known = {own.get(name) for own in split.versions.values()} if split is not None else set[str | None]()
            hosted = (await self._hosted(name)).models
            for version in {own[name]: None for own in arms if name in own}:
                if version not in known and version not in hosted:
                    if self._awaited != (what, version):
                        self._awaited = what, version
                        self._parts.say(f"{what} waits until agl learn host serves {name}@{version}")
                    return False
        return True

    def _weights_of(self, way: Way) -> dict[str, str]:
        return {name: version for name, version in way.candidate.versions.items() if name in self._weights}

    async def _hosted(self, name: str) -> HostedVersions:
        return await HOSTED.get(self._store, name) or HostedVersions(models={})

    def _last_stage(self, way: Way) -> Stage:
        return "rolled back" if way.candidate.id == self.state.watched else "withdrawn"

    async def _take_label(self) -> None:
        """Take the versions with the label `candidate`, which a person has set, as a proposal, once."""
        live, wanted = self.split.versions[self._settings.label], dict[str, str]()
        for name in self._settings.tunes:
            version = (await labels_of(self._store, name)).get(CANDIDATE)
            if version is not None and version != live.get(name):
                wanted[name] = version
        if wanted and wanted not in self._tried and self._work is None:
            self._proposals = [Proposal(versions=wanted, origin="a person")]
            await self._take_proposal()

    async def _propose(self, control: LearnerControl) -> None:
        """Start a round of training once enough conversations were rated since the last one."""
        is_due = self.state.rated - self.state.learned >= self._settings.every
        if self._work is not None or not (self.state.is_learning or (is_due and not control.is_paused)):
            return
        if not self.state.is_learning:
            tried = [way.candidate.versions for way in self._ways.values()]
            excluded = dict(self._parts.contradicting(await self._recent(_COMPARED), tried))
            for user in sorted(excluded.keys() - self.state.excluded.keys()):
                self._parts.say(f"the feedback of {user!r} does not count any more: {excluded[user]}")
            self._set(
                replace(
                    self.state,
                    rounds=self.state.rounds + 1,
                    learned=self.state.rated,
                    is_learning=True,
                    excluded=excluded,
                )
            )
            await self._save()
            self._parts.say(f"round {self.state.rounds}: learning from {self.state.rated:,} rated conversations")
        self._background(self._learn())

    async def _learn(self) -> None:
        train = [each for each in await self._history() if not self._is_held_out(each)]
        live, number = self.split.versions[self._settings.label], self.state.rounds
        if not train:
            self._parts.say(f"round {number} ended: the conversations of all users are held out for replays")
            self._proposals = []
            return
        try:
            self._proposals = list(await self._parts.proposer.propose(train, live=live, number=number))
        except StoreError:
            raise
        except AglError as error:
            self._parts.say(f"round {number} ended without a proposal: {error}")
            self._proposals = []

    async def _take_proposal(self) -> None:
        """Make the first proposal that may be tried a candidate, and end the round."""
        proposals, live = self._proposals or [], self.split.versions[self._settings.label]
        held_out = [each for each in await self._history() if self._is_held_out(each)] if proposals else []
        reasons = [await self._parts.proposer.refusal(each, live=live, held_out=held_out) for each in proposals]
        self._proposals = None  # after what may fail and be tried again
        self._tried += [each.versions for each in proposals]
        self._set(replace(self.state, is_learning=False))
        for proposal, reason in zip(proposals, reasons, strict=True):
            if not reason:
                self._begin(proposal, live)
                break
            self._parts.say(f"a proposal of {proposal.origin} was refused: {reason}")
        await self._save()

    def _begin(self, proposal: Proposal, live: Mapping[str, str]) -> None:
        gate, number = self._settings.gate, self.state.candidates + 1
        rules = GateRules(error=gate.error, gain=gate.replay.gain, tasks=gate.replay.tasks, guard=gate.canary.guard)
        candidate = LearningCandidate(
            id=f"c{number}",
            number=number,
            versions=proposal.versions,
            baseline={name: live[name] for name in proposal.versions},
            origin=proposal.origin,
            conversations=self.state.rated,
            created_at=self._parts.clock(),
            moves=[],
            rules=rules,
        )
        way = Way(candidate)
        way.rated_at_pair = self.state.rated
        self._ways[candidate.id] = way
        self._set(replace(self.state, candidates=number, current=candidate.id))
        self._record(way, "replay", share=0.0, reason=f"proposed by {proposal.origin}")

    async def _continue_replay(self, way: Way) -> None:
        if not self._settings.gate.replay.tasks:
            await self._leave_replay(way, reason="the replay is switched off")
        elif self._work is not None:
            return
        elif way.is_replayed or way.obstacle:
            await self._leave_replay(way)
        elif way.replay["replay"].verdict != "open" or way.rated_at_end != self.state.rated:
            self._background(self._replay(way))

    async def _replay(self, way: Way) -> None:
        """Add pairs until the verdict, or until no held-out conversation is left."""
        gate = way.replay["replay"]
        try:
            if gate.verdict == "open":
                await self._add_pairs(way)
            if gate.verdict == "better":  # the regression tasks come last
                await self._run_pairs(way, (), done={pair.unit for pair in way.pairs})
        except StoreError:
            raise
        except AglError as error:
            way.obstacle = f"the replay failed: {error}"
            return
        way.is_replayed, way.rated_at_end = gate.verdict != "open", self.state.rated
        is_hopeless = gate.upper <= gate.gain or (gate.count >= ENOUGH and gate.mean <= gate.gain)
        if is_hopeless or self.state.rated - way.rated_at_pair >= self._settings.every:  # no other users come
            way.obstacle = gate.words

    async def _add_pairs(self, way: Way) -> None:
        """Replay units one after another: of each its newest conversation, and if units are few, more of them.

        A candidate often changes the answers to one kind of task. Units whose mean is over all kinds differ less from
        each other than units of one kind each, so fewer of them prove its gain.
        """
        done = {pair.unit for pair in way.pairs}
        found: dict[str, list[Conversation]] = {}
        for each in sorted(await self._history(), key=lambda each: each.started_at, reverse=True):
            if self._is_held_out(each):
                found.setdefault(self._unit(each), []).append(each)
        most = max(1, self._settings.gate.replay.tasks // max(1, len(found)))
        chosen = [each for unit, newest in found.items() if unit not in done for each in newest[:most]]
        await self._run_pairs(way, chosen, done=done)

    async def _run_pairs(self, way: Way, held_out: Sequence[Conversation], *, done: Collection[str]) -> None:
        is_open = way.replay["replay"].verdict == "open"
        sizes, found = Counter(map(self._unit, held_out)), list[ReplayPair]()
        async with aclosing(self._parts.replayer.pairs(way.candidate, held_out, done=done)) as pairs:
            async for each in pairs:
                found.append(each)
                if len(found) < sizes[each.unit]:
                    continue
                pair, found = mean_pair(found), []
                entry = self.records.pairs(way.candidate.id).states({entry_name(len(way.pairs)): pair})
                await self._store.save_state(entry)
                way.add_pair(pair)
                way.rated_at_pair = self.state.rated
                if is_open and way.replay["replay"].verdict != "open":
                    return

    async def _leave_replay(self, way: Way, *, reason: str = "") -> None:
        gate = way.replay["replay"]
        obstacle = "" if reason else harm_in(way.replay) or way.obstacle or doubt(gate)
        if not obstacle and not await self._is_hosted(way):
            return
        for name, found in way.replay.items():
            if found.count:
                self._decide(way, name)
        if obstacle:
            self._end(way, "refused", obstacle)
        elif self._settings.gate.approve == "person":
            self._enter(way, "approval", share=0.0, reason=f"waits for: agl learn approve {way.candidate.id}")
        else:
            await self._begin_canary(way, reason or f"in the replay {gate.words}")
        await self._save()

    async def _begin_canary(self, way: Way, reason: str) -> None:
        gate, shares, limits = way.replay["replay"], self._settings.gate.canary.share, await self._limits()
        if self.state.watched:
            self._accept(self._ways[self.state.watched])
        live = self.split.versions[self._settings.label]
        changed = {name: live[name] for name in way.candidate.versions}
        way.candidate = replace(way.candidate, baseline=changed, limits=limits)
        self._enter(way, "canary", share=shares[-1 if gate.mean >= FAILING else 0], reason=reason)

    async def _limits(self) -> dict[str, float]:
        """Return the number that nine of ten recent answers keep, for each guard."""
        recent = await self._history()
        found: dict[str, float] = {}
        for name in self._settings.gate.canary.guard:
            values = sorted(each.numbers[name] for each in recent if name in each.numbers)
            if values:
                found[name] = values[min(len(values) - 1, int(0.9 * len(values)))]
        return found

    async def _history(self) -> list[Conversation]:
        """Return rated conversations, newest first, with at most `per_user` of each user: half of them the newest."""
        memory, excluded = self._settings.memory, self.state.excluded
        recent = [each for each in await self._recent() if each.started_at >= self.state.changed_at]
        kept = limit_per_user([each for each in recent if each.user not in excluded], self._settings.per_user)
        newest, older = kept[: memory // 2], kept[memory // 2 :]
        step = max(1, -(-len(older) // (memory - memory // 2)))
        return [*newest, *older[::step]]

    async def _recent(self, times: int = _REMEMBERED) -> Sequence[Conversation]:
        return await self._parts.traffic.recent(now=self._parts.clock(), limit=times * self._settings.memory)

    def _is_held_out(self, conversation: Conversation) -> bool:
        """Return whether a conversation is replayed; the others are trained on. A user's are on one side."""
        return bool(blake2b(self._unit(conversation).encode(), digest_size=1).digest()[0] % 2)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = asyncio.create_task(work)

    # The served split, the labels and the record

    def _enter(self, way: Way, stage: Stage, *, share: float, reason: str) -> None:
        """Move a candidate to a stage, or to another share of it."""
        label = self._settings.label
        self._record(way, stage, share=share, reason=reason)
        if stage == "approval":
            return
        before = {**self.split.versions[label], **way.candidate.baseline}
        after = {**before, **way.candidate.versions}
        if stage == "canary":
            self._set_split(
                {label: 1 - share, CANDIDATE: share}, {label: before, CANDIDATE: after}, salt=way.candidate.id
            )
        elif share < 1:
            self._set_split(
                {HOLDBACK: 1 - share, label: share}, {HOLDBACK: before, label: after}, salt=way.candidate.id
            )

    def _record(self, way: Way, stage: Stage, *, share: float, reason: str) -> None:
        entry = Move(stage=stage, at=self._parts.clock(), share=share, reason=reason, first=len(way.units))
        way.enter(entry)
        self._unsaved |= self.records.candidates.states({way.candidate.id: way.candidate})
        self._parts.say(f"{way.candidate.id}: {stage}{f' at {share:.0%}' if 0 < share < 1 else ''}: {reason}")

    def _decide(self, way: Way, name: str) -> None:
        is_replay = way.stage == "replay"
        decision = decision_of(
            way.candidate,
            name,
            (way.replay if is_replay else way.gates)[name],
            first=0 if is_replay else first_unit(way.candidate),
            end=len(way.pairs if is_replay else way.units),
            at=self._parts.clock(),
        )
        self._unsaved |= self.records.decisions.states({decision.id: decision})

    def _set_split(self, shares: dict[str, float], versions: Pins, *, salt: str) -> None:
        by_user, label = self._settings.unit == "user", self._settings.label
        if versions[label] != self.split.versions[label]:
            self._fall = FallDetector()
        self.split = ServedSplit(
            shares=shares, versions=versions, salt=salt, by_user=by_user, learner=self.records.name
        )
        if self._is_serving:
            self._unsaved |= SERVED.states({"": self.split})

    def _set(self, state: LearnerState) -> None:
        self.state, self._is_state_saved = state, False

    async def _save(self) -> None:
        if self._unsaved or not self._is_state_saved:
            state = self.state
            await self._store.save_state({**self._unsaved, **self.records.state.states({"": state})})
            self._unsaved, self._is_state_saved = {}, self.state is state

    async def _follow_labels(self) -> None:
        """Move the label of each tuned resource to the served version, or follow a person who has moved it."""
        label = self._settings.label
        for name in self._settings.tunes:
            moves, known = await self._store.label_moves(name, label), self.state.labels.get(name)
            last = moves[-1] if moves else None
            if last is not None and known is not None and last.moved_at > known:
                if last.version != self.split.versions[label][name]:
                    if not await self._are_hosted(label, {name: last.version}):
                        continue
                    self._follow_person(name, last.version)
            elif last is None or last.version != self.split.versions[label][name]:
                served = self.split.versions[label][name]
                last = await move(self._store, name, label, served, reason="agl learn serves it")
            if last.moved_at != known:
                self._set(replace(self.state, labels={**self.state.labels, name: last.moved_at}))
        await self._save()

    def _follow_person(self, name: str, version: str) -> None:
        """Serve the version to which a person moved the label; candidates were compared with another, so they end."""
        for way in list(self._ways.values()):
            if way.candidate.id in self._ways:
                self._end(way, self._last_stage(way), f"a person moved the label of {name} to {version}")
        self._parts.say(f"{name}: a person moved the label to {version}, which is served now")
        self._serve_alone({name: version})
