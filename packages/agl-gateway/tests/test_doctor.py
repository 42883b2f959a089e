"""``agl doctor`` reports the faults of a deployment, and nothing else."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from agl import PluginManager
from agl.contracts import Presence
from agl.schemas import Rollout
from agl.stores import MemoryStore
from agl_gateway.cli import doctor
from agl_gateway.cli.doctor import Finding, Patient, examine, forget_gone, patient_of, ports, transport
from agl_gateway.cli.serve import admin_key_of
from agl_gateway.processes.announcement import GATEWAYS
from agl_gateway.record.spool_file import SpooledCall, SpoolFile
from agl_run.access.tokens import AttemptTokens
from agl_store_sqlite._store import SQLiteStore

from .conftest import ADMIN, SECRET


class SkewedStore(MemoryStore):
    """A store whose clock is two minutes behind."""

    async def presences(self, experiment: str, *, member: str | None = None) -> list[Presence]:
        found = await super().presences(experiment, member=member)
        return [msgspec.structs.replace(each, seen_at=each.seen_at - 120) for each in found]


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set up a machine without faults: a separate state folder, a random key, no token."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("AGL_SECRET", "0f1e2d3c4b5a69788796a5b4c3d2e1f0")
    monkeypatch.delenv("AGL_TOKEN", raising=False)


@pytest.fixture
def manager() -> PluginManager:
    return PluginManager.from_environment()


async def wrong(patient: Patient, manager: PluginManager) -> dict[str, Finding]:
    """Return the findings that are not ok, by check."""
    found = await examine(patient, manager)
    assert found
    return {finding.check: finding for finding in found if finding.state != "ok"}


async def new_store(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    store = SQLiteStore(url)
    await store.cursor()
    await store.close()
    return url


async def test_sound_deployment_has_nothing_wrong_and_nothing_is_left_behind(tmp_path, manager):
    url = await new_store(tmp_path)
    assert {} == await wrong(Patient(store_url=url, spool=tmp_path), manager)
    store = SQLiteStore(url)
    assert {} == await store.load_state("")
    await store.close()


def test_store_that_cannot_be_read_is_not_called_damaged(tmp_path):
    finding = doctor._damage(tmp_path / "none.db")  # pyright: ignore[reportPrivateUsage]  # ``examine`` makes the file
    assert ("warning", "are unread: unable to open database file") == (finding.state, finding.text)


def test_empty_admin_token_leaves_the_token_file_in_charge(tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("environment", "option")]
    for file in files:
        file.write_text(ADMIN)
        file.chmod(0o600)
    monkeypatch.setenv("AGL_TOKEN", "")
    monkeypatch.setenv("AGL_TOKEN_FILE", str(files[0]))
    assert str(files[1]) == admin_key_of(files[1])[1]


async def test_damaged_late_page_of_a_store_is_named(tmp_path, manager, monkeypatch):
    url = await new_store(tmp_path)
    store = SQLiteStore(url)
    await store.enqueue([Rollout(rollout_id=f"ro-{number}", task="x" * 200) for number in range(200)])
    await store.close()
    path = tmp_path / "runs.db"
    data = path.read_bytes()
    path.write_bytes(data[:-8192] + b"\x07" * 4096 + data[-4096:])
    found = await wrong(Patient(store_url=url, spool=tmp_path), manager)
    assert "wrong" == found["pages of the store"].state
    assert "are damaged: " in found["pages of the store"].text
    assert ".recover | sqlite3 NEW" in found["pages of the store"].advice
    monkeypatch.setattr(doctor, "_READ_S", -1.0)
    path.write_bytes(data)
    assert {} == await wrong(Patient(store_url=url, spool=tmp_path), manager)  # a small file is read before the limit


@pytest.mark.parametrize(
    ("name", "value", "check", "state"),
    [
        ("AGL_SECRET", "changeme-changeme-changeme", "signing key", "wrong"),
        ("AGL_SECRET", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "signing key", "wrong"),
        ("AGL_SECRET", "short", "signing key", "wrong"),
        ("AGL_TOKEN", "4f9d0c7a1b2e8365", "admin token", "warning"),
    ],
)
async def test_guessable_secrets_are_named_and_never_shown(monkeypatch, tmp_path, manager, name, value, check, state):
    monkeypatch.setenv(name, value)
    found = await wrong(Patient(spool=tmp_path), manager)
    assert {check: state} == {key: finding.state for key, finding in found.items()}
    assert value not in str(found)


async def test_keys_that_the_experiment_names_and_nobody_set_are_named(tmp_path, manager):
    (tmp_path / "experiment.toml").write_text(
        '[experiment]\nname = "e"\nagent = "a:b"\n[gateway]\nparams = { port = 9, spool = "SPOOL" }\n'
        '[policy.small]\nuse = "openai"\nmodel = "m"\nbase_url = "http://x/v1"\napi_key_env = "NOBODY_SET_THIS"\n'
    )
    patient = patient_of(str(tmp_path / "experiment.toml"))
    assert ([("127.0.0.1", 9)], Path("SPOOL")) == (patient.ports, patient.spool)
    found = await wrong(patient, manager)
    assert ["key NOBODY_SET_THIS"] == list(found)


async def test_spool_that_nobody_drains_is_named_with_what_it_holds(tmp_path, manager):
    file = SpoolFile(tmp_path / "s-0.spool", store_id="s", store_url="postgresql://db/agl")
    file.add([SpooledCall(attempt_id="ro-1.1", spans=[])] * 3)
    assert {} == await wrong(Patient(spool=tmp_path), manager)  # a gateway has it open
    file.close()
    (finding,) = (await wrong(Patient(spool=tmp_path), manager)).values()
    assert "holds 3 calls" in finding.text
    assert "postgresql://db/agl" in finding.text
    assert "start a gateway of that store here" in finding.advice


async def test_gateway_that_is_gone_is_named_until_it_is_forgotten(tmp_path, manager, monkeypatch):
    url = await new_store(tmp_path)
    store = SQLiteStore(url)
    held = {"calls": 7, "size": 900, "is_ended": True}
    details = {"url": "http://far:4747", "machine": "far", "spool": "/spool/x", **held}
    await store.announce(Presence(experiment=GATEWAYS, member="g", session="s", details=details))
    (finding,) = (await wrong(Patient(store_url=url, spool=tmp_path), manager)).values()
    assert "wrong" == finding.state
    assert "on far ended at" in finding.text
    assert "held 7 calls (900 bytes) in /spool/x" in finding.text
    assert 1 == await forget_gone(store)
    await store.close()
    assert {} == await wrong(Patient(store_url=url, spool=tmp_path), manager)


async def test_clock_of_a_store_that_differs_is_named(monkeypatch, manager, tmp_path):
    store = SkewedStore()
    monkeypatch.setattr("agl_gateway.cli.doctor.build_store", lambda manager, url: store)
    (finding,) = (await wrong(Patient(store_url="memory://", spool=tmp_path), manager)).values()
    assert "clock of the store" == finding.check
    assert "differs from this machine's by 12" in finding.text
    assert "NTP" in finding.advice


async def test_gateway_is_asked_with_the_token_of_this_machine(serving, monkeypatch, tmp_path, manager):
    async with serving() as it:
        patient = Patient(gateway_url=it.url, spool=tmp_path)
        found = await wrong(patient, manager)
        assert [f"gateway {it.url}"] == list(found)
        assert "answers 401" in found[f"gateway {it.url}"].text
        monkeypatch.setenv("AGL_SECRET", SECRET.decode())
        assert {"signing key"} == set(await wrong(patient, manager))  # it calls itself a secret
        monkeypatch.setenv("AGL_TOKEN", ADMIN)
        assert {"signing key", "admin token"} == set(await wrong(patient, manager))
    monkeypatch.delenv("AGL_TOKEN")
    found = await wrong(patient, manager)
    assert "does not answer" in found[f"gateway {it.url}"].text


async def test_gateway_is_asked_with_the_token_in_its_url_which_is_never_shown(serving, tmp_path, manager):
    async with serving() as it:
        url = it.url.replace("//", f"//:{ADMIN}@")
        for given in (url, f"{url}/"):
            patient = patient_of(given)
            patient.spool = tmp_path
            found = await examine(patient, manager)
            assert [] == [finding for finding in found if finding.state != "ok"]
            assert {f"gateway {it.url}", f"store {it.url}"} <= {finding.check.rstrip("/") for finding in found}
            assert ADMIN not in str(found) + repr(patient.gateway_url)


def test_ports_are_looked_at_whatever_the_host():
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        taken = server.getsockname()[1]
        found = [*ports([("::1", taken), ("::", taken), ("127.0.0.1", taken)])]
    listens = "something listens there, as it should while the experiment runs"
    assert [listens, listens, "is free"] == [finding.text for finding in found]


def test_port_of_a_host_that_cannot_be_found_is_wrong():
    (finding,) = ports([("no-such-host.invalid", 4747)])
    assert ("port no-such-host.invalid:4747", "wrong") == (finding.check, finding.state)
    assert "host" in finding.advice


async def test_gateway_is_asked_with_a_workers_token_where_there_is_no_key(serving, monkeypatch, tmp_path, manager):
    token = AttemptTokens(SECRET).issue_for_worker("mine", expires_at=time.time() + 60)
    monkeypatch.setenv("AGL_WORKER_TOKEN", token)
    async with serving() as it:
        assert {} == await wrong(Patient(gateway_url=it.url, store_url=it.url, spool=tmp_path), manager)
        monkeypatch.setenv("AGL_WORKER_TOKEN", token[:-2] + "xx")
        assert {f"gateway {it.url}"} == (await wrong(Patient(gateway_url=it.url, spool=tmp_path), manager)).keys()


def test_connections_to_other_machines_without_encryption_are_named():
    urls = ["http://far:4747", "https://far:4747", "http://127.0.0.1:4747", "postgresql://u@db/agl"]
    urls += ["postgresql://u@db/agl?sslmode=verify-full", "postgresql://u@localhost/agl"]
    found = [finding for finding in transport(*urls) if finding.state != "ok"]
    assert ["http://far:4747 is not", "postgresql://db/agl is opened with sslmode=prefer"] == [
        finding.text.split(" encrypted")[0] for finding in found
    ]


@pytest.mark.long
def test_command_says_what_is_wrong_and_ends_with_1(tmp_path):
    environment = {**os.environ, "AGL_SECRET": "changeme-changeme-changeme"}
    command = [sys.executable, "-m", "agl", "doctor", "memory://"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert 1 == done.returncode, done.stderr
    assert "WRONG    signing key: AGL_SECRET looks like a default or an example" in done.stdout
    assert "1 wrong, 0 warnings" in done.stdout
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, cwd=tmp_path)
    states = {found["check"]: found["state"] for found in json.loads(done.stdout)}
    assert ("wrong", "ok") == (states["signing key"], states["clock of the store"])
