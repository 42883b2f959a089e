"""The gateway's status is readable with a known host name or a token, but not by a page in a browser."""

import socket

import aiohttp
import pytest

ADMIN = "an-admin-token-of-the-tests"
PATHS = ("/metrics", "/openapi.json")


async def get(url: str, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("path", PATHS)
async def test_unknown_host_is_refused_unless_it_has_the_admin_token(serving, path: str):
    async with serving() as service:
        for host in ("evil.example", "evil.example:4747", "127.0.0.1.evil.example", "[bad"):
            status, text = await get(f"{service.url}{path}", Host=host)
            assert 403 == status
            assert "--allow-host" in text
            assert 200 == (await get(f"{service.url}{path}", Host=host, Authorization=f"Bearer {ADMIN}"))[0]
            assert 401 == (await get(f"{service.url}{path}", Host=host, Authorization="Bearer wrong"))[0]


@pytest.mark.parametrize("path", PATHS)
async def test_known_hosts_need_no_token(serving, path: str):
    async with serving(known_hosts=("Gateway.internal",)) as service:
        for host in (
            "localhost:1",
            "127.0.0.1:4747",
            "[::1]:4747",
            "10.1.2.3",
            "gateway.INTERNAL",
            socket.gethostname(),
        ):
            assert 200 == (await get(f"{service.url}{path}", Host=host))[0]


@pytest.mark.parametrize("path", PATHS)
async def test_protected_status_needs_the_admin_token(serving, path: str):
    async with serving(is_status_protected=True) as service:
        attempt = service.tokens.issue("ro-1", "ro-1.1", expires_at=2**40)
        assert 401 == (await get(f"{service.url}{path}"))[0]
        assert 403 == (await get(f"{service.url}{path}", Authorization=f"Bearer {attempt}"))[0]
        assert 200 == (await get(f"{service.url}{path}", Authorization=f"Bearer {ADMIN}"))[0]
        assert 200 == (await get(f"{service.url}/healthz", Host="evil.example"))[0]
