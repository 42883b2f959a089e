"""Answers a replay's model calls in the agent's process, from the recording or with a replacement.

The wire hook asks the player before a request is sent. A call that the player answers never reaches a model, costs no
tokens, and is recorded with the model version ``replay:recorded``, ``replay:silent`` or ``replay:sibling``.
"""

from collections import Counter, defaultdict, deque
from threading import Lock
from typing import Literal

from agl.contracts import REPLAY_VERSION, CannedAnswer, ReplayPlan
from agl.dialects import Request
from agl.schemas import Dialect, Json, Record, new_span_id
from agl_inspect.rollouts.answers import RecordedAnswer, encode_answer, key_of, text_answer, whole_key_of

Source = Literal["recorded", "silent", "sibling"]


class ReplayScript(Record, frozen=True, kw_only=True, tag="replay"):
    """A replay's plan with the recorded answers, in order of time; can be sent to the agent's process."""

    plan: ReplayPlan
    recorded: tuple[RecordedAnswer, ...] = ()
    sibling: tuple[RecordedAnswer, ...] = ()


class Player:
    """Answers the calls of one attempt of a replay; thread-safe.

    Equal requests of one agent are answered in the order in which they were recorded.
    """

    def __init__(self, script: ReplayScript) -> None:
        self._plan = script.plan
        # A replay that replaces nothing only shares equal draws. Others compare less, as training changes parameters.
        self._key_of = key_of if script.plan.replaced else whole_key_of
        self._lock = Lock()
        self._turns: Counter[str] = Counter()
        self._recorded: dict[tuple[str, bytes], deque[RecordedAnswer]] = defaultdict(deque)
        self._siblings: dict[str, list[RecordedAnswer]] = defaultdict(list)
        for answer in script.recorded:
            self._recorded[answer.agent, self._key_of(answer.dialect, answer.request)].append(answer)
        for answer in script.sibling:
            self._siblings[answer.agent].append(answer)

    def respond(self, request: Request, *, agent: str) -> CannedAnswer | None:
        """Return the recorded or replaced answer to a request of ``agent``; ``None`` if a model has to answer it."""
        dialect, asked = request.dialect, request.to_dict()
        if asked is None or dialect == "embeddings":
            return None
        stored = request.stored().request  # as a record has it, with references in place of pictures
        with self._lock:
            found = self._replacement(dialect, asked, agent) or self._recorded_answer(dialect, stored, agent)
        if found is None:
            return None
        source, answer = found
        content_type, body = encode_answer(dialect, answer, is_streamed=asked.get("stream") is True)
        return CannedAnswer(content_type=content_type, body=body, model_version=f"{REPLAY_VERSION}{source}")

    def _replacement(self, dialect: Dialect, request: Json, agent: str) -> tuple[Source, Json] | None:
        if agent not in self._plan.replaced:
            return None
        # Counted per agent, since other agents' calls come in between.
        turn = self._turns[agent]
        self._turns[agent] += 1
        said = self._siblings[agent]
        # An answer of another API could not be read by this client.
        if turn < len(said) and said[turn].dialect == dialect:
            return "sibling", said[turn].response
        return "silent", text_answer(dialect, request, text=self._plan.text, answer_id=f"replay-{new_span_id()}")

    def _recorded_answer(self, dialect: Dialect, request: Json, agent: str) -> tuple[Source, Json] | None:
        waiting = self._recorded.get((agent, self._key_of(dialect, request)))
        return ("recorded", waiting.popleft().response) if waiting else None
