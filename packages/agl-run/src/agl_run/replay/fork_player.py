"""Answers the model calls of a fork: from the recording up to the fork, and then by a model.

A call is found in the recording by its agent and its request. An agent that has read only recorded answers must make
its recorded requests; the first other request is a divergence, which is refused with status 400 and fails the attempt.
Agents that run in parallel may make their calls in another order than in the recording.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from threading import Lock
from typing import Literal

from agl.contracts import REPLAY_VERSION, CannedAnswer, ForkPlan
from agl.dialects import Request
from agl.schemas import Dialect, Json, Record, to_json
from agl_inspect.rollouts.answers import RecordedAnswer, asked, encode_answer, key_of
from agl_inspect.rollouts.conversations import ending, nearest

REFUSED = 400
"""HTTP status that refuses a divergent request; clients do not retry after it."""

Place = tuple[str, bytes]
"""The key of a recorded call: its agent's name, and a digest of its request."""


class ForkScript(Record, frozen=True, kw_only=True, tag="fork"):
    """A fork's plan with the answers that it needs; can be sent to the agent's process.

    Attributes:
        plan: The fork's plan.
        position: The index in ``recorded`` of the call at which the rollout forks.
        recorded: The answers of the recorded rollout, in order of time.
        answer: The replacement for the answer at ``position``; ``None`` if a model answers that call.
    """

    plan: ForkPlan
    position: int
    recorded: tuple[RecordedAnswer, ...]
    answer: RecordedAnswer | None = None


class ForkPlayer:
    """Answers the calls of one attempt of a fork; thread-safe.

    Equal requests of one agent are answered in the order in which they were recorded.
    """

    def __init__(self, script: ForkScript) -> None:
        self._script = script
        self._lock = Lock()
        self._before = _waiting(script.recorded[: script.position])
        self._after = _waiting(script.recorded[script.position + 1 :])
        # How many recorded answers each agent has yet to ask for before the fork.
        self._owed = Counter(answer.agent for answer in script.recorded[: script.position])
        self._at = _place(script.recorded[script.position])
        self._is_reached = False
        # True once any agent has read an answer that is not in the recording; from then on other
        # requests are expected.
        self._is_anew = False
        self._diverged = ""

    def respond(self, request: Request, *, agent: str) -> CannedAnswer | None:
        """Return the recorded or replaced answer to a request of ``agent``; ``None`` if a model has to answer it."""
        body = request.to_dict()
        if body is None or request.dialect == "embeddings":
            return None
        with self._lock:
            # Compared as a record has it, with references in place of pictures.
            source, answer = self._answer(request.dialect, request.stored().request, agent)
        if source == "live":
            return None
        version = f"{REPLAY_VERSION}{source}"
        if answer is None:
            refusal = to_json({"type": "error", "error": {"type": "replay_error", "message": self._diverged}})
            return CannedAnswer(content_type="application/json", body=refusal, model_version=version, status=REFUSED)
        content_type, data = encode_answer(request.dialect, answer, is_streamed=body.get("stream") is True)
        return CannedAnswer(content_type=content_type, body=data, model_version=version)

    def divergence(self, *, is_over: bool) -> str:
        """Describe the first divergence from the recording; ``""`` if there is none.

        With ``is_over``, the agent has ended by itself, and recorded calls that it did not make are a divergence too.
        """
        if self._diverged or not is_over:
            return self._diverged
        missed = self._missed()
        if not missed:
            return ""
        return (
            f"the agent ended without {self._named(missed[0])}. Something other than its model calls went another way, "
            "such as a tool, or the call left through a client that is not on httpx; a fork answers no other"
        )

    def _answer(
        self, dialect: Dialect, body: Json, agent: str
    ) -> tuple[Literal["recorded", "sibling", "live", "diverged"], Json]:
        """Return the source of the answer to a request, and the answer itself unless the source is ``live``."""
        place = agent, key_of(dialect, body)
        if self._diverged:
            return "diverged", None
        # In any order: agents that run side by side need not take turns as they did then.
        if before := self._before.get(place):
            self._owed[agent] -= 1
            return "recorded", before.popleft().response
        if not self._is_reached and place == self._at:
            self._is_reached = self._is_anew = True
            given = self._script.answer
            return ("live", None) if given is None else ("sibling", given.response)
        if after := self._after.get(place):
            answer = after.popleft()
            # Coupled forks share every draw that did not depend on the replaced answer, which
            # lowers the variance.
            if self._script.plan.is_coupled:
                return "recorded", answer.response
        elif self._must_be_recorded(agent):
            self._diverged = self._difference(dialect, body, agent)
            return "diverged", None
        self._is_anew = True
        return "live", None

    def _must_be_recorded(self, agent: str) -> bool:
        """Return true if ``agent`` has read only recorded answers so far."""
        is_before = self._owed[agent] > 0 or (agent == self._at[0] and not self._is_reached)
        return is_before or not self._is_anew

    def _difference(self, dialect: Dialect, body: Json, agent: str) -> str:
        messages = asked(dialect, body)
        missed = self._missed()
        due = next((answer for answer in missed if answer.agent == agent), missed[0] if missed else None)
        message = f"{agent or 'the agent'} made a request that the recorded rollout did not make: {ending(messages)}"
        if due is None:
            return message
        where = nearest(messages, [asked(due.dialect, due.request)])
        return f"{message}. Due was {self._named(due)}: {where}"

    def _missed(self) -> list[RecordedAnswer]:
        """Return the recorded calls that no agent has made yet, up to and including the fork, in order of time."""
        # By identity: two calls may be equal and are still two.
        waiting = {id(answer) for answers in self._before.values() for answer in answers}
        recorded, position = self._script.recorded, self._script.position
        found = [answer for answer in recorded[:position] if id(answer) in waiting]
        return found if self._is_reached else [*found, recorded[position]]

    def _named(self, answer: RecordedAnswer) -> str:
        recorded = self._script.recorded
        number = next(number for number, each in enumerate(recorded, start=1) if each is answer)
        by = f" by {answer.agent}" if answer.agent else ""
        return f"call {number} of {self._script.plan.rollout_id}{by}"


def _waiting(answers: Iterable[RecordedAnswer]) -> dict[Place, deque[RecordedAnswer]]:
    found: dict[Place, deque[RecordedAnswer]] = defaultdict(deque)
    for answer in answers:
        found[_place(answer)].append(answer)
    return found


def _place(answer: RecordedAnswer) -> Place:
    return answer.agent, key_of(answer.dialect, answer.request)
