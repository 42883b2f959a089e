"""Contracts of serving: policies serve models, and the gateway records the calls that agents make to them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from agl.contracts._store import Store
from agl.contracts._tracing import Upstream
from agl.schemas import LLM, Blob, Json, Record, Resource, ResourceVersion

# A policy in the experiment's process listens on a port that every user of the machine can reach,
# so it asks for a key.
POLICY_KEY_ENV = "AGL_POLICY_KEY"
"""Environment variable with the key that callers must send to policies in an experiment's own process."""


class ServedModel(Record, frozen=True, kw_only=True):
    """A model that a policy serves: its addresses, its name and the version of its weights.

    Attributes:
        base_urls: Base URL of every server, including ``/v1``. All servers have the same weights.
        model: The servers' name for the weights.
        version: The version of the weights; ``""`` if it is known only from the servers' answers.
        api_key_env: Environment variable that holds the servers' key; ``""`` if they need none.
        sampling_parameters: Default sampling parameters, which agents find in their ``LLM`` resource.
    """

    # Several, because a policy may run on several GPUs or machines. The gateway sends all calls of
    # a rollout to one server, whose prefix cache is then warm.
    base_urls: tuple[str, ...]
    model: str
    version: str = ""
    api_key_env: str = ""
    sampling_parameters: dict[str, Json] = {}

    @property
    def llm(self) -> LLM:
        """The first server as an ``LLM`` resource, which a client can call."""
        return LLM(
            endpoint=self.base_urls[0],
            model=self.model,
            api_key_env=self.api_key_env,
            sampling_parameters=self.sampling_parameters,
        )


class Policy(Protocol):
    """One or several model servers with the same weights, which an experiment starts or connects to."""

    async def start(self) -> ServedModel:
        """Serve the initial weights; returns once the servers answer calls."""
        ...

    async def stop(self) -> None:
        """Stop the servers and release their resources; idempotent."""

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Serve the weights of ``version``; returns once all servers have loaded them.

        The servers' addresses stay the same; their name for the model may change. A policy that cannot load the weights
        raises, and the calls that it answers afterwards are recorded with the version ``unverified-VERSION``.
        """
        ...

    def resource(self) -> Resource:
        """The first version of the policy's resource: the initial weights, or the endpoint."""
        ...

    @property
    def has_token_ids(self) -> bool:
        """True if answers carry token ids and log-probabilities."""
        ...


@runtime_checkable
class VersionedPolicy(Policy, Protocol):
    """A policy that can also serve several versions of its weights at once."""

    async def serve_versions(self, versions: Sequence[ResourceVersion]) -> Mapping[str, ServedModel]:
        """Serve exactly these versions in addition to the weights of ``load``, and unload all earlier ones.

        Returns each version's model, by version, once all of them answer. They have the addresses of the policy, which
        has to be started, and model names of their own. Raises if one cannot be served.
        """
        ...


class Gateway(Protocol):
    """The capture proxy. It runs its own event loop, so that a blocking agent does not hold it up."""

    async def start(self, *, store: Store, upstreams: Sequence[Upstream], secret: bytes | Callable[[], bytes]) -> str:
        """Start listening; returns the base URL without ``/v1``, such as ``http://127.0.0.1:4747``.

        ``secret`` is the key for attempt tokens, or a function that returns the current keys, one a line: the first key
        signs new tokens, and tokens signed with any of them are accepted.
        """
        ...

    async def stop(self) -> None:
        """Write all pending records, then close; idempotent."""

    async def pause(self, policy: str, *, drain_s: float = 30.0) -> None:
        """Hold new calls of ``policy``, and wait up to ``drain_s`` seconds for its calls in flight."""

    async def resume(self, policy: str, *, model_version: str = "", model: str = "") -> None:
        """Let held calls through; later calls are sent to ``model`` and recorded with ``model_version``.

        An empty value leaves the current setting unchanged.
        """

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store."""


REDACTED = "the call was redacted, and token ids would reveal the texts"
"""Value of ``ids_missing`` in a :class:`~agl.schemas.ModelCall` that a redactor changed."""


class Redactor(Protocol):
    """Removes personal data and secrets from texts before a gateway stores them."""

    def redact(self, text: str) -> str:
        """Return the text without the parts that must not be stored.

        It is called in any thread, for every text of a call, and again for each text that a later call repeats.
        """
        ...


@runtime_checkable
class BlobRedactor(Redactor, Protocol):
    """A redactor that also reads pictures, audio and files; with any other redactor, a gateway stores none of them."""

    def redact_blob(self, blob: Blob) -> bytes | None:
        """Return the payload as it may be stored, or ``None`` to store only its digest.

        Return ``blob.data`` for a payload without anything to remove: a call trains only if its payloads are stored as
        the model saw them. It is called in any thread, and rarely again for a payload that later calls repeat.
        """
        ...
