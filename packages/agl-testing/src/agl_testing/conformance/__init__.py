"""Conformance classes, one per contract: a plugin's tests subclass one, and override a fixture to run all its tests.

Each class names the fixture to override. Capability flags are set to their strictest value by default. A single test
can be weakened only by overriding it with ``pytest.mark.xfail(reason=...)``.
"""

from agl_testing.conformance.algorithm import AlgorithmConformance
from agl_testing.conformance.bench import AlgorithmBench, AlgorithmScenario, RolloutOrder
from agl_testing.conformance.credit import CreditConformance
from agl_testing.conformance.modality import ModalityCase, ModalityConformance
from agl_testing.conformance.plugin import PluginConformance
from agl_testing.conformance.reward import RewardCase, RewardConformance
from agl_testing.conformance.runner import COMMAND_AGENTS, PYTHON_AGENTS, RunnerConformance
from agl_testing.conformance.samples import FinishedCredit, chat_span, make_episode, rollout_of, sampled_episode
from agl_testing.conformance.sink import SinkConformance, SinkRead
from agl_testing.conformance.store import StoreConformance, StoreLocation
from agl_testing.conformance.tracer import TracerConformance, TracerScenario

__all__ = [
    "COMMAND_AGENTS",
    "PYTHON_AGENTS",
    "AlgorithmBench",
    "AlgorithmConformance",
    "AlgorithmScenario",
    "CreditConformance",
    "FinishedCredit",
    "ModalityCase",
    "ModalityConformance",
    "PluginConformance",
    "RewardCase",
    "RewardConformance",
    "RolloutOrder",
    "RunnerConformance",
    "SinkConformance",
    "SinkRead",
    "StoreConformance",
    "StoreLocation",
    "TracerConformance",
    "TracerScenario",
    "chat_span",
    "make_episode",
    "rollout_of",
    "sampled_episode",
]
