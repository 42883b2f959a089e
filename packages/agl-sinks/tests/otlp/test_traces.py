"""The trace of a rollout, as a tracing backend receives it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agl
from agl.algorithms import component
from agl.schemas import LLM
from agl_run import Quiet, runner
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, ToolCall

from .agents import QUESTIONS, team
from .backends import Backend, ReceivedSpan

TASKS = [{"colour": colour, "answer": "hidden answer"} for colour in QUESTIONS]


def run_team(
    folder: Path, model: ScriptedModelServer, backend: Backend, **params: Any
) -> dict[str, list[ReceivedSpan]]:
    """Run the team on every task, and return the received spans by the task's colour."""
    agl.Trainer(
        name="team",
        initial_resources={"main_llm": LLM(endpoint=model.base_url, model="scripted", api_key_env="")},
        store=f"sqlite:///{folder}/runs.db",
        folder=folder,
        hidden=("answer",),
        exporters=component("otlp", endpoint=backend.url, **params),
        progress=Quiet(),
    ).fit(team, val_dataset=TASKS)
    roots = {span.trace_id: number for number, span in enumerate(span for span in by_id(backend) if not span.parent_id)}
    return {
        colour: [span for span in backend.spans if roots[span.trace_id] == number]
        for number, colour in enumerate(QUESTIONS)
    }


def by_id(backend: Backend) -> list[ReceivedSpan]:
    return sorted(backend.spans, key=lambda span: str(span.attributes["agl.rollout_id"]))


def tree(spans: list[ReceivedSpan], parent: str = "") -> list[Any]:
    own = sorted((span for span in spans if span.parent_id == parent), key=lambda span: span.times)
    return [[span.name, *tree(spans, span.span_id)] for span in own]


def test_a_rollout_is_one_trace_of_agents_calls_tools_and_rewards(
    tmp_path: Path, model: ScriptedModelServer, backend: Backend
) -> None:
    spans = run_team(tmp_path, model, backend)["red"]

    expected = [
        [
            "rollout team",
            ["invoke_agent planner", ["chat scripted"]],
            ["invoke_agent writer", ["chat scripted"], ["execute_tool look_up"]],
            ["evaluate parts"],
        ]
    ]
    assert expected == tree(spans)
    assert 1 == len({span.trace_id for span in spans})
    assert [True] * len(spans) == [start <= end and start > 0 for start, end in (span.times for span in spans)]
    assert {"service.name": "team", "agl.experiment": "team"}.items() <= spans[0].resource.items()


def test_model_calls_carry_the_conventions_and_what_training_knows(
    tmp_path: Path, model: ScriptedModelServer, backend: Backend
) -> None:
    spans = run_team(tmp_path, model, backend)["green"]

    root = next(span for span in spans if not span.parent_id)
    call = next(span for span in spans if span.attributes.get("gen_ai.agent.name") == "writer" and span.kind == 3)
    expected = {
        "agl.experiment": "team",
        "agl.rollout_id": root.attributes["agl.rollout_id"],
        "agl.attempt": 1,
        "agl.algorithm": "validate",
        "agl.step": 0,
        "agl.mode": "val",
        "agl.agent_path": ["writer"],
        "agl.turn": 0,
        "agl.policy": "main_llm",
        "agl.reject": "missing_token_ids",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "scripted",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert expected == {key: call.attributes.get(key) for key in expected}
    assert 0 < call.attributes["gen_ai.usage.input_tokens"]
    assert 0.5 == root.attributes["agl.reward"]
    assert ("succeeded", 1) == (root.attributes["agl.status"], root.attributes["agl.attempts"])


def test_rewards_are_evaluations_with_their_parts(tmp_path: Path, model: ScriptedModelServer, backend: Backend) -> None:
    spans = run_team(tmp_path, model, backend)["red"]

    reward = next(span for span in spans if span.name == "evaluate parts")
    expected = {
        "gen_ai.operation.name": "evaluate",
        "gen_ai.evaluation.name": "parts",
        "gen_ai.evaluation.score.value": 0.5,
        "agl.reward.dimensions.form": 1.0,
        "agl.reward.dimensions.goal": 0.5,
        "agl.reward.source": "environment",
        "agl.reward.scope": "rollout",
    }
    assert expected == {key: reward.attributes.get(key) for key in expected}


def test_contents_stay_out_unless_they_are_asked_for(
    tmp_path: Path, model: ScriptedModelServer, backend: Backend
) -> None:
    spans = run_team(tmp_path, model, backend)

    failed = next(span for span in spans["blue"] if not span.parent_id)
    assert ("KeyError", 2) == (failed.attributes["error.type"], failed.status.code)
    assert {"exception": {"exception.type": "KeyError"}} == failed.events
    everything = b"".join(request.SerializeToString() for request in backend.requests)
    assert [] == [word for word in (b"secret", b"be brief", b"plan for", b"colour", b"hidden") if word in everything]


def test_contents_are_messages_tasks_and_texts_but_never_hidden_fields(
    tmp_path: Path, model: ScriptedModelServer, backend: Backend
) -> None:
    spans = run_team(tmp_path, model, backend, contents=True)["blue"]

    call = next(span for span in spans if span.attributes.get("gen_ai.agent.name") == "planner" and span.kind == 3)
    sent = json.loads(call.attributes["gen_ai.input.messages"])
    expected = [
        {"role": "system", "parts": [{"type": "text", "content": "be brief"}]},
        {"role": "user", "parts": [{"type": "text", "content": "plan for blue"}]},
    ]
    assert expected == sent
    answer = [{"role": "assistant", "parts": [{"type": "text", "content": "ok"}], "finish_reason": "stop"}]
    assert answer == json.loads(call.attributes["gen_ai.output.messages"])
    root = next(span for span in spans if not span.parent_id)
    assert '{"colour":"blue"}' == root.attributes["agl.task"]
    assert "'secret error'" == root.status.message
    tool = next(span for span in spans if span.name == "execute_tool look_up")
    assert "a secret result" == tool.attributes["gen_ai.tool.call.result"]
    assert "secret feedback" in [span.attributes.get("gen_ai.evaluation.explanation") for span in spans]
    assert b"hidden answer" not in b"".join(request.SerializeToString() for request in backend.requests)


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_agent_that_was_tried_again_has_a_span_for_each_attempt(
    tmp_path: Path, backend: Backend, is_whole: bool
) -> None:
    tried: list[int] = []

    def solve(task: dict[str, Any]) -> float:
        tried.append(1)
        with agl.operation("try"):
            if len(tried) == 1:
                raise ValueError("not yet")
        return 1.0

    agl.Trainer(
        name="again",
        store=f"sqlite:///{tmp_path}/runs.db",
        folder=tmp_path,
        runner=runner("async", retry_on="failed", max_attempts=2),
        exporters=component("otlp", endpoint=backend.url, contents=is_whole),
        progress=Quiet(),
    ).fit(solve, val_dataset=TASKS[:1])

    expected = [["rollout again", ["attempt 1", ["try"]], ["attempt 2", ["try"], ["evaluate return"]]]]
    assert expected == tree(backend.spans)
    first = next(span for span in backend.spans if span.name == "attempt 1")
    assert ("failed", "ValueError", 2) == (
        first.attributes["agl.attempt_status"],
        first.attributes["error.type"],
        first.status.code,
    )
    assert ("not yet" if is_whole else "") == first.status.message


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[" * 989 + "]" * 989, '{"a": NaN}', '{"a": "\\ud800"}'])
def test_a_model_that_writes_odd_arguments_does_not_stop_the_export(
    tmp_path: Path, model: ScriptedModelServer, backend: Backend, arguments: str
) -> None:
    def odd(request: ModelRequest) -> Reply:
        return Reply(tool_calls=(ToolCall("look_up", arguments),))

    with ScriptedModelServer(respond=odd) as server:
        spans = run_team(tmp_path, server, backend, contents=True)

    assert [7, 7, 7] == [len(spans[colour]) for colour in QUESTIONS]
    for span in (span for own in spans.values() for span in own):
        for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
            msgspec.json.decode(span.attributes.get(name, "null"))
