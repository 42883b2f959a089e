"""Later turns as recorded tokens: through the relay to servers like vLLM 0.24's, and on VERL's replica for the CPU."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from transformers import AutoTokenizer

from agl.schemas import Episode, Row, Segment, Transition, pack_floats, pack_ids, unpack_ids
from agl_algo_verl.algorithm import make
from agl_algo_verl.serving.policy import VerlPolicy
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .test_policy import replicas, serving
from .test_ray import FORGOTTEN, gap_to
from .world import config, good_tokens

if TYPE_CHECKING:
    from agl.schemas import LLM
    from agl_testing.conformance.bench import RolloutOrder

STAND_IN = Path(__file__).parents[2] / "agl-vllm/tests/token_server.py"
_spec = importlib.util.spec_from_file_location("agl_token_server", STAND_IN)
assert _spec is not None
assert _spec.loader is not None
token_server: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(token_server)


async def asked(llm: LLM, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the answer with ids to a conversation, or the first event of a streamed one."""
    body = {"model": "llm", "messages": messages, "logprobs": True, "return_token_ids": True, **fields}
    headers = {"authorization": f"Bearer {os.environ[llm.api_key_env]}"}
    url = f"{llm.endpoint}/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
        text = await reply.text()
        assert 200 == reply.status, text
    return json.loads(text.removeprefix("data: ").partition("\n\n")[0])


def read_and_written(answer: dict[str, Any]) -> list[int]:
    return [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]


def test_turns_continue_recorded_tokens_on_whichever_replica_answers() -> None:
    first, second = token_server.Server(is_old=True), token_server.Server(is_old=True)

    async def run() -> None:
        async with (
            token_server.running(first) as one,
            token_server.running(second) as other,
            serving(model="some/hub-name") as (policy, llm),
        ):
            addresses = [url.removeprefix("http://").removesuffix("/v1") for url in (one, other)]
            messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
            before: list[int] = []
            for turn in range(8):  # each on the replica that the last one was not on
                version = f"global_step_{turn}"
                assert await policy.attach([addresses[turn % 2]], version=version, asks_tokens=True)
                is_streamed = turn == 5
                answer = await asked(llm, messages, stream=is_streamed)
                assert version == answer["model_version"]
                assert before == answer["prompt_token_ids"][: len(before)]
                before = read_and_written(answer)
                message = answer["choices"][0]["delta" if is_streamed else "message"]
                (call,) = message["tool_calls"]
                arguments = dict(sorted(json.loads(call["function"]["arguments"]).items()))
                call["function"]["arguments"] = json.dumps(arguments, indent=1)
                call.pop("index", None)
                messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "7"}]

    asyncio.run(run())
    assert [4, 4] == [len(server.prompts) for server in (first, second)]


def test_replicas_that_take_no_tokens_get_calls_as_they_came() -> None:
    async def run() -> None:
        async with replicas(1) as (found, _), serving(model="some/hub-name") as (policy, llm):
            assert not await policy.attach([found[0].address], asks_tokens=True)
            messages = [{"role": "user", "content": "go"}]
            await asked(llm, messages)
            assert messages == json.loads(found[0].bodies[-1])["messages"]

    asyncio.run(run())


TURNS = 3


def one_row(order: RolloutOrder, answers: list[dict[str, Any]]) -> Episode:
    """Return an episode whose calls are all on one row, as the tokens of the last call have them."""
    rollout, ids = order.rollout, read_and_written(answers[-1])
    mask, logprobs = bytearray(len(ids)), [0.0] * len(ids)
    segments, calls = list[Segment](), list[Transition]()
    for turn, answer in enumerate(answers):
        choice, start = answer["choices"][0], len(answer["prompt_token_ids"])
        stop, name = start + len(choice["token_ids"]), f"{rollout.rollout_id}/{turn}"
        mask[start:stop] = b"\1" * (stop - start)
        logprobs[start:stop] = [part["logprob"] for part in choice["logprobs"]["content"]]
        segments.append(Segment(start=start, stop=stop, span_id=name))
        calls.append(
            Transition(
                rollout_id=rollout.rollout_id,
                attempt_id=rollout.attempt_id,
                span_id=name,
                policy="llm",
                branch=0,
                prompt_ids=pack_ids(answer["prompt_token_ids"]),
                response_ids=pack_ids(choice["token_ids"]),
                logprobs=pack_floats(logprobs[start:stop]),
            )
        )
    row = Row(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt_id,
        group_id=rollout.group_id,
        branch=0,
        ids=pack_ids(ids),
        mask=bytes(mask),
        logprobs=pack_floats(logprobs),
        segments=tuple(segments),
    )
    sampled = [token for answer in answers for token in answer["choices"][0]["token_ids"]]
    return Episode(rollout=rollout, attempt=None, reward=good_tokens(sampled), transitions=tuple(calls), rows=(row,))


@FORGOTTEN
@pytest.mark.soak
def test_turns_on_verls_replica_continue_tokens_that_would_be_tokenised_differently(
    model_dir: Path, tmp_path: Path
) -> None:
    benches, episodes = list[AlgorithmBench](), list[Episode]()

    async def play(order: RolloutOrder) -> Episode:
        messages, answers = [{"role": "user", "content": "go"}], list[dict[str, Any]]()
        for turn in range(TURNS):
            llm = benches[0].context().endpoint("llm")
            answers.append(await asked(llm, messages, max_tokens=8))
            messages += [answers[-1]["choices"][0]["message"], {"role": "user", "content": f" {turn} "}]
        episodes.append(one_row(order, answers))
        return episodes[-1]

    scenario = AlgorithmScenario(
        make=lambda: make(engine="ray", threads=1, **config(**{"rollout.name": "agl_hf"})),
        play=play,
        tunes=("llm",),
        policies=lambda _: {"llm": VerlPolicy(name="llm", model=str(model_dir), threads=1)},
    )

    async def run() -> dict[str, float]:
        async with AlgorithmBench(scenario, tmp_path) as bench:
            benches.append(bench)
            algorithm = scenario.make()
            try:
                await algorithm.setup(bench.context())
                return dict((await algorithm.step()).metrics)
            finally:
                await algorithm.close()

    metrics = asyncio.run(run())
    assert (8.0, 8.0) == (metrics["rows"], metrics["rollouts"])
    assert max(metrics["logprob_gap"], metrics["probability_gap"]) < 1e-5
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    changed = 0
    for episode in episodes:
        for before, after in zip(episode.transitions, episode.transitions[1:], strict=False):
            earlier = [*unpack_ids(before.prompt_ids), *unpack_ids(before.response_ids)]
            assert earlier == list(unpack_ids(after.prompt_ids))[: len(earlier)]
            changed += tokenizer.encode(tokenizer.decode(earlier)) != earlier
    assert changed > len(episodes)
    assert gap_to(model_dir, [call for episode in episodes for call in episode.transitions]) < 1e-5
