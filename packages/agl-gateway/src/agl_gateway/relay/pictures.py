"""Fetches the pictures that requests name by URL, so that the model sees, and the record holds, the same bytes.

A gateway that fetches for its clients could be made to reach a network that they cannot reach. So it fetches from the
listed hosts only, and only if all addresses of such a host are public; it connects to the addresses that were checked.
Redirects are checked likewise. It sends no cookies, uses no proxy, and opens no files. All other URLs stay in the
request.
"""

import asyncio
import base64
import errno
import ipaddress
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from agl.contracts import MAX_BLOB_BYTES
from agl.dialects import Request, media_type_of
from agl.urls import shown_url
from agl_gateway.record.exchanges import CallRecord
from agl_gateway.relay.bodies import LARGE, ByteBudget
from agl_gateway.wire.problems import Problem

_LIMIT_S = 20.0
"""Seconds in which all pictures of one request have to arrive."""

_MAX_REDIRECTS = 3
_MAX_URLS = 100
_MAX_TOTAL = 64 * 1024 * 1024
_MAX_CACHED = 64 * 1024 * 1024
_MAX_SHOWN = 200
_OK = 200
_REDIRECTS = (301, 302, 303, 307, 308)
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")


class Pictures:
    """Fetches the pictures of requests. Used in one event loop only; close it after use.

    A picture stays the same for an attempt, whose later requests name it again, as long as the cache of 64 MiB holds
    it.

    Args:
        hosts: The hosts to fetch from, each with every host below it.
        budget: Bytes for the pictures of all requests in progress.
    """

    def __init__(self, hosts: Sequence[str], budget: ByteBudget) -> None:
        self._hosts = tuple(hosts)
        self._budget = budget
        self._cache: dict[tuple[str, str], bytes] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=_PublicResolver()),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"accept": "image/*", "accept-encoding": "identity", "user-agent": "agl-gateway"},
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    @asynccontextmanager
    async def inlined(self, record: CallRecord) -> AsyncGenerator[None]:
        """Replace the pictures' URLs in a call's request by their content; the block holds the bytes in the budget.

        Raises:
            Problem: 400 for a picture that cannot be fetched, 413 for too many bytes, and 503 if other requests hold
                the budget for too long.
        """
        outgoing, urls = record.outgoing, self._urls(record.outgoing.request)
        found: dict[str, bytes] = {}
        deadline = asyncio.get_running_loop().time() + _LIMIT_S
        # Only the first picture waits for the budget, and for half of it at most: a request that waited while it holds
        # its body and other pictures could wait for itself.
        held = await self._budget.take(min(MAX_BLOB_BYTES, self._budget.limit // 2)) if urls else 0
        try:
            for url in urls:
                found[url] = await self._picture(record.attempt_id, url, deadline)
                if (total := sum(map(len, found.values()))) > _MAX_TOTAL:
                    raise Problem(413, f"the request's pictures have more than {_MAX_TOTAL:,} bytes; send fewer")
                self._budget.give(held - total)
                held = total
            if found:
                is_large = len(outgoing.request.body) + held > LARGE
                inline = partial(_inlined, outgoing.request, found)
                request = await asyncio.to_thread(inline) if is_large else inline()
                record.outgoing = replace(outgoing, request=request)
            yield
        finally:
            self._budget.give(held)

    def _urls(self, asked: Request) -> list[str]:
        """Return the URLs of the request's pictures that lie on the listed hosts, each once."""
        if b"http" not in asked.body or b"image" not in asked.body:
            return []
        found: dict[str, None] = {}
        _changed(asked, lambda url: (found.setdefault(url), url)[1])
        urls = [url for url in found if self._is_listed(url)]
        if len(urls) > _MAX_URLS:
            raise Problem(
                400, f"the request names {len(urls)} pictures by URL, and {_MAX_URLS} are allowed; send fewer"
            )
        return urls

    def _is_listed(self, url: str) -> bool:
        try:
            host, scheme = (URL(url).raw_host or "").lower(), URL(url).scheme
        except ValueError:
            return False
        return scheme in ("http", "https") and any(host == one or host.endswith(f".{one}") for one in self._hosts)

    async def _picture(self, attempt_id: str, url: str, deadline: float) -> bytes:
        """Return a picture from the cache or its host."""
        if (data := self._cache.pop((attempt_id, url), None)) is None:
            try:
                async with asyncio.timeout_at(deadline):
                    data = await self._fetched(url)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                reason = str(error) or f"no answer within {_LIMIT_S:g} s"
                shown = shown_url(url)[:_MAX_SHOWN]
                text = f"the picture at {shown} cannot be fetched ({reason}); correct its URL, or send it as a data URL"
                raise Problem(400, text, code="picture_not_fetched") from error
        self._cache[attempt_id, url] = data  # the newest is the last
        while sum(map(len, self._cache.values())) > _MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        return data

    async def _fetched(self, url: str) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._session.get(URL(url), allow_redirects=False) as reply:
                if reply.status == _OK:
                    return await _read(reply)
                if reply.status not in _REDIRECTS:
                    raise ValueError(f"HTTP {reply.status}")
                url = str(reply.url.join(URL(reply.headers.get("location", ""))))
            if not self._is_listed(url):
                raise ValueError("it redirects to a host that fetch_media does not list")
        raise ValueError(f"more than {_MAX_REDIRECTS} redirects")


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for part in reply.content.iter_any():
        data += part
        if len(data) > MAX_BLOB_BYTES:
            raise ValueError(f"it has more than {MAX_BLOB_BYTES:,} bytes")
    if not media_type_of(data).startswith("image/"):
        raise ValueError("it is not a PNG, JPEG, GIF or WebP picture")
    return bytes(data)


class _PublicResolver(AbstractResolver):
    """Resolves names, and refuses those with an address that is not public."""

    def __init__(self) -> None:
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        if not all(is_public(one["host"]) for one in found):
            raise OSError(errno.EACCES, "its host has an address that is not public")
        return found

    async def close(self) -> None:
        await self._inner.close()


def is_public(address: str) -> bool:
    """Return true for a global unicast address that does not stand for another address, as 6to4 addresses do."""
    found = ipaddress.ip_address(address.partition("%")[0])
    is_plain = found.version == 4 or (found in _PUBLIC_IPV6 and found.sixtofour is None)  # no NAT64 or IPv4-mapped
    return is_plain and found.is_global and not found.is_multicast


def _inlined(asked: Request, pictures: dict[str, bytes]) -> Request:
    """Return the request with these pictures, by URL, in place of their URLs."""
    inline = {
        url: f"data:{media_type_of(data)};base64,{base64.b64encode(data).decode()}" for url, data in pictures.items()
    }
    return asked.changed(_changed(asked, lambda url: inline.get(url, url)))


def _changed(asked: Request, visit: Callable[[str], str]) -> dict[str, Any]:
    """Return the fields of a request that may hold pictures, with the result of ``visit`` for each picture's URL."""
    fields = {key: asked.get(key) for key in ("messages", "input")}
    return {key: _visited(value, visit) for key, value in fields.items() if value is not None}


def _visited(value: Any, visit: Callable[[str], str]) -> Any:
    match value:
        case list():
            return [_visited(one, visit) for one in cast("list[Any]", value)]
        case {"type": "image_url", "image_url": {"url": str(url)} as inner}:
            return {**value, "image_url": {**inner, "url": visit(url)}}
        case {"type": "input_image" | "computer_screenshot", "image_url": str(url)}:
            return {**value, "image_url": visit(url)}
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return {**value, "source": _source(visit(url))}
        case dict():
            return {key: _visited(one, visit) for key, one in cast("dict[str, Any]", value).items()}
        case _:
            return value


def _source(url: str) -> dict[str, str]:
    """Return the source of a picture in the messages API."""
    head, _, data = url.partition(";base64,")
    if not data:
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
