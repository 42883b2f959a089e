"""Contracts of capture: tracers report actors, upstreams are the targets of calls, responders answer some of them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from agl.schemas import Record

# The dialects are imported by those who read calls; a tracer does not need them.
if TYPE_CHECKING:
    from agl.dialects import Request


class Tracer(Protocol):
    """Reports a framework's events as spans of the attempt that is current in the context variable.

    It opens and closes spans with :func:`agl.tracing.open_span`, which never raises into the agent. Derive from this
    class to inherit the methods that a tracer may do without: all but the first two.
    """

    def install(self) -> None:
        """Start observing; idempotent. The agent's module may be imported before or after."""

    def uninstall(self) -> None:
        """Restore everything that :meth:`install` changed; idempotent."""

    def current_span_id(self) -> str | None:
        """Id of the span that is current in the framework's own context, ``None`` if there is none.

        A model call belongs to the innermost of these spans and of those that were opened as current.
        """
        return None

    def flush(self, timeout_s: float) -> None:
        """Return once every event so far is a recorded span, or ``timeout_s`` seconds are over."""

    def worker_env(self) -> Mapping[str, str]:
        """Environment that worker processes need, such as a framework's telemetry opt-outs."""
        return {}


class CannedAnswer(Record, frozen=True, kw_only=True):
    """A prepared answer to a model call, given in place of a model's.

    Attributes:
        content_type: The content type of ``body``, the whole HTTP body.
        model_version: The version that the call's record names as the one that answered.
        status: The HTTP status; 400 and more refuse the call.
    """

    content_type: str
    body: bytes
    model_version: str
    status: int = 200


class Responder(Protocol):
    """Answers model calls of an attempt in place of the model, before they leave the agent's process."""

    def respond(self, request: "Request", *, agent: str) -> CannedAnswer | None:
        """Answer a request of ``agent``; ``None`` when a model must answer. Thread-safe."""
        ...


class Upstream(Record, frozen=True, kw_only=True):
    """The target to which the gateway sends the calls of one policy.

    Attributes:
        name: The policy resource's name.
        base_url: OpenAI-compatible base URL with its ``/v1``.
        model: Model name the backend knows; ``""`` to pass the request's through.
        aliases: Model names (``fnmatch`` patterns) in requests that mean this policy, besides name and model.
        api_key_env: Environment variable with the backend's key; the key stays in the gateway.
        is_trained: Whether an algorithm tunes it; then token ids are requested, and their absence is an error.
        model_version: Version that serves now, when the backend does not name it in its answers.
        agents: Regular expression: calls made by agents, nodes or roles whose whole name it matches go here,
            whatever their model name is; ``""`` for none.
        replicas: Base URLs of further servers with the same weights; all calls of a rollout go to one server, and
            to another only where that one does not answer.
        sampling: Treatment of training calls that ask for less than the policy's full distribution: ``override`` that,
            ``refuse`` the call, or ``keep`` what it asks for; ``""`` for calls that train nothing.
    """

    name: str
    base_url: str
    model: str = ""
    aliases: tuple[str, ...] = ()
    api_key_env: str = ""
    is_trained: bool = False
    model_version: str = ""
    # By the caller rather than by the model's name: frameworks give several agents one client, and
    # so one model name.
    agents: str = ""
    replicas: tuple[str, ...] = ()
    # What a request may do with the policy's distribution; agl.dialects.sampled has the reason.
    sampling: Literal["", "override", "refuse", "keep"] = ""
