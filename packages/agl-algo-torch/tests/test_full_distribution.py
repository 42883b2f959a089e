"""Calls that train are sampled from the distribution that training computes, whatever parameters the agent sets."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import openai
import pytest
import torch

from agl.contracts import POLICY_KEY_ENV, Upstream
from agl.schemas import ModelCall, Rollout, unpack_floats, unpack_ids
from agl.stores import MemoryStore
from agl_gateway.embedded import EmbeddedGateway
from agl_run.access.tokens import AttemptTokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from agl_algo_torch.learner.model import LoadedModel
    from agl_algo_torch.serving.policy import TorchPolicy

SECRET = b"a secret of these tests"
ASKED = {"temperature": 0.7, "top_p": 0.8, "extra_body": {"top_k": 40}}


async def calls_of(policy: TorchPolicy, *, rule: str, mode: str) -> list[ModelCall]:
    """Return the calls of a rollout whose agent requests 128 answers of 16 tokens with top-k and top-p."""
    store, gateway = MemoryStore(), EmbeddedGateway()
    upstream = Upstream(
        name="llm",
        base_url=policy.base_url,
        model=policy.model_name,
        api_key_env=POLICY_KEY_ENV,
        is_trained=True,
        sampling=rule,  # pyright: ignore[reportArgumentType]  # a parameter of the test
    )
    url = await gateway.start(store=store, upstreams=[upstream], secret=SECRET)
    await store.enqueue([Rollout(rollout_id="r", task={}, mode=mode)])  # pyright: ignore[reportArgumentType]  # likewise
    (claim,) = await store.claim(worker="test")
    key = AttemptTokens(SECRET).issue("r", claim.attempt.attempt_id, expires_at=time.time() + 600)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        question = {"role": "user", "content": "hi"}
        await client.chat.completions.create(model="llm", messages=[question], n=128, max_tokens=16, **ASKED)  # pyright: ignore[reportArgumentType, reportCallIssue]
    await gateway.settle(claim.attempt.attempt_id)
    await gateway.stop()
    return [span.call for span in await store.spans("r") if span.call is not None]


def scores(loaded: LoadedModel, calls: list[ModelCall]) -> torch.Tensor:
    """Return `log p(x) + H(p)` of each token at the requested temperature, whose mean over samples of p is 0."""
    found: list[torch.Tensor] = []
    for call in calls:
        prompt, answer = unpack_ids(call.prompt_ids), unpack_ids(call.response_ids)
        with torch.no_grad():
            logits_T_V = loaded.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs_T_V = (logits_T_V.double() / 0.7).log_softmax(-1)
        chosen_T = logprobs_T_V.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert unpack_floats(call.logprobs) == pytest.approx(chosen_T.tolist(), abs=1e-4)
        found.append(chosen_T - (logprobs_T_V.exp() * logprobs_T_V).sum(-1))
    return torch.cat(found)


@pytest.mark.parametrize(("rule", "mode"), [("override", "train"), ("override", "val"), ("keep", "train")])
def test_mean_score_is_zero_where_the_policy_trains_unless_the_agents_cut_is_kept(
    rule: str, mode: str, make_loaded: Callable[..., LoadedModel], serve: Callable[..., TorchPolicy]
) -> None:
    loaded = make_loaded()
    score_T = scores(loaded, asyncio.run(calls_of(serve(loaded), rule=rule, mode=mode)))
    errors = float(score_T.mean() / (score_T.std() / len(score_T) ** 0.5))
    assert len(score_T) > 1000
    assert abs(errors) < 4 if (rule, mode) == ("override", "train") else errors > 20
