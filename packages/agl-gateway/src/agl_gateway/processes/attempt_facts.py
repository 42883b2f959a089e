"""Counts what an attempt does, for the processes and gateways that answer its calls together.

Behind a balancer, or with several processes, each sees a part of an attempt's calls. Three things need all of them: the
id of a request that a client repeats, the position of a call among those with the same opening, which its seed follows
from, and the attempt's limits. One process by itself asks nobody.

A process that is killed forgets what it counted; so do all of them when the gateway is started anew.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

import msgspec
from aiohttp import web

from agl_gateway.access.identity import Identities, key_of, require_scope
from agl_gateway.processes.peers import Peers
from agl_gateway.processes.presence import GatewayRecord
from agl_gateway.processes.siblings import PEER_HEADER, SIBLING, Siblings
from agl_gateway.record.exchanges import RequestIds, RequestKey
from agl_gateway.relay.bodies import BodyReader
from agl_gateway.wire.problems import Problem

_log = logging.getLogger(__name__)

PATH = "/peers"

_MAX_BODY = 64 * 1024
_REMEMBERED = 20_000


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /peers``: what one process asks another about an attempt.

    Attributes:
        asks: ``request``: the id of the request with these bytes; ``position``: the number of the next call with this
            opening; ``counts``: the model calls and spans that were counted.
        digest: Digest of the request's body, or of the call's opening.
        size: Bytes of the request's body.
    """

    asks: Literal["request", "position", "counts"]
    attempt_id: str
    digest: str = ""
    size: int = 0


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question; only what was asked for is set. ``at`` is when the request came, in Unix seconds."""

    request_id: str = ""
    at: float = 0.0
    position: int = 0
    calls: int = 0
    spans: int = 0


class Positions:
    """Numbers the calls of the newest 20,000 attempts that have the same opening."""

    def __init__(self) -> None:
        self._made: OrderedDict[str, Counter[str]] = OrderedDict()

    def next(self, attempt_id: str, opening: str) -> int:
        """Return the position of the attempt's next call with this opening, from 1."""
        made = self._made.setdefault(attempt_id, Counter())
        self._made.move_to_end(attempt_id)
        if len(self._made) > _REMEMBERED:
            self._made.popitem(last=False)
        made[opening] += 1
        return made[opening]


class Usage:
    """Counts the model calls and spans of the newest 20,000 attempts, as this process has seen them."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, Counter[str]] = OrderedDict()

    def of(self, attempt_id: str) -> "Counter[str]":
        """Return the counts of an attempt, to read and to add to: ``calls`` and ``spans``."""
        counts = self._counts.setdefault(attempt_id, Counter())
        self._counts.move_to_end(attempt_id)
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
        return counts


class AttemptFacts:
    """What this process knows of attempts, and what it learns from the others. Used in one event loop only.

    Attributes:
        requests: Ids of the requests that this process has got.
        usage: The calls and spans that it has counted.
    """

    def __init__(self, siblings: Siblings, peers: Peers) -> None:
        self._siblings = siblings
        self._peers = peers
        self._positions = Positions()
        self.requests = RequestIds()
        self.usage = Usage()

    @property
    def processes(self) -> int:
        """The number of processes of this gateway."""
        return self._siblings.count

    async def find_request(self, key: RequestKey) -> None:
        """Learn the id of a repeated request: that of the newest with its key, which any of the others may have got."""
        question = Question(asks="request", attempt_id=key.attempt_id, digest=key.digest, size=key.size)
        told = [await self._ask_siblings(question)]
        told += [await self._ask_gateway(peer, question) for peer in await self._peers.gateways()]
        newest = max(told, key=lambda each: each.at)
        if newest.at > self.requests.known(key)[0]:
            self.requests.learn(key, newest.at, newest.request_id)

    async def position(self, attempt_id: str, opening: bytes) -> int:
        """Return the position of the attempt's next call with this opening, by the count of one process for all."""
        question = Question(asks="position", attempt_id=attempt_id, digest=opening.hex())
        gateways = {peer.group: peer for peer in await self._peers.gateways()}
        keeper = max((self._peers.own_id, *gateways), key=lambda group: _rank(attempt_id, group))
        if keeper in gateways:
            told = await self._ask_gateway(gateways[keeper], question)
            if told.position:
                return told.position
        return (await self._position_here(question)).position

    async def others(self, attempt_id: str) -> Told:
        """Return the calls and spans of an attempt that the gateway's other processes have counted."""
        return await self._ask_siblings(Question(asks="counts", attempt_id=attempt_id))

    async def answer(self, question: Question, *, is_for_all: bool) -> Told:
        """Answer a question for this process, or for all of this gateway's."""
        if question.asks == "position":
            return await self._position_here(question) if is_for_all else self._own_position(question)
        own = self._own(question)
        return _together([own, await self._ask_siblings(question)]) if is_for_all else own

    def _own(self, question: Question) -> Told:
        if question.asks == "request":
            key = RequestKey(attempt_id=question.attempt_id, size=question.size, digest=question.digest)
            at, request_id = self.requests.known(key)
            return Told(at=at, request_id=request_id)
        counts = self.usage.of(question.attempt_id)
        return Told(calls=counts["calls"], spans=counts["spans"])

    def _own_position(self, question: Question) -> Told:
        return Told(position=self._positions.next(question.attempt_id, question.digest))

    async def _position_here(self, question: Question) -> Told:
        """Ask the process of this gateway that counts for the attempt."""
        group = self._siblings.group
        if group is None or (keeper := group.keeper_of(question.attempt_id)) == group.number:
            return self._own_position(question)
        status, answer = await self._siblings.ask(keeper, PATH, msgspec.to_builtins(question))
        if status == 200:
            return msgspec.convert(answer, Told)
        _log.warning("process %d, which counts the calls of attempt %s, is away", keeper, question.attempt_id)
        return self._own_position(question)

    async def _ask_siblings(self, question: Question) -> Told:
        """Ask all other processes of this gateway."""
        answers = await self._siblings.ask_all(PATH, msgspec.to_builtins(question))
        return _together([msgspec.convert(answer, Told) for answer in answers.values()])

    async def _ask_gateway(self, peer: GatewayRecord, question: Question) -> Told:
        status, text = await self._peers.ask(peer, PATH, msgspec.to_builtins(question))
        if status == 200:
            return msgspec.json.decode(text, type=Told)
        _log.warning("%s; it does not say what it knows of attempt %s: %s", peer, question.attempt_id, text)
        return Told()


class AttemptFactsApi:
    """``POST /peers``: answers the other processes and gateways."""

    def __init__(self, facts: AttemptFacts, *, identities: Identities, bodies: BodyReader) -> None:
        self._facts = facts
        self._identities = identities
        self._bodies = bodies

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one question; raises a 403 :class:`Problem` unless another gateway asks."""
        claim = self._identities.verify(key_of(request.headers))
        require_scope(claim, ("admin",), what=f"{PATH}, which is for the gateways of one store,")
        try:
            question = msgspec.json.decode(await self._bodies.read(request, limit=_MAX_BODY), type=Question)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Problem(400, f"the body is no question about an attempt ({error})") from error
        is_for_all = request.headers.get(PEER_HEADER) != SIBLING
        told = await self._facts.answer(question, is_for_all=is_for_all)
        return web.json_response(msgspec.to_builtins(told))


def _together(told: Sequence[Told]) -> Told:
    """Return the sums of several answers, and the newest request in them."""
    newest = max(told, key=lambda each: each.at, default=Told())
    return Told(
        request_id=newest.request_id,
        at=newest.at,
        calls=sum(each.calls for each in told),
        spans=sum(each.spans for each in told),
    )


def _rank(attempt_id: str, group: str) -> bytes:
    return blake2b(f"{attempt_id}\n{group}".encode(), digest_size=8).digest()
