"""Contracts of capture: tracers say who acted, the gateway and policies serve and record the model calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from agl.contracts._store import Store
from agl.schemas import LLM, Record, Resource, ResourceVersion, Reward, Rollout, Span

if TYPE_CHECKING:
    from agl.dialects import Request


class Tracer(Protocol):
    """Reports a framework's events as spans of the attempt that is current in the context variable.

    It opens and closes spans with :func:`agl.tracing.open_span`, which never raises into the agent. Derive from this
    class to inherit the methods that a tracer may do without: all but the first two.
    """

    def install(self) -> None:
        """Start observing; idempotent, and equal whether the agent's module was imported before or after."""
        ...

    def uninstall(self) -> None:
        """Restore everything that :meth:`install` changed; idempotent."""
        ...

    def current_span_id(self) -> str | None:
        """Id of the span that is current by the framework's own context, ``None`` if that says nothing here.

        The span in which a model call is made is the innermost of these and of the spans that were opened as current.
        """
        return None

    def flush(self, timeout_s: float) -> None:
        """Return once every event so far is a recorded span, or the time is over."""

    def worker_env(self) -> Mapping[str, str]:
        """Environment that worker processes need, such as a framework's telemetry opt-outs."""
        return {}


class CannedAnswer(Record, frozen=True, kw_only=True):
    """An answer to a model call that no model gives.

    Attributes:
        content_type: Of ``body``, which is the whole HTTP body.
        model_version: What the call's record names as the version that answered.
    """

    content_type: str
    body: bytes
    model_version: str


class Responder(Protocol):
    """Answers model calls of an attempt in place of the model, before they leave the agent's process."""

    def respond(self, request: "Request", *, agent: str) -> CannedAnswer | None:
        """The answer to a request of ``agent``; ``None`` when a model has to give it. Thread-safe."""
        ...


class RewardEmitter(Protocol):
    """Computes rewards from what was recorded; sees the task's hidden fields."""

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Sequence[Reward] | Reward | float | None:
        """Rewards of one finished attempt; ``None`` for no opinion. May be a coroutine function."""
        ...


@dataclass(frozen=True, kw_only=True)
class RewardSetup:
    """What a reward emitter may use besides its parameters, if its entry says ``takes_setup``.

    Attributes:
        folder: What relative paths in the experiment are relative to.
        policies: The experiment's model servers by name, at their own addresses: a call to one is not recorded as
            an agent's. They have no endpoint while an experiment is only checked.
        build: Makes another reward emitter from its name, or ``module:attribute``, and its parameters.
    """

    folder: Path
    policies: Mapping[str, LLM]
    build: Callable[[str, Mapping[str, Any]], RewardEmitter]


class Upstream(Record, frozen=True, kw_only=True):
    """Where the gateway sends the calls of one policy.

    Attributes:
        name: The policy resource's name.
        base_url: OpenAI-compatible base URL with its ``/v1``.
        model: Model name the backend knows; ``""`` to pass the request's through.
        aliases: Model names (``fnmatch`` patterns) in requests that mean this policy, besides name and model.
        api_key_env: Environment variable with the backend's key; the key stays in the gateway.
        is_trained: Whether an algorithm tunes it; then token ids are asked for, and their absence is an error.
        model_version: Version that serves now, when the backend does not say it in its answers.
        agents: Regular expression: calls made by agents, nodes or roles whose whole name it matches go here,
            whatever their model name is; ``""`` for none.
        replicas: Base URLs of further servers with the same weights; all calls of a rollout go to one of them, and
            to another only where that one does not answer.
    """

    name: str
    base_url: str
    model: str = ""
    aliases: tuple[str, ...] = ()
    api_key_env: str = ""
    is_trained: bool = False
    model_version: str = ""
    agents: str = ""
    replicas: tuple[str, ...] = ()


class Gateway(Protocol):
    """The capture proxy. It runs its own event loop, so that an agent that blocks cannot block it."""

    async def start(self, *, store: Store, upstreams: Sequence[Upstream], secret: bytes) -> str:
        """Listen; returns the base URL without ``/v1``, such as ``http://127.0.0.1:4747``."""
        ...

    async def stop(self) -> None:
        """Finish what is recorded, then close; idempotent."""
        ...

    async def pause(self, policy: str, *, drain_s: float = 30.0) -> None:
        """Hold new calls of ``policy`` and wait up to ``drain_s`` seconds for those in flight."""
        ...

    async def resume(self, policy: str, *, model_version: str = "", model: str = "") -> None:
        """Let held calls through; they carry ``model_version`` and ask the backend for ``model``.

        What is empty stays as it was.
        """
        ...

    async def settle(self, attempt_id: str) -> None:
        """Return once every call of the attempt that was answered is in the store."""
        ...


class Policy(Protocol):
    """A model server that an experiment starts or attaches to."""

    async def start(self) -> LLM:
        """Serve; returns endpoint (with ``/v1``), model and ``api_key_env``."""
        ...

    async def stop(self) -> None:
        """Release everything; idempotent."""
        ...

    async def load(self, version: ResourceVersion) -> None:
        """Serve these weights; returns once they are live. Refuses what it cannot load."""
        ...

    def resource(self) -> Resource:
        """What to publish as the first version of the policy's resource: its initial weights or endpoint."""
        ...

    @property
    def has_token_ids(self) -> bool:
        """Whether answers carry token ids and log-probabilities."""
        ...

    @property
    def model_version(self) -> str:
        """Version of the weights that serve now."""
        ...


@runtime_checkable
class ReplicatedPolicy(Policy, Protocol):
    """A policy of several servers, or one whose servers know new weights by another model name."""

    @property
    def replicas(self) -> Sequence[str]:
        """Base URLs of the servers besides the one that ``start`` returned; they do not change after it."""
        ...

    @property
    def served_model(self) -> str:
        """Name by which the servers know the weights that serve now; read again after every ``load``."""
        ...
