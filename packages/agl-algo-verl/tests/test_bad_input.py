"""Unusable input is refused: prompts over the limit, calls without token ids, models without a critic, no GPU."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace
from transformers import CohereConfig, Qwen2Config

from agl.errors import ConfigError, MissingTokenIdsError
from agl_algo_verl.local.critic import check_family
from agl_algo_verl.rows.rows import RowTooLongError
from agl_testing.conformance.bench import AlgorithmBench

from .test_inproc import train
from .world import PROMPT, World, scenario

if TYPE_CHECKING:
    from pathlib import Path

    from agl.schemas import Episode
    from agl_testing.conformance.bench import RolloutOrder

ONE: dict[str, Any] = {"trainer.total_training_steps": 1}


class Silent(World):
    """A backend that returns no token ids, either for all calls or for the first of every rollout."""

    def __init__(self, *, keeps_rows: bool) -> None:
        super().__init__()
        self.keeps_rows = keeps_rows

    def play(self, order: RolloutOrder) -> Episode:
        episode = super().play(order)
        first = replace(episode.transitions[0], span_id="unseen", reject="missing_token_ids")
        if self.keeps_rows:
            return replace(episode, transitions=(first, *episode.transitions))
        return replace(episode, transitions=(first,), rows=())


def test_prompts_that_are_too_long_are_left_out_and_counted_or_stop_the_run(model_dir: Path, tmp_path: Path) -> None:
    keys = {**ONE, "data.max_prompt_length": len(PROMPT) - 1}
    metrics, _ = train(tmp_path / "counted", model_dir, **keys)
    assert (0.0, 8.0) == (metrics[0]["rows"], metrics[0]["rows_prompt_too_long"])
    keys["data.filter_overlong_prompts"] = False
    with pytest.raises(RowTooLongError, match=r"data\.max_prompt_length = 2 tokens.*Raise the length"):
        train(tmp_path / "stopped", model_dir, **keys)


def test_a_backend_without_token_ids_stops_the_run(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingTokenIdsError, match=r"None of 8 calls has token ids.*Serve the policy"):
        train(tmp_path, model_dir, Silent(keeps_rows=False), **ONE)


def test_single_calls_without_token_ids_are_counted(model_dir: Path, tmp_path: Path) -> None:
    metrics, _ = train(tmp_path, model_dir, Silent(keeps_rows=True), **ONE)
    assert (8.0, 8.0) == (metrics[0]["rows"], metrics[0]["calls_without_ids"])


def setup_error(model_dir: Path, tmp_path: Path, **keys: Any) -> str:
    """Return the message with which setup refuses these keys, before any rollout."""
    bench = AlgorithmBench(scenario(model_dir, **keys), tmp_path)

    async def body() -> str:
        async with bench:
            with pytest.raises(ConfigError) as caught:
                await bench.scenario.make().setup(bench.context())
            assert 0 == bench.requests
            return str(caught.value)

    return asyncio.run(body())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that the settings ask for")
def test_settings_for_a_gpu_are_refused_before_the_first_rollout(model_dir: Path, tmp_path: Path) -> None:
    keys = {"actor.fsdp_config.param_offload": True}
    assert "param_offload need a GPU" in setup_error(model_dir, tmp_path / "actor", **keys)
    keys = {"algorithm.adv_estimator": "gae", "critic.fsdp.optimizer_offload": True}
    assert "critic.fsdp.optimizer_offload need a GPU" in setup_error(model_dir, tmp_path / "critic", **keys)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be loaded.*config\.json"):
        train(tmp_path / "run", tmp_path / "nothing", **ONE)


def test_a_family_without_a_token_classifier_has_no_critic() -> None:
    check_family(Qwen2Config(), path="m")
    with pytest.raises(ConfigError, match=r"is a cohere, of which.*adv_estimator = \"grpo\""):
        check_family(CohereConfig(), path="m")
