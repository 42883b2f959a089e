"""Rows of the call forest as Tinker's datums.

A datum reads all tokens of a row but the last, and predicts all but the first. Tokens that are not trained have
advantage 0 and log-probability 0, so that they add nothing to Tinker's losses, which have no mask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from tinker import types

from agl.schemas import Episode, Row, unpack_floats, unpack_ids

Aggregation = Literal["token", "sequence", "sum"]


@dataclass(frozen=True, kw_only=True)
class TrainedRow:
    """A row and what of it is trained; lists are as long as the row.

    Attributes:
        rollout: Its rollout, whose rows stay in one update.
        trained: Places of the trained tokens, never 0: nothing stands before the first token to predict it from.
    """

    rollout: str
    ids: list[int]
    logprobs: list[float]
    advantages: list[float]
    trained: list[int]

    @property
    def is_silent(self) -> bool:
        """True if every advantage is 0, so that the row has no gradient."""
        return not any(self.advantages[place] for place in self.trained)

    def datum(self, *, weight: float) -> types.Datum:
        """Return the row with its advantages times ``weight``."""
        size = len(self.ids)
        logprobs, advantages = np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32)
        logprobs[self.trained] = [self.logprobs[place] for place in self.trained]
        advantages[self.trained] = [self.advantages[place] * weight for place in self.trained]
        return types.Datum(
            model_input=types.ModelInput.from_ints(self.ids[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(np.asarray(self.ids[1:], dtype=np.int64)),
                "logprobs": types.TensorData.from_numpy(logprobs[1:]),
                "advantages": types.TensorData.from_numpy(advantages[1:]),
            },
        )


def trained_rows(episodes: Sequence[Episode], advantages: Sequence[Mapping[str, float]]) -> list[TrainedRow]:
    """Return the rows that have a trained token; ``advantages`` are those of each episode's calls, by span id."""
    found = [_trained(row, own) for episode, own in zip(episodes, advantages, strict=True) for row in episode.rows]
    return [row for row in found if row.trained]


def _trained(row: Row, advantages: Mapping[str, float]) -> TrainedRow:
    ids = unpack_ids(row.ids)
    spread, trained = [0.0] * len(ids), list[int]()
    for part in row.segments:
        if part.span_id in advantages:
            spread[part.start : part.stop] = [advantages[part.span_id]] * (part.stop - part.start)
            trained += range(max(1, part.start), part.stop)
    return TrainedRow(
        rollout=row.rollout_id, ids=ids, logprobs=unpack_floats(row.logprobs), advantages=spread, trained=trained
    )


def split_rows(rows: Sequence[TrainedRow], parts: int) -> list[list[TrainedRow]]:
    """Deal rows into at most ``parts`` lists of nearly equal numbers of rollouts, which stay whole; none is empty."""
    order = list(dict.fromkeys(row.rollout for row in rows))
    count = max(1, min(parts, len(order)))
    place = {rollout: index * count // len(order) for index, rollout in enumerate(order)}
    lists: list[list[TrainedRow]] = [[] for _ in range(count)]
    for row in rows:
        lists[place[row.rollout]].append(row)
    return [part for part in lists if part]


def token_weights(rows: Sequence[TrainedRow], aggregation: Aggregation) -> list[float]:
    """Return the weight of a trained token of each row, in an update that consists of ``rows``.

    ``token`` gives every token of the update one weight, ``sequence`` every rollout; the weights add up to 1. ``sum``
    divides by nothing.
    """
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row.rollout] = tokens.get(row.rollout, 0) + len(row.trained)
    total = sum(tokens.values())
    if aggregation == "sequence":
        return [1.0 / (tokens[row.rollout] * len(tokens)) for row in rows]
    return [1.0 / total if aggregation == "token" else 1.0 for _ in rows]
