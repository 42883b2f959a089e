"""Pictures by URL: fetched from the listed hosts alone, at public addresses alone, and within limits."""

import asyncio
import socket
import threading
from collections import Counter
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from agl.errors import ConfigError
from agl_gateway.relay import pictures
from agl_gateway.relay.pictures import is_public
from agl_gateway.settings import Settings

from .conftest import listening
from .test_media import PICTURE, calls_of, coded, digest, image, input_image, post, said
from .test_spool import open_attempt

HOST = "pictures.example.com"


class Names:
    """Stands in for the name server: every host of ``example.com`` is at ``addresses``, and lookups are counted."""

    def __init__(self, monkeypatch, *addresses: str) -> None:
        self.addresses = addresses or ("127.0.0.1",)
        self.asked = Counter()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)
        if not addresses:
            monkeypatch.setattr(pictures, "is_public", lambda address: address == "127.0.0.1")

    def look_up(self, host, port, *rest, **more):
        if not str(host).endswith("example.com"):
            return self._real(host, port, *rest, **more)
        self.asked[host] += 1
        return [found for one in self.addresses for found in self._real(one, port, *rest, **more)]


class PictureHost:
    """The server of the pictures; ``paths`` counts the requests."""

    def __init__(self) -> None:
        self.paths = Counter()
        self.port = 0
        self.hang = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths[request.path] += 1
        assert "authorization" not in request.headers
        match request.path:
            case "/missing.png":
                raise web.HTTPNotFound
            case "/page":
                return web.Response(text="<html>")
            case "/large.png":
                reply = web.StreamResponse()
                await reply.prepare(request)
                await reply.write(PICTURE)
                for _ in range(300):
                    await reply.write(bytes(100_000))
                return reply
            case "/slow.png":
                await self.hang.wait()
            case "/moved.png":
                raise web.HTTPFound(f"http://cdn.{HOST}:{self.port}/a.png")
            case "/loop.png":
                raise web.HTTPFound("/loop.png")
            case path if path.startswith("/to/"):
                raise web.HTTPFound(request.query["url"])
        return web.Response(body=PICTURE, content_type="text/plain")


@asynccontextmanager
async def hosting():
    host = PictureHost()
    async with listening(host.answer) as url:
        host.port = urlsplit(url).port
        try:
            yield host, f"http://{HOST}:{host.port}"
        finally:
            host.hang.set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", lambda url: said(image(url), image(url))),
        (
            "/v1/responses",
            lambda url: {"model": "main_llm", "input": [{"role": "user", "content": [input_image(url)]}]},
        ),
        ("/v1/messages", lambda url: said({"type": "image", "source": {"type": "url", "url": url}})),
        (
            "/v1beta/models/main_llm:generateContent",
            lambda url: {"contents": [{"parts": [{"fileData": {"mimeType": "image/png", "fileUri": url}}]}]},
        ),
    ],
)
@pytest.mark.parametrize("name", ["a.png", "moved.png"])
async def test_model_gets_a_fetched_picture_as_a_data_url_and_the_record_its_digest(
    serving, server, monkeypatch, path, body, name
):
    names = Names(monkeypatch)
    async with hosting() as (host, root), serving(fetch_media=["example.com"]) as it:
        attempt_id, token = await open_attempt(it)
        for _ in range(3):
            assert 200 == await post(it, token, body(f"{root}/{name}"), path)
        sent = str(server.calls[-1].json)
        assert coded(PICTURE) in sent
        assert HOST not in sent
        calls = await calls_of(it, attempt_id)
        assert {digest(PICTURE)} == {reference for call in calls for reference in call.inputs}
        assert [PICTURE] == [blob.data for blob in await it.store.blobs([digest(PICTURE)])]
        assert {1} == set(host.paths.values())
        assert {1} == set(names.asked.values())  # it connects to the address that it checked
        assert 0 == it.bodies_held
        other_id, other = await open_attempt(it)
        assert 200 == await post(it, other, body(f"{root}/{name}"), path)
        assert 2 == host.paths[f"/{name}"]
        await calls_of(it, other_id)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://localhost/",
        "http://2130706433/",
        "http://example.com.evil.org/a.png",
        "http://notexample.com/a.png",
        "http://example.com@127.0.0.1/a.png",
        "file:///etc/passwd",
        "file://example.com/etc/passwd",
        "ftp://example.com/a.png",
        "http://[::1",
        "/etc/passwd",
    ],
)
async def test_url_of_an_unlisted_host_or_scheme_goes_to_the_model_as_it_is(serving, server, monkeypatch, url):
    names = Names(monkeypatch)
    async with serving(fetch_media=["example.com"]) as it:
        attempt_id, token = await open_attempt(it)
        assert 200 == await post(it, token, said(image(url)))
        assert url == server.calls[-1].json["messages"][0]["content"][0]["image_url"]["url"]
        (call,) = await calls_of(it, attempt_id)
        assert (url,) == call.inputs
        assert not names.asked


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.1.2.3", "::1", "::ffff:127.0.0.1", "fe80::1"])
async def test_listed_host_at_an_address_that_is_not_public_is_not_asked(serving, server, monkeypatch, address):
    Names(monkeypatch, "93.184.215.14", address)
    async with hosting() as (host, root), serving(fetch_media=[HOST]) as it:
        attempt_id, token = await open_attempt(it)
        assert 400 == await post(it, token, said(image(f"{root}/a.png")))
        (call,) = await calls_of(it, attempt_id)
        assert "an address that is not public" in call.error
        assert (0, 0) == (host.paths.total(), len(server.calls))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing.png", "HTTP 404"),
        ("page", "it is not a PNG, JPEG, GIF or WebP picture"),
        ("large.png", "it has more than 20,000,000 bytes"),
        ("slow.png", "no answer within"),
        ("loop.png", "more than 3 redirects"),
        ("to/?url=http://169.254.169.254/", "a host that fetch_media does not list"),
        ("to/?url=http://localhost/", "a host that fetch_media does not list"),
        ("to/?url=file:///etc/passwd", "a host that fetch_media does not list"),
    ],
)
async def test_picture_that_cannot_be_fetched_is_a_400_with_the_reason(serving, server, monkeypatch, path, reason):
    Names(monkeypatch)
    monkeypatch.setattr(pictures, "_LIMIT_S", 0.5 if path == "slow.png" else 60.0)
    async with hosting() as (_, root), serving(fetch_media=[HOST]) as it:
        attempt_id, token = await open_attempt(it)
        assert 400 == await post(it, token, said(image(f"{root}/{path}")))
        (call,) = await calls_of(it, attempt_id)
        assert reason in call.error
        assert (0, 0) == (len(server.calls), it.bodies_held)


async def test_request_with_too_many_or_too_large_pictures_is_refused(serving, monkeypatch):
    Names(monkeypatch)
    monkeypatch.setattr(pictures, "_MAX_TOTAL", 3 * len(PICTURE))
    async with hosting() as (host, root), serving(fetch_media=[HOST]) as it:
        _, token = await open_attempt(it)
        urls = [image(f"{root}/{number}.png") for number in range(101)]
        assert 400 == await post(it, token, said(*urls))
        assert 0 == host.paths.total()
        assert 413 == await post(it, token, said(*urls[:4]))
        assert 200 == await post(it, token, said(*urls[:3]))
        assert 0 == it.bodies_held


async def test_request_does_not_wait_for_itself_where_the_budget_is_small(serving, monkeypatch):
    Names(monkeypatch)
    async with hosting() as (_, root), serving(fetch_media=[HOST], max_bodies=1_000_000, bodies_wait_s=2.0) as it:
        _, token = await open_attempt(it)
        assert 200 == await post(it, token, said(*(image(f"{root}/{number}.png") for number in range(5))))
        assert 0 == it.bodies_held


async def test_international_host_is_compared_in_its_encoded_form(serving, server, monkeypatch):
    Names(monkeypatch)
    async with hosting() as (host, _), serving(fetch_media=["xn--bcher-kva.example.com"]) as it:
        _, token = await open_attempt(it)
        assert 200 == await post(it, token, said(image(f"http://bücher.example.com:{host.port}/a.png")))
        assert coded(PICTURE) in str(server.calls[-1].json)


async def test_large_pictures_are_encoded_outside_the_event_loop(serving, monkeypatch):
    Names(monkeypatch)
    monkeypatch.setattr(pictures, "LARGE", 10)
    threads = []
    inlined = pictures._inlined
    monkeypatch.setattr(
        pictures, "_inlined", lambda *each: (threads.append(threading.current_thread()), inlined(*each))[1]
    )
    async with hosting() as (_, root), serving(fetch_media=[HOST]) as it:
        _, token = await open_attempt(it)
        assert 200 == await post(it, token, said(image(f"{root}/a.png")))
        assert threading.current_thread() not in threads
        assert 1 == len(threads)


@pytest.mark.parametrize(
    "host", ["https://example.com", "*.example.com", "localhost", "", "example.com/a", "127.0.0.1", "127.1"]
)
def test_setting_takes_names_of_hosts_only(host):
    with pytest.raises(ConfigError, match="give a host such as example"):
        Settings(fetch_media=(host,))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        *((address, False) for address in ("0.0.0.0", "100.64.0.1", "192.168.0.1", "172.16.0.1", "224.0.0.1")),
        *((address, False) for address in ("::", "fc00::1", "fe80::1%eth0", "ff02::1", "64:ff9b::7f00:1")),
        *((address, False) for address in ("2002:7f00:1::", "::ffff:169.254.169.254", "2001:0:7f00:1::")),
    ],
)
def test_address_is_public_only_if_it_is_global_and_stands_for_itself(address, expected):
    assert expected == is_public(address)
