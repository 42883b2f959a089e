"""Cut and long answers are masked, penalised and counted as by agl-algo-torch, on the same rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agl.episodes import EpisodeCredit
from agl.errors import ConfigError
from agl.schemas import Episode, Rollout, pack_ids
from agl_algo_verl.rows.rows import prepare, soft_overlong
from agl_algo_verl.settings.ray import read_ray_settings
from agl_algo_verl.settings.settings import read_settings
from agl_objectives import answers, registry

from .test_inproc import train
from .world import PROMPT, TOKENS, World, config, episode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agl_testing.conformance.bench import RolloutOrder

torch_preparation = pytest.importorskip("agl_algo_torch.data.credited_rows", reason="needs agl-algo-torch")

PUNISHED = {
    "reward.reward_kwargs.overlong_buffer_cfg.enable": True,
    "reward.reward_kwargs.overlong_buffer_cfg.len": 40,
    "reward.reward_kwargs.max_resp_len": 100,
}
SERVED = {"rollout.name": "agl_hf"}


def rollout(group: int, place: int) -> Rollout:
    return Rollout(rollout_id=f"{group}-{place}", task={}, group_id=str(group), attempt_id=f"{group}-{place}.1")


def played(group: int, place: int, *, reward: float, calls: Sequence[tuple[int, bool]], rows: int) -> Episode:
    """Return a rollout of two calls; `calls` says for each how many tokens it has, and whether it was cut."""
    ids = [*PROMPT, *range(TOKENS)]
    whole = episode(rollout(group, place), ids, [0.0] * len(ids), reward, rows=rows)
    made = [
        replace(call, response_ids=pack_ids(range(tokens)), finish_reason="length" if is_cut else "stop")
        for call, (tokens, is_cut) in zip(whole.transitions, calls, strict=True)
    ]
    return replace(whole, transitions=tuple(made))


answer = st.tuples(st.integers(0, 120), st.booleans())
drawn = st.tuples(st.integers(0, 2).map(float), st.tuples(answer, answer), st.integers(1, 2))
groups_of = st.lists(st.lists(drawn, min_size=2, max_size=4), min_size=1, max_size=3)


@settings(max_examples=20)
@given(drawn=groups_of, masks=st.booleans(), punishes=st.booleans(), dropped=st.integers(0, 3))
def test_masks_punishments_and_shares_are_those_of_the_torch_algorithms(
    drawn: list[list[Any]], masks: bool, punishes: bool, dropped: int
) -> None:
    groups = [
        [played(g, i, reward=reward, calls=calls, rows=rows) for i, (reward, calls, rows) in enumerate(group)]
        for g, group in enumerate(drawn)
    ]
    soft = answers.SoftOverlong(limit=100, buffer=40) if punishes else answers.SoftOverlong()
    grpo = registry.find_estimator("grpo").call
    expected = torch_preparation.prepare(
        groups, credit=EpisodeCredit(), estimator=grpo, mask_truncated=masks, overlong=soft
    )
    loud = {sample.rollout for sample in expected.samples if not sample.is_silent}
    episodes = [episode for group in groups for episode in group]
    shares = answers.rollout_shares(episodes, dropped=dropped, loud=loud)
    read, _ = read_settings(config(**{"sampling.mask_truncated": masks}, **(PUNISHED if punishes else {})))
    found = prepare(groups, credit=EpisodeCredit(), settings=read, dropped=dropped)
    assert [sample.trained_tokens for sample in expected.samples] == [s.trained_tokens for s in found.samples]
    for theirs, own in zip(expected.samples, found.samples, strict=True):
        both = theirs.advantages[theirs.mask.bool()].tolist(), own.advantages[own.mask].tolist()
        assert pytest.approx(both[0], abs=1e-6) == both[1]
    for name, calls in expected.uses.items():
        for theirs, own in zip(calls, found.uses[name], strict=True):
            assert replace(theirs, advantage=None) == replace(own, advantage=None)
            assert theirs.advantage == pytest.approx(own.advantage, abs=1e-6)
    counted = {*shares, "groups_silent", "reward"}
    assert (expected.metrics | shares).items() >= {name: found.metrics[name] for name in counted}.items()


def test_calls_of_rows_that_are_too_long_are_named() -> None:
    group = [played(0, i, reward=float(i), calls=((1, False), (1, False)), rows=1) for i in range(2)]
    read, _ = read_settings(config(**{"data.max_response_length": 1}))
    found = prepare([group], credit=EpisodeCredit(), settings=read)
    assert {("response_too_long", -1)} == {(call.note, call.row) for calls in found.uses.values() for call in calls}
    read, _ = read_settings(config(**{"algorithm.adv_estimator": "gae"}))
    uses = prepare([group], credit=EpisodeCredit(), settings=read).uses
    assert [(0, 1.0, None)] * 2 == [(call.row, call.credit, call.advantage) for call in uses["0-1"]]


class Cutting(World):
    """Cuts the second call of the first rollout of each group, and gives the first group equal rewards."""

    def play(self, order: RolloutOrder) -> Episode:
        place, number = order.rollout.rollout_id.split("-")[-2:]
        played = replace(super().play(order), reward=0.0 if place == "0" else float(number))
        if number != "0":
            return played
        first, second = played.transitions
        return replace(played, transitions=(first, replace(second, finish_reason="length")))


@pytest.mark.parametrize(("estimator", "silent"), [("grpo", 0.5), ("gae", 0.0)])
@pytest.mark.parametrize("masks", [False, True])
def test_step_reports_the_shares_of_cut_dropped_and_silent_rollouts(
    model_dir: Path, tmp_path: Path, estimator: str, silent: float, masks: bool
) -> None:
    keys: dict[str, Any] = {"trainer.total_training_steps": 1, "algorithm.adv_estimator": estimator}
    ((metrics,), _) = train(tmp_path, model_dir, Cutting(rows=2), **{"sampling.mask_truncated": masks}, **keys)
    assert 16 - 2 * masks == metrics["rows"]
    shares = {name: value for name, value in metrics.items() if name.endswith("_share")}
    assert {"truncated_share": 0.25, "dropped_share": 0.0, "silent_share": silent} == shares


@pytest.mark.parametrize(("tokens", "expected"), [(60, 0.0), (80, -1.0), (100, -2.0), (900, -2.0)])
def test_punishment_is_that_of_verls_reward_manager_up_to_its_limit(tokens: int, expected: float) -> None:
    keys = PUNISHED | {"reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": 2.0}
    read, _ = read_settings(config(**keys))
    assert expected == pytest.approx(soft_overlong(read).punishment(tokens))


def test_on_ray_the_punishment_is_read_here_and_verl_does_not_get_it() -> None:
    read = read_ray_settings(config(**PUNISHED, **SERVED))
    assert 40 == read.settings.reward.reward_kwargs.overlong_buffer_cfg.len
    assert [] == [name for name in read.given if name.startswith("reward")]


BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"{BUFFER}.len": 0}, r"len = 0 and max_resp_len = 100\. Give the most tokens"),
        ({f"{BUFFER}.len": 101}, "len = 101"),
        ({f"{BUFFER}.penalty_factor": -1.0}, "penalty_factor = -1.0"),
        ({f"{BUFFER}.log": True}, "is not logged"),
        ({"reward.reward_manager.name": "dapo"}, r"reward\.reward_kwargs\.overlong_buffer_cfg"),
    ],
)
@pytest.mark.parametrize("read", [read_settings, read_ray_settings])
def test_lengths_that_do_not_go_together_are_refused(read: Any, changed: dict[str, Any], message: str) -> None:
    given = PUNISHED | changed | (SERVED if read is read_ray_settings else {})
    with pytest.raises(ConfigError, match=message):
        read(config(**given))


def test_lengths_without_the_switch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ignored without overlong_buffer_cfg\.enable"):
        read_settings(config(**{name: value for name, value in PUNISHED.items() if not name.endswith("enable")}))
