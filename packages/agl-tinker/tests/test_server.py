"""The server as the published client sees it: losses, gradients, weights, refusals, and two clients at once."""

import asyncio
import json
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import tinker
import torch
from tinker import types

from agl_algo_torch.learner.batch import from_tokens, micro_batches
from agl_algo_torch.learner.model import load_model
from agl_algo_torch.serving.hosting import Adapter, HostedModel
from agl_objectives.aggregation import loss_weights
from agl_objectives.contract import TokenBatch
from agl_objectives.registry import find_loss
from agl_tinker.server.service import Samplers

from .world import KEY, Served

IDS = [5, 17, 60, 33, 2, 90, 41]
Connect = Callable[..., tinker.ServiceClient]


@pytest.fixture
def training(connect: Connect, served: Served) -> tinker.TrainingClient:
    return connect().create_lora_training_client(served.name, rank=4, seed=3).result()


def datum(ids: list[int] = IDS, **inputs: list[float]) -> types.Datum:
    tensors = {name: types.TensorData(data=values, dtype="float32") for name, values in inputs.items()}
    targets = types.TensorData(data=ids[1:], dtype="int64")
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": targets, **tensors}
    )


def on_policy(training: tinker.TrainingClient, shift: float = 0.3) -> types.Datum:
    """Return a row with sampler log-probabilities that are slightly off, so that the bounds of the ratio matter."""
    logprobs = own_logprobs(training)
    off = [p + shift * (-1) ** n for n, p in enumerate(logprobs)]
    return datum(logprobs=off, advantages=[1.0, 0.5, -1.0, -0.5, 2.0, -2.0])


def own_logprobs(training: tinker.TrainingClient, ids: list[int] = IDS) -> list[float]:
    passed = training.forward([datum(ids, weights=[1.0] * (len(ids) - 1))], "cross_entropy").result()
    return passed.loss_fn_outputs[0]["logprobs"].tolist()


def test_logprobs_are_those_of_the_model(training: tinker.TrainingClient, model_dir: Path) -> None:
    model = load_model(str(model_dir), device="cpu").model  # fresh adapters change nothing
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([IDS])).logits[0].log_softmax(-1)
    expected = [float(whole[place, token]) for place, token in enumerate(IDS[1:])]
    assert expected == pytest.approx(own_logprobs(training), abs=1e-5)


def test_cross_entropy_is_that_of_agl_algo_torch(training: tinker.TrainingClient, model_dir: Path) -> None:
    model = load_model(str(model_dir), device="cpu").model
    sample = from_tokens("r", IDS, [0, 0, 0, 1, 1, 1, 1])
    weight, _ = loss_weights([sample], aggregation="token")
    batch = next(micro_batches([sample], weight, token_budget=64, device=torch.device("cpu")))
    expected = -float(batch.logprobs(model).detach().sum())
    passed = training.forward_backward([datum(weights=[0, 0, 1, 1, 1, 1])], "cross_entropy").result()
    assert expected == pytest.approx(passed.metrics["loss:sum"], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "config", "ours", "params"),
    [
        ("ppo", {}, "ppo-clip", {"clip_low": 0.2, "clip_high": 0.2}),
        (
            "ppo",
            {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
            "ppo-clip",
            {"clip_low": 0.1, "clip_high": 0.3},
        ),
        ("cispo", {"clip_high_threshold": 1.2}, "cispo", {"clip_low": 1.0, "clip_high": 0.2}),
        ("dro", {"beta": 0.3}, "dro", {"beta": 0.3}),
        ("importance_sampling", {}, "ppo-clip", {"clip_low": 1.0, "clip_high": 1e9}),
    ],
)
def test_losses_are_those_of_agl_objectives(
    training: tinker.TrainingClient, name: Any, config: dict[str, float], ours: str, params: dict[str, float]
) -> None:
    row = on_policy(training)
    passed = training.forward_backward([row], name, config).result()
    logp = torch.tensor(passed.loss_fn_outputs[0]["logprobs"].tolist())
    old, advantages = (torch.tensor(row.loss_fn_inputs[key].tolist()) for key in ("logprobs", "advantages"))
    place = torch.zeros(len(logp), dtype=torch.int64)
    tokens = TokenBatch(
        logp_M=logp,
        old_M=old,
        behaviour_M=old,
        advantages_M=advantages,
        weight_M=torch.ones(len(logp)),
        row_M=place,
        rollout_M=place,
    )
    expected = float(find_loss(ours, params).call(tokens).loss_M.sum())
    assert expected == pytest.approx(passed.metrics["loss:sum"], abs=1e-5)
    assert abs(expected) > 0.01


def test_gradients_add_up_until_the_update(connect: Connect, served: Served) -> None:
    """Two calls and one update equal one call with both rows; the order of the rows changes nothing."""
    client, rows = connect(), [datum(weights=[1.0] * 6), datum(IDS[:4], weights=[0.5] * 3)]
    norms: list[float] = []
    after: list[list[float]] = []
    for parts in ([[rows[0]], [rows[1]]], [rows], [rows[::-1]]):
        training = client.create_lora_training_client(served.name, rank=4, seed=3).result()
        for part in parts:
            training.forward_backward(part, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        norms.append((stepped.metrics or {})["grad_norm:mean"])
        after.append(own_logprobs(training))
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
    assert after[1] == pytest.approx(after[0], abs=1e-3)
    assert after[2] == pytest.approx(after[0], abs=1e-3)


def test_forward_leaves_no_gradient(training: tinker.TrainingClient) -> None:
    training.forward([datum(weights=[1.0] * 6)], "cross_entropy").result()
    stepped = training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert 0.0 == (stepped.metrics or {})["grad_norm:mean"]


def test_clients_own_backward_pass_gives_the_gradient_of_its_loss(connect: Connect, served: Served) -> None:
    """`forward_backward_custom` needs a forward pass and a backward pass with weights, which the server has."""
    client = connect()

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.stack([row.sum() for row in logprobs]).sum(), {}

    norms: list[float] = []
    for is_custom in (True, False):
        training = client.create_lora_training_client(served.name, rank=4, seed=3).result()
        rows = [datum(weights=[1.0] * 6)]
        if is_custom:
            training.forward_backward_custom(rows, loss).result()
        else:
            training.forward_backward(rows, "cross_entropy").result()
        stepped = training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        norms.append((stepped.metrics or {})["grad_norm:mean"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_saved_state_continues_as_if_nothing_had_happened(connect: Connect, served: Served) -> None:
    client = connect()
    training = client.create_lora_training_client(served.name, rank=4, seed=3).result()
    update(training)
    path = training.save_state("half").result().path
    other = client.create_training_client_from_state_with_optimizer(path).result()
    fresh = client.create_training_client_from_state(path).result()
    assert own_logprobs(training) == own_logprobs(other) == own_logprobs(fresh)
    for one in (training, other, fresh):
        update(one)
    assert own_logprobs(training) == own_logprobs(other)
    assert own_logprobs(training) != own_logprobs(fresh), "without moments the second update is another one"


def update(training: tinker.TrainingClient) -> None:
    training.forward_backward([datum(weights=[1.0] * 6)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.01)).result()


def test_sampler_has_the_weights_that_were_saved(connect: Connect, served: Served) -> None:
    client = connect()
    training = client.create_lora_training_client(served.name, rank=4, seed=3).result()
    update(training)
    prompt = types.ModelInput.from_ints(IDS)
    named = client.create_sampling_client(training.save_weights_for_sampler("one").result().path).result()
    unnamed = training.save_weights_and_get_sampling_client().result()
    expected = own_logprobs(training)
    update(training)
    for sampler in (named, unnamed):
        assert expected == pytest.approx(sampler.compute_logprobs(prompt).result()[1:], abs=1e-4)
    base = client.create_sampling_client(base_model=served.name).result()
    assert expected != pytest.approx(base.compute_logprobs(prompt).result()[1:], abs=1e-2)
    assert served.name == named.get_base_model()


def test_sampling_is_what_was_asked_for(connect: Connect, served: Served) -> None:
    sampler = connect().create_sampling_client(base_model=served.name).result()
    prompt = types.ModelInput.from_ints(IDS)
    params = types.SamplingParams(max_tokens=6, seed=5, stop=[])
    first, second = (sampler.sample(prompt, 3, params, topk_sample_logprobs=2).result() for _ in range(2))
    assert [one.tokens for one in first.sequences] == [one.tokens for one in second.sequences]
    assert 3 == len({tuple(one.tokens) for one in first.sequences})
    assert 3 == len({one.sequence_id for one in first.sequences})
    one = first.sequences[0]
    assert (6, "length") == (len(one.tokens), one.stop_reason)
    whole = sampler.compute_logprobs(types.ModelInput.from_ints([*IDS, *one.tokens])).result()
    assert one.logprobs == pytest.approx(whole[len(IDS) :], abs=1e-4)
    assert one.topk_logprobs is not None
    assert [2] * 6 == [len(tops or ()) for tops in one.topk_logprobs]
    stopped = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=400, seed=5, stop=[one.tokens[2]])).result()
    assert (one.tokens[:3], "stop") == (stopped.sequences[0].tokens, stopped.sequences[0].stop_reason)
    last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result()
    assert [True] * 5 + [False] * 2 == [value is None for value in last]


def test_clients_do_not_disturb_each_other(connect: Connect, served: Served) -> None:
    """Two clients take turns, and each gets the same result as when it runs alone."""
    alone = connect().create_lora_training_client(served.name, rank=4, seed=3).result()
    for _ in range(3):
        update(alone)
    both = [connect().create_lora_training_client(served.name, rank=4, seed=3).result() for _ in range(2)]
    futures: list[Any] = []
    for _ in range(3):
        for training in both:
            futures.append(training.forward_backward([datum(weights=[1.0] * 6)], "cross_entropy"))
            futures.append(training.optim_step(types.AdamParams(learning_rate=0.01)))
    for future in futures:
        future.result()
    assert own_logprobs(alone) == own_logprobs(both[0]) == own_logprobs(both[1])


def test_more_models_than_the_server_holds(launch: Callable[..., Served], connect: Connect) -> None:
    served = launch(most_models=2)
    client = connect(served.url)
    first, second, third = (client.create_lora_training_client(served.name, rank=2).result() for _ in range(3))
    update(second)
    update(third)
    with pytest.raises(tinker.NotFoundError, match="is not in training here"):
        update(first)


def test_models_that_are_made_at_once_are_no_more_than_the_server_holds(
    launch: Callable[..., Served], connect: Connect
) -> None:
    served = launch(most_models=1)
    clients = [connect(served.url) for _ in range(3)]
    futures = [client.create_lora_training_client(served.name, rank=2) for client in clients]
    made: list[tinker.TrainingClient] = []
    for future in futures:  # all of them first: one that trains before the next is made would count too
        with suppress(tinker.NotFoundError):
            made.append(future.result())
    trained: list[tinker.TrainingClient] = []
    for training in made:
        with suppress(tinker.NotFoundError):
            update(training)
            trained.append(training)
    assert 1 == len(trained)


@pytest.mark.parametrize(
    ("row", "loss", "part"),
    [
        (datum(weights=[1.0] * 6), "gspo", "The loss 'gspo' is not offered"),
        (datum(), "ppo", "data[0] lacks ['advantages', 'logprobs']"),
        (datum(weights=[1.0] * 6, mask=[1.0] * 6), "cross_entropy", "data[0] has ['mask']"),
        (datum(weights=[1.0] * 5), "cross_entropy", "data[0].weights has 5 numbers, and the row has 6 tokens"),
        (datum([1, 2, 10**6], weights=[1.0] * 2), "cross_entropy", "token ids outside of 0 to"),
        (datum([1] * 600, weights=[1.0] * 599), "cross_entropy", "data[0] has 599 tokens; this model takes from 1"),
        (datum(weights=[math.nan] * 6), "cross_entropy", "numbers that are not finite"),
    ],
)
def test_rows_are_refused_by_name(training: tinker.TrainingClient, row: types.Datum, loss: Any, part: str) -> None:
    with pytest.raises(tinker.UnprocessableEntityError) as caught:
        training.forward_backward([row], loss).result()
    assert part in str(caught.value)


def test_requests_for_what_is_not_offered(connect: Connect, served: Served, training: tinker.TrainingClient) -> None:
    sampler = connect().create_sampling_client(base_model=served.name).result()
    prompt, params = types.ModelInput.from_ints(IDS), types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.UnprocessableEntityError, match="'topk_prompt_logprobs' of sampling is not offered"):
        sampler.sample(prompt, 1, params, topk_prompt_logprobs=2).result()
    with pytest.raises(tinker.UnprocessableEntityError, match="This model's context is 512 tokens"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=600)).result()
    with pytest.raises(tinker.RequestFailedError, match="it has '"):
        connect().create_lora_training_client("Qwen/Qwen3-8B").result()
    with pytest.raises(tinker.RequestFailedError, match="rank 1000 is not offered"):
        connect().create_lora_training_client(served.name, rank=1000).result()
    with pytest.raises(tinker.NotFoundError, match="There is no checkpoint"):
        connect().create_sampling_client(f"tinker://{training.model_id}/sampler_weights/none").result()
    with pytest.raises(tinker.UnprocessableEntityError, match="holds weights, and one samples from sampler_weights"):
        connect().create_sampling_client(training.save_state("x").result().path).result()
    with pytest.raises(tinker.RequestFailedError, match=r"The checkpoint .* exists"):
        training.save_state("x").result()
    with pytest.raises(tinker.RequestFailedError, match="cannot be given to a checkpoint"):
        training.save_state("../../x").result()


def test_other_routes_of_the_client_are_refused_by_name(served: Served) -> None:
    with pytest.raises(tinker.NotFoundError, match="GET /api/v1/training_runs is not offered by this server"):
        tinker.RestClient(base_url=served.url, api_key=KEY).list_training_runs().result()


def test_checkpoints_are_listed_and_deleted(training: tinker.TrainingClient, served: Served) -> None:
    rest = tinker.RestClient(base_url=served.url, api_key=KEY)
    paths = [training.save_state("a").result().path, training.save_weights_for_sampler("b").result().path]
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert paths == [one.tinker_path for one in listed]
    assert all((one.size_bytes or 0) > 0 for one in listed)
    assert 4 == rest.get_weights_info_by_tinker_path(paths[1]).result().lora_rank
    rest.delete_checkpoint_from_tinker_path(paths[0]).result()
    assert paths[1:] == [one.tinker_path for one in rest.list_checkpoints(training.model_id).result().checkpoints]


def test_name_of_a_checkpoint_that_is_being_saved_is_taken(training: tinker.TrainingClient) -> None:
    for save in (training.save_state, training.save_weights_for_sampler):
        futures = [save("same") for _ in range(2)]
        futures[0].result()
        with pytest.raises(tinker.RequestFailedError, match=r"The checkpoint .* exists"):
            futures[1].result()


def test_name_that_is_used_again_has_its_own_weights(training: tinker.TrainingClient, connect: Connect) -> None:
    client, prompt = connect(), types.ModelInput.from_ints(IDS)
    found: list[Any] = []
    for _ in range(2):
        path = training.save_weights_for_sampler("again").result().path
        found.append(client.create_sampling_client(path).result().compute_logprobs(prompt).result()[1:])
        rest = tinker.RestClient(base_url=str(client.holder.shadow_config.base_url), api_key=KEY)
        rest.delete_checkpoint_from_tinker_path(path).result()
        update(training)
    assert found[0] != pytest.approx(found[1], abs=1e-3)


def test_more_weights_than_stay_ready(launch: Callable[..., Served], connect: Connect) -> None:
    """Closed samplers are opened again when they are needed, even while others are in use."""
    served = launch(samplers=2)
    client, prompt = connect(served.url), types.ModelInput.from_ints(IDS)
    training = client.create_lora_training_client(served.name, rank=2, seed=1).result()
    samplers: list[tinker.SamplingClient] = []
    for _ in range(4):
        update(training)
        samplers.append(training.save_weights_and_get_sampling_client().result())
    first = [one.compute_logprobs(prompt).result() for one in samplers]
    futures = [one.compute_logprobs(prompt) for one in samplers * 5]
    assert first * 5 == [future.result() for future in futures]
    assert 4 == len({tuple(values[1:]) for values in first})


def test_key_is_asked_for(served: Served) -> None:
    for headers in ({}, {"X-API-Key": "tml-another-key-entirely"}):
        answer = httpx.get(f"{served.url}/api/v1/get_server_capabilities", headers=headers)
        assert 401 == answer.status_code
        assert "TINKER_API_KEY" in answer.json()["detail"]
    assert 200 == httpx.get(f"{served.url}/api/v1/healthz").status_code


@pytest.mark.parametrize(
    ("path", "content", "kind", "status"),
    [
        ("create_model", b"{", "application/json", 422),
        ("create_model", b"[]", "application/json", 422),
        ("create_model", b'{"session_id": "../..", "model_seq_id": 0, "base_model": "x"}', "application/json", 404),
        ("forward_backward", b"\xff\x00garbage", "application/x-protobuf", 422),
        ("forward_backward", b"{}", "application/json", 415),
        ("asample", json.dumps({"prompt": {"chunks": []}}).encode(), "application/json", 422),
        ("retrieve_future", b'{"request_id": "none"}', "application/json", 410),
        ("cancel_future", b"7", "application/json", 422),
        ("weights_info", b'{"tinker_path": "tinker://../../etc"}', "application/json", 422),
        ("create_sampling_session", b'{"session_id": "s", "sampling_session_seq_id": 0}', "application/json", 404),
        ("nothing", b"", "application/json", 404),
    ],
)
def test_garbage_gets_a_reason(served: Served, path: str, content: bytes, kind: str, status: int) -> None:
    answer = httpx.post(
        f"{served.url}/api/v1/{path}", content=content, headers={"X-API-Key": KEY, "content-type": kind}
    )
    assert status == answer.status_code, answer.text
    assert len(answer.json()["detail"]) > 20


def test_giant_requests_are_refused_unread(launch: Callable[..., Served]) -> None:
    served = launch(max_mb=1)
    answer = httpx.post(
        f"{served.url}/api/v1/asample", content=b"x" * (3 * 2**20), headers={"X-API-Key": KEY}, timeout=60
    )
    assert 413 == answer.status_code


def test_request_that_is_sent_twice_runs_once(training: tinker.TrainingClient, served: Served) -> None:
    """A client that lost the answer sends its request again under the same number."""
    update(training)
    body = {"model_id": training.model_id, "seq_id": 77, "adam_params": {"learning_rate": 0.1}}
    before = own_logprobs(training)
    training.forward_backward([datum(weights=[1.0] * 6)], "cross_entropy").result()
    ids = {
        httpx.post(f"{served.url}/api/v1/optim_step", json=body, headers={"X-API-Key": KEY}).json()["request_id"]
        for _ in range(2)
    }
    assert 1 == len(ids)
    after = own_logprobs(training)
    assert before != after
    assert after == own_logprobs(training)


def test_requests_without_a_number_are_requests_of_their_own(training: tinker.TrainingClient, served: Served) -> None:
    body = {"model_id": training.model_id, "adam_params": {"learning_rate": 0.1}}
    ids = {
        httpx.post(f"{served.url}/api/v1/optim_step", json=body, headers={"X-API-Key": KEY}).json()["request_id"]
        for _ in range(2)
    }
    assert 2 == len(ids)


def test_request_that_is_cancelled_while_its_weights_are_read_leaves_no_sampler_behind() -> None:
    opened: list[threading.Event] = []
    may_open = threading.Event()

    class Opened:
        def __init__(self) -> None:
            self.closed = threading.Event()
            opened.append(self.closed)

        def close(self) -> None:
            self.closed.set()

    class Model:
        def sampler(self, _folder: Path | None) -> Opened:
            may_open.wait(10)
            return Opened()

    async def body() -> None:
        samplers = Samplers(cast("Any", Model()), most=1)

        async def use() -> None:
            async with samplers.using(None):
                pass

        cancelled = asyncio.ensure_future(use())
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await asyncio.sleep(0.05)
        may_open.set()
        with suppress(asyncio.CancelledError):
            await cancelled
        await use()
        await samplers.close()

    asyncio.run(body())
    assert [True] == [closed.is_set() for closed in opened]


def test_loss_that_is_not_finite_discards_the_gradient(model_dir: Path) -> None:
    from agl.errors import AglError
    from agl_algo_torch.serving.hosting import AdamStep, TargetRow

    trainee = HostedModel(str(model_dir)).trainee(Adapter(rank=2))
    row = TargetRow(ids=IDS[:-1], targets=IDS[1:], inputs={"w": [1.0] * 6})
    trainee.run([row], lambda logp, inputs, _: -inputs["w"] * logp, has_gradient=True)
    with pytest.raises(AglError, match="the gradient since the last update is discarded"):
        trainee.run([row], lambda logp, inputs, _: inputs["w"] * logp * math.inf, has_gradient=True)
    assert 0.0 == trainee.step(AdamStep(lr=0.1))


def test_micro_batches_add_up_to_one_pass(model_dir: Path) -> None:
    from agl_algo_torch.serving.hosting import AdamStep, TargetRow

    rows = [TargetRow(ids=IDS[:n], targets=IDS[1 : n + 1], inputs={"w": [1.0] * n}) for n in (2, 5, 3, 6)]
    found: list[tuple[float, float]] = []
    for budget in (1000, 6):
        trainee = HostedModel(str(model_dir), token_budget=budget).trainee(Adapter(rank=2, seed=1))
        total, logprobs = trainee.run(rows, lambda logp, inputs, _: -inputs["w"] * logp, has_gradient=True)
        assert [2, 5, 3, 6] == [len(row) for row in logprobs]
        assert total == pytest.approx(-sum(map(sum, logprobs)), abs=1e-4)
        found.append((total, trainee.step(AdamStep(lr=0.1))))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
