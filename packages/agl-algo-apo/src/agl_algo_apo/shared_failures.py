"""Failures that other algorithms paid for: where to look first, and more to show the critic.

They are evidence and never a score: what else was live when they ran, such as weights, is not what is live now.
"""

from agl.contracts import AlgorithmContext
from agl.schemas import to_json
from agl_algo_apo.evaluation import Measured, feedback_of
from agl_algo_apo.progress import SearchProgress


async def read_failures(context: AlgorithmContext, progress: SearchProgress, *, perfect_score: float) -> None:
    """Take what the sources' steps since the last time say about the live texts into ``progress.shared``.

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
        progress.shared.pop(position, None)
        if episode.reward < perfect_score:
            progress.shared[position] = Measured(
                reward=episode.reward, rollout=episode.rollout.rollout_id, feedback=feedback_of(episode)
            )
