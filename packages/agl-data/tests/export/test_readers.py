"""The published classes of Tinker and VERL read the exported files; needs torch (``nox -s trl``)."""

import json
from typing import Any

import pytest
from hypothesis import given, settings

from agl.contracts import Recording
from agl.schemas import unpack_floats, unpack_ids

from .conftest import episode_of, export
from .worlds import recordings

FEW = settings(max_examples=25, deadline=None)


def lines_and_rows(form: str, recording: Recording) -> list[tuple[Any, Any]]:
    """Return the lines of a format, each with its row; empty for a rollout without rows."""
    episode = episode_of(recording)
    if not episode.rows:
        return []
    lines = [json.loads(line) for line in export(form, [recording]).data.splitlines()]
    return list(zip(lines, episode.rows, strict=True))


@pytest.mark.filterwarnings("default")
@given(recording=recordings())
@FEW
def test_tinker_loads_the_datums(recording: Recording) -> None:
    tinker = pytest.importorskip("tinker", reason="Tinker's client is not installed; nox -s trl installs it")
    for line, row in lines_and_rows("tinker", recording):
        inputs = {name: tinker.TensorData(**value) for name, value in line["datum"]["loss_fn_inputs"].items()}
        datum = tinker.Datum(
            model_input=tinker.ModelInput.model_validate(line["datum"]["model_input"]), loss_fn_inputs=inputs
        )
        ids = unpack_ids(row.ids)
        assert ids[:-1] == datum.model_input.to_ints()
        assert ids[1:] == datum.loss_fn_inputs["target_tokens"].tolist()
        assert list(row.mask[1:]) == datum.loss_fn_inputs["weights"].tolist()
        assert unpack_floats(row.logprobs)[1:] == datum.loss_fn_inputs["logprobs"].tolist()


@pytest.mark.filterwarnings("default")
@given(recording=recordings())
@FEW
def test_verl_loads_the_outputs_of_agent_loops(recording: Recording) -> None:
    loops = pytest.importorskip(
        "verl.experimental.agent_loop.agent_loop", reason="VERL is not installed; nox -s trl installs it"
    )
    for line, row in lines_and_rows("verl", recording):
        made = loops.AgentLoopOutput(**line).as_dict()
        prompt = len(made["prompts"])
        assert unpack_ids(row.ids) == [*made["prompts"].tolist(), *made["responses"].tolist()]
        assert list(row.mask[prompt:]) == made["response_mask"].tolist()
        assert unpack_floats(row.logprobs)[prompt:] == made["rollout_log_probs"].tolist()
        assert (episode_of(recording).reward is not None) == ("rm_scores" in made)
