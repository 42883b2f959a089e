"""Applies ``[retention]``: computes the limits from the section, and removes old rollouts at the end of a run."""

from collections.abc import Callable, Iterable

from agl.contracts import RolloutQuery, Store
from agl.errors import AglError, ConfigError
from agl.schemas import Rollout
from agl_inspect.retention import RetentionLimits, compacted, parse_duration, parse_size, removal_text, remove_old
from agl_run.config.sections import RetentionConfig


def limits_of(config: RetentionConfig) -> RetentionLimits | None:
    """Return the limits that ``[retention]`` sets; ``None`` if no rollout is to be removed.

    Raises:
        ConfigError: A value cannot be used, or the section sets no limit; the message names the key.
    """
    key = "older_than"
    try:
        older_than = parse_duration(config.older_than) if config.older_than else None
        key = "max_size"
        max_bytes = parse_size(config.max_size) if config.max_size else None
    except ValueError as error:
        raise ConfigError(f"retention.{key}: {error}") from None
    limits = RetentionLimits.of(older_than, config.keep, max_bytes)
    # A section that sets no limit removes nothing, which its author cannot have meant.
    if limits is None and config != RetentionConfig():
        raise ConfigError('[retention] needs a limit: write older_than = "30d", keep = 1000, or max_size = "10GB"')
    return limits


async def retain_after_run(
    store: Store, config: RetentionConfig, *, name: str, run: int, sources: Iterable[str], say: Callable[[str], None]
) -> None:
    """Remove old rollouts after a run, as ``[retention]`` says; errors are shown and not raised.

    Args:
        store: The store, opened as the owner of the run.
        config: The section ``[retention]``.
        name: The experiment's name.
        run: The number of the run that has ended; its rollouts are never removed.
        sources: Experiments from which this one learns; their rollouts are never removed.
        say: Shows one line.
    """
    limits = limits_of(config)
    if limits is None:
        return
    query = RolloutQuery(experiment=name if config.experiments == "own" else None)
    prefix, others = f"{name}-{run}-", frozenset(sources)

    def spares(rollout: Rollout) -> bool:
        # Rollouts of the run that has just ended are never removed, because a resume needs them.
        is_current = rollout.experiment == name and rollout.rollout_id.startswith(prefix)
        return is_current or rollout.experiment in others

    try:
        report = await compacted(store, await remove_old(store, query, limits, own=name, spares=spares))
    # The run is finished; trouble with old rollouts must not make it look failed.
    except AglError as error:
        say(f"retention: old rollouts could not be removed, and the next run tries again: {error}")
        return
    if report.removed:
        say(f"retention: {removal_text(report)}")
