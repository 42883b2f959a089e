"""The contracts between the parts: what every store, tracer, runner, policy, credit and algorithm promises."""

from agl.contracts.capture import Gateway, Policy, RewardEmitter, RewardSetup, Tracer, Upstream
from agl.contracts.store import Change, Metric, RolloutQuery, Store
from agl.contracts.training import (
    Algorithm,
    AlgorithmContext,
    Collected,
    CollectFn,
    Credit,
    Logger,
    Params,
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
    "Change",
    "CollectFn",
    "Collected",
    "Credit",
    "Gateway",
    "Logger",
    "Metric",
    "Params",
    "Policy",
    "ProposeFn",
    "PublishFn",
    "Recorded",
    "RecordedFn",
    "RewardEmitter",
    "RewardSetup",
    "RolloutQuery",
    "Runner",
    "StepReport",
    "Store",
    "Tracer",
    "Upstream",
]
