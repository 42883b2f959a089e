"""Decides whether the gateway of a run shares the trainer's process or has a process of its own.

In the trainer's process the gateway costs nothing to start and needs no spool. Under high load, however, gateway and
trainer delay each other there, because one process runs Python in one thread at a time.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from agl.contracts import Gateway
from agl.errors import ConfigError
from agl_run.plan import Plan

PROCESS_ABOVE = 64
"""Above this number of attempts at once, over all workers of the experiment, the gateway gets its own process."""


@runtime_checkable
class SeparableGateway(Protocol):
    """A gateway that can also run in a separate process."""

    def apart(self, store_url: str, *, plugins: Mapping[str, str]) -> Gateway:
        """Return a gateway with the same settings in a separate process.

        Args:
            store_url: The URL with which the separate process opens the store.
            plugins: Environment variables that make the separate process load the same plugins.

        Raises:
            ConfigError: The gateway cannot run in a separate process.
        """
        ...


def placed(gateway: Gateway, plan: Plan, *, store_url: str) -> tuple[Gateway, str]:
    """Return the gateway to start, and a line that says in which process it runs.

    Args:
        gateway: A gateway that runs in this process.
        plan: The experiment.
        store_url: The store's URL; ``""`` for a store object, which other processes cannot open.

    Raises:
        ConfigError: ``[gateway] process`` is true, and the gateway cannot have a process of its own.
    """
    config = plan.config.gateway
    load = plan.config.runner.concurrency if plan.fleet is None else plan.fleet.most_attempts
    if config.process is False:
        return gateway, "the gateway runs in this process, as [gateway] process = false says"
    count = f"{load} attempt{'' if load == 1 else 's'} at once" if load else "workers elsewhere run the attempts"
    # Few attempts leave the trainer's process time enough to answer them.
    if config.process == "auto" and 0 < load <= PROCESS_ABOVE:
        return gateway, f"the gateway runs in this process: {count}, and it gets its own above {PROCESS_ABOVE}"
    try:
        separate = _apart(gateway, plan, store_url)
    except ConfigError as error:
        # An explicit request is refused; with ``auto`` the gateway runs here, and the line says
        # why.
        if config.process is True:
            raise ConfigError(f"[gateway] process is true, and {error}") from error
        return gateway, f"the gateway runs in this process, although it would get its own ({count}): {error}"
    return separate, f"the gateway runs in a process of its own: {count}"


def check_place(plan: Plan, *, store_url: str) -> None:
    """Raise :class:`ConfigError` if ``[gateway] process`` is true and the gateway cannot have its own process."""
    config = plan.config.gateway
    if config.process is not True or not plan.config.policy:
        return
    entry = plan.manager.gateway("gateway" if config.use == "auto" else config.use)
    params: dict[str, Any] = gateway_params(plan)
    placed(plan.manager.build(entry, **params), plan, store_url=store_url)


_FILES = ("tls_cert", "tls_key", "audit_log")
"""Parameters of a gateway that are file names, relative to the experiment's folder."""


def gateway_params(plan: Plan) -> dict[str, Any]:
    """Return the arguments of the gateway, with file names joined to the experiment's folder.

    A gateway that redacts also gets the manager of the plan's plugins, which knows the redactor.
    """
    params = plan.config.gateway.params
    plugins = {"plugins": plan.manager} if "redact" in params else {}
    return {**params, **plugins, **{name: str(plan.folder / str(params[name])) for name in _FILES if name in params}}


def _apart(gateway: Gateway, plan: Plan, store_url: str) -> Gateway:
    if not isinstance(gateway, SeparableGateway):
        raise ConfigError(f"the gateway {type(gateway).__name__} has no process of its own")
    if not store_url:
        raise ConfigError("the store is an object, which a second process cannot open; give its URL")
    return gateway.apart(store_url, plugins=plan.manager.worker_env())
