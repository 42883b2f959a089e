"""Failures that other algorithms paid for: tasks to try first, and further runs to show the critic.

They are evidence and never a score, because other weights may have been live when they ran.
"""

from collections.abc import Mapping

from agl.contracts import AlgorithmContext
from agl.schemas import to_json
from agl_algo_apo.measurement.evaluation import feedback_of
from agl_algo_apo.measurement.scores import Measured
from agl_algo_apo.search.progress import SearchProgress


async def read_failures(context: AlgorithmContext, progress: SearchProgress, *, perfect_score: float) -> None:
    """Put the failures of the sources' new steps into ``progress.shared``, as far as they ran with the live texts.

    Only rollouts with the texts that are live now count (staleness 0). Where algorithms run at the same time this
    waits for a source's next step.
    """
    if not context.sources:
        return
    recorded = await context.recorded(after=progress.shared_steps, max_age=0)
    progress.shared_steps = dict(recorded.steps)
    positions = {to_json(task): position for position, task in enumerate(context.train)}
    for episode in recorded.episodes:
        position = positions.get(to_json(episode.rollout.task))
        if position is None or episode.reward is None:
            continue
        progress.shared.pop(position, None)  # the newest rollout of a task counts, also where it succeeded
        if episode.reward < perfect_score:
            progress.shared[position] = Measured(
                reward=episode.reward, rollout=episode.rollout.rollout_id, feedback=feedback_of(episode)
            )


def live_failures(progress: SearchProgress, candidate: str) -> Mapping[int, Measured]:
    """Return rollouts of other algorithms that fell short with these texts; only the best texts are live there."""
    return progress.shared if candidate == progress.best else {}
