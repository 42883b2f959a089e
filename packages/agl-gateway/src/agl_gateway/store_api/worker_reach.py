"""Restricts a worker's token at the store API to the everyday work of a worker, within one experiment.

Methods that are not listed here are refused. Rollouts and attempts of other experiments appear not to exist. A version
of a resource belongs to the experiment while it is live there, or pinned by a running rollout.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from agl.contracts import Change, RolloutQuery, SpanQuery, Store
from agl.errors import FencedError, NotFoundError
from agl.schemas import Claim, Span, rollout_id_of
from agl.stores import all_spans
from agl_gateway.access.identity import RunningAttempts
from agl_gateway.recent import Recent
from agl_gateway.wire.problems import Problem
from agl_inspect.presence import OWNER
from agl_run.access import AttemptToken, AttemptTokens, IssuedClaim, issue_token

WORKER_METHODS = (
    *("announce", "append_spans", "attempts", "claim", "count_rollouts", "experiments", "finish", "presences"),
    *("recordings", "renew", "resource", "rollouts", "spans", "withdraw"),
)
"""The store methods that a worker's token may call, each within its experiment only."""

_REMEMBERED = 20_000
_PAGE = 1000


class WorkerReach:
    """Checks the calls that workers' tokens make; used in the gateway's event loop.

    Args:
        tokens: Signs the tokens of claimed attempts.
        attempts: Knows which attempts still run.
    """

    def __init__(self, store: Store, *, tokens: AttemptTokens, attempts: RunningAttempts) -> None:
        self._store = store
        self._tokens = tokens
        self._attempts = attempts
        self._experiments: Recent[str, str] = Recent(_REMEMBERED)
        self._versions: Recent[tuple[str, str, str], None] = Recent(_REMEMBERED)

    async def narrowed(self, claim: AttemptToken, name: str, params: dict[str, Any]) -> dict[str, Any]:
        """Check a call, and return its parameters with every query restricted to the token's experiment.

        Raises:
            Problem: 403 for a method or an experiment that the token does not allow.
            NotFoundError: A rollout, attempt or version does not belong to the token's experiment.
            FencedError: A reward is for an attempt that has ended.
        """
        if name not in WORKER_METHODS:
            raise Problem(403, f"{_this(claim)} does not allow {name!r}; an admin token does")
        match name:
            case "claim" | "presences":
                _require_own(claim, name, params["experiment"])
            case "experiments":
                _require_own(claim, name, params["name"])
            case "announce":
                presence = params["presence"]
                _require_own(claim, name, presence.experiment)
                _require_member(claim, name, [presence.member])
            case "withdraw":
                _require_own(claim, name, params["experiment"])
                _require_member(claim, name, params["members"])
            case "rollouts" | "count_rollouts" | "recordings":
                return await self._narrowed_query(claim, name, params)
            case "resource":
                await self._require_version(claim, params["name"], params["version"])
            case _:
                await self.require(claim, _rollouts_of(claim, name, params))
                await self._require_rewards(claim, _spans_of(name, params))
        return params

    async def require(self, claim: AttemptToken, rollout_ids: Sequence[str]) -> None:
        """Raise :class:`NotFoundError` unless all of ``rollout_ids`` belong to the token's experiment."""
        known = {each: self._experiments.get(each) for each in rollout_ids}
        known.update(await self._read([each for each, experiment in known.items() if experiment is None]))
        for rollout_id, experiment in known.items():
            if experiment != claim.experiment:
                raise NotFoundError("rollout", rollout_id, f"{_this(claim)} reaches no others; an admin token does")

    async def experiment_of(self, rollout_ids: Sequence[str]) -> str:
        """Return the common experiment of these rollouts; ``""`` if they belong to several or do not exist."""
        found = set((await self._read(list(rollout_ids))).values())
        return found.pop() if len(found) == 1 else ""

    def issued(self, claim: AttemptToken, claims: Sequence[Claim]) -> list[Claim]:
        """Return the claims that belong to the token's experiment, each with a token for its attempt."""
        own = [each for each in claims if each.rollout.experiment == claim.experiment]
        for each in own:
            self._experiments[each.rollout.rollout_id] = claim.experiment
            for name, version in each.rollout.resources.items():
                self._versions[claim.experiment, name, version] = None
        tokens = [issue_token(self._tokens, each.rollout, each.attempt) for each in own]
        return [
            IssuedClaim(rollout=each.rollout, attempt=each.attempt, token=token)
            for each, token in zip(own, tokens, strict=True)
        ]

    def on_changes(self, changes: Sequence[Change]) -> None:
        """Drop cached rollouts that have been created anew under another experiment."""
        for change in changes:
            if change.kind == "rollout" and self._experiments.get(change.key, change.experiment) != change.experiment:
                del self._experiments[change.key]

    def forget(self) -> None:
        """Drop all cached rollouts; the next calls read them from the store again."""
        self._experiments.clear()

    async def _narrowed_query(self, claim: AttemptToken, name: str, params: dict[str, Any]) -> dict[str, Any]:
        query: RolloutQuery = params["query"]
        if query.ids and query.experiment in (None, claim.experiment):
            await self.require(claim, query.ids)
        else:
            _require_own(claim, name, query.experiment)
        spans = params.get("spans")
        if isinstance(spans, SpanQuery) and spans.attempt_id:
            await self.require(claim, [rollout_id_of(spans.attempt_id)])
        return {**params, "query": msgspec.structs.replace(query, experiment=claim.experiment)}

    async def _read(self, rollout_ids: Sequence[str]) -> dict[str, str]:
        """Return the experiment of each rollout, by rollout id; rollouts that do not exist are left out."""
        found: dict[str, str] = {}
        for start in range(0, len(rollout_ids), _PAGE):
            part = tuple(rollout_ids[start : start + _PAGE])
            try:
                page = await self._store.rollouts(RolloutQuery(ids=part, limit=len(part)))
                found.update({rollout.rollout_id: rollout.experiment for rollout in page})
            except NotFoundError:
                if len(part) > 1:
                    for each in part:
                        found.update(await self._read([each]))
        for rollout_id, experiment in found.items():
            self._experiments[rollout_id] = experiment
        return found

    async def _require_version(self, claim: AttemptToken, name: str, version: str | None) -> None:
        if version is None:
            raise Problem(
                403,
                f"the newest version of {name!r} was asked for; {_this(claim)} reads versions by name and version, an "
                "admin token reads any",
            )
        if (claim.experiment, name, version) in self._versions:
            return
        if not await self._is_used(claim.experiment, name, version):
            hint = f"{_this(claim)} reads versions live there or pinned by a running rollout; an admin token reads any"
            raise NotFoundError("resource version", f"{name}@{version}", hint)
        self._versions[claim.experiment, name, version] = None

    async def _is_used(self, experiment: str, name: str, version: str) -> bool:
        lives = [record.live for record in await self._store.experiments(experiment)]
        lives += [one.details.get("live") or {} for one in await self._store.presences(experiment, member=OWNER)]
        if any(live.get(name) == version for live in lives):
            return True
        query = RolloutQuery(experiment=experiment, status=("running",), limit=_PAGE)
        while page := await self._store.rollouts(query):
            if any(rollout.resources.get(name) == version for rollout in page):
                return True
            query = query.next(page[-1])
        return False

    async def _require_rewards(self, claim: AttemptToken, spans: Sequence[Span]) -> None:
        """Raise :class:`FencedError` for a new reward of an attempt that has ended."""
        rewarded = {span.attempt_id: span.rollout_id for span in spans if span.reward is not None}
        for attempt_id, rollout_id in rewarded.items():
            if await self._attempts.runs(rollout_id, attempt_id):
                continue
            known = {span.span_id for span in await all_spans(self._store, rollout_id, attempt_id)}
            if any(s.attempt_id == attempt_id and s.reward is not None and s.span_id not in known for s in spans):
                raise FencedError(
                    f"attempt {attempt_id!r} has ended; {_this(claim)} adds no rewards to it, an admin token does"
                )


def _this(claim: AttemptToken) -> str:
    return f"this worker's token of experiment {claim.experiment!r}"


def _require_own(claim: AttemptToken, name: str, experiment: str | None) -> None:
    if experiment != claim.experiment:
        asked = "every experiment" if experiment is None else f"experiment {experiment!r}"
        raise Problem(403, f"{name!r} asks for {asked}; {_this(claim)} is for no other, an admin token is for all")


def _require_member(claim: AttemptToken, name: str, members: Sequence[str]) -> None:
    if OWNER in members:
        raise Problem(403, f"{name!r} is about the process that runs the experiment; {_this(claim)} is not its own")


def _rollouts_of(claim: AttemptToken, name: str, params: dict[str, Any]) -> list[str]:
    """Return the ids of the rollouts that a store call refers to."""
    match name:
        case "renew":
            return [rollout_id_of(each) for each in params["attempt_ids"]]
        case "finish":
            spans = [span.rollout_id for span in _spans_of(name, params)]
            return [*(rollout_id_of(outcome.attempt_id) for outcome in params["outcomes"]), *spans]
        case "append_spans":
            outside = next((span for span in params["spans"] if not span.attempt_id), None)
            if outside is not None:
                raise Problem(
                    403,
                    f"span {outside.span_id!r} belongs to rollout {outside.rollout_id!r} and to no attempt; "
                    f"{_this(claim)} appends to attempts, an admin token to rollouts too",
                )
            return [each for span in params["spans"] for each in (span.rollout_id, rollout_id_of(span.attempt_id))]
        case _:
            attempt_id = params.get("attempt_id")
            return [params["rollout_id"], *([rollout_id_of(attempt_id)] if attempt_id else [])]


def _spans_of(name: str, params: dict[str, Any]) -> list[Span]:
    if name == "finish":
        return [span for outcome in params["outcomes"] for span in outcome.spans]
    return list(params["spans"]) if name == "append_spans" else []
