"""Names more rollouts at once than one event loop should hold, and what to do instead."""

from agl_run.config.records import ASYNC
from agl_run.fleet import LOOP_ROLLOUTS


def crowded_loop(use: str, concurrency: int, *, key: str) -> list[str]:
    """Describe that a runner would hold too many rollouts on one event loop; no line for one that would not.

    Args:
        use: The runner. Only ``async`` runs agents on the loop of the process.
        concurrency: Rollouts at once.
        key: The place where the user wrote that number.
    """
    if use != ASYNC or concurrency <= LOOP_ROLLOUTS:
        return []
    more = -(-concurrency // LOOP_ROLLOUTS)
    return [
        f"{key} is {concurrency}, and beyond {LOOP_ROLLOUTS} rollouts on one event loop their calls wait for each "
        f"other; set it to {LOOP_ROLLOUTS} and run them in {more} processes: start agl worker FILE as often as that "
        "takes, here or on other machines, or agl run FILE --ray auto"
    ]
