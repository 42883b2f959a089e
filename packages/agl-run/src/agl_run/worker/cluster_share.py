"""Finds the fleet of an experiment, and the store's URL that its workers on other machines can reach."""

import msgspec

from agl import PluginManager
from agl.errors import ConfigError
from agl_inspect.stores import SQLITE
from agl_run.config.sections import ASYNC, ExperimentConfig, RunnerConfig
from agl_run.fleet import Fleet

RAY = "ray"
"""The runner that the option ``--ray`` selects."""

_OURS = ("placement", "concurrency")


def with_fleet(config: ExperimentConfig, manager: PluginManager) -> tuple[ExperimentConfig, Fleet | None]:
    """Return the configuration of each worker, and the fleet; no fleet if the runner runs on this machine.

    Raises:
        ConfigError: A parameter of the fleet is wrong, or ``resources`` is set although there is no fleet.
        PluginError: The runner is not installed.
    """
    runner = config.runner
    entry = manager.runner(runner.use)
    is_elsewhere = not runner.concurrency or isinstance(manager.resolve(entry), Fleet)
    if runner.is_adaptive and is_elsewhere:
        raise ConfigError(
            "runner.is_adaptive follows the model servers' load with the attempts of the experiment's own process, and "
            "workers run all of them; remove it, or give concurrency above 0 and a runner of this process"
        )
    # Runners of this machine ignore placements, and a setting that is ignored is refused.
    if not isinstance(manager.resolve(entry), Fleet):
        _refuse_placements(config)
        return config, None
    for name in _OURS:
        if name in runner.params:
            raise ConfigError(f"runner.params has {name!r}, which the runner {runner.use!r} is given anyway; remove it")
    fleet: Fleet = manager.build(entry, placement=runner.resources, concurrency=runner.concurrency, **runner.params)
    # From here on the configuration describes the runner within each worker.
    use, params = fleet.attempts()
    if isinstance(manager.resolve(manager.runner(use)), Fleet):
        raise ConfigError(f"each worker of the runner {runner.use!r} would run {use!r}, which places workers itself")
    inner = msgspec.structs.replace(runner, use=use, params=params, resources=None)
    return msgspec.structs.replace(config, runner=inner), fleet


def _refuse_placements(config: ExperimentConfig) -> None:
    placed = [f"algorithm {algorithm.name!r}" for algorithm in config.algorithm if algorithm.resources is not None]
    if config.runner.resources is not None:
        placed.append("[runner]")
    if placed:
        raise ConfigError(
            f"{placed[0]} has resources, and the runner {config.runner.use!r} runs everything in this process or on "
            'this machine; set [runner] use = "ray", or remove the table resources'
        )


def on_ray(config: ExperimentConfig, address: str) -> ExperimentConfig:
    """Return the configuration with workers on a Ray cluster; each worker uses the runner of the given one."""
    runner = config.runner
    params = {**runner.params, "address": address}
    if runner.use != RAY:
        own = {"runner": runner.use} if runner.use != ASYNC else {}
        # ``--ray`` wraps the runner of the file: it becomes the one that each worker runs.
        params = {"address": address, **own, **({"runner_params": runner.params} if runner.params else {})}
    concurrency = runner.concurrency or RunnerConfig().concurrency
    changed = msgspec.structs.replace(runner, use=RAY, params=params, concurrency=concurrency)
    return msgspec.structs.replace(config, runner=changed)


def store_for_workers(url: str, gateway_url: str) -> str:
    """Return the URL at which other processes open the experiment's store.

    Args:
        url: The URL of the experiment's store; ``""`` for a store object.
        gateway_url: The URL at which other machines reach the gateway, which also serves the store; ``""`` without a
            gateway.

    Raises:
        ConfigError: Only this process can open the store.
    """
    if url and not url.startswith((SQLITE, "memory:")):
        return url
    # The gateway also serves the store, with tokens that reach one experiment only.
    if gateway_url:
        return gateway_url
    if url.startswith(SQLITE):
        return url
    raise ConfigError(
        f"the experiment's store is {url or 'an object'}, which only this process can open, and no gateway serves it; "
        "name a store by URL that workers reach, such as sqlite:///runs.db on this machine or postgresql://..., or "
        'remove [gateway] use = "none"'
    )
