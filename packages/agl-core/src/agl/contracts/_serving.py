"""Contracts of serving: policies serve models, and the gateway records the calls that agents make to them."""

from collections.abc import Callable, Sequence
from typing import Protocol

from agl.contracts._store import Store
from agl.contracts._tracing import Upstream
from agl.schemas import LLM, Json, Record, Resource, ResourceVersion

# A policy in the experiment's process listens on a port that every user of the machine can reach,
# so it asks for a key.
POLICY_KEY_ENV = "AGL_POLICY_KEY"
"""Environment variable of the key that policies ask for which run in an experiment's own process."""


class ServedModel(Record, frozen=True, kw_only=True):
    """A model that a policy serves: its addresses, its name and the version of its weights.

    Attributes:
        base_urls: Base URL of every server, with its ``/v1``. All of them serve the same weights.
        model: The name by which the servers know the weights.
        version: The version of the weights; ``""`` where only the servers' answers name it.
        api_key_env: Environment variable that holds the servers' key; ``""`` if they need none.
        sampling_parameters: Defaults that agents find in their resource.
    """

    # Several, because a policy may run on several GPUs or machines; the gateway keeps a rollout at
    # one of them, whose prefix cache is warm.
    base_urls: tuple[str, ...]
    model: str
    version: str = ""
    api_key_env: str = ""
    sampling_parameters: dict[str, Json] = {}

    @property
    def llm(self) -> LLM:
        """The first server, as a resource that a client can call."""
        return LLM(
            endpoint=self.base_urls[0],
            model=self.model,
            api_key_env=self.api_key_env,
            sampling_parameters=self.sampling_parameters,
        )


class Policy(Protocol):
    """A model server, or several with the same weights, that an experiment starts or attaches to."""

    async def start(self) -> ServedModel:
        """Serve the initial weights; returns once they can be called."""
        ...

    async def stop(self) -> None:
        """Release everything; idempotent."""

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Serve these weights; returns once all servers have them.

        The servers keep their addresses, and their name for the model may change. A policy raises for weights that it
        cannot load; calls that it answers from then on are recorded with the version ``unverified-VERSION``.
        """
        ...

    def resource(self) -> Resource:
        """The first version of the policy's resource: its initial weights, or its endpoint."""
        ...

    @property
    def has_token_ids(self) -> bool:
        """True if answers carry token ids and log-probabilities."""
        ...


class Gateway(Protocol):
    """The capture proxy. It runs its own event loop, which a blocking agent cannot block."""

    async def start(self, *, store: Store, upstreams: Sequence[Upstream], secret: bytes | Callable[[], bytes]) -> str:
        """Listen; returns the base URL without ``/v1``, such as ``http://127.0.0.1:4747``.

        ``secret`` is the key that signs attempt tokens, or returns the keys of now, one a line: the first one signs.
        """
        ...

    async def stop(self) -> None:
        """Write the remaining records, then close; idempotent."""

    async def pause(self, policy: str, *, drain_s: float = 30.0) -> None:
        """Hold new calls of ``policy`` and wait up to ``drain_s`` seconds for those in flight."""

    async def resume(self, policy: str, *, model_version: str = "", model: str = "") -> None:
        """Let held calls through; they carry ``model_version`` and ask the backend for ``model``.

        An empty value leaves the current one in place.
        """

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store."""
