"""Joining an experiment from another machine: addresses, settings that must be equal, and unreachable policies."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agl
from agl import PluginManager
from agl._entries import RewardEntry
from agl.algorithms import ComponentConfig
from agl.contracts import Presence, RewardSetup, Store, Upstream
from agl.errors import ConfigError, NotFoundError, PolicyError, UnknownComponentError
from agl.schemas import LLM, JsonResource, Mode, PromptTemplate, ResourceVersion, Rollout, Weights
from agl.stores import MemoryStore
from agl.urls import without_credentials
from agl_inspect.ownership import Ownership
from agl_inspect.presence import host_id, worker_is_dead, worker_name
from agl_run import parse_config
from agl_run.access.tokens import AdminKey
from agl_run.parts.build import build_rewards
from agl_run.plan import Plan
from agl_run.runners.setup import RunContext
from agl_run.worker.address import advertised_url, is_loopback, local_url
from agl_run.worker.admission import (
    check_direct_calls,
    differences,
    make_worker_plan,
    try_gateway,
    unreachable_policies,
)
from agl_run.worker.current import LiveResources, PinnedResources
from agl_run.worker.invitation import Announcement, Invitation, UnclaimedReport, load_running, make_running
from agl_run.worker.remote import RemoteWorker
from agl_run.worker.remote_gateway import RemoteGateway
from agl_testing.waiting import eventually

AGENT = "def solve(task, prompt):\n    return 1.0\n"
SECRET = b"a secret that everybody shares"


def a_plan(folder: Path, **changes: Any) -> Plan:
    """Return a worker's plan that needs no data and no package of an algorithm or policy."""
    (folder / "joining_agent.py").write_text(AGENT)
    data: dict[str, Any] = {
        "experiment": {"agent": "joining_agent:solve", "train": "no-such-file.jsonl", "hidden": ["answer"]},
        "policy": {"main": {"use": "no-such-policy"}},
        "algorithm": [{"use": "no-such-algorithm", "tunes": "main"}],
        "reward": [{"use": "exact-match"}],
    }
    data = {**data, **changes, "experiment": {**data["experiment"], **changes.get("experiment", {})}}
    return make_worker_plan(parse_config(data), folder=folder, manager=PluginManager())


def a_serving(plan: Plan, **changes: Any) -> Announcement:
    """Return the record of a running experiment with this plan."""
    upstream = Upstream(name="main", base_url="http://me:my-key@127.0.0.1:8000/v1", model="small")
    llm = LLM(endpoint="http://me:my-key@127.0.0.1:8000/v1", model="small", api_key="my-key")
    context = RunContext(store=MemoryStore(), upstreams=[upstream], requires_calls=True)
    serving = make_running(
        plan, context, run=1, gateway_url="http://10.0.0.1:4748", endpoints={"main": llm}, live={"main": "v1"}
    )
    return msgspec.structs.replace(serving, **{"session": worker_name(), **changes})


@asynccontextmanager
async def running_in(store: Store, plan: Plan, **changes: Any) -> AsyncGenerator[Invitation]:
    """Own the experiment of ``plan`` in a store, and let workers join it."""
    async with Ownership(store, plan.name, workdir=plan.workdir) as own:
        async with Invitation(own, a_serving(plan, **changes)) as invitation:
            yield invitation
        assert await load_running(store, plan.name) is None
        assert [""] == [each.member for each in await store.presences(plan.name)]
    assert [] == await store.presences(plan.name)


@pytest.mark.parametrize(
    ("url", "advertise", "expected"),
    [
        ("http://127.0.0.1:4748", "", "http://127.0.0.1:4748"),
        ("http://10.0.0.1:4748", "", "http://10.0.0.1:4748"),
        ("http://0.0.0.0:4748", "trainer", "http://trainer:4748"),
        ("http://[::]:4748", "10.0.0.1", "http://10.0.0.1:4748"),
        ("http://[::]:4748", "fd00::1", "http://[fd00::1]:4748"),
        ("http://127.0.0.1:4748", "https://gateway.example/", "https://gateway.example"),
    ],
)
def test_gateway_is_advertised_by_a_name_or_a_whole_url(url: str, advertise: str, expected: str) -> None:
    assert expected == advertised_url(url, advertise)


def test_gateway_that_listens_everywhere_is_advertised_by_an_address_of_this_machine() -> None:
    found = advertised_url("http://0.0.0.0:4748")
    assert "0.0.0.0" not in found
    assert found.endswith(":4748")
    assert "http://127.0.0.1:4748" == local_url("http://0.0.0.0:4748")
    assert "http://[::1]:4748" == local_url("http://[::]:4748")


@pytest.mark.parametrize(
    "advertise", ["ftp://host", "http://key@host", "host/path", "key@host", "http://", "http://[x"]
)
def test_odd_address_to_advertise_is_refused(advertise: str) -> None:
    with pytest.raises(ConfigError, match="write a host name, or http://HOST:PORT"):
        advertised_url("http://0.0.0.0:4748", advertise)


def test_loopback_is_recognised_by_address_and_name() -> None:
    loopback = ["http://127.0.0.1:1", "http://127.9.9.9/v1", "http://[::1]:1", "http://localhost:1"]
    assert [True] * 4 + [False] * 2 == [is_loopback(url) for url in (*loopback, "http://10.0.0.1", "http://host:1")]
    assert "http://host:1/v1" == without_credentials("http://me:my-key@host:1/v1")


def test_worker_of_this_machine_is_judged_and_one_of_an_equally_named_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    own = worker_name()
    assert not worker_is_dead(own)
    assert worker_is_dead(own.replace(f":{os.getpid()}:", f":{ended.pid}:"))
    assert not worker_is_dead(own.replace(f":{os.getpid()}:", f":{ended.pid}:").replace(host_id(), "0" * 12))
    assert not worker_is_dead(f"{own.partition('@')[0]}:{ended.pid}:an-older-release")


def test_record_of_a_running_experiment_holds_no_key(tmp_path: Path) -> None:
    text = msgspec.json.encode(a_serving(a_plan(tmp_path))).decode()
    assert "my-key" not in text
    assert "http://127.0.0.1:8000/v1" in text


def test_experiment_is_joined_while_it_runs_and_versions_follow(tmp_path: Path) -> None:
    async def work() -> None:
        store = MemoryStore()
        plan = a_plan(tmp_path)
        async with running_in(store, plan) as invitation:
            await invitation.update({"main": "v2"})
            found = await load_running(store, plan.name)
            assert found is not None
            assert {"main": "v2"} == found.live
            assert differences(found, plan) is None
        await store.close()

    asyncio.run(work())


def test_worker_reports_while_it_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_run.worker.remote.BEAT_S", 0.1)
    monkeypatch.setattr("agl_run.worker.remote.LOOK_S", 0.1)

    async def work() -> None:
        store = MemoryStore()
        plan = a_plan(tmp_path)
        worker = RemoteWorker(plan, store, tell=lambda *_, **__: None, concurrency=1)

        reported = set[float]()

        async def has_reported() -> bool:
            reports = [each for each in await store.presences(plan.name) if each.member]
            reported.update(each.seen_at for each in reports if each.seen_at > each.since > 0)
            return len(reported) > 2

        async with running_in(store, plan, gateway_url="", upstreams=(), endpoints={}, live={}):
            running = asyncio.create_task(worker.run())
            await eventually(has_reported)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await store.close()

    asyncio.run(work())


def test_end_waits_for_workers_to_take_leave(tmp_path: Path) -> None:
    async def work() -> None:
        store = MemoryStore()
        plan = a_plan(tmp_path)
        async with asyncio.TaskGroup() as group:
            async with running_in(store, plan):
                await store.announce(Presence(experiment=plan.name, member="somebody", session="s"))

                async def is_over() -> bool:
                    return await load_running(store, plan.name) is None

                async def leave() -> None:
                    await eventually(is_over)
                    await asyncio.sleep(0.1)
                    await store.withdraw(plan.name, ["somebody"])

                leaving = group.create_task(leave())
            assert leaving.done()
        await store.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experiment": {"hidden": []}}, r'experiment.hidden is \["answer"\] there and \[\] here'),
        ({"reward": []}, r'reward is \[{"use":"exact-match","params":{}}\] there and \[\] here'),
        ({"tracers": ["otel"]}, r'tracers is \[\] there and \["otel"\] here'),
    ],
)
def test_other_settings_are_named_with_both_values(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    found = differences(a_serving(a_plan(tmp_path)), a_plan(tmp_path, **changes))
    assert found is not None
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(found.text)


def test_other_release_is_named(tmp_path: Path) -> None:
    plan = a_plan(tmp_path)
    found = differences(a_serving(plan, release="9.9.9"), plan)
    assert found is not None
    assert "runs with agl-core 9.9.9" in found.text


def test_missing_reward_of_the_experiment_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownComponentError, match="judge"):
        a_plan(tmp_path, reward=[{"use": "judge"}])


def test_loopback_of_another_machine_names_the_setting_and_is_never_asked(tmp_path: Path) -> None:
    plan = a_plan(tmp_path)
    serving = a_serving(plan, session="trainer@elsewhere:1:0", gateway_url="http://127.0.0.1:9")
    gateway = RemoteGateway(serving.gateway_url, key=AdminKey(SECRET))
    found = asyncio.run(try_gateway(serving, gateway, is_given=False))
    assert found is not None
    assert "on 'trainer' listens on its own machine only" in found.text
    assert '[gateway] params = { host = "0.0.0.0"' in found.text
    given = asyncio.run(try_gateway(serving, gateway, is_given=True))
    assert given is not None
    assert "ConnectionRefusedError" in given.text
    here = asyncio.run(try_gateway(msgspec.structs.replace(serving, session=worker_name()), gateway, is_given=False))
    assert here is not None
    assert "ConnectionRefusedError" in here.text


def test_policies_of_another_machine_are_refused_to_rewards_and_agents(tmp_path: Path) -> None:
    plan = a_plan(tmp_path)
    assert {} == unreachable_policies(a_serving(plan))
    serving = a_serving(plan, session="trainer@elsewhere:1:0")
    lost = unreachable_policies(serving)
    assert "serves at http://127.0.0.1:8000/v1 on 'trainer'" in lost["main"]
    assert check_direct_calls(serving) is None
    direct = check_direct_calls(msgspec.structs.replace(serving, gateway_url=""))
    assert direct is not None
    assert 'remove [gateway] use = "none" there' in direct.text


class Asking:
    """A reward that uses a policy when it is created."""

    def __init__(self, *, setup: RewardSetup) -> None:
        self._llm = setup.policies["main"]

    def __call__(self, rollout: Rollout, spans: object) -> float:
        """Always return the same reward."""
        return 1.0


class AskingPlugin:
    """A plugin that registers :class:`Asking`."""

    @agl.hookimpl
    def agl_rewards(self) -> list[RewardEntry]:
        """Register the reward."""
        return [RewardEntry(name="asking", factory=Asking, takes_setup=True)]


def test_reward_that_asks_for_an_unreachable_policy_is_refused(tmp_path: Path) -> None:
    plan = a_plan(tmp_path)
    plan.manager.register(AskingPlugin(), name="asking")
    asking = replace(plan, config=msgspec.structs.replace(plan.config, reward=(ComponentConfig(use="asking"),)))
    assert ["asking"] == [name for name, _ in build_rewards(asking)]
    with pytest.raises(ConfigError, match="where only that machine"):
        build_rewards(asking, unreachable={"main": "it serves where only that machine reaches it"})


def test_pinned_versions_are_read_from_the_store_and_others_are_live() -> None:
    async def work() -> None:
        store = MemoryStore()
        await store.publish(
            [
                ResourceVersion(name="prompt", version="1", resource=PromptTemplate(template="one")),
                ResourceVersion(name="prompt", version="2", resource=PromptTemplate(template="two")),
                ResourceVersion(name="limit", version="1", resource=JsonResource(value=3)),
                ResourceVersion(name="main", version="1", resource=JsonResource(value="weights")),
            ]
        )

        async def live() -> dict[str, str]:
            return {"prompt": "2", "limit": "1", "main": "1"}

        llm = LLM(endpoint="http://10.0.0.1:4748/v1", model="small")
        resources = PinnedResources(store, {"main": llm}, live=live)
        pinned = await resources.for_rollout(Rollout(rollout_id="r", task={}, resources={"prompt": "1"}))
        assert {"prompt": PromptTemplate(template="one"), "limit": 3, "main": llm} == pinned
        with pytest.raises(NotFoundError):
            await resources.for_rollout(Rollout(rollout_id="r", task={}, resources={"prompt": "9"}))
        await store.close()

    asyncio.run(work())


def test_policy_that_serves_several_versions_gives_a_rollout_its_own_or_an_error() -> None:
    async def work() -> None:
        store = MemoryStore()
        versions = ("1", "2", "3")
        await store.publish([ResourceVersion(name="main", version=v, resource=Weights(uri=v)) for v in versions])

        async def live() -> dict[str, str]:
            return {"main": "1"}

        first, second = LLM(model="small"), LLM(model="small@2")
        resources = PinnedResources(store, {"main": first, "main@2": second}, live=live)

        def pinned_to(version: str) -> Rollout:
            return Rollout(rollout_id="r", task={}, mode="test", resources={"main": version})

        given = [(await resources.for_rollout(pinned_to(version)))["main"] for version in ("1", "2")]
        assert [first, second] == given
        with pytest.raises(PolicyError, match="policy 'main' does not serve 3, to which the rollout is pinned"):
            await resources.for_rollout(pinned_to("3"))
        await store.close()

    asyncio.run(work())


@pytest.mark.parametrize("mode", ["train", "test"])  # credit replays training rollouts in mode test
def test_rollout_gets_the_live_weights_if_they_changed_since_it_was_queued(mode: Mode) -> None:
    async def work() -> None:
        store = MemoryStore()
        await store.publish([ResourceVersion(name="main", version=v, resource=Weights(uri=v)) for v in ("1", "2")])
        resources = LiveResources(store, {"main": LLM(model="small"), "other": LLM(), "other@2": LLM()})
        await resources.restore({"main": "2"})
        rollout = Rollout(rollout_id="r", task={}, mode=mode, resources={"main": "1"})
        assert {"main": LLM(model="small")} == await resources.for_rollout(rollout)
        await store.close()

    asyncio.run(work())


def test_person_is_told_that_nobody_claims() -> None:
    async def work() -> list[str]:
        store = MemoryStore()
        said: list[str] = []
        async with UnclaimedReport(store, "small", say=said.append, first_s=0.05):
            await asyncio.sleep(0.2)
            assert [] == said
            await store.enqueue([Rollout(rollout_id="r", task={}, experiment="small")])
            await eventually(lambda: said)
            await store.claim(worker="somebody")
            count = len(said)
            await asyncio.sleep(0.2)
            assert count >= len(said) - 1
        await store.close()
        return said

    assert "agl worker FILE, with the file of experiment 'small'" in asyncio.run(work())[0]
