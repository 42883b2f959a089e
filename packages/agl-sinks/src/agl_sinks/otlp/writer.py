"""``agl data export --format otlp``: whole rollouts as a file of OTLP, with contents and token ids.

A file is read by collectors and by ``agl data import``: JSON, one request a line, or Protobuf, each request with its
length before it, where the name ends in ``.pb``. A call and a reward have all of their fields as JSON in attributes.
"""

import math

import msgspec

from agl.contracts import Recording
from agl.schemas import Episode, to_json, unpack_floats
from agl_inspect.exports import Exported, ExportSetup, Losses
from agl_sinks.otlp.requests import as_json, requests_of

_UNFINISHED = "rollouts that are not finished: left out"
_OTHERS = "spans of attempts that did not decide: left out"
_REASONS = {
    "late": "model calls that were recorded after the attempt had ended: left out",
    "not_selected": "model calls of agents that --agents does not choose: left out",
}
_TARGETS = "rewards about spans that are not written: left out"
_NO_NUMBERS = "calls with log-probabilities that JSON has no numbers for (NaN, infinities): without any"
_CHANGED = "rollouts with halves of characters, which were replaced, or integers beyond 64 bits, now texts"


class OtlpWriter:
    """Writes rollouts as traces."""

    def __init__(self, *, setup: ExportSetup) -> None:
        self._file, self._losses = setup.file, setup.losses
        self._is_protobuf = setup.path is not None and setup.path.suffix == ".pb"

    def write(self, item: Exported) -> int:
        """Write a rollout as one request or several; returns 0 for one that is not finished."""
        rollout = item.recording.rollout
        if not rollout.is_finished:
            self._losses.add(_UNFINISHED, rollout.rollout_id)
            return 0
        kept = _decided(item.recording, item.episode, self._losses)
        for request in requests_of([kept], has_contents=True, has_records=True):
            if self._is_protobuf:
                data = request.SerializeToString()
                self._file.write(_varint(len(data)) + data)
            else:
                self._file.write(to_json(as_json(request)) + b"\n")
        return 1

    def close(self) -> None:
        """Nothing is left to write."""


def _decided(recording: Recording, episode: Episode, losses: Losses) -> Recording:
    """Return the recording with the deciding attempt alone, and count what that leaves out."""
    rollout_id, attempt = recording.rollout.rollout_id, episode.attempt
    own = [span for span in recording.spans if attempt is not None and span.attempt_id == attempt.attempt_id]
    losses.add(_OTHERS, rollout_id, len(recording.spans) - len(own))
    left_out = {call.span_id: call.reject for call in episode.transitions if call.reject in _REASONS}
    known = {span.span_id for span in own} - left_out.keys()
    kept = [span for span in own if span.span_id in known]
    for span in own:
        if span.span_id in left_out:
            losses.add(_REASONS[left_out[span.span_id]], rollout_id)
        if span.call is not None and not all(map(math.isfinite, unpack_floats(span.call.logprobs))):
            losses.add(_NO_NUMBERS, rollout_id)
    written = [span for span in kept if not span.reward or span.reward.span_id in {None, *known}]
    losses.add(_TARGETS, rollout_id, len(kept) - len(written))
    try:
        to_json(written)
    except (UnicodeEncodeError, OverflowError):
        losses.add(_CHANGED, rollout_id)
    return msgspec.structs.replace(recording, attempts=[attempt] if attempt else [], spans=written)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*made, value))
