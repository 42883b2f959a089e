"""Counts the requests, calls and spans of an attempt across the processes and gateways that answer its calls.

Behind a balancer, or with several processes, each process sees only a part of an attempt's calls. Three things need the
calls of all processes: the id of a request that a client repeats, the position of a call among the calls with the same
opening (which determines its seed), and the attempt's limits. A single process asks no other.

A killed process loses its counts. A restart of the whole gateway loses the counts of all its processes.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import msgspec
from aiohttp import web

from agl.schemas import new_trace_id
from agl_gateway.access.identity import Admission
from agl_gateway.processes.announcement import AnnouncedGateway
from agl_gateway.processes.peers import PEER_HEADER, SIBLING, Peers, Siblings
from agl_gateway.recent import Recent

_log = logging.getLogger(__name__)

PATH = "/peers"

_REMEMBERED = 20_000
_LARGE = 1024 * 1024
"""Bytes from which a body's digest is computed in a thread."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /peers``: a question about an attempt that one process asks another.

    Attributes:
        asks: ``request`` for the id of the request with these bytes, ``position`` for the number of the next call with
            this opening, ``counts`` for the model calls and spans counted so far.
        digest: Digest of the request's body, or of the call's opening.
        size: Bytes of the request's body.
    """

    asks: Literal["request", "position", "counts"]
    attempt_id: str
    digest: str = ""
    size: int = 0


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a :class:`Question`; only the fields that the question asks for are set.

    ``at`` is the time of the request, in Unix seconds.
    """

    request_id: str = ""
    at: float = 0.0
    position: int = 0
    calls: int = 0
    spans: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKey:
    """Identifies a request and its repetitions: the attempt, and the size and digest of the body."""

    attempt_id: str
    size: int
    digest: str


@dataclass
class RequestIds:
    """Assigns one id to a request and all of its retries."""

    _recent: Recent[RequestKey, tuple[float, str]] = field(default_factory=lambda: Recent(_REMEMBERED))

    def of(self, key: RequestKey, *, is_retry: bool) -> str:
        """Return the id of the request with ``key``: a new one, or for a retry the id of the first try."""
        if is_retry and (known := self._recent.get(key)) is not None:
            return known[1]
        request_id = new_trace_id()
        self.learn(key, time.time(), request_id)
        return request_id

    def known(self, key: RequestKey) -> tuple[float, str]:
        """Return the time (Unix seconds) and the id of the newest request with ``key``; ``(0.0, "")`` without one."""
        return self._recent.get(key, (0.0, ""))

    def learn(self, key: RequestKey, at: float, request_id: str) -> None:
        """Remember the id of a request that arrived at ``at``, in Unix seconds."""
        self._recent[key] = (at, request_id)


def _digest(body: bytes) -> str:
    return blake2b(body, digest_size=8).hexdigest()


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 6 else 0


class AttemptFacts:
    """Counts the calls and spans of attempts and knows their request ids, across all processes and gateways.

    Used in one event loop only.

    Attributes:
        requests: Ids of the requests that this process received.
    """

    def __init__(self, siblings: Siblings, peers: Peers) -> None:
        self._siblings = siblings
        self._peers = peers
        self._positions: Recent[str, Counter[str]] = Recent(_REMEMBERED)
        self._usage: Recent[str, Counter[str]] = Recent(_REMEMBERED)
        self.requests = RequestIds()

    @property
    def processes(self) -> int:
        """The number of processes of this gateway."""
        return self._siblings.count

    def usage(self, attempt_id: str) -> "Counter[str]":
        """Return this process's counter of the attempt's ``calls`` and ``spans``; the caller may increment it."""
        return self._usage.touched(attempt_id, Counter)

    async def request_id(self, attempt_id: str, headers: Mapping[str, str], body: bytes) -> tuple[str, int]:
        """Return the id of a request, the same for all its retries, and the client's retry count.

        A retry carries the same ``x-agl-request-id``, or the same body with a retry count above zero.
        """
        retries = _count(headers.get("x-stainless-retry-count", "0"))
        if given := headers.get("x-agl-request-id", ""):
            return given[:128], retries
        digest = await asyncio.to_thread(_digest, body) if len(body) > _LARGE else _digest(body)
        key = RequestKey(attempt_id=attempt_id, size=len(body), digest=digest)
        if retries:
            await self._find_request(key)
        return self.requests.of(key, is_retry=retries > 0), retries

    async def _find_request(self, key: RequestKey) -> None:
        """Ask the other processes and gateways for the id of a repeated request, and remember the newest one."""
        question = Question(asks="request", attempt_id=key.attempt_id, digest=key.digest, size=key.size)
        replies = [await self._ask_siblings(question)]
        replies += [await self._ask_gateway(peer, question) for peer in await self._peers.gateways()]
        newest = max(replies, key=lambda each: each.at)
        if newest.at > self.requests.known(key)[0]:
            self.requests.learn(key, newest.at, newest.request_id)

    async def position(self, attempt_id: str, opening: bytes) -> int:
        """Return the position of the attempt's next call among its calls with this opening.

        One process of one gateway counts the positions for all.
        """
        question = Question(asks="position", attempt_id=attempt_id, digest=opening.hex())
        gateways = {peer.group: peer for peer in await self._peers.gateways()}
        keeper = max((self._peers.own_id, *gateways), key=lambda group: _rank(attempt_id, group))
        if keeper in gateways:
            reply = await self._ask_gateway(gateways[keeper], question)
            if reply.position:
                return reply.position
        return (await self._position_here(question)).position

    async def others(self, attempt_id: str) -> Reply:
        """Return the numbers of the attempt's calls and spans that the gateway's other processes have counted."""
        return await self._ask_siblings(Question(asks="counts", attempt_id=attempt_id))

    async def answer(self, question: Question, *, is_for_all: bool) -> Reply:
        """Answer a question for this process alone, or, with ``is_for_all``, for all processes of this gateway."""
        if question.asks == "position":
            return await self._position_here(question) if is_for_all else self._own_position(question)
        own = self._own(question)
        return _together([own, await self._ask_siblings(question)]) if is_for_all else own

    def _own(self, question: Question) -> Reply:
        if question.asks == "request":
            key = RequestKey(attempt_id=question.attempt_id, size=question.size, digest=question.digest)
            at, request_id = self.requests.known(key)
            return Reply(at=at, request_id=request_id)
        counts = self.usage(question.attempt_id)
        return Reply(calls=counts["calls"], spans=counts["spans"])

    def _own_position(self, question: Question) -> Reply:
        made = self._positions.touched(question.attempt_id, Counter)
        made[question.digest] += 1
        return Reply(position=made[question.digest])

    async def _position_here(self, question: Question) -> Reply:
        """Ask the process of this gateway that counts the attempt's positions; count here if it does not answer."""
        group = self._siblings.group
        if group is None or (keeper := group.keeper_of(question.attempt_id)) == group.number:
            return self._own_position(question)
        status, answer = await self._siblings.ask(keeper, PATH, msgspec.to_builtins(question))
        if status == 200:
            return msgspec.convert(answer, Reply)
        _log.warning("process %d, which counts the calls of attempt %s, is away", keeper, question.attempt_id)
        return self._own_position(question)

    async def _ask_siblings(self, question: Question) -> Reply:
        """Ask all other processes of this gateway, and combine their replies into one."""
        answers = await self._siblings.ask_all(PATH, msgspec.to_builtins(question))
        return _together([msgspec.convert(answer, Reply) for answer in answers.values()])

    async def _ask_gateway(self, peer: AnnouncedGateway, question: Question) -> Reply:
        status, text = await self._peers.ask(peer, PATH, msgspec.to_builtins(question))
        if status == 200:
            return msgspec.json.decode(text, type=Reply)
        _log.warning("%s; it does not say what it knows of attempt %s: %s", peer, question.attempt_id, text)
        return Reply()


@dataclass(frozen=True, eq=False, kw_only=True)
class AttemptFactsApi:
    """``POST /peers``: answers the questions of other processes and gateways."""

    facts: AttemptFacts
    admission: Admission

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one question; raises a 403 :class:`Problem` unless another gateway or process asks."""
        self.admission.caller(request, "admin", what=f"{PATH}, which is for the gateways of one store,")
        question = await self.admission.read(request, Question, form="a question about an attempt")
        is_for_all = request.headers.get(PEER_HEADER) != SIBLING
        return web.json_response(msgspec.to_builtins(await self.facts.answer(question, is_for_all=is_for_all)))


def _together(replies: Sequence[Reply]) -> Reply:
    """Combine several replies into one, with the sums of their counts and the newest of their requests."""
    newest = max(replies, key=lambda each: each.at, default=Reply())
    return Reply(
        request_id=newest.request_id,
        at=newest.at,
        calls=sum(each.calls for each in replies),
        spans=sum(each.spans for each in replies),
    )


def _rank(attempt_id: str, group: str) -> bytes:
    return blake2b(f"{attempt_id}\n{group}".encode(), digest_size=8).digest()
