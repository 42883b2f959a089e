"""A running experiment: store, gateway, policies, runner and worker, started in order and stopped in reverse."""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from agl.algorithms import AlgorithmConfig
from agl.contracts import (
    POLICY_KEY_ENV,
    Algorithm,
    ExperimentRecord,
    Gateway,
    GroupRewardEmitter,
    Policy,
    RolloutQuery,
    ServedModel,
    Store,
    Upstream,
    VersionedPolicy,
)
from agl.errors import ConfigError, PolicyError, UnknownComponentError
from agl.hints import did_you_mean
from agl.schemas import LLM, Json, Resource, ResourceVersion
from agl_inspect.ownership import Ownership
from agl_inspect.records.labels import labelled
from agl_inspect.stores import address_of, build_store, without_password
from agl_run.access.secret import signing_keys
from agl_run.checks.notices import crowded_loop
from agl_run.deliver.exporting import Exporting
from agl_run.fleet import FleetSetup
from agl_run.parts.build import build_exporters, no_token_ids
from agl_run.parts.gateway import gateway_params, placed
from agl_run.parts.models import policy_params
from agl_run.parts.waiting import loading, waiting_for
from agl_run.plan import Plan, store_url_of
from agl_run.run.finish_feed import FinishFeed
from agl_run.run.group_rewards import NamedGroupRewards
from agl_run.run.opponents import PastPolicy
from agl_run.runners.setup import RunContext
from agl_run.worker.address import advertised_url, local_url
from agl_run.worker.cluster_share import store_for_workers
from agl_run.worker.current import LiveResources
from agl_run.worker.fleet_worker import order_of, reclaim_lost
from agl_run.worker.invitation import Invitation, UnclaimedReport, make_running
from agl_run.worker.setup import make_runner, make_tracers, run_context
from agl_run.worker.worker import Worker

_LOG = logging.getLogger("agl_run.run")


class RunningExperiment:
    """The running parts of an experiment: call ``open_store``, then ``start``, and at the end ``close``.

    Attributes:
        store: The opened store.
        live: The live resources.
        feed: Wakes waiters when rollouts finish.
        policies: The running policies by name.
        group_rewards: The rewards that compare rollouts of a group.
        worker: This process's worker; an error that ends the worker is set on its future ``failure``.
    """

    store: Store
    live: LiveResources
    feed: FinishFeed
    worker: Worker
    group_rewards: NamedGroupRewards
    _ownership: Ownership

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.policies: dict[str, Policy] = {}
        self._served: dict[str, ServedModel] = {}
        self._beside: dict[str, ServedModel] = {}  # further versions, by POLICY@VERSION
        self._gateway: Gateway | None = None
        self._gateway_url = ""
        self._advertised_url = ""
        self._invitation: Invitation | None = None
        self._say: Callable[[str], None] | None = None
        self._stack = AsyncExitStack()

    async def open_store(self) -> Store:
        """Lock the experiment and open its store; must be the first call.

        Raises:
            ConfigError: Another process, on this machine or another, runs the experiment.
        """
        # The lock comes before the store: two trainers in one folder would overwrite each other's
        # weights even where their stores differ.
        lock = ExperimentLock(self.plan.workdir)
        lock.acquire()
        # Every started part is pushed onto one stack, so that a start that fails halfway stops
        # exactly the parts that run.
        self._stack.callback(lock.release)
        store = self.plan.store or open_store(self.plan)
        if self.plan.store is None:
            self._stack.push_async_callback(store.close)
        # The lock above is this machine's; the lease in the store keeps out trainers elsewhere.
        # From here on only the fenced store is used, so a trainer that was taken over can no longer
        # write.
        ownership = Ownership(store, self.plan.name, workdir=self.plan.workdir)
        self._ownership = await self._stack.enter_async_context(ownership)
        self.store = ownership.store
        return self.store

    @property
    def store_url(self) -> str:
        """The store's URL without passwords; ``""`` if a store object without a known URL was passed."""
        given = self.plan.store
        return without_password(store_url_of(self.plan)) if given is None else address_of(given)

    async def start(
        self,
        state: ExperimentRecord,
        *,
        say: Callable[[str], None] | None = None,
        arms: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Start the other parts: the gateway, the worker, and the policies with their live versions.

        Args:
            state: The experiment's state.
            say: Called with a line while a model loads, and when rollouts wait although no worker is running.
            arms: Sets of versions that run side by side with the live ones.

        Raises:
            ConfigError: A policy cannot serve several versions at once, as the arms need.
        """
        self._say = say
        # Reservations come first: workers and policies would otherwise take the machines that an
        # algorithm asks for.
        await self._reserve()
        # Before the first claim, so that no rollout finishes unseen, and below the worker on the
        # stack, so that the last outcomes are still sent.
        await self._start_exporters()
        # Attempts of a trainer that died on this machine are ended now; waiting for their leases
        # would idle half a minute.
        await reclaim_lost(self.store, self.plan.name)
        await self._start_policies()
        await self._serve_arms(arms, live=state.live)
        # The gateway needs to know where the policies serve, so they start before it.
        upstreams = self._upstreams()
        await self._start_gateway(upstreams)
        llms = self._agent_llms()
        self.live = LiveResources(self.store, llms)
        # Versions are restored before the worker claims: an attempt that started earlier would see
        # the initial weights.
        await self._make_live(state)
        # The feed begins at the end of the change log; requests enqueue only after it, so no end is
        # missed.
        self.feed = await self._stack.enter_async_context(FinishFeed(self.store))
        context = self._context(upstreams)
        self.group_rewards = [(name, one) for name, one in context.rewards if isinstance(one, GroupRewardEmitter)]
        is_adaptive = self.plan.config.runner.is_adaptive
        worker = Worker(context, make_runner(self.plan, context), is_adaptive=is_adaptive, cache=self.feed.cache)
        self.worker = await self._stack.enter_async_context(worker)
        # The loss of the lease must reach all waiters for rollouts, and they watch the worker's
        # failure.
        self._ownership.on_loss = self.worker.fail
        running = make_running(
            self.plan,
            context,
            run=state.run,
            gateway_url=self._advertised_url,
            endpoints=llms,
            live=self.live.versions(),
        )
        # The record invites workers on other machines, so it is written last, when everything that
        # they need answers.
        self._invitation = await self._stack.enter_async_context(Invitation(self._ownership, running))
        if self.plan.fleet is not None:
            self._stack.push_async_callback(self.plan.fleet.recall)
            await self.plan.fleet.deploy(self._fleet_setup())
        elif say is not None:
            await self._watch_load(context.concurrency, say)

    async def _watch_load(self, concurrency: int, say: Callable[[str], None]) -> None:
        """Warn if this process runs too many rollouts on its event loop, or if no worker claims its rollouts."""
        if not concurrency:
            await self._stack.enter_async_context(UnclaimedReport(self.store, self.plan.name, say=say))
        for text in crowded_loop(self.plan.config.runner.use, concurrency, key="runner.concurrency"):
            say(text)

    async def close(self) -> None:
        """Stop all parts in the reverse order of their start."""
        await self._stack.aclose()

    def endpoint(self, name: str) -> LLM:
        """Return the endpoint of a policy's server itself; raises :class:`ConfigError` if there is no such policy."""
        if name not in self._served:
            hint = did_you_mean(name, self._served, otherwise=f"there are {sorted(self._served)}")
            raise ConfigError(f"there is no policy {name!r}; {hint}")
        return self._served[name].llm

    async def publish(self, version: ResourceVersion) -> ResourceVersion:
        """Store a version and make it live; its policy serves the version before this returns."""
        # Stored before it is served: a rollout that is pinned to a version must find it after a
        # crash at any point below.
        version = await self.live.publish(version)
        policy = self.policies.get(version.name)
        if policy is not None:
            await self._load(version.name, policy, version)
        self.live.set(version)
        await self._move_opponents(version)
        if self._invitation is not None:
            await self._invitation.update(self.live.versions())
        return version

    def kept(self, algorithm: str) -> frozenset[int]:
        """Return the steps of an algorithm whose files must stay, because an opponent may answer with them."""
        return frozenset(step for one in self._opponents() for step in one.kept(algorithm))

    async def _move_opponents(self, version: ResourceVersion) -> None:
        """Let the opponents of a version that is live now answer with what came before it."""
        for opponent in self._opponents(version.name):
            await self.publish(await opponent.draw(self.store, version, seed=self.plan.config.experiment.seed))

    def _opponents(self, of: str = "") -> list[PastPolicy]:
        return [one for one in self.policies.values() if isinstance(one, PastPolicy) and of in ("", one.of)]

    async def go_back(self, versions: Mapping[str, str]) -> None:
        """Make earlier versions live; returns once their policies serve them."""
        for name, version in versions.items():
            if self.live.current(name).version != version and not isinstance(self.policies.get(name), PastPolicy):
                # Versions are immutable, so going back is a load of the stored one and changes no
                # history.
                found = await self.store.resource(name, version)
                if name in self.policies:
                    await self._load(name, self.policies[name], found)
                self.live.set(found)
                await self._move_opponents(found)
        if self._invitation is not None:
            await self._invitation.update(self.live.versions())

    async def _load(self, name: str, policy: Policy, version: ResourceVersion) -> None:
        if self._gateway is None:
            served = await policy.load(version)
            _require_name(name, served, agents_ask_for=self._served[name].model)
        else:
            served = await _load_between_calls(self._gateway, name, policy, version)
        self._served[name] = served

    def algorithm(self, config: AlgorithmConfig) -> Algorithm:
        """Build an algorithm; if it sets ``resources``, build one whose steps run in the fleet's cluster."""
        plan = self.plan
        if plan.fleet is not None and config.resources is not None:
            return plan.fleet.algorithm(config, self._fleet_setup())
        return plan.manager.build(plan.entry(config), **config.params)

    async def _reserve(self) -> None:
        """Reserve the cluster shares of the algorithms before workers and policies can occupy them."""
        fleet = self.plan.fleet
        if fleet is not None:
            self._stack.push_async_callback(fleet.stop)
            placed = [algorithm for algorithm in self.plan.config.algorithm if algorithm.resources is not None]
            with waiting_for("connecting to the cluster", say=self._say):
                await fleet.reserve(placed)

    def _fleet_setup(self) -> FleetSetup:
        # A store object exists only in this process; other processes reach it through the gateway.
        url = store_for_workers("" if self.plan.store else store_url_of(self.plan), self._advertised_url)
        query = RolloutQuery(experiment=self.plan.name, status=("queued", "running"))
        return FleetSetup(
            order=order_of(self.plan, store_url=url, secret=signing_keys()()),
            open_rollouts=lambda: self.store.count_rollouts(query),
            fail=self.worker.fail,
            say=self._say or _LOG.info,
        )

    async def _start_exporters(self) -> None:
        """Start to send finished rollouts to the exporters; they are stopped after the worker."""
        for name, exporter in build_exporters(self.plan):
            exporting = Exporting(self.store, exporter, experiment=self.plan.name, name=name, say=self._say)
            await self._stack.enter_async_context(exporting)

    async def _start_policies(self) -> None:
        manager, trained = self.plan.manager, self.plan.trained_policies()
        for name, config in self.plan.config.policy.items():
            params = await asyncio.to_thread(policy_params, self.plan, name)
            # In a thread, because a policy may read a model or ask another interpreter when it is built.
            policy: Policy = await asyncio.to_thread(manager.build, manager.policy(config.use), name=name, **params)
            self.policies[name] = policy
            if name in trained and self.plan.needs_token_ids() and not policy.has_token_ids:
                raise ConfigError(no_token_ids(name, config.use))
        # All policies are built before the first one starts: a wrong parameter of the second costs
        # no model load of the first. Opponents come last, because another policy serves them.
        for name, policy in sorted(self.policies.items(), key=lambda item: isinstance(item[1], PastPolicy)):
            if isinstance(policy, PastPolicy):
                policy.bind(self.policies.get(policy.of), self._served.get(policy.of))
            # Pushed before the start, because a server that fails half way may have left a process.
            self._stack.push_async_callback(policy.stop)
            config = self.plan.config.policy[name]
            with waiting_for(loading(name, config.use, config.params, folder=self.plan.folder), say=self._say):
                self._served[name] = await policy.start()

    async def _serve_arms(self, arms: Sequence[Mapping[str, str]], *, live: Mapping[str, str]) -> None:
        """Let the policies serve the versions of the arms that are not live."""
        for name, policy in self.policies.items():
            wanted = dict.fromkeys(arm[name] for arm in arms if arm.get(name, live.get(name)) != live.get(name))
            if not wanted:
                continue
            if self._opponents(name):
                raise ConfigError(
                    f'policy {name!r} serves an opponent (use = "past") besides its newest weights, and cannot serve '
                    f"{', '.join(wanted)} as well; remove the opponent from a copy of the file, and compare with that"
                )
            if not isinstance(policy, VersionedPolicy):
                raise ConfigError(
                    f"policy {name!r} cannot serve several versions at once, which {', '.join(wanted)} side by side "
                    f'with {live.get(name, "the live one")} needs; set [policy.{name}] use = "torch", or "vllm" with '
                    "lora_rank"
                )
            with waiting_for(f"policy {name!r}: loading {', '.join(wanted)}", say=self._say):
                found = [await self.store.resource(name, version) for version in wanted]
                served = await policy.serve_versions(found)
            self._beside |= {f"{name}@{version}": one for version, one in served.items()}

    def _upstreams(self) -> list[Upstream]:
        trained, configs = self.plan.trained_policies(), self.plan.config.policy
        found = [
            Upstream(
                name=name,
                base_url=served.base_urls[0],
                model=served.model,
                aliases=configs[name].aliases,
                agents=configs[name].agents,
                api_key_env=served.api_key_env,
                is_trained=name in trained,
                model_version=served.version,
                replicas=served.base_urls[1:],
                sampling=configs[name].sampling if name in trained else "",
            )
            for name, served in self._served.items()
        ]
        by_name = {upstream.name: upstream for upstream in found}
        return found + [
            msgspec.structs.replace(
                by_name[name.partition("@")[0]],
                name=name,
                model=served.model,
                model_version=served.version,
                aliases=(),
                agents="",
            )
            for name, served in self._beside.items()
        ]

    async def _start_gateway(self, upstreams: list[Upstream]) -> None:
        config, manager = self.plan.config.gateway, self.plan.manager
        if config.use == "none" or not upstreams:
            _require_no_gateway(upstreams)
            return
        try:
            # ``auto`` does without a gateway that is not installed, unless something here works
            # only with one.
            entry = manager.gateway("gateway" if config.use == "auto" else config.use)
        except UnknownComponentError:
            needs_gateway = self.plan.agent.is_program or any(
                up.agents or up.replicas or up.sampling == "refuse" for up in upstreams
            )
            if config.use != "auto" or needs_gateway:
                raise
            _LOG.info("agl-gateway is not installed; model calls are recorded in the agent's process")
            return
        own: Gateway = manager.build(entry, **gateway_params(self.plan))
        gateway, where = placed(own, self.plan, store_url="" if self.plan.store else store_url_of(self.plan))
        (self._say or _LOG.info)(where)
        self._stack.push_async_callback(gateway.stop)
        url = await gateway.start(store=self.store, upstreams=upstreams, secret=signing_keys())
        # Two addresses of one gateway: workers elsewhere get the advertised one, agents here the
        # nearest.
        self._advertised_url = advertised_url(url, config.advertise)
        # a certificate carries the name that others use
        own_url = self._advertised_url if url.startswith("https:") else local_url(url)
        self._gateway, self._gateway_url = gateway, own_url

    def _agent_llms(self) -> dict[str, LLM]:
        """Return the LLM through which agents call each policy.

        Behind a gateway, policies that share a model are called by their own names.
        """
        llms = {name: served.llm for name, served in (self._served | self._beside).items()}
        if not self._gateway_url:
            return {name: _with_key(llm) for name, llm in llms.items()}
        # Behind the gateway the model's name selects the policy, so two policies of one model must
        # ask under their own names.
        count = Counter(llm.model for llm in llms.values())
        return {
            name: msgspec.structs.replace(
                llm,
                endpoint=f"{self._gateway_url}/v1",
                model=llm.model if llm.model and count[llm.model] == 1 else name,
                api_key_env="",
            )
            for name, llm in llms.items()
        }

    async def _make_live(self, state: ExperimentRecord) -> None:
        await self.live.restore(state.live)
        own = {name: policy for name, policy in self.policies.items() if not isinstance(policy, PastPolicy)}
        for name in state.live:
            if name in own:
                version = self.live.current(name)
                with waiting_for(f"policy {name!r}: loading version {version.version}", say=self._say):
                    await self._load(name, own[name], version)
        initial = {name: policy.resource() for name, policy in own.items()} | dict(self.plan.resources)
        version = f"{self.plan.name}-{state.run}-initial"
        for name, resource in initial.items():
            if name in state.live:
                # A resumed run keeps its versions even if the file has changed since; without a
                # message the edit would seem to work.
                if state.agent and name in self.plan.resources:  # a trial names no agent, and reports this itself
                    await self._say_if_changed(name, resource, first=version)
            # A fresh run begins with the file's own value unless a label names a version to
            # continue from.
            elif not await self._start_from_label(name):
                origin: dict[str, Json] = {"experiment": self.plan.name}
                first = ResourceVersion(
                    name=name, version=version, resource=resource, created_at=time.time(), metadata=origin
                )
                self.live.set(await self.live.publish(first))
        for opponent in self._opponents():
            await self._move_opponents(self.live.current(opponent.of))

    async def _say_if_changed(self, name: str, resource: Resource, *, first: str) -> None:
        """Warn if a resource's value in the file has changed since the run began, because the change has no effect.

        The run keeps its own version: training may have used it, rollouts and validations are pinned to it, and a
        return to the best versions would restore it.
        """
        version = self.live.current(name)
        if version.resource == resource:
            return
        began = [one.resource for one in await self.store.resources(name) if one.version.partition(".")[0] == first]
        if began and resource not in began:  # one that began at a label has no first version of its own
            (self._say or _LOG.info)(
                f"{name}: the run goes on with the version {version.version}, and not with what the experiment's file "
                "says, which has changed since the run began; to use the file's, start again with --fresh (fresh=True) "
                "or give the experiment another name"
            )

    async def _start_from_label(self, name: str) -> bool:
        """Make the version with the resource's label live; return false if no version has the label."""
        label = self.plan.label(name)
        version = await labelled(self.store, name, label) if label else None
        if version is None:
            return False
        if name in self.policies:
            await self._load(name, self.policies[name], version)
        self.live.set(version)
        return True

    def _context(self, upstreams: list[Upstream]) -> RunContext:
        return run_context(
            self.plan,
            make_tracers(self.plan, self._stack.enter_context(ExitStack())),
            store=self.store,
            secret=signing_keys(),
            resources=self.live.for_rollout,
            gateway_url=self._gateway_url,
            gateway=self._gateway,
            upstreams=upstreams,
            requires_calls=bool(self.plan.config.algorithm) and self.plan.needs_token_ids(),
            concurrency=0 if self.plan.fleet is not None else self.plan.config.runner.concurrency,
        )


def _with_key(llm: LLM) -> LLM:
    """Return the LLM, with the API key added if the policy runs in this process, because only then it is known."""
    is_own = llm.api_key_env == POLICY_KEY_ENV
    return msgspec.structs.replace(llm, api_key=os.environ.get(POLICY_KEY_ENV, "")) if is_own else llm


async def _load_between_calls(gateway: Gateway, name: str, policy: Policy, version: ResourceVersion) -> ServedModel:
    """Load new weights while the gateway holds the policy's calls back."""
    # Calls wait at the gateway while the weights change, so no answer is drawn half from the old
    # and half from the new ones.
    await gateway.pause(name)
    try:
        served = await policy.load(version)
    except BaseException:
        # A load that failed may have replaced some of the weights, so calls are marked until the
        # next good load.
        await gateway.resume(name, model_version=f"unverified-{version.version}")
        raise
    await gateway.resume(name, model_version=served.version, model=served.model)
    return served


def _require_no_gateway(upstreams: list[Upstream]) -> None:
    for upstream in upstreams:
        if upstream.replicas:
            raise ConfigError(
                f"the policy {upstream.name!r} has several servers, and only the gateway spreads calls over them; "
                'remove [gateway] use = "none", or give the policy one server'
            )
        if upstream.sampling == "refuse":
            raise ConfigError(
                f'policy.{upstream.name}.sampling is "refuse", and only the gateway can refuse calls; remove [gateway] '
                'use = "none", or set sampling to "override" or "keep"'
            )


def _require_name(name: str, served: ServedModel, *, agents_ask_for: str) -> None:
    """Refuse new weights that are served under another name than agents use, if no gateway translates the name."""
    if served.model != agents_ask_for:
        raise PolicyError(
            f"policy {name!r} serves its new weights as {served.model!r} and agents ask for {agents_ask_for!r}; only "
            'the gateway can send their calls there: install agl-gateway, and do not set [gateway] use = "none"'
        )


class ExperimentLock:
    """The lock that is held while an experiment runs; it is released when the process ends or is killed.

    The system releases the lock even after a kill. A process id in a file could mislead instead, because a restarted
    container reuses ids; the holder's id is written to such a file only for people to read. The lock protects one
    machine (see :class:`Ownership` for others), and child processes of the holder do not hold it.

    Args:
        workdir: The folder of the lock.
        title: A name for messages, of what may run only once.
    """

    def __init__(self, workdir: Path, *, title: str = "this experiment") -> None:
        self._title = title
        self._holder = workdir / "trainer.pid"
        self._file = workdir / "trainer.lock"
        self._lock = FileLock(self._file, timeout=0, thread_local=False, fallback_to_soft=False)

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: Another trainer holds the lock (the message names its process), or the work directory is on a
                file system without locks.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        # The lock belongs to an open file, not to a process id, so a holder that was killed never
        # blocks this.
        except Timeout:
            raise ConfigError(f"{self._who()} runs {self._title} already; wait for it, or stop it") from None
        except OSError as error:
            raise ConfigError(
                f"{self._file} cannot be locked ({error.strerror or error}), so that nothing would keep a second "
                "trainer from this experiment; set [experiment] workdir to a folder on a local disk"
            ) from error
        self._note(str(os.getpid()))

    def release(self) -> None:
        """Release the lock; idempotent."""
        if self._lock.is_locked:
            # Emptied before the release: afterwards the file may already hold the next owner's id.
            self._note("")
            self._lock.release()

    def _note(self, holder: str) -> None:
        # For people only, so that a full disk or a removed folder is reported by what needs it.
        with suppress(OSError):
            self._holder.write_text(holder, encoding="utf-8")

    def _who(self) -> str:
        holder = self._holder.read_text(encoding="utf-8", errors="replace").strip() if self._holder.exists() else ""
        return f"process {holder}" if holder else "another process"


def open_store(plan: Plan) -> Store:
    """Open the store in the experiment's configuration."""
    return build_store(plan.manager, store_url_of(plan))
