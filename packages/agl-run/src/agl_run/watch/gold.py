"""Compares the reward that trains with the gold rewards of a sample, step by step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from agl.contracts import CallUse, ExperimentRecord, Recording, Store
from agl.schemas import Record
from agl_inspect.records.gold import GapTest, GoldPair, gold_of
from agl_inspect.records.names import step_name
from agl_inspect.records.shelf import Shelf, run_key
from agl_run.watch.observers import Batch, Observer


class _Pairs(Record, frozen=True, kw_only=True):
    """The pairs of one step; stored, so that a resumed run goes on with the gap of its first steps."""

    pairs: tuple[GoldPair, ...]


class GoldWatch(Observer):
    """Measures ``gold_reward``, ``gold_gap`` and ``gold_evidence`` of each step with gold rewards; see the test."""

    def __init__(self, store: Store, record: ExperimentRecord) -> None:
        self._store, self._record = store, record
        self._gold: dict[str, float] = {}
        self._pairs: defaultdict[str, list[GoldPair]] = defaultdict(list)
        self._tests: dict[str, GapTest] = {}

    def rollout(self, caller: str, recording: Recording) -> None:
        """Remember the gold reward of a rollout until its batch is complete."""
        value = gold_of(recording.spans, recording.rollout.attempt_id)
        if value is not None:
            self._gold[recording.rollout.rollout_id] = value

    def batch(self, batch: Batch) -> None:
        """Pair the gold rewards of a batch with the rewards that train; other batches have no pairs."""
        found = {one.rollout.rollout_id: self._gold.pop(one.rollout.rollout_id, None) for one in batch.episodes}
        for one in batch.kept if batch.trains else ():
            gold = found.get(one.rollout.rollout_id)
            if gold is not None and one.reward is not None:
                pair = GoldPair(group=one.rollout.group_id, reward=one.reward, gold=gold)
                self._pairs[batch.caller].append(pair)

    async def measure(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> Mapping[str, float]:
        """Return the numbers of the step, and store its pairs; nothing for a step without gold rewards."""
        pairs = self._pairs.pop(caller, [])
        if not pairs:
            return {}
        shelf = Shelf(_Pairs, run_key(self._record.name, self._record.run, f"gold/{caller}/"))
        if caller not in self._tests:
            self._tests[caller] = test = GapTest()
            for name, before in (await shelf.read(self._store)).items():
                if name < step_name(step):  # a step that is repeated has been stored before
                    test.add(before.pairs)
        await shelf.add(self._store, {step_name(step): _Pairs(pairs=tuple(pairs))})
        test = self._tests[caller]
        test.add(pairs)
        gold = fmean(pair.gold for pair in pairs)
        gap = fmean(pair.reward for pair in pairs) - gold
        return {"gold_reward": gold, "gold_gap": gap, "gold_evidence": test.evidence}
