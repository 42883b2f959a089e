"""The servers of models are asked through the environment's proxy, and errors and ``agl doctor`` name it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.request import getproxies_environment

import aiohttp
import pytest
from aiohttp import web

from agl.contracts import POLICY_KEY_ENV, Upstream
from agl_gateway.cli.doctor import models, patient_of
from agl_gateway.relay.routing import proxy_for

ELSEWHERE = "http://models.invalid/v1"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@asynccontextmanager
async def proxy() -> AsyncIterator[tuple[str, list[str]]]:
    """Run a proxy that answers for every model itself and opens no tunnel; yields its URL and what it was asked."""
    asked: list[str] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        asked.append(f"{request.method} {request.raw_path} {request.headers.get('proxy-authorization', '')}".strip())
        if request.method == "CONNECT":
            return web.Response(status=403)
        return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": "by proxy"}}]})

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://me:secret@127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


async def answered(stage: Any, base_url: str, **given: str) -> tuple[int, str]:
    """Call a model at ``base_url`` through a gateway; returns the status and the text of the answer."""
    upstream = Upstream(name="main_llm", base_url=base_url, **given)
    async with stage(upstreams=[upstream]) as it, aiohttp.ClientSession() as client:
        _, token = await it.open_attempt()
        body = {"model": "main_llm", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {token}"}
        async with client.post(f"{it.url}/v1/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.text()


async def test_upstream_is_asked_through_the_proxy_of_the_environment(stage, monkeypatch):
    async with proxy() as (url, asked):
        monkeypatch.setenv("HTTP_PROXY", url)
        status, text = await answered(stage, ELSEWHERE)
    assert (200, True) == (status, "by proxy" in text)
    assert [f"POST {ELSEWHERE}/chat/completions Basic bWU6c2VjcmV0"] == asked


async def test_upstream_with_an_umlaut_in_its_name_is_asked_by_its_encoded_name(stage, monkeypatch):
    async with proxy() as (url, asked):
        monkeypatch.setenv("HTTP_PROXY", url)
        status, _ = await answered(stage, "http://müller.invalid:8000/v1")
    assert 200 == status
    assert "POST http://xn--mller-kva.invalid:8000/v1/chat/completions" in asked[0]


async def test_upstreams_of_this_machine_and_of_no_proxy_are_asked_directly(stage, server, monkeypatch):
    async with proxy() as (url, asked):
        monkeypatch.setenv("HTTP_PROXY", url)
        monkeypatch.setenv("NO_PROXY", "example.org, .invalid")
        assert 200 == (await answered(stage, server.base_url))[0]
        status, text = await answered(stage, ELSEWHERE)
    assert (502, False) == (status, "through the proxy" in text)
    assert [] == asked


@pytest.mark.parametrize(
    ("entry", "direct", "proxied"),
    [
        ("10.0.0.0/8", "http://10.1.2.3:8000/v1", "http://11.1.2.3:8000/v1"),
        ("10.0.0.5/8", "http://10.1.2.3/v1", "http://models.example/v1"),
        ("fd00::/8", "https://[fd12::1]:8000/v1", "https://[fe80::1]/v1"),
        ("fd00:0::1", "http://[fd00::1]:8000/v1", "http://[fd00::2]:8000/v1"),
        ("[fd00::1]:8000", "http://[fd00::1]:8000/v1", "http://[fd00::1]:8001/v1"),
        ("10.0.0.5:8000", "http://10.0.0.5:8000/v1", "http://10.0.0.5:8001/v1"),
        ("models.example", "https://eu.models.example/v1", "https://my-models.example/v1"),
        (".models.example", "https://models.example/v1", "https://my-models.example/v1"),
        ("*.Models.example:443", "https://eu.models.example/v1", "http://eu.models.example/v1"),
        ("other, 10.0.0.0/33 ,models.example", "http://models.example/v1", "http://10.0.0.1/v1"),
        ("müller.example", "http://müller.example/v1", "http://example/v1"),
        (".,*.,[],:80,models.example", "http://models.example/v1", "http://example/v1"),
    ],
)
def test_entry_of_no_proxy_exempts_the_servers_that_it_names(monkeypatch, entry, direct, proxied):
    monkeypatch.setenv("HTTP_PROXY", "proxy:3128")
    monkeypatch.setenv("HTTPS_PROXY", "proxy:3128")
    monkeypatch.setenv("NO_PROXY", entry)
    found = [proxy_for(url, getproxies_environment()) for url in (direct, proxied)]
    assert ["", "http://proxy:3128"] == found


def test_star_in_no_proxy_exempts_every_server(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "proxy:3128")
    monkeypatch.setenv("NO_PROXY", "*")
    assert "" == proxy_for(ELSEWHERE, getproxies_environment())


async def test_policies_of_the_run_on_other_machines_are_asked_directly(stage, monkeypatch):
    async with proxy() as (url, asked):
        monkeypatch.setenv("HTTP_PROXY", url)
        monkeypatch.setenv(POLICY_KEY_ENV, "the run's own key of its policies")
        status, _ = await answered(stage, ELSEWHERE, api_key_env=POLICY_KEY_ENV)
    assert 502 == status
    assert [] == asked


@pytest.mark.parametrize(
    ("variable", "base_url", "reason"),
    [
        ("HTTP_PROXY", ELSEWHERE, "Cannot connect to host 127.0.0.1:9"),
        ("HTTPS_PROXY", "https://models.invalid/v1", "the proxy answers 403"),
    ],
)
async def test_error_names_the_proxy_without_its_password(stage, monkeypatch, variable, base_url, reason):
    async with proxy() as (url, _):
        url = url if variable == "HTTPS_PROXY" else "me:secret@127.0.0.1:9"
        monkeypatch.setenv(variable, url)
        status, text = await answered(stage, base_url)
    shown = f"http://{url.rpartition('@')[2]}"
    assert 502 == status
    for part in (f"through the proxy {shown},", reason, "add models.invalid to NO_PROXY"):
        assert part in text
    assert "secret" not in text


def test_doctor_names_the_proxy_of_each_model_server_and_base_urls_that_cannot_work(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "direct.example,10.0.0.0/8")
    servers = {
        "hosted": '"https://models.example/v1"',
        "two": '["https://direct.example/v1", "http://127.0.0.1:8000/v1"]',
        "near": '"https://10.1.2.3/v1"',
        "odd": '"http://127.0.0.1:8000/v1/chat/completions"',
    }
    file = tmp_path / "experiment.toml"
    policies = [f'[policy.{name}]\nuse = "openai"\nmodel = "m"\nbase_url = {url}' for name, url in servers.items()]
    file.write_text("\n".join(['[experiment]\nname = "x"\nagent = "agent:solve"', *policies]))
    found = {finding.check: finding for finding in models(patient_of(str(file)).models)}
    expected = "through http://proxy:3128, except those in NO_PROXY, which is 'direct.example,10.0.0.0/8'"
    assert expected in found["proxy for https"].text
    assert "asked through the proxy http://proxy:3128" in found["model server 1 of hosted"].text
    assert "direct.example/v1 is asked directly (NO_PROXY has direct.ex" in found["model server 1 of two"].text
    assert "10.1.2.3/v1 is asked directly (NO_PROXY has 10.0.0.0/8)" in found["model server 1 of near"].text
    assert "8000/v1 is asked directly" in found["model server 2 of two"].text
    odd = found["model server 1 of odd"]
    assert ("wrong", True) == (odd.state, "write http://127.0.0.1:8000/v1" in odd.text)
    assert "secret" not in str(found)
