"""Parts of toy plugins for tests of whole experiments: an algorithm that lacks its step, and a policy.

The plugins are installed by :class:`agl_testing.plugins.PluginFolder`.
"""

from collections.abc import Mapping

import msgspec

from agl.contracts import AlgorithmContext, ServedModel
from agl.schemas import Json, ResourceVersion, Weights


class ToyAlgorithm:
    """Counts the steps that its subclass does: ``step`` adds 1 to ``_step``, and reads ``_context``."""

    _step: Json = 0

    async def setup(self, context: AlgorithmContext) -> None:
        """Remember the context."""
        self._context = context

    def state(self) -> Mapping[str, Json]:
        """Return the number of steps done."""
        return {"step": self._step}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue after the steps that are done."""
        self._step = state["step"]

    async def close(self) -> None:
        """Do nothing."""


class ToyPolicy:
    """Counts as trained, but is a model server that runs elsewhere; remembers the version that it was asked to load."""

    has_token_ids = True

    def __init__(self, *, name: str, base_url: str, model: str = "scripted") -> None:
        self._served = ServedModel(base_urls=(base_url,), model=model, version="initial")

    async def start(self) -> ServedModel:
        """Return the server's address."""
        return self._served

    async def stop(self) -> None:
        """Do nothing."""

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Serve the same model under another version."""
        self._served = msgspec.structs.replace(self._served, version=version.version)
        return self._served

    def resource(self) -> Weights:
        """Return weights that nobody reads."""
        return Weights(uri="none")
