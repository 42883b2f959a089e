"""Contracts of recording: tracers report actors, upstreams are targets of calls, responders replace the model."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from agl.schemas import Record

# Only for type checkers: a tracer should not have to import the dialects.
if TYPE_CHECKING:
    from agl.dialects import Request


class Tracer(Protocol):
    """Reports a framework's events as spans of the current attempt.

    A tracer opens and closes spans with :func:`agl.tracing.open_span`, which never raises into the agent. Derive from
    this class to inherit the optional methods, which are all but :meth:`install` and :meth:`uninstall`.
    """

    @abstractmethod
    def install(self) -> None:
        """Start observing the framework; idempotent. The agent's module may be imported before or after."""

    @abstractmethod
    def uninstall(self) -> None:
        """Restore everything that :meth:`install` changed; idempotent."""

    def current_span_id(self) -> str | None:
        """Id of the span that is current in the framework's own context; ``None`` without such a span.

        A model call belongs to the innermost of the spans that the tracers name and those that were opened with
        ``is_current``.
        """
        return None

    def flush(self, timeout_s: float) -> None:
        """Return once every event up to now is recorded as a span, or after ``timeout_s`` seconds."""

    def worker_env(self) -> Mapping[str, str]:
        """Environment variables for worker processes, such as a framework's opt-out from telemetry."""
        return {}


class CannedAnswer(Record, frozen=True, kw_only=True):
    """A prepared HTTP response that answers a model call in place of the model.

    Attributes:
        content_type: The content type of ``body``.
        body: The whole HTTP body.
        model_version: The model version that is recorded for the call.
        status: The HTTP status; a status of 400 or more refuses the call.
    """

    content_type: str
    body: bytes
    model_version: str
    status: int = 200


class Responder(Protocol):
    """Answers an attempt's model calls in place of the model, before the calls leave the agent's process."""

    def respond(self, request: "Request", *, agent: str) -> CannedAnswer | None:
        """Answer a request of ``agent``, or return ``None`` to let the model answer. Thread-safe."""
        ...


class Upstream(Record, frozen=True, kw_only=True):
    """The target to which the gateway sends the calls of one policy.

    Attributes:
        name: The policy resource's name.
        base_url: Base URL of an OpenAI-compatible API, including ``/v1``.
        model: The backend's name for the model; ``""`` to pass on the name in the request.
        aliases: Further model names (``fnmatch`` patterns) that select this policy, besides ``name`` and ``model``.
        api_key_env: Environment variable with the backend's key; the key stays in the gateway.
        is_trained: Whether an algorithm tunes the policy. If so, token ids are requested, and a backend that returns
            none is an error.
        model_version: The version that the backend serves now; used if the backend's answers do not name it.
        agents: Regular expression that must match the whole name of an agent, node or role. Calls of those that match
            go to this policy, whatever model name they send; ``""`` matches none.
        replicas: Base URLs of further servers with the same weights. All calls of a rollout go to one server, or to
            another one if it does not answer.
        sampling: Treatment of training calls that ask for less than the policy's full distribution: ``override`` their
            parameters, ``refuse`` the calls, or ``keep`` their parameters; ``""`` if the calls do not train.
    """

    name: str
    base_url: str
    model: str = ""
    aliases: tuple[str, ...] = ()
    api_key_env: str = ""
    is_trained: bool = False
    model_version: str = ""
    # By the caller and not by the model's name, because frameworks give several agents one client,
    # and with it one model name.
    agents: str = ""
    replicas: tuple[str, ...] = ()
    # agl.dialects.sampled applies this rule, and its module explains the reason.
    sampling: Literal["", "override", "refuse", "keep"] = ""
