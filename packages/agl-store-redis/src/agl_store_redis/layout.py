"""Names the store's keys, and numbers their layout.

All keys begin with the prefix in braces, which is the hash tag of a Cluster, so that all of a store lies in one slot
and a script may change several keys at one moment. ``ID`` is a rollout's id, ``N`` an attempt's number, 0 for the spans
of no attempt:

=================== ====== ============================================================================================
``meta``            hash   ``version`` of this layout, and the last ``seq`` and ``cursor``
``r/ID``            hash   a rollout: its number ``n``, experiment ``e``, progress ``p``, the rest ``d``, attempts by N
``s/ID/N``          list   an attempt's packed spans, each behind its sequence (4 bytes)
``i/ID/N``          hash   the sequences of the attempt's spans by their ids
``f/ID``            list   cursors of the rollout's changes
``q``, ``q/E``      zset   queued rollouts by number, all and those of one experiment
``held``            zset   queued rollouts that a transaction is claiming, by the time at which they are queued again
``due``             zset   running attempts by deadline
``c/CLAIM``         zset   running attempts of a claim id
``by/FIELD/E/M/S``  zset   rollouts of an experiment, mode and status by a field; ``lists`` has the names of the lists
``ids``, ``g/G``    zset   all rollouts by id, and those of one group
``feed``            stream the change feed
``v/R``, ``o/R``    hash   versions of a resource, and their order (a list); ``names`` has the names of the resources
``d``, ``k``        hash   documents, and their keys in order (a zset)
``m/E/RUN/NAME``    hash   metrics by algorithm and step; ``mn/E`` has the runs and names of an experiment
``st/E``            hash   statistics by algorithm, step and mode; ``stn`` has the experiments that have any
``w/WRITER``        string the last transaction of a writer, for a day
=================== ====== ============================================================================================
"""

from agl.errors import SchemaVersionError
from agl_store_redis.connections import Server
from agl_store_redis.urls import ServerTarget

CURRENT = 1
"""The number of this layout."""


def prepare(server: Server, target: ServerTarget) -> None:
    """Number the layout of a new store, and check that of a known one.

    Raises:
        SchemaVersionError: A newer release wrote the store.
    """
    meta = f"{target.base}meta"
    server.run("HSETNX", meta, "version", CURRENT)
    found = int(server.run("HGET", meta, "version"))
    if found > CURRENT:
        raise SchemaVersionError(
            f"{target.shown} has layout version {found} and this agl-store-redis reads up to {CURRENT}; "
            "upgrade it: pip install --upgrade agl-store-redis"
        )


def list_name(field: str, *, experiment: str, mode: str, status: str, is_finished: bool) -> str:
    """Return the name of the list in which rollouts are sorted by a field; unfinished ones have no end to sort by."""
    field = "rollout_id" if field == "finished_at" and not is_finished else field
    return f"by/{field}/{experiment}/{mode}/{status}"
