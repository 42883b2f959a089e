"""The policy with servers that it starts: the command, the checks at the start, and loading new weights."""

import asyncio
import logging
import os
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl import PluginManager
from agl.contracts import ServedModel
from agl.errors import ConfigError, PolicyError
from agl.schemas import PROBE_FILE, PromptTemplate, Weights
from agl_inspect.terminal.program import cli
from agl_testing.conformance import PluginConformance
from agl_vllm.client import ServerClient
from agl_vllm.policy import VLLMPolicy
from agl_vllm.server import LaunchSettings, LocalServer
from agl_vllm.settings import VllmSettings

from .conftest import noted, published, started

pytestmark = pytest.mark.alone

ASKED_AT_START = 10
"""Requests of the checks at the start: one for ids, two for the log-probabilities' temperature, seven for sampling."""


def run(policy, act):
    async def whole():
        try:
            return await act(await policy.start())
        finally:
            await policy.stop()

    return asyncio.run(whole())


def test_a_started_server_gets_its_command_and_environment(base, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    policy = started(base, args=["--enforce-eager"], env={"EXTRA": "1"}, lora_rank=3, devices=["3"])
    assert Weights(uri=base.uri) == policy.resource()

    async def act(served):
        return served, noted(served.base_urls[0])

    served, found = run(policy, act)
    assert ServedModel(base_urls=served.base_urls[:1], model="main_llm") == served
    said = " ".join(found["argv"])
    for part in (f"--model {base.uri}", "--served-model-name main_llm", "--dtype float32", "--host 127.0.0.1"):
        assert part in said
    kept = "--generation-config vllm --logprobs-mode processed_logprobs"
    assert f"{kept} --enable-lora --max-lora-rank 8 --max-loras 4 --enforce-eager" in said
    environ = found["environ"]
    expected = ("1", "3", "1", "1", "True")
    names = ("EXTRA", "CUDA_VISIBLE_DEVICES", "VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS")
    assert expected == (*(environ[name] for name in names), environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"])
    with pytest.raises(ProcessLookupError):
        os.kill(found["pid"], 0)


def test_full_weights_restart_a_started_server_at_the_same_address(base, make_weights):
    new = make_weights("new", shift=0.5)
    policy = started(base)

    async def act(served):
        before = noted(served.base_urls[0])["pid"]
        await policy.load(published(new))
        after = noted(served.base_urls[0])
        assert before != after["pid"]
        assert ["--model", new.uri] == after["argv"][:2]
        again = await policy.load(published(new, "the-same-again"))
        assert "the-same-again" == again.version
        assert after["pid"] == noted(served.base_urls[0])["pid"]

    run(policy, act)


def test_an_adapter_is_loaded_in_place_between_answers_and_named(base, make_weights):
    first = make_weights("a1", shift=0.25, base=base)
    second = make_weights("a2", shift=0.75, base=base)
    policy = started(base, lora_rank=4)

    async def act(served):
        for version, weights in (("v1", first), ("v2", second)):
            now = await policy.load(published(weights, version))
            assert (version, "main_llm-adapter") == (now.version, now.model)
        return noted(served.base_urls[0])

    found = run(policy, act)
    update = ["/pause?mode=wait", "/v1/load_lora_adapter", "/reset_prefix_cache", "/resume", "/v1/completions"]
    assert [*["/v1/completions"] * ASKED_AT_START, *update, *update] == found["paths"]
    body = {"lora_name": "main_llm-adapter", "lora_path": second.uri, "load_inplace": True}
    assert body == found["bodies"][ASKED_AT_START + 6]
    assert "main_llm-adapter" == found["bodies"][-1]["model"]


def test_several_versions_are_served_at_once_as_adapters(base, make_weights):
    first = make_weights("a1", shift=0.25, base=base)
    second = make_weights("a2", shift=0.75, base=base)
    policy = started(base, lora_rank=4)

    async def act(served):
        versions = [published(policy.resource(), "v0"), published(first, "v1"), published(second, "v2")]
        found = await policy.serve_versions(versions)
        names = {"v0": "main_llm", "v1": "main_llm@v1", "v2": "main_llm@v2"}
        assert names == {version: each.model for version, each in found.items()}
        client = ServerClient(served.base_urls[0], key="", timeout_s=10)
        scores = [(await client.score([1, 2], model=name))[0] for name in names.values()]
        assert [0.25, 0.75] == pytest.approx([scores[0] - scores[1], scores[0] - scores[2]])
        await policy.serve_versions(versions[:2])
        assert ["main_llm", "main_llm@v1"] == await client.models()
        with pytest.raises(ConfigError, match=r"v3 is not an adapter of .*only as adapters"):
            await policy.serve_versions([published(make_weights("full", shift=0.5), "v3")])

    run(policy, act)


def test_adapters_of_another_process_are_replaced_under_the_same_name_and_stay_under_others(base, make_weights):
    stale = make_weights("stale", shift=0.25, base=base)
    fresh = make_weights("fresh", shift=0.75, base=base)
    earlier = started(base, lora_rank=4)

    async def act(served):
        await earlier.serve_versions([published(stale, "v1"), published(stale, "v2")])
        later = VLLMPolicy(name="main_llm", model=base.uri, base_url=served.base_urls[0], probe=False)
        await later.start()
        client = ServerClient(served.base_urls[0], key="", timeout_s=10)
        for _ in range(2):  # it is loaded once
            await later.serve_versions([published(fresh, "v1")])
            scores = [(await client.score([1, 2], model=name))[0] for name in ("main_llm", "main_llm@v1")]
            assert 0.75 == pytest.approx(scores[0] - scores[1])
        await later.serve_versions([])
        assert ["main_llm", "main_llm@v2"] == await client.models()
        loads = [path for path in noted(served.base_urls[0])["paths"] if path == "/v1/load_lora_adapter"]
        assert 3 == len(loads)

    run(earlier, act)


def test_adapter_that_failed_its_check_is_checked_again(base, make_weights):
    adapter, other = (make_weights(name, shift=shift, base=base) for name, shift in (("a", 0.25), ("b", 0.75)))
    probe = Path(adapter.uri, PROBE_FILE)
    good = probe.read_bytes()
    probe.write_bytes(Path(other.uri, PROBE_FILE).read_bytes())
    policy = started(base, lora_rank=4)

    async def act(served):
        for _ in range(2):
            with pytest.raises(PolicyError):
                await policy.serve_versions([published(adapter, "v1")])
        probe.write_bytes(good)
        assert "main_llm@v1" == (await policy.serve_versions([published(adapter, "v1")]))["v1"].model

    run(policy, act)


def test_calls_go_back_to_the_base_of_an_adapter_without_loading_it(base, make_weights):
    policy = started(base, lora_rank=4)

    async def act(served):
        pid = noted(served.base_urls[0])["pid"]
        await policy.load(published(make_weights("a1", shift=0.5, base=base), "v1"))
        back = await policy.load(published(policy.resource(), "initial"))
        assert ("initial", "main_llm") == (back.version, back.model)
        found = noted(served.base_urls[0])
        assert pid == found["pid"]
        assert not {"/collective_rpc", "/sleep?level=2"} & set(found["paths"])
        again = await policy.load(published(make_weights("a2", shift=0.25, base=base), "v2"))
        assert "main_llm-adapter" == again.model

    run(policy, act)


@pytest.mark.long
def test_initial_weights_come_back_and_are_checked_by_what_they_gave_at_the_start(base, make_weights):
    policy = started(base)

    async def act(served):
        await policy.load(published(make_weights("new", shift=0.5)))
        back = await policy.load(published(policy.resource(), "initial"))
        assert "initial" == back.version
        found = noted(served.base_urls[0])
        assert ["--model", base.uri] == found["argv"][:2]
        assert ["/v1/completions"] == found["paths"]
        await policy.load(published(make_weights("newer", shift=0.75)))
        Path(base.uri, "weights.json").write_text('{"shift": 0.25}')
        with pytest.raises(PolicyError, match="'changed', and does not serve them"):
            await policy.load(published(policy.resource(), "changed"))

    run(policy, act)


def test_a_reload_changes_the_running_server(base, make_weights):
    policy = started(base, sync="reload")

    async def act(served):
        pid = noted(served.base_urls[0])["pid"]
        assert "grpo-1" == (await policy.load(published(make_weights("new", shift=0.5)))).version
        assert pid == noted(served.base_urls[0])["pid"]

    run(policy, act)


@pytest.mark.parametrize("settings", [{"sync": "sleep"}, {"args": ["--enable-sleep-mode"]}], ids=["asked", "auto"])
def test_a_server_takes_new_weights_in_its_sleep(base, make_weights, settings):
    policy = started(base, **settings)

    async def act(served):
        pid = noted(served.base_urls[0])["pid"]
        for version in ("v1", "v2"):
            assert version == (await policy.load(published(make_weights(version, shift=0.5), version))).version
        found = noted(served.base_urls[0])
        assert pid == found["pid"]
        assert 1 == found["argv"].count("--enable-sleep-mode")
        return found["paths"]

    update = [
        *("/pause?mode=wait", "/sleep?level=2", "/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"),
        *("/reset_prefix_cache", "/resume", "/v1/completions"),
    ]
    assert [*["/v1/completions"] * ASKED_AT_START, *update, *update] == run(policy, act)


@pytest.mark.long
def test_a_server_that_wakes_with_other_weights_is_restarted_from_then_on(base, make_weights, fake, caplog):
    fake("reload-ignored")
    policy = started(base, args=["--enable-sleep-mode"])

    async def act(served):
        before = noted(served.base_urls[0])["pid"]
        await policy.load(published(make_weights("new", shift=0.5), "v1"))
        after = noted(served.base_urls[0])
        assert before != after["pid"]
        await policy.load(published(make_weights("newer", shift=0.75), "v2"))
        assert after["pid"] != noted(served.base_urls[0])["pid"]

    run(policy, act)
    (told,) = [record.getMessage() for record in caplog.records if "in their sleep" in record.getMessage()]
    assert "does not serve them" in told
    policy = started(base, sync="sleep")
    with pytest.raises(PolicyError, match="does not serve them"):
        run(policy, lambda _: policy.load(published(make_weights("newest", shift=0.5))))


def test_a_server_that_cannot_sleep_is_refused_with_what_it_needs(base, make_weights):
    server = started(base)

    async def act(served):
        policy = VLLMPolicy(name="main_llm", model=base.uri, base_url=served.base_urls[0], sync="sleep")
        await policy.start()
        with pytest.raises(PolicyError, match=r"cannot sleep .*; start it with --enable-sleep-mode"):
            await policy.load(published(make_weights("new", shift=0.5)))
        await policy.stop()

    run(server, act)


def test_a_reload_that_answers_200_and_serves_other_weights_stops_the_run(base, make_weights, fake):
    fake("reload-ignored")
    policy = started(base, sync="reload")

    async def act(_served):
        with pytest.raises(PolicyError) as refused:
            await policy.load(published(make_weights("new", shift=0.5)))
        return str(refused.value)

    message = run(policy, act)
    assert "said that it had taken the weights 'grpo-1', and does not serve them" in message
    assert "has log-probability -1.4000 there and -1.9000 by the weights" in message
    assert "mean difference 0.5000, tolerance 0.001" in message


@pytest.mark.long
def test_the_tolerance_and_the_probe_itself_are_the_users_choice(base, make_weights, fake):
    fake("reload-ignored")
    new, bare = make_weights("new", shift=0.5), make_weights("bare", shift=0.5, has_probe=False)

    async def act(policy, weights):
        return (await policy.load(published(weights))).version

    for settings, weights in (({"probe_tolerance": 0.6}, new), ({"probe": False}, bare)):
        policy = started(base, sync="reload", **settings)
        assert "grpo-1" == run(policy, lambda _, policy=policy, weights=weights: act(policy, weights))
    policy = started(base)
    with pytest.raises(PolicyError, match=r"have no probe.json, without which nobody can check"):
        run(policy, lambda _: act(policy, bare))


def test_every_replica_is_updated_and_a_dead_one_is_started_again(base, make_weights, caplog):
    policy = started(base, replicas=2, lora_rank=4)
    adapter = make_weights("a", shift=0.5, base=base)

    async def act(served):
        urls = served.base_urls
        assert 2 == len(set(urls))
        os.kill(noted(urls[1])["pid"], signal.SIGKILL)
        with caplog.at_level(logging.WARNING):
            await policy.load(published(adapter))
        assert "has died; starting it again" in caplog.text
        return [noted(url)["paths"] for url in urls]

    first, second = run(policy, act)
    assert "/v1/load_lora_adapter" in first
    assert "/v1/load_lora_adapter" in second


@pytest.mark.parametrize(
    ("lora_rank", "message"), [(0, r"rank 9 .* started for none; set lora_rank = 9"), (2, r"started for 8; set")]
)
def test_an_adapter_that_the_server_was_not_started_for_is_refused(base, make_weights, lora_rank, message):
    policy = started(base, lora_rank=lora_rank)
    with pytest.raises(PolicyError, match=message):
        run(policy, lambda _: policy.load(published(make_weights("a", shift=0.5, base=base, rank=9))))


def test_what_is_no_weights_is_refused(base):
    policy = started(base, lora_rank=4)

    async def act(_served):
        with pytest.raises(PolicyError, match="is a PromptTemplate"):
            await policy.load(published(PromptTemplate(template="x")))

    run(policy, act)


def test_an_adapter_of_another_model_brings_its_base_which_the_next_one_finds(base, make_weights):
    merged = make_weights("merged", shift=0.25)
    policy = started(base, lora_rank=4)

    async def act(served):
        first, second = (make_weights(name, shift=0.5, base=merged) for name in ("a1", "a2"))
        pid = noted(served.base_urls[0])["pid"]
        await policy.load(published(first, "v1"))
        after = noted(served.base_urls[0])
        assert pid != after["pid"]
        assert ["--model", merged.uri] == after["argv"][:2]
        assert "/v1/load_lora_adapter" in after["paths"]
        await policy.load(published(second, "v2"))
        assert after["pid"] == noted(served.base_urls[0])["pid"]
        back = await policy.load(published(make_weights("a3", shift=0.5, base=base), "v3"))
        assert "main_llm-adapter" == back.model
        assert ["--model", base.uri] == noted(served.base_urls[0])["argv"][:2]

    run(policy, act)


def test_a_server_that_ends_while_it_starts_shows_its_last_lines(base, fake, tmp_path):
    fake("dies")
    policy = started(base, log_dir=str(tmp_path / "logs"))
    with pytest.raises(PolicyError, match=r"ended with exit code 1 (.|\n)*RuntimeError: no GPU was found") as refused:
        run(policy, None)
    assert str(tmp_path / "logs" / "main_llm-0.log") in str(refused.value)


def test_what_servers_print_is_removed_after_a_run_that_ended_well_and_kept_after_another(base, fake, tmp_path):
    def logs():
        return list(tmp_path.glob("agl-vllm-*/main_llm-0.log"))

    async def act(_served):
        assert 1 == len(logs())

    run(started(base), act)
    assert [] == logs()
    fake("dies")
    with pytest.raises(PolicyError) as refused:
        run(started(base), act)
    assert str(logs()[0]) in str(refused.value)


def test_no_other_program_gets_the_port_before_the_first_start(base, fake, tmp_path):
    settings = VllmSettings(model=base.uri, dtype="float32")
    server = LocalServer(LaunchSettings(name="main_llm", chosen=settings), log=tmp_path / "log", device="")
    port = server.client.base_url.removesuffix("/v1").rpartition(":")[2]
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(port)))

    async def act():
        await server.start(model=base.uri)
        found = noted(server.client.base_url)["argv"]
        await server.stop()
        return found

    assert port in asyncio.run(act())


def test_a_server_that_takes_too_long_is_ended(base, fake):
    fake("hangs")
    with pytest.raises(PolicyError, match=r"did not serve within 1 s \(start_timeout_s\)"):
        run(started(base, start_timeout_s=1), None)


def test_a_server_that_gives_no_token_ids_is_refused(base, fake):
    fake("no-ids")
    with pytest.raises(PolicyError, match="returned no token ids although they were asked for"):
        run(started(base), None)


def test_another_server_at_the_address_is_not_taken_for_the_own_one(base):
    policy = started(base)

    async def act(_served):
        (server,) = policy._servers
        server._process, running = None, server._process
        try:
            with pytest.raises(PolicyError, match="another program answers"):
                await server.start(model=base.uri)
        finally:
            server._process = running

    run(policy, act)


def test_key_of_another_server_in_the_environment_is_not_passed_on(base, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of another server")

    async def act(served):
        return noted(served.base_urls[0])["environ"]

    assert "VLLM_API_KEY" not in run(started(base), act)


def test_name_of_a_policy_with_a_slash_is_no_folder_of_its_log(base, tmp_path):
    policy = VLLMPolicy(
        name="org/llm", model=base.uri, python=sys.executable, dtype="float32", log_dir=str(tmp_path / "logs")
    )

    async def act(served):
        return served.model

    assert "org/llm" == run(policy, act)
    assert ["org_llm-0.log"] == [file.name for file in (tmp_path / "logs").iterdir()]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_check_of_an_experiment_says_that_vllm_is_not_installed(base, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    (tmp_path / "agent.py").write_text("def solve(task, llm):\n    return 0\n", encoding="utf-8")
    (tmp_path / "tasks.jsonl").write_text('{"question": "?"}\n', encoding="utf-8")
    (tmp_path / "experiment.toml").write_text(
        '[experiment]\nname = "e"\nagent = "agent:solve"\ntrain = "tasks.jsonl"\n\n'
        f'[policy.main_llm]\nuse = "vllm"\nmodel = "{base.uri}"\npython = "{sys.executable}"\n',
        encoding="utf-8",
    )
    result = CliRunner().invoke(cli, ["check", str(tmp_path / "experiment.toml")])
    assert 1 == result.exit_code
    assert "vLLM is not installed for" in result.stderr
    assert "install it there" in result.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs model"),
        ({"model": "m", "modle": 1}, r"does not know \['modle'\]"),
        ({"model": "/nowhere/at/all"}, "there is no directory /nowhere/at/all"),
        ({"model": "m", "python": "/no/python"}, "there is no interpreter '/no/python'"),
        ({"model": "m", "sync": "copy"}, 'sync is "copy"; write one of auto'),
        ({"model": "m", "replicas": "2"}, 'replicas is "2"; write a whole number without quotes, such as replicas = 2'),
        ({"model": "m", "args": ["--port", "1"]}, r"agl sets \['--port'\] itself"),
        (
            {"model": "m", "args": ["--logprobs_mode=raw_logprobs"]},
            r"agl sets \['--logprobs_mode=raw_logprobs'\] itself",
        ),
        ({"model": "m", "replicas": 2, "devices": ["0"]}, "has 2 replicas and devices for 1"),
        ({"model": "m", "replicas": 0}, "replicas must be 1 or more"),
        ({"model": "m", "served_model": "x"}, "belong to servers that run already"),
        ({"model": "m", "base_url": "127.0.0.1:1"}, "is not a URL"),
        ({"model": "m", "base_url": "http://h/v1", "replicas": 2}, r"so \['replicas'\] would change nothing"),
        ({"model": "m", "base_url": "http://h/v1", "sync": "restart"}, "which agl cannot restart"),
        ({"model": "m", "base_url": "http://h/v1", "api_key_env": "NO_SUCH_KEY"}, "takes its key from NO_SUCH_KEY"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(settings, message):
    with pytest.raises(ConfigError, match=message):
        VLLMPolicy(name="main_llm", **settings)


class TestPlugin(PluginConformance):
    module = "agl_vllm.plugin"


def test_the_plugin_registers_a_policy_that_takes_weights(fake):
    manager = PluginManager.from_environment()
    entry = manager.policy("vllm")
    assert entry.trains
    policy = manager.build(entry, name="llm", model="Qwen/Qwen2.5-0.5B-Instruct", python=sys.executable)
    assert policy.has_token_ids
