"""The contracts between the parts: what every store, tracer, runner, policy, credit and algorithm promises.

Also the records that plugins register.
"""

from agl._entries import (
    AlgorithmEntry,
    CommandEntry,
    CreditEntry,
    Entry,
    GatewayEntry,
    Kind,
    PluginStatus,
    PolicyEntry,
    RewardEntry,
    RunnerEntry,
    StoreEntry,
    TracerEntry,
)
from agl.contracts._rewards import RewardEmitter, RewardSetup
from agl.contracts._serving import Gateway, Policy, ServedModel
from agl.contracts._store import Change, Metric, RolloutQuery, Store
from agl.contracts._tracing import CannedAnswer, Responder, Tracer, Upstream
from agl.contracts._training import (
    Algorithm,
    AlgorithmContext,
    CheckedAlgorithm,
    Collected,
    CollectFn,
    Credit,
    ExtendableAlgorithm,
    ProposeFn,
    PublishFn,
    Recorded,
    RecordedFn,
    Runner,
    StepReport,
)

__all__ = [
    "Algorithm",
    "AlgorithmContext",
    "AlgorithmEntry",
    "CannedAnswer",
    "Change",
    "CheckedAlgorithm",
    "CollectFn",
    "Collected",
    "CommandEntry",
    "Credit",
    "CreditEntry",
    "Entry",
    "ExtendableAlgorithm",
    "Gateway",
    "GatewayEntry",
    "Kind",
    "Metric",
    "PluginStatus",
    "Policy",
    "PolicyEntry",
    "ProposeFn",
    "PublishFn",
    "Recorded",
    "RecordedFn",
    "Responder",
    "RewardEmitter",
    "RewardEntry",
    "RewardSetup",
    "RolloutQuery",
    "Runner",
    "RunnerEntry",
    "ServedModel",
    "StepReport",
    "Store",
    "StoreEntry",
    "Tracer",
    "TracerEntry",
    "Upstream",
]
