"""Runs an experiment's gateway in its own thread and event loop, so that agents cannot block it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from agl import PluginManager
from agl.contracts import Store, Upstream
from agl.errors import CaptureError, ConfigError
from agl.served_calls import CallGate
from agl_gateway.access.certificate import certificate_of
from agl_gateway.processes.gateway_process import GatewayProcess, refusal
from agl_gateway.processes.loop_thread import LoopThread
from agl_gateway.record.redaction import redaction_of
from agl_gateway.record.spool_file import default_folder, left_text, spools_for
from agl_gateway.relay.routing import Router
from agl_gateway.service import GatewayService
from agl_gateway.settings import EmbeddedSettings, Settings
from agl_gateway.traffic.arms import with_distinct_names
from agl_run.access import AttemptTokens, Secret

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class EmbeddedGateway(EmbeddedSettings):
    """Implements :class:`agl.contracts.Gateway`. Its methods may be called from any event loop.

    Attributes:
        plugins: Has the redactor that ``redact`` names; by default, the installed plugins.
    """

    plugins: PluginManager | None = None

    def __post_init__(self) -> None:
        self._certificate = certificate_of(self)
        self._redaction = None
        if self.redact:
            self._redaction = redaction_of(self.redact, self.plugins or PluginManager.from_environment())
        self._settings = Settings(**{one.name: getattr(self, one.name) for one in fields(EmbeddedSettings)})
        self._thread = LoopThread("agl-gateway")
        self._service: GatewayService | None = None

    def apart(self, store_url: str, *, plugins: Mapping[str, str]) -> GatewayProcess:
        """Return a gateway with the same settings that runs in a separate process.

        The new gateway always has a spool, so no recorded call is lost if its process is killed.

        Args:
            store_url: The URL of a store that a second process can open.
            plugins: Environment variables that make a process load the same plugins.

        Raises:
            ConfigError: The gateway cannot run in a separate process; the message gives the reason.
        """
        if reason := refusal(store_url, spool=self.spool):
            raise ConfigError(f"the gateway cannot run in its own process, because {reason}")
        return GatewayProcess(
            store_url=store_url,
            settings=replace(self._settings, spool=self.spool or str(default_folder())),
            plugins=plugins,
        )

    async def start(self, *, store: Store, upstreams: Sequence[Upstream], secret: Secret) -> str:
        """Start the gateway; returns its base URL without ``/v1``."""
        if self._thread.is_running:
            raise CaptureError("this gateway is already running; stop it first, or create another one")
        self._thread.start()
        tokens = AttemptTokens(secret)
        try:
            return await self._thread.run(lambda: self._start(store, upstreams, tokens))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Write all remaining records to the store, then close; idempotent."""
        if not self._thread.is_running:
            return
        try:
            await self._thread.run(self._stop)
        finally:
            await self._thread.stop()

    async def pause(self, policy: str, *, drain_s: float = 30.0) -> None:
        """Hold new calls of ``policy`` and wait up to ``drain_s`` seconds until the calls in flight have ended."""
        gate = self._gate(policy)
        await self._thread.run(lambda: gate.pause(drain_s=drain_s))

    async def resume(self, policy: str, *, model_version: str = "", model: str = "") -> None:
        """Release the held calls; later calls carry ``model_version`` and request ``model``."""
        gate = self._gate(policy)

        async def resume() -> None:
            gate.resume(model_version=model_version, model=model)

        await self._thread.run(resume)

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store."""
        recorder = self._running().recorder
        await self._thread.run(lambda: recorder.settle(attempt_id))

    async def _start(self, store: Store, upstreams: Sequence[Upstream], tokens: AttemptTokens) -> str:
        Router(with_distinct_names(upstreams))  # refuses what cannot be served before anything is opened
        spools = await spools_for(store, self.spool, shown=repr(store))
        self._service = GatewayService(
            store=store,
            upstreams=upstreams,
            tokens=tokens,
            settings=self._settings,
            certificate=self._certificate,
            redaction=self._redaction,
            spools=spools,
        )
        return await self._service.start()

    async def _stop(self) -> None:
        if self._service is not None:
            left = await self._service.stop()
            if left:
                _log.warning("%s", left_text(left, self._service.spool_path))
            self._service = None

    def _running(self) -> GatewayService:
        if self._service is None:
            raise CaptureError("the gateway is not running; start it first")
        return self._service

    def _gate(self, policy: str) -> CallGate:
        gates = self._running().router.gates
        if policy not in gates:
            raise ConfigError(f"the gateway serves no policy {policy!r}; it serves {sorted(gates)}")
        return gates[policy]
