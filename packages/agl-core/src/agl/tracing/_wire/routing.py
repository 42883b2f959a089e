"""Decides, without doing it, what happens to a request that leaves a client inside a rollout."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from agl.contracts import Upstream
from agl.dialects import dialect_of, head_of
from agl.schemas import Dialect
from agl.tracing._context import Capture
from agl.tracing._roles import claimants

_ENDPOINTS: dict[Dialect, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "responses": "/responses",
    "messages": "/messages",
    "embeddings": "/embeddings",
}


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes.

    Attributes:
        target: ``gateway``: with the attempt's identity to the gateway, which records it;
            ``record``: where it was going, recorded in this process.
        url: The URL to call, the request's own unless it is redirected.
        dialect: ``None`` for calls to the gateway that are no model calls.
        upstream: The policy it is for, ``None`` for models that no configured policy serves.
        wants_ids: Whether the body should ask for token ids: the policy is trained, and the call goes to its server.
    """

    target: Literal["gateway", "record"]
    url: str
    dialect: Dialect | None
    upstream: Upstream | None = None
    wants_ids: bool = False


def route_of(capture: Capture, *, method: str, url: str, body: bytes | None, names: Sequence[str] = ()) -> Route | None:
    """The route of a request, ``None`` for one that is none of our business.

    Args:
        body: The request's content; ``None`` where it is not in memory, then only calls that already go to the
            gateway are touched.
        names: Who makes the call, innermost first; a policy that claims them is preferred to the model's name where
            a gateway can send the call there.
    """
    dialect = dialect_of(urlsplit(url).path) if method == "POST" else None
    if is_below(url, capture.gateway_url):
        return Route(target="gateway", url=url, dialect=dialect)
    if dialect is None or body is None:
        return None
    head = head_of(body)
    if head is None:
        return None
    is_sent = bool(capture.gateway_url) and dialect != "embeddings"
    claimed = claimants(capture.upstreams, names) if is_sent else ()
    upstream = claimed[0] if claimed else find_upstream(capture.upstreams, model=head.model_name, url=url)
    if upstream is not None and capture.gateway_url:
        query = urlsplit(url).query
        target = f"{capture.gateway_url.rstrip('/')}/v1{_ENDPOINTS[dialect]}" + (f"?{query}" if query else "")
        return Route(target="gateway", url=target, dialect=dialect, upstream=upstream)
    wants_ids = upstream is not None and upstream.is_trained and _same_host(url, upstream.base_url)
    return Route(target="record", url=url, dialect=dialect, upstream=upstream, wants_ids=wants_ids)


def find_upstream(upstreams: Sequence[Upstream], *, model: str, url: str) -> Upstream | None:
    """The policy that a request means: by its name, its model or an alias; the only one also by its own host."""
    for upstream in upstreams:
        names = (upstream.name, upstream.model)
        if model and (model in names or any(fnmatchcase(model, alias) for alias in upstream.aliases)):
            return upstream
    if len(upstreams) == 1 and _same_host(url, upstreams[0].base_url):
        return upstreams[0]
    return None


def is_below(url: str, root: str) -> bool:
    """Whether ``url`` is ``root`` or below it; the host and port must be equal, not only start alike."""
    root = root.rstrip("/")
    return bool(root) and (url == root or url.startswith((root + "/", root + "?")))


def host_of(url: str) -> str:
    """The host that a URL names, without credentials and port; ``""`` where it names none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _same_host(url: str, other: str) -> bool:
    first, second = urlsplit(url), urlsplit(other)
    return (first.scheme, first.netloc) == (second.scheme, second.netloc)
