"""The tasks of a search and the resources around it, on which its rewards depend."""

import hashlib

from agl.contracts import AlgorithmContext
from agl.errors import ConfigError
from agl.schemas import to_json


def environment_of(context: AlgorithmContext) -> dict[str, str]:
    """Return the version of every resource that is not tuned here, on which rewards depend besides the candidate."""
    return {name: version for name, version in sorted(context.live().items()) if name not in context.tunes}


def dataset_digest(context: AlgorithmContext) -> str:
    """Return a digest of the training and validation tasks, by which a resumed run notices that they have changed."""
    return hashlib.blake2b(to_json([list(context.train), list(context.val)]), digest_size=8).hexdigest()


def check_splits(context: AlgorithmContext) -> None:
    """Refuse a missing validation set, or one that shares tasks with training; raises :class:`ConfigError`."""
    if not context.train:
        raise ConfigError("there are no training tasks; set [experiment] train to a JSON-lines file")
    if not context.val:
        raise ConfigError(
            "there are no validation tasks to compare prompts on; set [experiment] val to tasks that are not in train, "
            "about as many"
        )
    train = {to_json(task) for task in context.train}
    shared = [task for task in context.val if to_json(task) in train]
    if shared:
        raise ConfigError(
            f"{len(shared)} of {len(context.val)} validation tasks are training tasks too, such as "
            f"{to_json(shared[0]).decode()[:120]}; take them out of one of the two, or the score means nothing"
        )
