"""The policy `vllm`: one or several vLLM servers, and the routes by which new weights get into them.

There are five routes:

- `lora`: an adapter is loaded into the running server, under a new model name.
- `base`: calls go to the full weights below the adapter again.
- `sleep`: the running server frees the old weights and then loads the new ones.
- `reload`: full weights are loaded over the old ones.
- `restart`: the server is stopped, and started again with the new weights.

After every route that loads weights, each server is asked for the log-probabilities of a fixed text. They must equal
those that came with the weights (`update.py`) or, for the initial weights, those of the servers after their start.

Limits: full weights travel through files that the servers can read. A server that the policy attached to is never
restarted.
"""

import asyncio
import logging
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from agl.contracts import ServedModel
from agl.errors import ConfigError, PolicyError
from agl.schemas import ResourceVersion, Weights, WeightsProbe
from agl_vllm.client import ServerClient
from agl_vllm.relay import TokenRelay
from agl_vllm.server import SLEEP_MODE, LaunchSettings, LocalServer, can_sleep, can_take_tokens, require_vllm
from agl_vllm.settings import read_settings
from agl_vllm.update import (
    FLOAT32_TOLERANCE,
    TOLERANCE,
    check_served,
    load_adapter,
    probe_of,
    rank_of,
    reload_weights,
    replace_weights,
    run_together,
)

_LOG = logging.getLogger("agl_vllm")
_ASKED_IDS = tuple(range(1, 17))
"""Token ids in every vocabulary; they serve to check that a server returns ids and log-probabilities."""

Route = Literal["lora", "base", "sleep", "reload", "restart"]


class VLLMPolicy:
    """Implements `Policy` with vLLM servers.

    Args:
        name: The policy's name; servers that are started serve the model under it.
        settings: Keyword arguments, the keys of `[policy.NAME]`:

            - `model`: directory or hub name of the initial weights, from which algorithms train too.
            - `base_url`: attach to this server, or to each of a list, written with `/v1`. Absent: start servers.
            - `served_model`: the model's name on servers that are attached to; by default the first that they list.
            - `api_key_env`: environment variable with the servers' key.
            - `python`: interpreter that has vLLM; by default this one.
            - `args`: further arguments of vLLM's server; `env`: a table of environment variables for it.
            - `replicas`: number of servers to start; `devices`: `CUDA_VISIBLE_DEVICES` for each of them.
            - `dtype`: vLLM's `--dtype`; `lora_rank`: largest rank of adapters, 0 for none.
            - `sync`: the route of full weights: `sleep`, `reload`, `restart`, or `auto`. With `auto`, servers that are
              attached to use `reload`. Servers started here use `sleep` if they can (on CUDA and ROCm, without
              `lora_rank`), else `restart`, also after a failed check.
            - `tokens_in`: whether vLLM gets the turns of a conversation as their recorded tokens; needs
              `--enable-scale-out`. Absent: true if a vLLM that is started here has that option.
            - `probe`: whether to compare log-probabilities after each update; `probe_tolerance`: largest mean
              difference in nats, by default 0.001 with `dtype = "float32"`, else 0.05.
            - `start_timeout_s`, `sync_timeout_s`: seconds; `log_dir`: directory of the servers' output.

    Raises:
        ConfigError: A setting is unknown, would be ignored, or cannot work; or servers are to be started, and vLLM is
            not installed for their interpreter.
    """

    def __init__(self, *, name: str, **settings: Any) -> None:
        self.name = name
        self._settings = read_settings(name, settings)
        if not self._settings.urls:
            require_vllm(self._settings.python, name=name)
        self._clients = [
            ServerClient(url, key=self._settings.key, timeout_s=self._settings.sync_timeout_s)
            for url in self._settings.urls
        ]
        self._servers: list[LocalServer] = []
        self._relay: TokenRelay | None = None
        self._addresses: list[str] = []
        self._log_dir: Path | None = None
        self._is_well = self._can_sleep = False
        self._base_name = self._served = self._settings.served_model or name
        self._full = self._initial = Weights(uri=self._settings.model)
        self._beside: defaultdict[str, set[str]] = defaultdict(set)  # adapters loaded here, by the server's URL
        self._initial_probe: WeightsProbe | None = None
        self._live: Weights | None = self._full  # what the servers have; unknown while and after an update failed

    @property
    def has_token_ids(self) -> bool:
        """Always true: `start` refuses a server that returns no token ids."""
        return True

    def resource(self) -> Weights:
        """Return the initial weights as a resource."""
        return Weights(uri=self._settings.model)

    async def start(self) -> ServedModel:
        """Start the servers or attach to them; checks that they return token ids and log-probabilities.

        Raises:
            PolicyError: A server does not start (with the last lines that it printed), cannot be reached, serves
                another model, returns no token ids, or has default sampling parameters of its own.
        """
        if not self._settings.urls:
            await self._start_servers()
        else:
            await self._find_model()
        await self._each(self._ask)
        await self._take_tokens()
        self._is_well = True
        return self._serving("")

    async def stop(self) -> None:
        """Stop the servers that were started; idempotent. Their logs are kept if an error occurred."""
        if self._relay is not None:
            await self._relay.stop()
        await run_together(server.stop() for server in self._servers)
        self._servers = []
        if self._is_well and self._log_dir is not None and not self._settings.log_dir:
            shutil.rmtree(self._log_dir, ignore_errors=True)

    def counts(self) -> dict[str, int]:
        """Return the number of chat calls that continued recorded tokens (`spliced`), and of those sent as text.

        Calls sent as text are counted by reason.
        """
        return dict(self._relay.counts) if self._relay is not None else {}

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Load the weights into every server and check that the servers use them.

        An adapter is served under a separate name, on its base weights; servers with another base load that base first.

        Raises:
            PolicyError: The resource holds no weights, or an adapter that the servers were not started for; or a server
                refuses the weights, or serves others afterwards (the message gives both log-probabilities).
        """
        weights = self._weights_of(version)
        if weights != self._live:
            await self._sync(weights, version.version)
        return self._serving(version.version)

    def _weights_of(self, version: ResourceVersion) -> Weights:
        if not isinstance(version.resource, Weights):
            raise PolicyError(
                f"policy {self.name!r} can load weights, and {version.name}@{version.version} is a "
                f"{type(version.resource).__name__}; let an algorithm that trains weights tune it"
            )
        return version.resource

    async def serve_versions(self, versions: Sequence[ResourceVersion]) -> Mapping[str, ServedModel]:
        """Serve exactly these versions in addition to the weights of `load`, adapters under names of their own.

        Adapters that a server has lost, because it was started again, are loaded again. Those that other processes left
        there under the same names may be other weights, and are replaced; under other names they stay.

        Raises:
            ConfigError: A version is neither an adapter of the servers' full weights nor these weights.
            PolicyError: A server refuses a version, or serves other weights afterwards.
        """
        models = [self._model_of(each) for each in versions]
        wanted = {model: each for model, each in zip(models, versions, strict=True) if model != self._base_name}
        await self._each(lambda client: self._serve_beside(client, wanted))
        return {
            each.version: msgspec.structs.replace(self._serving(each.version), model=model)
            for model, each in zip(models, versions, strict=True)
        }

    def _model_of(self, version: ResourceVersion) -> str:
        weights = self._weights_of(version)
        if weights == self._full:
            return self._base_name
        if weights.format != "lora" or weights.base_model != self._full.uri:
            raise ConfigError(  # loading it again cannot help
                f"policy {self.name!r}: {version.version} is not an adapter of {self._full.uri}, and vLLM serves "
                'several versions only as adapters; train with lora, or set use = "torch"'
            )
        self._require_rank(weights, version.version)
        return f"{self._base_name}@{version.version}"

    async def _serve_beside(self, client: ServerClient, wanted: Mapping[str, ResourceVersion]) -> None:
        loaded = self._beside[client.base_url]
        loaded &= set(await client.models())
        for name in loaded - wanted.keys():
            await client.unload_adapter(name)
            loaded.remove(name)
        for name in wanted.keys() - loaded:
            weights = self._weights_of(wanted[name])
            await load_adapter(client, weights, name=name)
            if self._settings.probe:
                how: dict[str, Any] = {"name": self.name, "model": name, "version": wanted[name].version}
                await check_served(client, probe_of(weights, name=self.name), tolerance=self._tolerance(), **how)
            loaded.add(name)

    def _serving(self, version: str) -> ServedModel:
        return ServedModel(
            base_urls=tuple(self._addresses or [client.base_url for client in self._clients]),
            model=self._served,
            version=version,
            api_key_env=self._settings.api_key_env,
        )

    async def _sync(self, weights: Weights, version: str) -> None:
        """Load weights by their route and check every server; until then the servers' weights count as unknown."""
        self._require_rank(weights, version)
        is_below = weights == self._full and self._live is not None and self._live.format == "lora"
        route: Route = "base" if is_below else self._route(weights)
        probe = self._probe(weights) if self._settings.probe and not is_below else None
        self._live, self._is_well = None, False
        try:
            if route == "lora" and weights.base_model != self._full.uri:
                base = Weights(uri=weights.base_model)
                await self._bring(base, self._route(base))  # its probe is checked with the adapter
                self._full = base
            await self._bring(weights, route)
            await self._check(probe, version)
        except PolicyError as error:
            if route != "sleep" or self._settings.sync != "auto":
                raise
            _LOG.warning(
                "policy %r: its servers did not take new weights in their sleep, so they are restarted with them, now "
                'and later; sync = "restart" leaves the attempt out. The reason: %s',
                self.name,
                error,
            )
            self._can_sleep = False
            await self._bring(weights, "restart")
            await self._check(probe, version)
        self._live, self._is_well = weights, True
        self._full = weights if weights.format == "hf" else self._full

    async def _bring(self, weights: Weights, route: Route) -> None:
        self._served = f"{self._base_name}-adapter" if route == "lora" else self._base_name
        if route == "restart":
            await run_together(self._restart(server, weights) for server in self._servers)
            return
        for server in self._servers:
            await self._revive(server)
        if route == "lora":
            await self._each(lambda client: load_adapter(client, weights, name=self._served))
        elif route != "base":
            update = replace_weights if route == "sleep" else reload_weights
            await self._each(lambda client: update(client, weights))

    async def _ask(self, client: ServerClient) -> None:
        """Check a server after its start; if it was started here, store its log-probabilities for the probe."""
        scores = await client.score(_ASKED_IDS, model=self._base_name)
        if self._servers:  # a server that already ran may have weights of an earlier run
            self._initial_probe = WeightsProbe(token_ids=_ASKED_IDS, logprobs=tuple(scores))
        await client.check_logprobs_mode(_ASKED_IDS, model=self._base_name)
        await client.check_own_sampling(_ASKED_IDS, model=self._base_name)

    def _probe(self, weights: Weights) -> WeightsProbe:
        if weights == self._initial and self._initial_probe is not None:
            return self._initial_probe
        return probe_of(weights, name=self.name)

    async def _check(self, probe: WeightsProbe | None, version: str) -> None:
        """Raise PolicyError if a server does not serve the weights of `probe`; does nothing if `probe` is None."""
        if probe is not None:
            how: dict[str, Any] = {"name": self.name, "model": self._served, "version": version}
            tolerance = self._tolerance()
            await self._each(lambda client: check_served(client, probe, tolerance=tolerance, **how))

    def _route(self, weights: Weights) -> Route:
        if weights.format == "lora":
            return "lora"
        if self._settings.sync == "auto":
            return "sleep" if self._can_sleep else "restart" if self._servers else "reload"
        return self._settings.sync

    def _tolerance(self) -> float:
        if self._settings.probe_tolerance is not None:
            return self._settings.probe_tolerance
        return FLOAT32_TOLERANCE if self._settings.dtype == "float32" else TOLERANCE

    def _require_rank(self, weights: Weights, version: str) -> None:
        """Raise PolicyError if an adapter's rank is higher than the servers were started for."""
        if weights.format != "lora":
            return
        rank = rank_of(weights)
        if self._servers and rank > self._settings.max_lora_rank:
            raise PolicyError(
                f"policy {self.name!r}: the adapter {version!r} has rank {rank} and the servers were started for "
                f"{self._settings.max_lora_rank or 'none'}; set lora_rank = {rank}"
            )

    async def _start_servers(self) -> None:
        chosen = self._settings
        self._log_dir = Path(chosen.log_dir or tempfile.mkdtemp(prefix="agl-vllm-")).absolute()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        if chosen.tokens_in is None and await asyncio.to_thread(can_take_tokens, chosen.python):
            self._settings = chosen = msgspec.structs.replace(chosen, tokens_in=True)
        self._can_sleep = await self._may_sleep()
        how = LaunchSettings(name=self.name, chosen=chosen, tokens_in=bool(chosen.tokens_in), can_sleep=self._can_sleep)
        file_name = re.sub(r"[^\w.-]", "_", self.name)
        self._servers = [
            LocalServer(
                how,
                log=self._log_dir / f"{file_name}-{number}.log",
                device=chosen.devices[number] if chosen.devices else "",
            )
            for number in range(chosen.replicas)
        ]
        self._clients = [server.client for server in self._servers]
        await run_together(server.start(model=self._full.uri) for server in self._servers)

    async def _may_sleep(self) -> bool:
        """Return true if servers are to be started with sleep mode."""
        chosen = self._settings
        if chosen.sync == "sleep" or SLEEP_MODE in chosen.args:
            return True
        return chosen.sync == "auto" and not chosen.lora_rank and await asyncio.to_thread(can_sleep, chosen.python)

    async def _take_tokens(self) -> None:
        """Put a relay in front of the servers that sends them recorded tokens, if the settings ask for it."""
        if not self._settings.tokens_in:
            return
        for client in self._clients:
            if not await client.takes_tokens(model=self._base_name):
                raise PolicyError(
                    f"policy {self.name!r}: the server at {client.base_url} takes no prompts of token ids; start vLLM "
                    "0.32 or later with --enable-scale-out, or remove tokens_in"
                )
        self._relay = TokenRelay([client.base_url.removesuffix("/v1") for client in self._clients])
        self._addresses = await self._relay.start()

    async def _find_model(self) -> None:
        for client in self._clients:
            served = await client.models()
            wanted = self._settings.served_model or (self._base_name if self._base_name in served else served[0])
            if wanted not in served:
                raise PolicyError(
                    f"policy {self.name!r}: the server at {client.base_url} serves {served} and not {wanted!r}; set "
                    "served_model to one of them"
                )
            if client is not self._clients[0] and wanted != self._base_name:
                raise PolicyError(
                    f"policy {self.name!r}: its servers know the model by different names, {self._base_name!r} and "
                    f"{wanted!r}; start them with one --served-model-name"
                )
            self._base_name = self._served = wanted

    async def _revive(self, server: LocalServer) -> None:
        """Restart a server of this policy if it has died, with its latest full weights."""
        if not (server.is_running and await server.client.is_healthy(within_s=self._settings.sync_timeout_s)):
            _LOG.warning("policy %r: the server at %s has died; starting it again", self.name, server.client.base_url)
            await self._restart(server, self._full)

    async def _restart(self, server: LocalServer, weights: Weights) -> None:
        await server.stop()
        await server.start(model=weights.uri)

    async def _each(self, act: Callable[[ServerClient], Awaitable[Any]]) -> None:
        """Run a call on every server at once; raises the first failure."""
        await run_together(act(client) for client in self._clients)
