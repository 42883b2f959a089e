"""A gateway with a certificate from an authority that the test creates."""

import asyncio
import os
import re
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from agl.errors import ConfigError, StoreError
from agl.schemas import Rollout, new_rollout_id
from agl.stores import MemoryStore
from agl_gateway.access.certificate import Certificate
from agl_gateway.client import HttpStore
from agl_gateway.processes.announcement import gateways_of
from agl_run.access.tokens import AdminKey
from agl_run.worker.remote_gateway import RemoteGateway
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.waiting import eventually

from .conftest import ADMIN, SECRET

AGENT = """
import openai


def ask(task, resources):
    with openai.OpenAI(max_retries=0) as client:
        assert str(client.base_url).startswith("https://"), client.base_url
        asked = [{"role": "user", "content": task["question"]}]
        answer = client.chat.completions.create(model="main_llm", messages=asked)
    return float(answer.choices[0].message.content == "hello")
"""

EXPERIMENT = """
[experiment]
name = "tls-{runner}"
agent = "tls_agent:ask"
store = "sqlite:///runs.db"
train = "tasks.jsonl"

[runner]
use = "{runner}"

[policy.main_llm]
use = "openai"
base_url = "{url}"
api_key_env = ""
model = "scripted"

[gateway]
ca = "ca.pem"
params = {{ tls_cert = "cert.pem", tls_key = "key.pem" }}
"""


def write(authority: trustme.CA, folder: Path, *names: str) -> tuple[Path, Path]:
    """Write a new certificate, by default for this machine, and its key; returns their paths."""
    made = authority.issue_cert(*(names or ("localhost", "127.0.0.1")))
    cert, key = folder / "cert.pem", folder / "key.pem"
    made.private_key_pem.write_to_path(key)
    cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
    return cert, key


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    return made


async def serial(port: int, authority: trustme.CA) -> int:
    """Return the serial number of the certificate that a new connection gets."""
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    found = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return int(found, 16)


@pytest.mark.long
def test_command_reaches_a_served_store_over_tls_if_it_trusts_the_authority(tmp_path, authority):
    cert, key = write(authority, tmp_path)
    environment = {**os.environ, "AGL_TOKEN": "a-token-of-the-tests-0123456789", "XDG_STATE_HOME": str(tmp_path)}
    agl = [sys.executable, "-m", "agl"]
    serving = subprocess.Popen(
        [*agl, "serve", "--store", "served.db", "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        found = re.search(r"https://127\.0\.0\.1:\d+", serving.stdout.readline())
        assert found is not None

        def listed(**trust: str) -> subprocess.CompletedProcess[str]:
            command = [*agl, "doctor", found[0], "--json"]
            return subprocess.run(command, env={**environment, **trust}, cwd=tmp_path, capture_output=True, text=True)

        trusted = listed(SSL_CERT_FILE=str(tmp_path / "ca.pem"))
        assert "answers in" in trusted.stdout, trusted.stderr
        assert "writes to the store" in trusted.stdout
        assert "certificate is not trusted here by the system's authorities" in listed().stdout
    finally:
        serving.kill()
        serving.communicate()


async def test_renewed_certificate_serves_new_connections_without_a_restart(serving, tmp_path, authority):
    certificate = Certificate(*write(authority, tmp_path))
    async with serving(certificate=certificate) as it:
        port = urlsplit(it.url).port
        assert it.url.startswith("https://")
        first = await serial(port, authority)
        certificate.look()
        assert first == await serial(port, authority)
        (tmp_path / "key.pem").write_text("not a key")
        certificate.look()
        assert first == await serial(port, authority)
        write(authority, tmp_path)
        certificate.look()
        assert first != await serial(port, authority)


async def test_certificate_that_is_being_exchanged_is_no_error(tmp_path, authority, monkeypatch):
    """The files may disappear right after the gateway has seen that they exist."""
    cert, key = write(authority, tmp_path)
    certificate = Certificate(cert, key)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    cert.unlink()
    key.unlink()
    certificate.look()


async def test_store_and_worker_trust_the_authority_of_a_file_alone(serving, tmp_path, authority, monkeypatch):
    cert, key = write(authority, tmp_path)
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    ca = tmp_path / "ca.pem"
    async with serving(certificate=Certificate(cert, key)) as it:
        assert 0 <= await _asked(f"{it.url}?ca={ca}")
        assert "" == await RemoteGateway(it.url, key=AdminKey(SECRET), ca=ca).look()
        for file, trusted in ((other, str(other)), (None, "the system's authorities")):
            with pytest.raises(StoreError, match="its certificate is not trusted here") as caught:
                await _asked(f"{it.url}?ca={file}" if file else it.url)
            problem = await RemoteGateway(it.url, key=AdminKey(SECRET), ca=file).look()
            assert "certificate is not trusted here" in problem
            assert "Name the file of its authority as AGL_CA_FILE" in problem
            assert trusted in problem
            assert trusted in str(caught.value)
        monkeypatch.setenv("AGL_CA_FILE", str(ca))
        assert 0 <= await _asked(it.url)
    async with serving(certificate=Certificate(*write(authority, tmp_path, "elsewhere.example"))) as it:
        with pytest.raises(StoreError, match=r"not valid for '127\.0\.0\.1'"):
            await _asked(it.url)


async def _asked(url: str) -> int:
    """Return the cursor of the store that a gateway serves."""
    store = HttpStore(url, token=ADMIN)
    try:
        return await store.cursor()
    finally:
        await store.close()


async def test_https_to_a_port_without_it_says_so(serving):
    async with serving() as it:
        problem = await RemoteGateway(it.url.replace("http:", "https:"), key=AdminKey(SECRET)).look()
        assert "does not speak TLS" in problem


def test_authorities_that_cannot_be_used_are_refused_with_the_places_to_name_them(tmp_path):
    (tmp_path / "ca.pem").write_text("none")
    for file in ("ca.pem", "absent.pem"):
        with pytest.raises(ConfigError, match="as AGL_CA_FILE, "):
            HttpStore(f"https://gateway:4747?ca={tmp_path / file}", token=ADMIN)
    with pytest.raises(ConfigError, match="has no TLS"):
        HttpStore("http://gateway:4747?ca=ca.pem", token=ADMIN)
    with pytest.raises(ConfigError, match="has the setting 'cert'"):
        HttpStore("https://gateway:4747?cert=ca.pem", token=ADMIN)


async def test_gateways_of_one_store_reach_each_other_over_tls(serving, tmp_path, authority, monkeypatch):
    monkeypatch.setenv("AGL_CA_FILE", str(tmp_path / "ca.pem"))
    certificate, store = Certificate(*write(authority, tmp_path)), MemoryStore()
    shared = {"store": store, "certificate": certificate, "is_shared": True}
    async with (
        serving(**shared, spool=tmp_path / "one") as one,
        serving(**shared, spool=tmp_path / "two") as two,
    ):
        (rollout,) = await store.enqueue([Rollout(rollout_id=new_rollout_id(), task={})])
        (claim,) = await store.claim(worker="test")
        await eventually(lambda: _knows(store, 2))
        await one.peers.settle(claim.attempt.attempt_id)
        monkeypatch.delenv("AGL_CA_FILE")
        (peer,) = await two.peers.gateways()
        status, text = await two.peers.ask(peer, "/settle", {"attempt_id": claim.attempt.attempt_id})
        assert (0, True) == (status, "certificate is not trusted here" in text), rollout


async def _knows(store, number: int) -> bool:
    return number == len(await gateways_of(store))


@pytest.mark.long
def test_agents_of_an_experiment_with_a_certificate_call_its_gateway_over_tls(tmp_path, authority):
    """Agents in this process and in a separate one trust the authority because of one line in the experiment's file."""
    write(authority, tmp_path)
    folder = tmp_path / "experiment"
    folder.mkdir()
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).rename(folder / name)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "SSL_", "AGL_"))
    }
    environment |= {"AGL_SECRET": SECRET.decode(), "XDG_STATE_HOME": str(tmp_path / "state")}
    (folder / "tls_agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text('{"question": "hi"}\n')
    with ScriptedModelServer(default=Reply(text="hello")) as server:
        for runner in ("async", "process"):
            file = folder / f"{runner}.toml"
            file.write_text(EXPERIMENT.format(runner=runner, url=server.base_url))
            command = [sys.executable, "-m", "agl", "dev", file.name, "--json"]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert '"reward":1.0' in done.stdout, done.stdout + done.stderr


def test_files_that_are_no_pair_are_refused_with_advice(tmp_path, authority):
    cert, _ = write(authority, tmp_path)
    with pytest.raises(ConfigError, match="its private key with --tls-key"):
        Certificate(cert, tmp_path / "absent.pem")
