"""The parts of `engine = "ray"` that need no cluster: rows for VERL, checkpoints, and repairs of VERL."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from agl.errors import AglError, ConfigError
from agl.schemas import CallCredit
from agl_algo_verl.losses.choice import LossChoice
from agl_algo_verl.losses.correction import corrected, correction_metrics, correction_of
from agl_algo_verl.losses.loss_worker import LossWorker
from agl_algo_verl.losses.shaping import distance
from agl_algo_verl.ray.bridge import Bridge, StepRequest
from agl_algo_verl.ray.checkpoints import count, forget_after, merge_saved, origins, prune, say_precision, steps_of
from agl_algo_verl.ray.cluster import check_alone
from agl_algo_verl.ray.completion import Completion
from agl_algo_verl.ray.rows import rows_for_verl
from agl_algo_verl.ray.trainer import REPORTED, RayVERL
from agl_algo_verl.rows.batches import per_rollout, weighting
from agl_algo_verl.rows.replay import replay_weights
from agl_algo_verl.rows.rows import PreparedStep, RowSample
from agl_algo_verl.serving.policy import VerlPolicy
from agl_algo_verl.settings.settings import RolloutCorrectionKeys
from agl_algo_verl.typed import ragged
from agl_testing.conformance import FinishedCredit
from agl_testing.conformance.bench import AlgorithmBench

from .world import config, scenario

if TYPE_CHECKING:
    from agl_algo_verl.ray.bridge import StepRows


def sample(rollout: str, *, group: int = 0, tokens: int = 2, temperature: float = 1.0) -> RowSample:
    return RowSample(
        rollout=rollout,
        group=group,
        ids=torch.arange(3 + tokens),
        mask=torch.ones(tokens, dtype=torch.bool),
        advantages=torch.full((tokens,), 6.0),
        behaviour=torch.zeros(tokens),
        temperature=temperature,
    )


def prepared(*samples: RowSample, rollouts: list[tuple[str, int]]) -> PreparedStep:
    return PreparedStep(samples=list(samples), rollouts=rollouts, metrics={"rows_prompt_too_long": 2.0})


def test_rows_are_named_by_task_rollout_and_part() -> None:
    rollouts = [("a", 0), ("b", 0), ("c", 1)]
    samples = (sample("a"), sample("a", tokens=1), sample("c", group=1))
    answer: StepRows = rows_for_verl(prepared(*samples, rollouts=rollouts), mode="token-mean", step=1)
    assert [(0, 0, 0), (0, 0, 1), (1, 0, 0)] == [(row.group, row.rollout, row.part) for row in answer.rows]
    assert (0, 1.0) == (answer.rollouts, answer.temperature)


def test_a_mean_over_sequences_counts_rollouts_even_those_without_rows() -> None:
    samples = (sample("a"), sample("a", tokens=1))
    answer: StepRows = rows_for_verl(
        prepared(*samples, rollouts=[("a", 0), ("b", 0)]), mode="seq-mean-token-mean", step=1
    )
    assert 2 == answer.rollouts
    assert [[4.0, 4.0], [2.0]] == [row.scores.tolist() for row in answer.rows]


def test_rows_name_the_update_that_holds_their_whole_rollout() -> None:
    rollouts = [("a", 0), ("b", 0), ("c", 1), ("d", 2)]
    rows = (sample("a"), sample("c", group=1), sample("a", tokens=1), sample("d", group=2), sample("b"))
    answer: StepRows = rows_for_verl(prepared(*rows, rollouts=rollouts), mode="seq-mean-token-mean", step=1, tasks=2)
    assert [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (2, 0, 0, 1)] == [
        (row.group, row.rollout, row.part, row.update) for row in answer.rows
    ]
    assert ((3, 1), 0) == (answer.updates, answer.rollouts)


def test_an_update_without_a_gradient_is_left_out_unless_all_are() -> None:
    silent = replace(sample("b", group=1), advantages=torch.zeros(2))
    rollouts = [("a", 0), ("b", 1), ("c", 2)]

    def rows(*samples: RowSample) -> list[tuple[int, int]]:
        answer: StepRows = rows_for_verl(
            prepared(*samples, rollouts=rollouts),
            mode="token-mean",
            step=1,
            tasks=1,
            has_gradient=lambda part: any(not row.is_silent for row in part),
        )
        return [(row.group, row.update) for row in answer.rows]

    assert [(0, 0), (2, 1)] == rows(sample("a"), silent, sample("c", group=2))
    assert [(1, 0)] == rows(silent)


def held(rollout: str, *, group: int, tokens: int) -> RowSample:
    row = sample(rollout, group=group, tokens=tokens, temperature=0.5)
    return replace(row, mask=torch.zeros(tokens, dtype=torch.bool), held=torch.ones(tokens, dtype=torch.bool))


def test_rows_that_are_held_go_with_the_update_of_their_rollout() -> None:
    rollouts = [("a", 0), ("b", 0), ("c", 1)]
    calls = [held("a", group=0, tokens=3), held("c", group=1, tokens=2), held("b", group=0, tokens=9)]
    answer: StepRows = rows_for_verl(
        prepared(sample("a"), sample("c", group=1), rollouts=rollouts),
        mode="token-mean",
        step=1,
        tasks=1,
        held=[*calls, held("a", group=0, tokens=1)],
    )
    found = [(row.group, row.rollout, row.part, row.update, row.held, int(row.mask.sum())) for row in answer.rows]
    first = [(0, 0, 0, 0, 0.0, 2), (0, 0, 1, 0, 0.25, 0), (0, 0, 2, 0, 0.25, 0)]
    assert [*first, (1, 0, 0, 1, 0.0, 2), (1, 0, 1, 1, 0.5, 0)] == found
    assert 1.0 == answer.temperature


def evaluated(rows: list[RowSample], *, replayed: tuple[str, ...] = ()) -> TensorDict:
    """Return rows in the form that VERL has after it has recomputed log-probabilities."""
    numbers = {row.rollout: number for number, row in enumerate(rows)}
    fields = {
        "response_mask": ragged([row.mask.long() for row in rows]),
        "rm_scores": ragged([row.advantages for row in rows]),
        "rollout_log_probs": ragged([row.behaviour for row in rows]),
        "old_log_probs": ragged([row.old for row in rows if row.old is not None]),
        "ref_log_prob": ragged([row.behaviour - 1.0 for row in rows]),
        "agl_rollout": torch.tensor([[numbers[row.rollout]] for row in rows]),
        "agl_held": torch.tensor([[0.0 if row.held is None else 0.25] for row in rows]),
        "agl_update": torch.tensor([[numbers[row.rollout]] for row in rows]),
        "agl_replayed": torch.tensor([[float(row.rollout in replayed)] for row in rows]),
    }
    return TensorDict(fields, batch_size=len(rows))


def drawn(count: int) -> list[RowSample]:
    """Return `count` rollouts of two rows each, and a held row."""
    generator = torch.Generator().manual_seed(3)
    rows = [sample(f"r{number // 2}", tokens=2 + number) for number in range(count)]
    noisy = [replace(row, old=0.4 * torch.randn(len(row.mask), generator=generator)) for row in rows]
    return [*noisy, replace(held("r0", group=0, tokens=4), old=torch.full((4,), -3.0))]


SEQUENCE = RolloutCorrectionKeys(rollout_is="sequence", rollout_is_threshold=1.1, rollout_is_batch_normalize=True)
REJECTED = RolloutCorrectionKeys(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.7_1.4,0.2")
CHOICE = LossChoice(name="gspo", params={}, aggregation="sequence", constant=1)


@pytest.mark.parametrize("keys", [SEQUENCE, REJECTED], ids=["weights", "rejection"])
@pytest.mark.parametrize("choice", [None, CHOICE], ids=["verls", "ours"])
def test_rows_are_corrected_over_whole_rollouts(keys: RolloutCorrectionKeys, choice: LossChoice | None) -> None:
    rows, correction = drawn(6), correction_of(keys)
    completion = Completion(correction=correction, choice=choice, mode="seq-mean-token-mean")
    found = completion.completed(evaluated(rows), padding=[False] * len(rows))
    fields, metrics = found.fields, found.metrics
    assert {} == found.options
    expected = corrected(rows, correction)
    shares = correction_metrics(expected, correction)
    assert {f"agl/{name}": pytest.approx(value) for name, value in shares.items()} == metrics
    if keys is SEQUENCE:
        assert {"rollout_is_weights"} == fields.keys()
        for weight_R, row in zip(fields["rollout_is_weights"].unbind(), expected, strict=True):
            assert row.importance is None or torch.equal(row.importance, weight_R)
        assert not fields["rollout_is_weights"].unbind()[-1].any()
        return
    assert 0 < shares["rejected_share"] < 1
    for kept_R, row in zip(fields["response_mask"].unbind(), expected, strict=True):
        assert torch.equal(row.kept.long(), kept_R)
    if choice is None:
        for scores_R, row in zip(fields["rm_scores"].unbind(), per_rollout(expected), strict=True):
            assert torch.equal(row.advantages, scores_R)
    else:
        weight = weighting(expected, rollouts=3, choice=choice).weight
        assert [[pytest.approx(weight[row.rollout])] for row in expected] == fields["agl_weight"].tolist()


def test_advantages_are_scaled_once() -> None:
    rows = prepared(*drawn(4)[:4], rollouts=[("r0", 0), ("r1", 0)])
    for keys, is_scaled in ((SEQUENCE, True), (REJECTED, False)):
        completion = Completion(correction=correction_of(keys), mode="seq-mean-token-mean")
        answer: StepRows = rows_for_verl(rows, mode="seq-mean-token-mean", step=1, completion=completion)
        assert is_scaled == any(bool((row.scores != 6.0).any()) for row in answer.rows)
        assert completion is answer.completion


def test_copies_of_a_held_row_that_fill_up_a_batch_are_not_held() -> None:
    rows = drawn(2)
    completion = Completion(anchor_coef=0.1)
    found = completion.completed(evaluated([*rows, rows[-1]]), padding=[False, False, False, True])
    assert [0.0, 0.0, 0.25, 0.0] == [float(share_R.max()) for share_R in found.fields["agl_anchor"].unbind()]
    assert [[-1.0] * 2, [-1.0] * 3, [-1.0] * 4, [-1.0] * 4] == [
        start_R.tolist() for start_R in found.fields["agl_start"].unbind()
    ]
    assert {"agl_anchor_coef": 0.1} == found.options


def test_updates_that_the_correction_leaves_without_a_gradient_are_named() -> None:
    away = {"r0": 0.0, "r1": 3.0, "r2": 0.0, "r3": -3.0}
    rows = [
        replace(sample(name), old=torch.full((2,), log), advantages=torch.full((2,), 0.0 if name == "r2" else 6.0))
        for name, log in away.items()
    ]
    keys = RolloutCorrectionKeys(rollout_rs="token_k3", rollout_rs_threshold="1.0")
    for has_critic, expected in ((False, (1, 2, 3)), (True, ())):
        completion = Completion(
            correction=correction_of(keys),
            has_gradient=None if has_critic else lambda part: any(not row.is_silent for row in part),
        )
        found = completion.completed(evaluated(rows), padding=[False] * len(rows))
        assert expected == found.options.get("agl_silent", ())
        assert bool(expected) == ("agl/updates_skipped" in found.metrics)


def test_the_distance_to_the_reference_is_that_of_the_steps_own_rows() -> None:
    rows = drawn(6)
    completion = Completion(measures_kl=True)
    assert completion.is_needed
    assert set(completion.reads) <= set(evaluated(rows).keys())
    found = completion.completed(evaluated(rows, replayed=("r2",)), padding=[False] * len(rows))
    own = [replace(row, reference=row.behaviour - 1.0) for row in rows if row.rollout != "r2"]
    assert {f"agl/{name}": pytest.approx(value) for name, value in distance(own).items()} == found.metrics
    assert ({}, {}) == (found.fields, found.options)


def test_weights_of_replayed_rows_are_reported_as_in_one_process() -> None:
    rows, correction = drawn(6), correction_of(RolloutCorrectionKeys(rollout_is="token", rollout_is_threshold=1.1))
    completion = Completion(correction=correction)
    found = completion.completed(evaluated(rows, replayed=("r1", "r2")), padding=[False] * len(rows)).metrics
    again = [row for row in corrected(rows, correction) if row.rollout in ("r1", "r2")]
    expected = replay_weights(again, bound=1.1)
    assert 0 < expected["replay_truncated"] < 1
    assert expected == {name: found[f"agl/{name}"] for name in expected}
    without = completion.completed(evaluated(rows), padding=[False] * len(rows)).metrics
    assert not {"agl/replay_weight", "agl/replay_truncated"} & without.keys()


def test_rows_say_which_of_them_are_replayed() -> None:
    rows = prepared(sample("a"), sample("b", group=1), rollouts=[("a", 0), ("b", 1)])
    answer: StepRows = rows_for_verl(rows, mode="token-mean", step=1, replayed={"b"})
    assert [False, True] == [row.is_replayed for row in answer.rows]


def test_what_workers_and_completion_report_is_logged() -> None:
    named = {"actor/ratio_max", "agl/kl", "agl/entropy", "agl/replay_weight", "agl/replay_truncated"}
    assert named <= REPORTED.keys()


@pytest.mark.parametrize("is_anchored", [True, False])
def test_a_rank_without_a_row_of_an_update_joins_it_with_one_that_has_no_token(is_anchored: bool) -> None:
    fields: dict[str, Any] = {
        "response_mask": ragged([torch.ones(2, dtype=torch.int64), torch.ones(3, dtype=torch.int64)]),
        "loss_mask": ragged([torch.ones(2, dtype=torch.int64), torch.ones(3, dtype=torch.int64)]),
        "agl_update": torch.tensor([[0], [2]]),
        "agl_rollouts": torch.tensor([[4], [5]]),
    }
    if is_anchored:
        fields["agl_anchor"] = ragged([torch.full((2,), 0.5), torch.zeros(3)])
    worker: Any = object.__new__(LossWorker)
    worker.engine = SimpleNamespace(get_data_parallel_size=lambda: 2)
    masks = [name for name in ("response_mask", "loss_mask", "agl_anchor") if name in fields]
    for number, (rows, tokens) in enumerate([(1, 2), (1, 0), (1, 3)]):
        part = worker._update(TensorDict(fields, batch_size=2), number)
        assert rows == len(part)
        assert tokens == int(part["response_mask"].values().sum()) == int(part["loss_mask"].values().sum())
        assert set(masks) <= set(part.keys())
        if is_anchored:
            assert (1.0 if number == 0 else 0.0) == float(part["agl_anchor"].values().sum())


class Alone(RayVERL):
    """The algorithm with a cluster that answers immediately."""

    async def _launch(self) -> Any:
        self._request = StepRequest(step=1, addresses=())
        return SimpleNamespace(ended=asyncio.Event().wait, stop=asyncio.Event().set)

    async def _exchange(self, cluster: Any, answer: StepRows, *, after: StepRequest) -> StepRequest:
        return StepRequest(step=after.step + 1, addresses=())

    def _trained(self, step: int) -> dict[str, float]:
        return {}


def test_a_step_in_which_the_critic_learns_alone_publishes_nothing(model_dir: Path, tmp_path: Path) -> None:
    keys = {"rollout.name": "agl_hf", "algorithm.adv_estimator": "gae", "trainer.critic_warmup": 3}
    policies = {"llm": VerlPolicy(name="llm", model=str(model_dir), threads=1)}
    bench = AlgorithmBench(replace(scenario(model_dir), policies=lambda _: policies), tmp_path)

    async def body() -> list[Any]:
        async with bench:
            algorithm = Alone(**config(**keys))
            await algorithm.setup(replace(bench.context(), defer=lambda save: None))
            return [await algorithm.step() for _ in range(3)]

    reports = asyncio.run(body())
    assert [0, 0, 1] == [len(report.published) for report in reports]
    assert ["verl-000000/global_step_3"] == [
        str(Path(version.resource.uri).relative_to(tmp_path.absolute()).parents[1]) for version in bench.published
    ]


def test_credit_of_finished_advantages_is_said_to_leave_the_estimator_nothing(model_dir: Path, tmp_path: Path) -> None:
    policies = {"llm": VerlPolicy(name="llm", model=str(model_dir), threads=1)}
    bench = AlgorithmBench(replace(scenario(model_dir), policies=lambda _: policies), tmp_path, credit=FinishedCredit())
    said: list[str] = []

    async def body() -> None:
        async with bench:
            algorithm = Alone(**config(**{"rollout.name": "agl_hf"}))
            await algorithm.setup(replace(bench.context(), defer=lambda save: None, say=said.append))
            await algorithm.step()

    asyncio.run(body())
    (line,) = [line for line in said if "estimator" in line]
    assert 'finished advantages, which estimator = "grpo" does not change' in line


def test_with_a_critic_rows_bring_rewards_that_sum_to_what_credit_gave() -> None:
    row = replace(sample("a", tokens=3), calls=(("a/0", 0, 2), ("a/1", 2, 3)))
    credits = (
        (CallCredit(span_id="a/0", value=3.0, baseline="t"), CallCredit(span_id="a/1", value=1.0, baseline="t")),
    )
    batch = replace(prepared(row, rollouts=[("a", 0)]), credits=credits)
    answer: StepRows = rows_for_verl(batch, mode="token-mean", step=1, has_critic=True)
    assert [[0.0, 2.0, 1.0]] == [row.scores.tolist() for row in answer.rows]


def test_saved_adapters_are_added_to_their_weights(tmp_path: Path) -> None:
    name, layer = "base_model.model.model.norm.weight", "base_model.model.model.q_proj"
    state = {
        name: torch.ones(2),
        f"{layer}.base_layer.weight": torch.eye(2),
        f"{layer}.base_layer.bias": torch.zeros(2),
        f"{layer}.lora_A.default.weight": torch.tensor([[1.0, 2.0]]),
        f"{layer}.lora_B.default.weight": torch.tensor([[1.0], [0.0]]),
    }
    save_file(dict(list(state.items())[:2]), tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict(list(state.items())[2:]), tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").touch()
    merge_saved(tmp_path, scaling=2.0)
    assert ["model.safetensors"] == [path.name for path in tmp_path.iterdir()]
    found = load_file(tmp_path / "model.safetensors")
    assert {"model.norm.weight", "model.q_proj.weight", "model.q_proj.bias"} == found.keys()
    assert [[3.0, 4.0], [0.0, 1.0]] == found["model.q_proj.weight"].tolist()
    save_file(state, tmp_path / "model-00001-of-00001.safetensors")  # as after a stop before it was removed
    merge_saved(tmp_path, scaling=2.0)
    assert ["model.safetensors"] == [path.name for path in tmp_path.iterdir()]
    again = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in again.items())
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(AglError, match="saved no adapters"):
        merge_saved(tmp_path, scaling=2.0)


def test_the_configuration_says_which_precision_the_weights_have(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1), "v": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16", "hidden_size": 2}')
    say_precision(tmp_path)
    assert {"dtype": "float32", "hidden_size": 2} == json.loads((tmp_path / "config.json").read_text())


def test_rows_that_verl_cannot_train_are_refused() -> None:
    mixed = prepared(sample("a"), sample("b", temperature=0.5), rollouts=[("a", 0), ("b", 0)])
    with pytest.raises(AglError, match=r"temperatures \[0.5, 1.0\]"):
        rows_for_verl(mixed, mode="token-mean", step=4)


def test_a_checkpoint_is_asked_for_while_verl_waits_for_rows() -> None:
    async def body() -> None:
        bridge = Bridge()
        asked = asyncio.ensure_future(bridge.ask(StepRequest(step=3, addresses=())))
        assert 3 == (await bridge.request()).step
        saving = asyncio.ensure_future(bridge.save())
        assert [] == await asked
        assert not saving.done()
        asked = asyncio.ensure_future(bridge.saved())
        await saving
        assert not asked.done()
        await bridge.answer(["rows"])
        assert ["rows"] == await asked

    asyncio.run(body())


def test_checkpoints_of_uncounted_steps_and_old_ones_are_removed(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        (tmp_path / f"global_step_{step}").mkdir()
    forget_after(tmp_path, step=10)
    assert {8, 9, 10} == {int(path.name[12:]) for path in tmp_path.iterdir()}


def test_checkpoints_that_count_are_removed_except_the_newest_the_kept_and_those_in_use(tmp_path: Path) -> None:
    places = {1: "verl-000000/global_step_1", 2: "verl-000000/global_step_2", 3: "verl-000000/global_step_3"}
    places |= {5: "verl-000004/global_step_2", 6: "verl-000004/global_step_3"}
    for step, place in places.items():
        (tmp_path / place).mkdir(parents=True)
        count(tmp_path / place, step=step, origin="")
    count(tmp_path / places[3], step=4, origin="merged/one")  # which trained nothing
    (tmp_path / "verl-000004/global_step_4").mkdir()  # which no step counts yet
    assert [3, 4] == steps_of(tmp_path / places[3])
    assert ["", "", "", "", "merged/one"] == sorted(origins(tmp_path))
    prune(tmp_path, keep=2, kept={4}, used=("", str(tmp_path / places[1] / "actor/huggingface")))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    assert {places[step] for step in (1, 3, 5, 6)} | {"verl-000004/global_step_4"} == left


class Queues:
    """Stands for Ray's module, connected to a cluster that reports VERL's queue a given number of times."""

    def __init__(self, *, times: float) -> None:
        self.times = times

    def get_actor(self, name: str, *, namespace: str) -> None:
        assert ("TransferQueueController", "transfer_queue") == (name, namespace)
        self.times -= 1
        if self.times < 0:
            raise ValueError(name)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="here:6379")


def test_a_cluster_on_which_another_run_trains_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_algo_verl.ray.cluster.QUEUE_POLL_S", 0.0)
    check_alone(Queues(times=0))
    check_alone(Queues(times=3))
    with pytest.raises(ConfigError, match=r"Another run trains with VERL on the Ray cluster at here:6379"):
        check_alone(Queues(times=math.inf), patience_s=0.05)
