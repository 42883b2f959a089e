"""Tells training that counts from that of a step which ended before it was saved."""

from agl.contracts import Store
from agl_inspect.records.state import load_algorithm
from agl_inspect.rollouts.training_records import TrainingRecord


async def is_saved(store: Store, rollout_id: str, record: TrainingRecord) -> bool:
    """Return false for training that no saved step accounts for, because the process ended before it was saved."""
    if not record.is_trained or not await store.experiments(record.experiment):
        return True
    steps = await store.trained(record.experiment, run=record.run, algorithm=record.algorithm, rollout_ids=[rollout_id])
    own = steps.get(rollout_id)
    if own is None or own >= record.step:
        return own == record.step
    # The ledger holds the step that trained on the rollout as its own; a later one replayed it.
    state = await load_algorithm(store, record.experiment, record.run, record.algorithm)
    return state is None or state.step >= record.step
