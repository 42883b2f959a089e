"""Gateways serve the split that `agl learn` saves in the store, and know the users of conversations."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from click.testing import CliRunner

from agl.contracts import RolloutQuery, Store, Upstream
from agl.schemas import LLM, ResourceVersion, Rollout
from agl_gateway.record.outage import Outage
from agl_gateway.traffic.conversations import Conversations
from agl_inspect.records.splits import SERVED, Pins, ServedSplit, placement_of
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore

from .test_split import ADMIN, CLIENT, HALVES, WEIGHTS, Served, prompts, publish, serve, servers, two

__all__ = ["servers"]

OLD = {"main_llm": "w1", "prompt": "v1"}
NEW = {"main_llm": "w2", "prompt": "v2"}
CANARY: Pins = {"production": OLD, "candidate": NEW}


async def switch(store: Store, versions: Pins, *, salt: str = "c1", **more: Any) -> None:
    """Serve the arms with equal shares from now on."""
    shares = {label: 1 / len(versions) for label in versions}
    await SERVED.add(store, {"": ServedSplit(shares=shares, versions=versions, salt=salt, **more)})


async def arm_and_text(gateway: Served, conversation: str, **headers: str) -> tuple[str, str]:
    text, got = await gateway.ask(CLIENT, conversation=conversation, extra=headers)
    return got.get("x-agl-arm", ""), text


async def record_of(store: Store, headers: Mapping[str, str]) -> Rollout:
    return (await store.rollouts(RolloutQuery(ids=(headers["x-agl-rollout-id"],))))[0]


async def printed(folder: Path, *words: str) -> str:
    """Run a command on the folder's database; returns what it prints."""
    command = [*words, "--store", f"sqlite:///{folder}/served.db"]
    done = await asyncio.to_thread(CliRunner().invoke, cli, command)
    assert 0 == done.exit_code, done.output
    return done.output


async def test_switched_split_counts_for_the_next_conversation_and_no_earlier_one(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS, *prompts("v1", "v2"), labelled=("unrelated",))
    async with serve(tmp_path, None, two(servers)) as one, serve(tmp_path, None, two(servers)) as other:
        assert ("", "old") == await arm_and_text(one, "before")
        await switch(one.store, {"production": OLD})
        assert ("production", "old") == await arm_and_text(one, "first")
        await switch(other.store, {"production": NEW})
        assert ("production", "new") == await arm_and_text(one, "second")
        for gateway in (one, other):
            assert ("production", "old") == await arm_and_text(gateway, "first")
            assert ("", "old") == await arm_and_text(gateway, "before")


async def test_resources_of_an_arm_switch_together(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS, *prompts("v1", "v2"))
    async with serve(tmp_path, None, two(servers)) as gateway:
        await switch(gateway.store, CANARY)
        seen = set()
        for index in range(12):
            name = f"c{index}"
            _, prompt = await gateway.get("/split/resources/prompt", CLIENT, **{"x-agl-conversation-id": name})
            seen.add((*await arm_and_text(gateway, name), prompt["version"]))
        assert {("production", "old", "v1"), ("candidate", "new", "v2")} == seen
        (rollout, *_) = await gateway.store.rollouts(RolloutQuery(experiment="served-conversations"))
        placement = placement_of(rollout)
        assert placement is not None
        assert ("c1", CANARY, CANARY[placement.arm]) == (placement.salt, placement.versions, rollout.resources)


@pytest.mark.parametrize("versions", [CANARY, {"production": NEW}])
async def test_split_of_a_learner_places_no_rollout_that_is_queued(tmp_path, servers, versions):
    await publish(tmp_path, *WEIGHTS, *prompts("v1", "v2"))
    async with serve(tmp_path, None, two(servers)) as gateway:
        await switch(gateway.store, versions)
        (stored,) = await gateway.http.enqueue([Rollout(rollout_id="ro-1", task=0)])
        assert ({}, {}) == (stored.resources, stored.metadata)


async def test_split_of_the_command_line_wins(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS)
    async with serve(tmp_path, HALVES, two(servers)) as gateway:
        await switch(gateway.store, {"learned": {"main_llm": "w1"}})
        assert {"production", "candidate"} == {(await arm_and_text(gateway, f"c{i}"))[0] for i in range(10)}


@pytest.mark.parametrize("by_user", [True, False])
async def test_user_meets_one_arm_until_the_next_candidate(tmp_path, servers, by_user):
    await publish(tmp_path, *WEIGHTS)
    versions = {"production": {"main_llm": "w1"}, "candidate": {"main_llm": "w2"}}
    async with serve(tmp_path, None, two(servers)) as one, serve(tmp_path, None, two(servers)) as other:
        arms: dict[str, list[frozenset[str]]] = {}
        for salt in ("c1", "c2"):
            await switch(one.store, versions, salt=salt, by_user=by_user)
            for user in "abcdefgh":
                found = [
                    (await arm_and_text(gateway, f"{salt}-{user}-{i}", **{"x-agl-user-id": user}))[0]
                    for gateway in (one, other)
                    for i in range(3)
                ]
                arms.setdefault(user, []).append(frozenset(found))
        is_one_arm = all(len(found) == 1 for both in arms.values() for found in both)
        assert by_user == is_one_arm
        assert not by_user or any(first != second for first, second in arms.values())


async def prompt_for(gateway: Served, conversation: str, **headers: str) -> str:
    """Return the version of the prompt that a conversation gets."""
    named = {"x-agl-conversation-id": conversation, **headers}
    return (await gateway.get("/split/resources/prompt", CLIENT, **named))[1]["version"]


async def test_variant_serves_its_user_from_all_gateways_until_it_is_removed(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS, *prompts("v1", "v2", "v3"))
    ann, bob = {"x-agl-user-id": "ann@home"}, {"x-agl-user-id": "bob"}
    async with serve(tmp_path, None, two(servers)) as one, serve(tmp_path, None, two(servers)) as other:
        await switch(one.store, {"production": OLD})
        for name, version in (("prompt", "v3"), ("main_llm", "w2")):
            assert f"{name} for user:ann@home: {version}\n" == await printed(
                tmp_path, "resources", "variant", name, version, "--user", "ann@home"
            )
        for number, gateway in enumerate((one, other)):
            assert "v3" == await prompt_for(gateway, f"ann-{number}", **ann)
            assert ("user:ann@home", "new") == await arm_and_text(gateway, f"ann-{number}", **ann)
            assert "v1" == await prompt_for(gateway, f"bob-{number}", **bob)
            assert ("production", "old") == await arm_and_text(gateway, f"bob-{number}", **bob)
        assert "user:ann@home  main_llm  w2" in await printed(tmp_path, "resources", "variant")
        await printed(tmp_path, "resources", "variant", "prompt", "--user", "ann@home", "--remove")
        assert "v1" == await prompt_for(other, "ann-later", **ann)
        assert ("user:ann@home", "new") == await arm_and_text(other, "ann-later", **ann)
        assert "v3" == await prompt_for(other, "ann-0", **ann)
        await printed(tmp_path, "resources", "variant", "main_llm", "--user", "ann@home", "--remove")
        assert ("production", "old") == await arm_and_text(one, "ann-last", **ann)
        assert "{}" == (await printed(tmp_path, "resources", "variant", "--json")).strip()


async def test_variant_of_an_agent_gives_way_to_that_of_the_user(tmp_path, servers):
    await publish(tmp_path, *prompts("v1", "v2", "v3"))
    async with serve(tmp_path, None, two(servers)) as gateway:
        await switch(gateway.store, {"production": {"prompt": "v1"}})
        await printed(tmp_path, "resources", "variant", "prompt", "v2", "--agent", "writer")
        await printed(tmp_path, "resources", "variant", "prompt", "v3", "--user", "ann")
        agents = {name: {"x-agl-agent": name} for name in ("writer", "reader")}
        assert ["v2", "v1"] == [await prompt_for(gateway, name, **headers) for name, headers in agents.items()]
        both = {"x-agl-agent": "writer", "x-agl-user-id": "ann"}
        assert "v3" == await prompt_for(gateway, "both", **both)


async def test_variant_belongs_to_no_candidate(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS, *prompts("v1", "v2"))
    async with serve(tmp_path, None, two(servers)) as gateway:
        await switch(gateway.store, CANARY)
        await printed(tmp_path, "resources", "variant", "prompt", "v2", "--user", "ann")
        _, headers = await gateway.ask(CLIENT, conversation="c", extra={"x-agl-user-id": "ann"})
        rollout = await record_of(gateway.store, headers)
        assert {"main_llm": "w1", "prompt": "v2"} == rollout.resources
        placement = placement_of(rollout)
        assert placement is not None
        assert ("user:ann", "", {"user:ann": {}}) == (placement.arm, placement.salt, placement.versions)


async def test_variant_whose_weights_no_upstream_serves_falls_back_with_a_warning(tmp_path, servers, caplog):
    lost = ResourceVersion(name="main_llm", version="w9", resource=WEIGHTS[0].resource)
    await publish(tmp_path, *WEIGHTS, lost)
    async with serve(tmp_path, None, two(servers)) as gateway:
        await switch(gateway.store, {"production": {"main_llm": "w1"}})
        await printed(tmp_path, "resources", "variant", "main_llm", "w9", "--user", "ann")
        for name in ("c1", "c2"):
            assert ("user:ann", "old") == await arm_and_text(gateway, name, **{"x-agl-user-id": "ann"})
    assert 1 == len([each for each in caplog.messages if "no upstream serves main_llm@w9" in each])


async def test_variant_without_a_split_in_the_store_says_who_serves_it(tmp_path, servers):
    await publish(tmp_path, *prompts("v1"))
    said = await printed(tmp_path, "resources", "variant", "prompt", "v1", "--user", "ann")
    note = "the store has no split of agl learn, so only gateways with --split serve this"
    assert ["prompt for user:ann: v1", note] == said.splitlines()
    removed = await printed(tmp_path, "resources", "variant", "prompt", "--user", "ann", "--remove")
    assert ["prompt for user:ann: the shared version"] == removed.splitlines()


async def test_variant_needs_a_version_and_whose_it_is(tmp_path, servers):
    await publish(tmp_path, *prompts("v1"))
    for words in (["v1"], ["--user", "ann"], ["v1", "--user", "ann", "--remove"], ["--user", "ann", "--remove"]):
        command = ["resources", "variant", "prompt", *words, "--store", f"sqlite:///{tmp_path}/served.db"]
        done = await asyncio.to_thread(CliRunner().invoke, cli, command)
        assert 1 == done.exit_code, words
        assert "agl resources variant" in done.output


@pytest.mark.parametrize(
    ("headers", "body", "user"),
    [
        ({"x-agl-user-id": "h"}, {"user": "u", "safety_identifier": "s"}, "h"),
        ({}, {"metadata": {"user_id": "m"}, "user": "u", "safety_identifier": "s"}, "m"),
        ({}, {"user": "u", "safety_identifier": "s"}, "s"),
        ({}, {"user": "u"}, "u"),
        ({}, {"metadata": {"user_id": "user_1a_account_2b_session_3c-4d"}}, "user_1a_account_2b"),
        ({}, {"metadata": {"user_id": '{"device_id":"1a","session_id":"3c-4d"}'}}, '{"device_id":"1a"}'),
        ({}, {}, None),
    ],
)
async def test_user_is_named_by_header_then_metadata_then_the_fields_of_openai(tmp_path, servers, headers, body, user):
    async with serve(tmp_path, None, two(servers)) as gateway:
        _, got = await gateway.ask(CLIENT, conversation="c", extra=headers, **body)
        assert user == (await record_of(gateway.store, got)).metadata.get("user")


async def test_first_call_of_a_conversation_decides_its_user(tmp_path, servers):
    await publish(tmp_path, *prompts("v1", "v2"))
    async with serve(tmp_path, None, two(servers)) as gateway:
        await switch(gateway.store, {"production": {"prompt": "v1"}})
        named = {"x-agl-conversation-id": "c", "x-agl-user-id": "ann"}
        assert 200 == (await gateway.get("/split/resources/prompt", CLIENT, **named))[0]
        _, got = await gateway.ask(CLIENT, conversation="c", extra={"x-agl-user-id": "bob"})
        assert "ann" == (await record_of(gateway.store, got)).metadata["user"]
    shown = await printed(tmp_path, "show", got["x-agl-rollout-id"])
    assert "user ann, arm production, 100% of the traffic" in shown


async def test_conversations_of_two_users_with_one_opening_are_two(tmp_path, servers):
    async with serve(tmp_path, None, two(servers)) as gateway:
        calls = [await gateway.ask(CLIENT, text="hi", user=user) for user in ("ann", "bob", "ann")]
        ann, bob, again = (headers["x-agl-rollout-id"] for _, headers in calls)
        assert ann == again != bob


async def test_two_users_may_open_one_conversation_at_the_same_time(tmp_path):
    store = SQLiteStore(f"sqlite:///{tmp_path}/served.db")

    async def settle(attempt_id: str) -> None:
        pass

    outage = Outage(store, is_watched=False)
    gateways = [
        Conversations(store=store, enqueue=store.enqueue, settle=settle, idle_s=600.0, outage=outage) for _ in range(2)
    ]
    users = ("ann", "bob")
    found = await asyncio.gather(*[one.open("c", user=user) for one, user in zip(gateways, users, strict=True)])
    assert found[0] == found[1]
    await store.close()


async def test_too_long_user_is_refused(tmp_path, servers):
    async with serve(tmp_path, None, two(servers)) as gateway:
        with pytest.raises(openai.BadRequestError, match="the user's id has 513 characters; 512 are allowed"):
            await gateway.ask(CLIENT, conversation="c", user="u" * 513)


def adapters(url: str, **by_version: str) -> list[ResourceVersion]:
    """Return versions of the model as LoRAs that the server at ``url`` has loaded by name."""
    found = [LLM(model=model, endpoint=url) for model in by_version.values()]
    return [
        ResourceVersion(name="main_llm", version=v, resource=each) for v, each in zip(by_version, found, strict=True)
    ]


async def test_canary_of_an_adapter_is_served_by_the_server_that_loaded_it(tmp_path, servers):
    old, new = servers
    await publish(tmp_path, *adapters(old.base_url, w1="base"), *adapters(new.base_url, w2="support-c1"))
    upstreams = [
        Upstream(name="main_llm", base_url=old.base_url, model_version="w0"),
        Upstream(name="main_llm", base_url=new.base_url, model_version="w00"),
    ]
    async with serve(tmp_path, None, upstreams) as gateway:
        await switch(gateway.store, {"production": {"main_llm": "w1"}, "candidate": {"main_llm": "w2"}})
        found = {await arm_and_text(gateway, f"c{index}") for index in range(12)}
        assert {("production", "old"), ("candidate", "new")} == found
        assert [{"base"}, {"support-c1"}] == [{call.json["model"] for call in server.calls} for server in servers]
        (rollout, *_) = await gateway.store.rollouts(RolloutQuery(experiment="served-conversations"))
        (span,) = [span for span in await gateway.store.spans(rollout.rollout_id) if span.call]
        assert span.call is not None
        assert rollout.resources["main_llm"] == span.call.model_version


async def test_version_without_a_server_fails_its_own_arm_only(tmp_path, servers):
    old, _ = servers
    elsewhere = adapters("http://127.0.0.1:9/v1", w2="support-c1")
    await publish(tmp_path, *adapters(old.base_url, w1="base"), *elsewhere)
    async with serve(tmp_path, None, [Upstream(name="main_llm", base_url=old.base_url)]) as gateway:
        split = ServedSplit(shares={"a": 0.5, "b": 0.5}, versions={"a": {"main_llm": "w1"}, "b": {"main_llm": "w2"}})
        await SERVED.add(gateway.store, {"": split})
        for index in range(8):
            if split.arm_of(f"c{index}") == "a":
                assert ("a", "old") == await arm_and_text(gateway, f"c{index}")
            else:
                with pytest.raises(openai.InternalServerError, match="no upstream serves main_llm@w2"):
                    await arm_and_text(gateway, f"c{index}")
        await SERVED.add(gateway.store, {"": ServedSplit(shares={"b": 1.0}, versions={"b": {"main_llm": "w2"}})})
        with pytest.raises(openai.InternalServerError, match="no upstream serves main_llm@w2"):
            await arm_and_text(gateway, "later")


async def rate(gateway: Served, conversation: str, value: float) -> None:
    sent = {"authorization": f"Bearer {CLIENT}", "x-agl-conversation-id": conversation}
    url = f"{gateway.url}/conversations/rate"
    async with aiohttp.ClientSession() as session, session.post(url, json={"value": value}, headers=sent) as reply:
        assert 200 == reply.status


async def test_reports_are_about_the_served_split(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS, labelled=("production", "candidate"))
    async with serve(tmp_path, None, two(servers)) as gateway:
        assert 404 == (await gateway.get("/split", ADMIN))[0]
        await switch(gateway.store, {"holdback": {"main_llm": "w2"}, "production": {"main_llm": "w1"}})
        placed = [(await arm_and_text(gateway, f"c{index}"))[0] for index in range(12)]
        for index, arm in enumerate(placed):
            await rate(gateway, f"c{index}", float(arm == "production"))
        status, report = await gateway.get("/split", ADMIN)
        assert (200, {"holdback": 0.5, "production": 0.5}) == (status, report["shares"])
        assert [("holdback", 0.0), ("production", 1.0)] == [(arm["label"], arm["mean"]) for arm in report["arms"]]
        assert [placed.count(arm["label"]) for arm in report["arms"]] == [arm["rollouts"] for arm in report["arms"]]
        assert "production against holdback" in await printed(tmp_path, "resources", "split")
        assert "candidate against production" in await printed(
            tmp_path, "resources", "split", "production", "candidate"
        )
        await switch(gateway.store, {"production": {"main_llm": "w1"}})
        assert "all traffic gets these versions" in await printed(tmp_path, "resources", "split")


async def test_split_is_read_from_the_store_of_another_process(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS)
    async with serve(tmp_path, None, two(servers)) as gateway:
        other = SQLiteStore(f"sqlite:///{tmp_path}/served.db")
        await switch(other, {"production": {"main_llm": "w2"}})
        await other.close()
        assert ("production", "new") == await arm_and_text(gateway, "c")
