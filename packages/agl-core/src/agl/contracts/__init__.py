"""The contracts between the parts: what every store, tracer, runner, policy, credit and algorithm promises."""

from agl.contracts.capture import Gateway, Policy, RewardEmitter, RewardSetup, Tracer, Upstream
from agl.contracts.store import Change, Metric, RolloutQuery, Store
from agl.contracts.training import (
    Algorithm,
    AlgorithmContext,
    Collected,
    CollectFn,
    CounterfactualCredit,
    Credit,
    Logger,
    Params,
    ProposeFn,
    PublishFn,
    Recorded,
    RecordedFn,
    ReplayFn,
    Runner,
    StepReport,
)

__all__ = [
    "Algorithm",
    "AlgorithmContext",
    "Change",
    "CollectFn",
    "Collected",
    "CounterfactualCredit",
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
    "ReplayFn",
    "RewardEmitter",
    "RewardSetup",
    "RolloutQuery",
    "Runner",
    "StepReport",
    "Store",
    "Tracer",
    "Upstream",
]
