"""The algorithm and the policy with our own server, which they reach through the published client."""

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl import AlgorithmEntry, PluginManager, PolicyEntry
from agl.contracts import POLICY_KEY_ENV
from agl.errors import ConfigError
from agl.schemas import Episode, ResourceVersion, Row, Segment, Transition, Weights, pack_floats, pack_ids
from agl_testing.conformance import FinishedCredit
from agl_testing.conformance.algorithm import AlgorithmConformance
from agl_testing.conformance.bench import AlgorithmBench, AlgorithmScenario, RolloutOrder
from agl_tinker.algorithm import Tinker, TrainedRow, token_weights
from agl_tinker.policy import TinkerPolicy

from .world import KEY, Served, complete

TOKENS = 4


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv(POLICY_KEY_ENV, "key-of-the-policies")
    return


async def play(order: RolloutOrder) -> Episode:
    """Ask the policy for a few tokens, and reward tokens of the lower half of the vocabulary."""
    llm = order.llms["llm"]
    answer = await complete(llm.endpoint, model=llm.model, prompt=[10, 20, 30], max_tokens=TOKENS, seed=order.seed)
    choice = answer["choices"][0]
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    rollout, prompt = order.rollout, choice["prompt_token_ids"]
    whole = [*prompt, *ids]
    span = f"{rollout.rollout_id}/call"
    row = Row(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt_id,
        group_id=rollout.group_id,
        branch=0,
        ids=pack_ids(whole),
        mask=bytes([0] * len(prompt) + [1] * len(ids)),
        logprobs=pack_floats([0.0] * len(prompt) + logprobs),
        segments=(Segment(start=len(prompt), stop=len(whole), span_id=span),),
    )
    call = Transition(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt_id,
        span_id=span,
        branch=0,
        start=len(prompt),
        model_version=answer["model_version"],
    )
    reward = sum(token < 128 for token in ids) / len(ids)
    return Episode(rollout=rollout, attempt=None, reward=reward, transitions=(call,), rows=(row,))


def make(**settings: Any) -> Tinker:
    small = {"steps": 3, "tasks_per_step": 2, "group_size": 4, "lora_rank": 4, "optim": {"lr": 0.01}}
    entry = AlgorithmEntry(name="tinker", factory=Tinker, summary="under test")
    return PluginManager().build(entry, **{**small, **settings})


def scenario_of(served: Served, make: Callable[[], Tinker] = make, **more: Any) -> AlgorithmScenario:
    return AlgorithmScenario(
        make=make,
        play=play,
        tunes=("llm",),
        policies=lambda _: {"llm": TinkerPolicy(name="llm", model=served.name, base_url=served.url)},
        **more,
    )


class TestTinker(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, served: Served) -> AlgorithmScenario:
        return scenario_of(served, make_longer=lambda: make(steps=5))


class TestTinkerWithChosenTasks(AlgorithmConformance):
    """A run with refilled rounds and a curriculum resumes exactly, too."""

    @pytest.fixture
    def scenario(self, served: Served) -> AlgorithmScenario:
        train = [{"question": f"q{number}"} for number in range(12)]
        return scenario_of(
            served, lambda: make(group_size=2, sampling={"refill": 2, "curriculum": "frontier"}), train=train
        )


async def complete_run(bench: AlgorithmBench) -> list[dict[str, float]]:
    async with bench:
        algorithm = bench.scenario.make()
        await algorithm.setup(bench.context())
        found: list[dict[str, float]] = []
        is_finished = False
        while not is_finished:
            report = await algorithm.step()
            found.append(report.metrics)
            is_finished = report.is_finished
        await algorithm.close()
        return found


def test_reward_rises(served: Served, tmp_path: Path) -> None:
    scenario = scenario_of(
        served, lambda: make(steps=12, group_size=8, loss="ppo", optim={"lr": 0.02}, updates_per_step=2)
    )
    found = asyncio.run(complete_run(AlgorithmBench(scenario, tmp_path)))
    first, last = (sum(metrics["reward"] for metrics in part) / 2 for part in (found[:2], found[-2:]))
    assert last > first + 0.2, [metrics["reward"] for metrics in found]
    assert found[0]["logprob_gap"] < 5.0  # of the second update, which follows the first
    assert all(metrics["tokens"] == 16 * TOKENS for metrics in found)


def test_sampler_and_trainer_agree_about_fresh_tokens(served: Served, tmp_path: Path) -> None:
    found = asyncio.run(complete_run(AlgorithmBench(scenario_of(served), tmp_path)))
    assert max(metrics["logprob_gap"] for metrics in found) < 1e-3


def test_credit_of_finished_advantages_is_said_to_leave_the_estimator_nothing(served: Served, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(served), tmp_path, credit=FinishedCredit())
    (line,) = [line for line in asyncio.run(bench.said(steps=2)) if "estimator" in line]
    assert 'finished advantages, which estimator = "grpo" does not change' in line


def test_server_that_lost_the_model_gets_the_last_state(launch: Callable[..., Served], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first = launch(folder=folder)
    port = int(first.url.rpartition(":")[2])
    bench = AlgorithmBench(scenario_of(first), tmp_path / "bench")

    async def body() -> list[str]:
        said: list[str] = []
        async with bench:
            algorithm = make()
            context = bench.context()
            await algorithm.setup(replace(context, say=said.append))
            await algorithm.step()
            await asyncio.to_thread(first.stop)
            second = await asyncio.to_thread(lambda: launch(folder=folder, port=port))
            assert first.url == second.url
            report = await algorithm.step()
            assert 2 == report.step
            assert report.published
            await algorithm.close()
        return said

    said = asyncio.run(body())
    assert any("going on from the last saved state" in text for text in said)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"model": "other/model"}, "has no base model 'other/model'; it has"),
        ({"api_key_env": "NO_SUCH_KEY"}, "taken from NO_SUCH_KEY, which is not set"),
        ({"base_url": "http://127.0.0.1:9"}, "does not answer"),
        ({"base_url": "ftp://x"}, "is not a URL"),
        ({"modle": "x"}, "takes no parameter 'modle'; did you mean 'model'"),
        ({"max_tokens": -1}, "max_tokens is -1; write a whole number of at least 0"),
        ({"tool_parser": "none-such"}, "did you mean 'none'"),
    ],
)
def test_policy_refuses(served: Served, settings: dict[str, Any], part: str) -> None:
    given = {"model": served.name, "base_url": served.url, **settings}
    entry = PolicyEntry(name="tinker", factory=TinkerPolicy, summary="under test")
    with pytest.raises(ConfigError) as caught:
        PluginManager().build(entry, name="llm", **given)
    assert part in str(caught.value)


@pytest.mark.parametrize("base_url", ["http://127.0.0.1:port", "http://[::1"])
def test_policy_refuses_an_address_that_is_none(base_url: str) -> None:
    with pytest.raises(ConfigError, match="correct base_url"):
        TinkerPolicy(name="llm", model="m", base_url=base_url)


def test_policy_refuses_a_server_of_another_protocol() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"-ERR wrong number of arguments\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="correct base_url"):
            TinkerPolicy(name="llm", model="m", base_url=f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("end", ["\n", " ", "\u20ac"])
def test_policy_refuses_a_key_that_no_header_takes_without_showing_it(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", f"tml-geheim{end}")
    with pytest.raises(ConfigError, match="the key in TINKER_API_KEY has a space") as caught:
        TinkerPolicy(name="llm", model="m", base_url="http://127.0.0.1:9")
    assert "geheim" not in str(caught.value)


def test_policy_refuses_a_wrong_key(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-somebody-else")
    with pytest.raises(ConfigError, match="refuses the key in TINKER_API_KEY"):
        TinkerPolicy(name="llm", model=served.name, base_url=served.url)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"lora_rank": 4096}, "makes no LoRA adapters of rank 4096"),
        ({"loss_params": {"clip": 1.0}}, "does not take the loss_fn_config ['clip']"),
    ],
)
def test_setup_refuses_what_the_server_lacks(
    served: Served, tmp_path: Path, settings: dict[str, Any], part: str
) -> None:
    async def body() -> None:
        bench = AlgorithmBench(scenario_of(served), tmp_path)
        async with bench:
            await make(**settings).setup(bench.context())

    with pytest.raises(ConfigError) as caught:
        asyncio.run(body())
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"loss": "pppo"}, "did you mean 'ppo'"),
        ({"estimator": "gae"}, "write one of grpo, dr_grpo, rloo"),
        ({"group_size": 1}, "group_size is 1; write a whole number of at least 2"),
        ({"lora_rank": 0}, "lora_rank is 0; write a whole number of at least 1"),
        ({"optim": {"lr": 0.0}}, "optim.lr is 0.0; write a number above 0"),
        ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas[1] is 1.0; write a number of at least 0 and below 1"),
        ({"sampling": {"refil": 2}}, "no parameter 'sampling.refil'; did you mean 'sampling.refill'"),
    ],
)
def test_parameters_are_refused_at_once(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    assert part in str(caught.value)


def test_policy_loads_weights_of_its_server_alone(served: Served) -> None:
    async def body() -> None:
        policy = TinkerPolicy(name="llm", model=served.name, base_url=served.url)
        await policy.start()
        try:
            other = ResourceVersion(name="llm", version="v1", resource=Weights(uri="/elsewhere"))
            await policy.load(other)
        finally:
            await policy.stop()
            await policy.stop()

    with pytest.raises(ConfigError, match="can load weights that are on its server"):
        asyncio.run(body())


def test_weights_add_up_over_tokens_or_rollouts() -> None:
    rng = random.Random(0)
    rows = [
        TrainedRow(rollout=f"r{n // 2}", ids=[1] * 9, logprobs=[0.0] * 9, advantages=[1.0] * 9, trained=trained)
        for n, trained in enumerate([rng.sample(range(1, 9), k) for k in (1, 2, 3, 4, 5, 6)])
    ]
    for kind in ("token", "sequence"):
        weights = token_weights(rows, kind)
        assert 1.0 == pytest.approx(sum(w * len(row.trained) for w, row in zip(weights, rows, strict=True)))
    shares = token_weights(rows, "sequence")
    assert 1 / 3 == pytest.approx(shares[0] * 1 + shares[1] * 2)
    assert [1.0] * 6 == token_weights(rows, "sum")
