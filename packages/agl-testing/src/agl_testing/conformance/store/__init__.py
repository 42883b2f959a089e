"""The conformance class of stores, which tests every invariant of :mod:`agl.contracts._store`."""

from collections.abc import Callable
from typing import ClassVar

import pytest

from agl_testing.conformance._base import Conformance
from agl_testing.conformance.store.blobs import BlobTests
from agl_testing.conformance.store.choosing import SpanQueryTests
from agl_testing.conformance.store.cost import CostTests
from agl_testing.conformance.store.durability import DurabilityTests
from agl_testing.conformance.store.experiments import ExperimentTests
from agl_testing.conformance.store.leases import LeaseTests
from agl_testing.conformance.store.listing import ListTests
from agl_testing.conformance.store.queue import QueueTests
from agl_testing.conformance.store.recordings import RecordingTests
from agl_testing.conformance.store.resources import ResourceTests
from agl_testing.conformance.store.spans import FeedTests, SpanTests
from agl_testing.conformance.store.statistics import StatisticsTests
from agl_testing.stores.process import StoreLocation

__all__ = ["StoreConformance", "StoreLocation"]


class StoreConformance(
    QueueTests,
    ListTests,
    LeaseTests,
    SpanTests,
    FeedTests,
    RecordingTests,
    SpanQueryTests,
    BlobTests,
    ResourceTests,
    ExperimentTests,
    StatisticsTests,
    CostTests,
    DurabilityTests,
    Conformance,
):
    """Run every test of the store contract.

    .. code-block:: python

        class TestMyStore(StoreConformance):
            @pytest.fixture
            def locate(self, tmp_path):
                return lambda name: StoreLocation(factory="my_store:MyStore", url=f"my:///{tmp_path}/{name}.db")

            def set_schema_version(self, location, version): ...

            def make_older(self, location): ...

            def damage(self, location, rollout_id, number, data): ...

    Flags, all true by default: ``is_durable``, ``is_shared``, ``is_in_process``, ``has_schema_version``,
    ``has_older_schema``, ``can_be_damaged``.
    """

    contract: ClassVar[str] = "store"

    @pytest.fixture
    def locate(self) -> Callable[[str], StoreLocation]:
        """A function that returns a new, empty location for a name; the only fixture to override."""
        raise NotImplementedError("override the fixture 'locate' with the store under test")

    @pytest.fixture
    def location(self, locate: Callable[[str], StoreLocation]) -> StoreLocation:
        """The location for tests that need only one."""
        return locate("store")
