"""Reading all of what a store gives page by page."""

from agl.contracts import Store
from agl.schemas import Span

PAGE = 10_000


async def all_spans(store: Store, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
    """All spans of one attempt in order of ``sequence``, by default of the deciding or running one.

    Raises :class:`agl.errors.NotFoundError` for an unknown rollout.
    """
    spans: list[Span] = []
    while True:
        after = spans[-1].sequence if spans else 0
        page = await store.spans(rollout_id, attempt_id=attempt_id, after=after, limit=PAGE)
        spans.extend(page)
        if len(page) < PAGE:
            return spans
