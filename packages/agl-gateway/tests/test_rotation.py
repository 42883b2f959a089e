"""Keys are replaced under load: no call fails meanwhile, and an old token is refused once its key is removed."""

import asyncio
from pathlib import Path

import openai
import pytest

from agl.errors import TokenError
from agl.schemas import Rollout, new_rollout_id
from agl.stores import MemoryStore
from agl_gateway.cli.serve import admin_key_of, client_key_of
from agl_gateway.client import HttpStore
from agl_gateway.service import GatewayService
from agl_gateway.settings import Settings
from agl_gateway.wire.problems import Problem
from agl_run import signing_keys
from agl_run.access.tokens import AdminKey, AttemptTokens
from agl_run.worker.remote_gateway import RemoteGateway
from agl_testing.waiting import eventually

from .conftest import SECRET, Stage, StageFactory

OLD, NEW = SECRET.decode(), "another key of the gateway's own tests"
STEPS = (f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\n", f"{NEW}\n")
CALLS = 25
"""Number of calls that every client makes between two changes of the keys."""


def write(path: Path, content: str) -> None:
    """Replace the file in one atomic operation."""
    draft = path.with_name("draft")
    draft.write_text(content)
    draft.chmod(0o600)
    draft.replace(path)


class Agents:
    """Workers that open attempts one after the other, each with a few calls, until they are stopped."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.made = 0
        self.held: set[str] = set()
        self.is_over = False

    async def work(self) -> None:
        """Open attempts with tokens that the first key signed, and make their calls."""
        while not self.is_over:
            _, token = await self._stage.open_attempt()
            self.held.add(token)
            async with self._stage.openai(token) as client:
                for _ in range(3):
                    ask = [{"role": "user", "content": "hi"}]
                    await client.chat.completions.create(model="main_llm", messages=ask)
                    self.made += 1
            self.held.remove(token)


@pytest.mark.long
async def test_signing_key_rotates_under_load(stage: StageFactory, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "secret"
    write(path, OLD)
    monkeypatch.delenv("AGL_SECRET", raising=False)
    monkeypatch.setenv("AGL_SECRET_FILE", str(path))
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    async with stage(secret=signing_keys()) as it:
        it.tokens = AttemptTokens(signing_keys())  # another process has its own
        remote, store = RemoteGateway(it.url, key=AdminKey(signing_keys())), HttpStore(it.url)
        _, old = await it.open_attempt()
        assert not await _is_refused(it, old)  # and so it is among the verified tokens
        agents = Agents(it)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(agents.work())
            for step in STEPS:
                await _after(agents, CALLS)
                assert "" == await remote.look()
                await store.cursor()
                if step == STEPS[-1]:  # attempts that began with the old key end first
                    began = set(agents.held)
                    await eventually(lambda began=began: not began & agents.held)
                write(path, step)
            await _after(agents, CALLS)
            assert "" == await remote.look()
            await store.cursor()
            await eventually(lambda: _is_refused(it, old), within_s=30)
            await _after(agents, CALLS)
            agents.is_over = True
        await store.close()


async def _after(agents: Agents, calls: int) -> None:
    seen = agents.made
    await eventually(lambda: agents.made >= seen + calls)


async def _is_refused(stage: Stage, token: str) -> bool:
    """Return true if the gateway no longer accepts the token's signature."""
    try:
        async with stage.openai(token) as client:
            await client.chat.completions.create(model="main_llm", messages=[{"role": "user", "content": "hi"}])
    except openai.AuthenticationError as error:
        return "signature does not match" in str(error)
    return False


async def test_admin_and_client_tokens_rotate_without_a_restart(tmp_path: Path, monkeypatch) -> None:
    paths = {name: tmp_path / name.lower() for name in ("AGL_TOKEN", "AGL_CLIENT_TOKEN")}
    for name, path in paths.items():
        write(path, f"the-old-{name}-of-the-tests")
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(f"{name}_FILE", str(path))
    admin, source = admin_key_of(None)
    assert str(paths["AGL_TOKEN"]) == source
    service = GatewayService(
        store=MemoryStore(),
        upstreams=[],
        tokens=AttemptTokens(SECRET),
        settings=Settings(),
        admin_key=admin,
        client_key=client_key_of(),
    )
    assert service.has_conversations
    url = await service.start()
    following, old = HttpStore(url), HttpStore(url, token="the-old-AGL_TOKEN-of-the-tests")
    assert "client" == service.identities.verify("the-old-AGL_CLIENT_TOKEN-of-the-tests").scope
    for name, path in paths.items():
        write(path, f"the-new-{name}-of-the-tests\nthe-old-{name}-of-the-tests")
    for store in (following, old):
        await store.enqueue([Rollout(rollout_id=new_rollout_id(), task={})])
    assert "client" == service.identities.verify("the-new-AGL_CLIENT_TOKEN-of-the-tests").scope
    for name, path in paths.items():
        write(path, f"the-new-{name}-of-the-tests")

    async def is_refused() -> bool:
        try:
            await old.cursor()
        except TokenError:
            return True
        return False

    await eventually(is_refused, within_s=30)
    await following.cursor()
    with pytest.raises(Problem, match="is not an agl token"):
        service.identities.verify("the-old-AGL_CLIENT_TOKEN-of-the-tests")
    for store in (following, old):
        await store.close()
    await service.stop()
