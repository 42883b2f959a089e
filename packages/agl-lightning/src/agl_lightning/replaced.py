"""The names of Agent Lightning that this module does not offer, and the replacement of each name."""

from collections.abc import Mapping
from typing import NoReturn

from agl.errors import ConfigError
from agl.hints import did_you_mean

_ADAPTER = (
    "algorithms read episodes, which agl.episodes.build_episode makes of spans",
    "docs/reference/python.md",
)
_ALGORITHM = (
    "write a class with setup, step, state and restore, and register it as a plugin",
    "docs/tutorial/algorithm.md",
)
_SERVER = ("start `agl serve`, whose address is a store: Trainer(store='http://HOST:PORT')", "docs/how-to/serve.md")
_STORE = (
    "write a store on agl.stores, or name one by its URL: Trainer(store='postgresql://...')",
    "docs/tutorial/store.md",
)
_STRATEGY = ("leave it out, write runner='process', or start `agl worker` on other machines", "docs/how-to/workers.md")
_RUNNER = ("name a runner: Trainer(runner=agl_run.runner('process', concurrency=4))", "docs/how-to/workers.md")
_TRACER = ("inside a rollout agl.current() gives the running attempt with its tracers", "docs/tutorial/tracer.md")
_SETTINGS = ("give settings as arguments of Trainer, or in an experiment file", "docs/reference/experiment-file.md")
_LEGACY = ("it belongs to the HTTP protocol of Agent Lightning 0.1; give tasks to trainer.fit() or trainer.dev()", "")
_QUERY = ("ask the store with agl.contracts.RolloutQuery, or with `agl sql`", "docs/reference/store-contract.md")
_SPAN = ("a span's parts are fields of agl.schemas.Span: attributes, events, status, call and reward", "")
_PAGE = "docs/how-to/agent-lightning.md"

REPLACED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("Adapter", "OtelTraceAdapter", "TraceAdapter", "TraceToTripletBase", "TraceTree"), _ADAPTER),
    **dict.fromkeys(("Algorithm", "FastAlgorithm", "algo"), _ALGORITHM),
    **dict.fromkeys(("AgentLightningServer", "LightningStoreClient", "LightningStoreServer"), _SERVER),
    "AgentLightningClient": _LEGACY,
    "CollectionBasedLightningStore": _STORE,
    "LightningStoreCapabilities": _STORE,
    "LightningStoreStatistics": _QUERY,
    **dict.fromkeys(("ExecutionEvent", "ExecutionStrategy", "MultiprocessingEvent", "ThreadingEvent"), _STRATEGY),
    **dict.fromkeys(("LegacyAgentRunner", "ParallelWorkerBase", "Runner"), _RUNNER),
    **dict.fromkeys(("clear_active_tracer", "get_active_tracer", "set_active_tracer"), _TRACER),
    **dict.fromkeys(("build_component", "lightning_cli"), _SETTINGS),
    "LightningEnvVar": _SETTINGS,
    **dict.fromkeys(("resolve_bool_env_var", "resolve_int_env_var", "resolve_str_env_var"), _SETTINGS),
    "LLMProxy": (
        "every trainer starts its own gateway: give models in policies= or in initial_resources=, or serve them to "
        "many with `agl serve`",
        "docs/how-to/serve.md",
    ),
    "Hook": (
        "take finished rollouts by an exporter of a plugin, agl_exporters, or read them in the store",
        "docs/reference/hooks.md",
    ),
    "RolloutConfig": (
        "set time limit and retries of all rollouts: Trainer(runner=agl_run.runner('async', timeout_s=600, "
        "max_attempts=2, retry_on='failed'))",
        "docs/reference/experiment-file.md",
    ),
    **dict.fromkeys(
        ("GenericResponse", "RolloutLegacy", "RolloutRawResultLegacy", "Task", "TaskIfAny"),
        _LEGACY,
    ),
    "EnqueueRolloutRequest": ("enqueue agl.schemas.Rollout records: await store.enqueue([Rollout(...)])", _QUERY[1]),
    "ResourcesUpdate": ("publish agl.schemas.ResourceVersion records: await store.publish([...])", _QUERY[1]),
    **dict.fromkeys(("FilterField", "FilterOptions", "PaginatedResult", "SortOptions"), _QUERY),
    **dict.fromkeys(
        ("Worker", "WorkerStatus"),
        ("`agl runs workers` lists trainers and workers, and whether they are busy", _QUERY[1]),
    ),
    **dict.fromkeys(("Event", "Link", "OtelResource", "SpanContext", "SpanCoreFields", "TraceState"), _SPAN),
    **dict.fromkeys(("StatusCode", "TraceStatus"), _SPAN),
    **dict.fromkeys(("SpanAttributeNames", "SpanNames"), ("the names of attributes are in agl.semconv", "")),
    "SpanRecordingContext": ("open a span with agl.operation, and add to it with set(...)", ""),
}
"""For each name that is not offered: its replacement, and the page of the documentation that describes it."""


def refuse(name: str) -> NoReturn:
    """Raise the error for a name that this module does not offer.

    Raises:
        ConfigError: Agent Lightning has the name; the message names the replacement.
        AttributeError: Agent Lightning does not have the name.
    """
    if name not in REPLACED:
        import agl_lightning as lightning

        near = did_you_mean(name, [*dir(lightning), *REPLACED])
        raise AttributeError(f"module 'agl_lightning' has no attribute {name!r}{f'; {near}' if near else ''}")
    remedy, page = REPLACED[name]
    raise ConfigError(f"Agent Lightning's {name} has no counterpart of its form here; {remedy} (see {page or _PAGE})")
