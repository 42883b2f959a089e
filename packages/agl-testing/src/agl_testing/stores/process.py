"""The location of a store under test, and a child process that works on the store.

``python -m agl_testing.stores.process FACTORY URL REPORT write|drain|save`` works on a store until it is killed
(``write``) or the queue is empty (``drain``), or saves :data:`BLOBS` (``save``). It appends a line to REPORT after each
acknowledged write, so that a test can compare the acknowledged writes with the stored records.
"""

import asyncio
import importlib
import sys
from itertools import count
from typing import BinaryIO

import msgspec

from agl.contracts import ExperimentRecord, Store, Trained
from agl.schemas import Record
from agl_testing.stores.samples import TWO_ATTEMPTS, VICTIM, make_blob, make_call, make_rollout, make_span, outcome_of

LEASE_S = 1.0

BLOBS = [make_blob(f"{at}" * 10_000) for at in range(20)]
"""The blobs that the mode ``save`` saves, one after the other."""


class StoreLocation(Record, frozen=True, kw_only=True):
    """A store's factory and URL, from which another process can open the same store.

    Attributes:
        factory: Import path ``"module:attribute"`` of the factory, as in the plugin's entry.
        url: URL of the store, which is new and empty for every test.
    """

    factory: str
    url: str

    def open(self) -> Store:
        """Open a store object at this location."""
        module, _, attribute = self.factory.partition(":")
        return getattr(importlib.import_module(module), attribute)(self.url)


class Acknowledged(Record, frozen=True, kw_only=True):
    """One line of a child process's report: a write that the store acknowledged.

    Attributes:
        kind: The kind of write: ``enqueued``, ``claimed``, ``appended``, ``finished`` or ``trained``.
        key: The id of the rollout that was written.
    """

    kind: str
    key: str


async def main(location: StoreLocation, report_path: str, mode: str) -> None:
    """Write until killed (``write``), finish rollouts until the queue is empty (``drain``), or save blobs (``save``).

    Each acknowledged write is reported as a line in the file at ``report_path``.
    """
    store = location.open()
    with open(report_path, "ab", buffering=0) as report:
        if mode == "drain":
            await _drain(store, report)
        elif mode == "save":
            for blob in BLOBS:
                await store.save_blobs([blob])
        else:
            await asyncio.gather(*(_write(store, report) for _ in range(3)))
    await store.close()


async def _write(store: Store, report: BinaryIO) -> None:
    numbers = count(1)
    while True:
        rollout = (await store.enqueue([make_rollout(retry=TWO_ATTEMPTS)]))[0]
        _acknowledge(report, "enqueued", rollout.rollout_id)
        for claim in await store.claim(worker="victim", lease_s=LEASE_S):
            key = claim.rollout.rollout_id
            _acknowledge(report, "claimed", key)
            await store.append_spans([make_span(claim, name="appended", call=make_call(range(99), range(9)))])
            _acknowledge(report, "appended", key)
            await store.finish([outcome_of(claim, spans=[make_span(claim, name="final")])])
            _acknowledge(report, "finished", key)
            step = next(numbers)
            await store.save_state(
                {f"victim/{key}": bytes(1000)},
                experiment=ExperimentRecord(name=VICTIM, turn=step),
                trained=[Trained(experiment=VICTIM, run=1, algorithm="a", step=step, rollout_ids=(key,))],
            )
            _acknowledge(report, "trained", key)


async def _drain(store: Store, report: BinaryIO) -> None:
    while claims := await store.claim(worker="worker", limit=3):
        await store.finish([outcome_of(claim) for claim in claims])
        for claim in claims:
            _acknowledge(report, "finished", claim.rollout.rollout_id)


def _acknowledge(report: BinaryIO, kind: str, key: str) -> None:
    report.write(msgspec.json.encode(Acknowledged(kind=kind, key=key)) + b"\n")


if __name__ == "__main__":
    asyncio.run(main(StoreLocation(factory=sys.argv[1], url=sys.argv[2]), sys.argv[3], sys.argv[4]))
