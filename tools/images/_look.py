"""Prints as JSON how far the calculator in a store is: ``python -m tools.images._look URL``."""

import asyncio
import json
import sys
from collections import Counter
from typing import Any

from agl.contracts import RolloutQuery
from agl_inspect.records.state import load_experiment, trained_rollouts
from agl_store_postgres.store import PostgresStore

NAME = "calc"
ALGORITHM = "grpo"


async def look(url: str) -> dict[str, Any]:
    """Return the experiment's status, and the rollouts of its reinforcement learning by what became of them."""
    store = PostgresStore(url)
    try:
        experiment = await load_experiment(store, NAME)
        rollouts = await store.rollouts(RolloutQuery(experiment=NAME, limit=10**6))
        own = [one for one in rollouts if one.mode == "train" and one.metadata.get("algorithm") == ALGORITHM]
        trained = await trained_rollouts(store, NAME, 1, ALGORITHM)
        return {
            "status": experiment.status if experiment else "",
            "finished": sum(one.status == "succeeded" for one in rollouts),
            "rollouts": len(own),
            "by_status": Counter(one.status for one in own),
            "trained": len(trained),
            "untrained": sorted({one.rollout_id for one in own} - trained),
            "unknown": sorted(trained - {one.rollout_id for one in own}),
            "losses": sum(one.losses for one in rollouts),
        }
    finally:
        await store.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(look(sys.argv[1]))))
