"""In rollouts that train, a policy's server samples from the full distribution, whatever parameters the agent sets."""

import time

import httpx
import pytest

from agl import semconv
from agl.contracts import Upstream
from agl.errors import ConfigError
from agl.schemas import Rollout, new_rollout_id
from agl_run.run.greedy import as_greedy

BODIES = {
    "/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/completions": {"prompt": "hi"},
    "/responses": {"input": "hi"},
    "/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
}


def upstream(server, sampling):
    return Upstream(name="main", base_url=server.base_url, model="m", is_trained=True, sampling=sampling)


async def ask(it, body, *, endpoint="/chat/completions", mode="train", greedy=()):
    """Make a call in a rollout of that mode; returns the answer, the request that the server got, and the spans."""
    rollout = Rollout(rollout_id=new_rollout_id(), task={}, mode=mode)
    if greedy:
        rollout = as_greedy(rollout, greedy)
    await it.store.enqueue([rollout])
    (claim,) = await it.store.claim(worker="test")
    attempt_id = claim.attempt.attempt_id
    key = it.tokens.issue(rollout.rollout_id, attempt_id, expires_at=time.time() + 600)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
        answer = await client.post(f"{it.url}/v1{endpoint}", json={"model": "main", **BODIES[endpoint], **body})
    spans = [span for span in await it.spans(attempt_id) if span.call is not None]
    return answer, (it.server.calls[-1].json if answer.status_code == 200 else None), spans


def notes(span):
    names = (semconv.SAMPLING_OVERRIDDEN, semconv.SAMPLING_KEPT)
    return {name.rpartition(".")[2]: span.attributes[name] for name in names if name in span.attributes}


@pytest.mark.parametrize("endpoint", BODIES)
async def test_training_call_is_sampled_from_the_full_distribution_in_every_dialect(stage, server, endpoint):
    async with stage(upstreams=[upstream(server, "override")]) as it:
        _, sent, (span,) = await ask(it, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}, endpoint=endpoint)
        assert (0.7, 1.0, -1) == (sent["temperature"], sent["top_p"], sent["top_k"])
        assert {"overridden": ["top_k = 20", "top_p = 0.8"]} == notes(span)
        assert (0.7, 1.0, -1) == (span.call.sampling.temperature, span.call.sampling.top_p, span.call.sampling.top_k)


async def test_greedy_decoding_becomes_temperature_one_in_training(stage, server):
    async with stage(upstreams=[upstream(server, "override")]) as it:
        _, sent, (span,) = await ask(it, {"temperature": 0})
        assert (1.0, 1.0, False) == (
            sent["temperature"],
            span.call.sampling.temperature,
            span.call.sampling.changes_distribution,
        )
        assert {"overridden": ["temperature = 0"]} == notes(span)


async def test_constraints_on_the_answers_form_stay_and_are_named(stage, server):
    form = {"type": "json_object"}
    async with stage(upstreams=[upstream(server, "override")]) as it:
        _, sent, (span,) = await ask(it, {"response_format": form, "presence_penalty": 0.5, "min_p": 0})
        assert (form, 0, 0) == (sent["response_format"], sent["presence_penalty"], sent["min_p"])
        assert {
            "overridden": ["presence_penalty = 0.5"],
            "kept": ["response_format = {'type': 'json_object'}"],
        } == notes(span)


@pytest.mark.parametrize("mode", ["val", "test"])
@pytest.mark.parametrize("rule", ["override", "refuse", "keep"])
async def test_validation_samples_as_the_agent_asks(stage, server, mode, rule):
    async with stage(upstreams=[upstream(server, rule)]) as it:
        _, sent, (span,) = await ask(it, {"temperature": 0, "top_p": 0.8}, mode=mode)
        assert (0, 0.8, {}) == (sent["temperature"], sent["top_p"], notes(span))


@pytest.mark.parametrize("rule", ["override", "refuse", "keep"])
@pytest.mark.parametrize("endpoint", BODIES)
async def test_greedy_rollout_gets_the_likeliest_tokens_of_the_whole_distribution(stage, server, rule, endpoint):
    async with stage(upstreams=[upstream(server, rule)]) as it:
        asked = {"temperature": 0.7, "top_k": 20}
        _, sent, (span,) = await ask(it, asked, endpoint=endpoint, mode="test", greedy=("main",))
        assert (0, -1, 0, {}) == (sent["temperature"], sent["top_k"], span.call.sampling.temperature, notes(span))


async def test_greedy_rollout_asks_other_policies_as_its_agent_does(stage, server):
    async with stage(upstreams=[upstream(server, "override")]) as it:
        _, sent, _ = await ask(it, {"temperature": 0.7}, mode="test", greedy=("another",))
        assert 0.7 == sent["temperature"]


def test_rollout_that_trains_is_never_greedy():
    with pytest.raises(ConfigError, match="greedy answers teach nothing"):
        as_greedy(Rollout(rollout_id="r", task={}, mode="train"), ["main"])


async def test_refused_call_is_answered_with_the_parameter_and_the_ways_out(stage, server):
    async with stage(upstreams=[upstream(server, "refuse")]) as it:
        answer, _, (span,) = await ask(it, {"top_p": 0.8})
        error = answer.json()["error"]
        assert (400, "narrowed_sampling", 0) == (answer.status_code, error["code"], len(it.server.calls))
        for part in ("top_p = 0.8", "'main'", '[policy.main] sampling = "override"', '"keep"'):
            assert part in error["message"]
        assert 400 == span.call.status_code
        plain, _, (plain_span,) = await ask(it, {"temperature": 0.7, "response_format": {"type": "json_object"}})
        assert (200, {"kept": ["response_format = {'type': 'json_object'}"]}) == (plain.status_code, notes(plain_span))


async def test_kept_parameters_pass_unchanged_and_are_marked(stage, server):
    async with stage(upstreams=[upstream(server, "keep")]) as it:
        _, sent, (span,) = await ask(it, {"top_p": 0.8})
        assert (0.8, {"kept": ["top_p = 0.8"]}) == (sent["top_p"], notes(span))
        assert span.call.sampling.changes_distribution


async def test_call_without_such_parameters_is_not_touched(stage, server):
    async with stage(upstreams=[upstream(server, "override")]) as it:
        plain = {"temperature": 0.7, "top_p": 1, "tool_choice": "auto", "logit_bias": {}, "stop": ["x"]}
        _, sent, (span,) = await ask(it, plain)
        assert (plain, {}) == ({key: sent[key] for key in plain}, notes(span))
        assert "top_k" not in sent
