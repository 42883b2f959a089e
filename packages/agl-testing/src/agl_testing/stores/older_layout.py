"""Converts data of durable stores back to older layouts, for tests of migrations."""

import msgspec

from agl.contracts import Store


def narrow_numbers(prefix: str = "") -> list[str]:
    """Return the SQL statements that convert tables back to layout 3, which had 8 bits for an attempt's number.

    They do not convert the spans, whose keys differ between stores. ``prefix`` is the prefix of the tables' names.
    """
    narrow = "({0} >> 14 << 8) + ({0} & 255)"
    return [
        f"UPDATE {prefix}attempts SET id = {narrow.format('id')}",
        f"UPDATE {prefix}changes SET attempt = {narrow.format('attempt')} WHERE attempt IS NOT NULL",
        f"UPDATE {prefix}rollouts SET attempt = {narrow.format('attempt')} WHERE attempt IS NOT NULL",
        f"DROP TABLE {prefix}statistics",
        f"DROP INDEX {prefix}rollouts_created",
        f"ALTER TABLE {prefix}rollouts DROP COLUMN created_at",
        f"ALTER TABLE {prefix}rollouts DROP COLUMN failures",
        f"ALTER TABLE {prefix}rollouts DROP COLUMN losses",
    ]


async def older_states(store: Store, *, ledger: tuple[str, int, str]) -> dict[str, bytes]:
    """Return a store's states as layout 2 stored them, including experiments, labels, scores and one ledger.

    ``ledger`` is the experiment, run and algorithm of that ledger.
    """
    states = dict(await store.load_state(""))
    for record in await store.experiments():
        fields = {**msgspec.to_builtins(record)}
        name = fields.pop("name")
        states[f"experiment/{name}/experiment"] = msgspec.json.encode(fields)
    for label in await store.labels():
        for move in await store.label_moves(label.name, label.label):
            key = f"label/{move.name}/{move.label}/{round(move.moved_at * 1e9):020d}"
            states[key] = msgspec.json.encode(move)
    for version in await store.resources():
        for score in await store.scores(version.name):
            fields = {key: value for key, value in msgspec.to_builtins(score).items() if key not in ("name", "version")}
            states[f"score/{score.name}/{score.version}"] = msgspec.json.encode(fields)
    experiment, run, algorithm = ledger
    steps: dict[int, list[str]] = {}
    for rollout_id, step in (await store.trained(experiment, run=run, algorithm=algorithm)).items():
        steps.setdefault(step, []).append(rollout_id)
    for step, rollout_ids in steps.items():
        key = f"experiment/{experiment}/{run}/trained/{algorithm}/{step:08d}"
        states[key] = msgspec.json.encode(rollout_ids)
    states[f"experiment/{experiment}/serving"] = b"{}"
    states[f"experiment/{experiment}/worker/w"] = b"{}"
    return states
