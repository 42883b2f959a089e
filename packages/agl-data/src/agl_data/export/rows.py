"""Makes training rows, with the ids and rewards of their rollouts, for formats that hold token ids and no texts."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from agl.dialects import call_messages
from agl.errors import ConfigError
from agl.schemas import Row, to_builtins, unpack_floats, unpack_ids
from agl_data.export.about import rewards_about, rollout_about
from agl_data.export.pictures import data_url
from agl_data.json_values import without_empty
from agl_inspect.exports import Exported, Losses

TEXTS = "model calls, whose messages, tools and times stay behind: token ids stand for them"
_NO_PICTURE = "rows with a picture that the store no longer has: left out"
_REASONS = {
    "error": "model calls that failed: left out",
    "incomplete": "model calls whose answer was cut: left out",
    "superseded": "model calls that the client repeated: left out",
    "missing_token_ids": "model calls without token ids: left out",
    "length_mismatch": "model calls with another number of log-probabilities than of tokens: left out",
    "empty_response": "model calls with an empty answer: left out",
    "non_token_input": "model calls with pictures or other inputs whose tokens are unknown: left out",
    "not_selected": "model calls of agents that --agents does not choose: left out",
    "late": "model calls that were recorded after the attempt had ended: left out",
    "unseen_calls": "model calls of attempts of which others were not recorded: left out",
    "unattributed": "model calls outside of the framework's spans: left out",
    "unreadable": "model calls of attempts with damaged spans: left out",
    "not_final": "model calls of attempts that did not decide: left out",
}


class ExportedRow(NamedTuple):
    """A training row as lists, where T is the number of tokens.

    Attributes:
        ids: Token ids, [T].
        mask: Loss mask: 1 where a policy sampled the token, else 0, [T].
        logprobs: Behaviour log-probabilities, 0.0 where the mask is 0, [T].
        turns: Number of messages in the branch's last call, including the answer.
        latency_s: Total seconds that the branch's calls took.
        about: The rollout's fields and rewards, the number of the branch, and the segments; with pictures, also
            their processor, and their digests with the tokens that stand for them.
        pictures: The pictures as data URLs, in the order of their tokens.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    turns: int
    latency_s: float
    about: dict[str, Any]
    pictures: list[str]


def why_left_out(reason: str) -> str:
    """Return the text under which calls with a reject reason are counted as losses."""
    return _REASONS.get(reason, f"model calls that are in no row ({reason}): left out")


class RowMaker:
    """Makes the rows of rollouts, and detects an export whose calls have texts but no token ids.

    Args:
        form: The format's name, for messages.
        losses: Counts the calls, texts and rewards that the rows do not hold.
    """

    def __init__(self, form: str, losses: Losses) -> None:
        self._form, self._losses = form, losses
        self._rows = self._texts = 0

    def rows(self, item: Exported) -> Iterator[ExportedRow]:
        """Yield the rows of a rollout, in the order of their first calls."""
        episode, rollout_id = item.episode, item.recording.rollout.rollout_id
        for reason, count in Counter(call.reject for call in episode.transitions if call.reject).items():
            self._losses.add(why_left_out(reason), rollout_id, count)
            self._texts += count if reason == "missing_token_ids" else 0
        calls = {call.span_id for call in episode.transitions if not call.reject}
        self._losses.add(TEXTS, rollout_id, len(calls))
        about = rollout_about(item)
        rewards = rewards_about(item, calls, self._losses) if calls else []
        for row in episode.rows:
            self._rows += 1
            if any(span.digest not in item.blobs for span in row.media):
                self._losses.add(_NO_PICTURE, rollout_id)
                continue
            yield _row(item, row, {**about, **without_empty({"rewards": rewards})})

    def check(self) -> None:
        """Raise :class:`ConfigError` if there was no row, and at least one call had text but no token ids."""
        if self._texts and not self._rows:
            raise ConfigError(
                f"the {self._texts} model calls to export have no token ids, which {self._form} is made of: they were "
                "imported as text, or their model server gave no ids; export their texts with --format messages, dpo "
                "or atif, or record runs of a model server that returns token ids"
            )


def _row(item: Exported, row: Row, about: dict[str, Any]) -> ExportedRow:
    spans = {span.span_id: span for span in item.recording.spans if span.attempt_id == row.attempt_id}
    rewards = {call.span_id: call.reward for call in item.episode.transitions}
    calls = [call for segment in row.segments if (call := spans[segment.span_id].call) is not None]
    segments = [
        {
            "start": segment.start,
            "stop": segment.stop,
            "span_id": segment.span_id,
            **without_empty({"agent": segment.agent, "model_version": segment.model_version}),
            **without_empty({"policy": call.policy, "reward": rewards[segment.span_id]}),
        }
        for segment, call in zip(row.segments, calls, strict=True)
    ]
    return ExportedRow(
        ids=unpack_ids(row.ids),
        mask=list(row.mask),
        logprobs=unpack_floats(row.logprobs),
        turns=len(call_messages(calls[-1])),
        latency_s=sum(call.latency_s for call in calls),
        about={
            **about,
            "branch": row.branch,
            "segments": segments,
            **without_empty({"processor": row.processor, "media": to_builtins(row.media)}),
        },
        pictures=[data_url(item.blobs[span.digest]) for span in row.media],
    )
