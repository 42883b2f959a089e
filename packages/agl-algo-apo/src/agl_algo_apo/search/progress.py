"""The counters of a search, and the reasons why it stops."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from agl.schemas import Json
from agl_algo_apo.measurement.scores import Measured

StopReason = Literal[
    "budget",
    "rounds",
    "perfect",
    "patience",
    "nothing_to_learn",
    "no_proposals",
    "optimizer_unreachable",
    "optimizer_garbage",
    "infrastructure",
]

STOP_WORDS: Mapping[str, str] = {
    "budget": "the budget has no room for the next rollouts or question",
    "rounds": "all rounds are done",
    "perfect": "every validation task scores the perfect score",
    "patience": "no improvement for as many steps as patience allows",
    "nothing_to_learn": "no training task fails any more",
    "no_proposals": "no new text was proposed that could be tried",
    "optimizer_unreachable": "the optimiser's model does not answer",
    "optimizer_garbage": "the optimiser's model does not answer the question",
    "infrastructure": "not one rollout of a step could be scored",
}
"""Each stop reason as a clause of the sentence that users read."""


class SearchProgress(msgspec.Struct, kw_only=True):
    """The counters of a search, saved as JSON.

    Attributes:
        step: Number of completed steps.
        rounds: Number of completed steps that tried to improve something.
        seed: Id of the first candidate.
        best: Id of the best candidate, by races.
        winner: Id of the last best candidate that the gate called better than the first one; until then, of the first.
        raced: Ids of the candidates that have raced, in order of their first race.
        published: Id of the candidate that was made live last.
        stop_reason: The reason why the search is over, followed by the final measurement; ``None`` while it continues.
        stop_detail: Details of that reason.
        stale: Consecutive steps without an improvement.
        doubted: The value of ``stale`` at which the best candidate was last measured again; 0 for a new best one.
        is_steady: True if measuring the best candidate again gave the same rewards, as it then always will.
        barren: Consecutive answers without a usable text.
        unusable: All answers without a usable text.
        idle: Consecutive steps without a proposal that could be tried.
        shared_steps: The last step whose rollouts were read, by other algorithm.
        shared: A failing rollout of another algorithm with the best candidate's texts, by training task.
        proven: Changes of texts whose removal lost something, by resource.
        used: The training tasks whose failures a critic has seen, by candidate.
    """

    step: int = 0
    rounds: int = 0
    seed: str = ""
    best: str = ""
    winner: str = ""
    raced: list[str] = []
    published: str = ""
    stop_reason: StopReason | None = None
    stop_detail: str = ""
    stale: int = 0
    doubted: int = 0
    is_steady: bool = False
    barren: int = 0
    unusable: int = 0
    idle: int = 0
    proven: dict[str, list[str]] = {}
    used: dict[str, list[int]] = {}
    shared_steps: dict[str, int] = {}
    shared: dict[int, Measured] = {}

    @classmethod
    def load(cls, data: Json) -> "SearchProgress":
        """Return the counters of a saved state."""
        return msgspec.convert(data, cls, str_keys=True)  # JSON has no numbers as keys: those of `shared` are strings

    def stop(self, reason: StopReason, detail: str = "") -> None:
        """Record the reason why the search ends; if there is one already, it stays."""
        if self.stop_reason is None:
            self.stop_reason, self.stop_detail = reason, detail
