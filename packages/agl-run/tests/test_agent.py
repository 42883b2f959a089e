"""The kinds of agents, the arguments with which they are called, and the meaning of their return values."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import agl
from agl.errors import ConfigError, RunError
from agl.schemas import LLM, NamedResources, PromptTemplate, Reward, Rollout
from agl_run import AgentSpec
from agl_run.runners.result import AgentResult, read_result

ROLLOUT = Rollout(rollout_id="r1", task={"question": "2+2", "answer": 4}, hidden=("answer",))
RESOURCES: NamedResources = {
    "main_llm": LLM(endpoint="http://gateway/v1", model="m"),
    "prompt": PromptTemplate(template="Say {x}"),
}


def call(agent: Any) -> Any:
    return AgentSpec.of(agent).load().call(ROLLOUT, RESOURCES)


def test_plain_function_gets_the_task_without_hidden_fields() -> None:
    assert {"question": "2+2"} == call(lambda anything: anything)


def test_parameters_are_filled_by_name() -> None:
    def agent(task: Any, llm: LLM, prompt_template: PromptTemplate, rollout: Rollout, main_llm: LLM) -> Any:
        return task, llm, prompt_template, rollout.task, rollout.hidden, main_llm

    task, llm, prompt, inner, hidden, main = call(agent)

    assert {"question": "2+2"} == task == inner
    assert () == hidden
    assert RESOURCES["main_llm"] == llm == main
    assert RESOURCES["prompt"] == prompt


def test_defaults_are_left_alone() -> None:
    assert ({"question": "2+2"}, 3) == call(lambda task, retries=3: (task, retries))


def test_resource_fills_the_parameter_of_its_name_even_if_it_has_a_default() -> None:
    assert "Say {x}" == call(lambda task, prompt="Say nothing.": prompt)
    assert RESOURCES["prompt"] == call(lambda task, *, prompt=None: prompt)
    assert RESOURCES["main_llm"] == call(lambda task, llm=None: llm)


def test_lit_agent_class_is_made_and_called_with_task_resources_rollout() -> None:
    class Agent(agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
            return task, sorted(resources), rollout.task

    assert ({"question": "2+2"}, ["main_llm", "prompt"], {"question": "2+2"}) == call(Agent)
    assert ({"question": "2+2"}, ["main_llm", "prompt"], {"question": "2+2"}) == call(Agent())


@pytest.mark.parametrize("mode", ["train", "val", "test"])
def test_class_may_have_methods_of_their_own_for_training_and_validation(mode: Any) -> None:
    class Both(agl.LitAgent[Any]):
        def training_rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> str:
            return f"trains in {rollout.mode}"

        def validation_rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> str:
            return f"validates in {rollout.mode}"

    class One(agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> str:
            return "runs"

        async def training_rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> str:
            return "trains"

    one = replace(ROLLOUT, mode=mode)
    both, mixed = (AgentSpec.of(agent).load() for agent in (Both, One))
    assert ("trains in train" if mode == "train" else f"validates in {mode}") == both.call(one, RESOURCES)
    said = mixed.call(one, RESOURCES)
    assert ("trains" if mode == "train" else "runs") == (asyncio.run(said) if mode == "train" else said)
    assert (False, False) == (both.is_async, mixed.is_async)


def test_class_with_a_coroutine_method_is_asynchronous() -> None:
    class Agent(agl.LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> str:
            return "runs"

    spec = AgentSpec.of(Agent()).load()
    assert (True, "runs") == (spec.is_async, asyncio.run(spec.call(ROLLOUT, RESOURCES)))


def test_decorated_function_stays_callable() -> None:
    @agl.agent
    def agent(task: Any, llm: LLM) -> str:
        return llm.model

    assert "x" == agent({}, LLM(model="x"))
    assert "m" == call(agent)


def test_unknown_parameter_is_an_error_that_lists_what_there_is() -> None:
    def agent(task: Any, judge: LLM) -> None: ...

    with pytest.raises(ConfigError, match=r"'judge'.*\['main_llm', 'prompt'\]"):
        call(agent)


def test_llm_parameter_is_refused_when_there_are_two() -> None:
    def agent(task: Any, llm: LLM) -> None: ...

    spec = AgentSpec.of(agent).load()
    with pytest.raises(ConfigError, match="exactly one LLM"):
        spec.call(ROLLOUT, {**RESOURCES, "other": LLM()})


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no_colon", "module:attribute"),
        ("no_such_module_x:solve", "no module 'no_such_module_x'"),
        ("agl.schemas._ids:new_rollout_ids", "did you mean 'new_rollout_id'"),
    ],
)
def test_bad_import_path_says_what_is_missing(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        AgentSpec(path=path).load()


def test_module_that_needs_a_missing_module_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent_with_need.py").write_text("import not_installed_at_all\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match="not_installed_at_all"):
        AgentSpec(path="agent_with_need:solve", folder=str(tmp_path)).load()


def test_module_of_another_folder_with_the_name_of_the_agents_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "agent_of_two.py").write_text(f"def solve(task): return {name!r}\n")
    first, second = (AgentSpec(path="agent_of_two:solve", folder=str(tmp_path / name)) for name in ("first", "second"))

    assert "first" == first.load().call(ROLLOUT, RESOURCES)
    with pytest.raises(ConfigError, match=r"'agent_of_two' for the agent is imported from \S+first\S+ already, and"):
        second.load()


def test_base_url_carries_the_attempt_only_with_a_token() -> None:
    bare = LLM(endpoint="http://g:1/v1")
    bound = LLM(endpoint="http://g:1/v1", api_key="agl_t")

    assert "http://g:1/v1" == bare.get_base_url("r", "r.1")
    assert "http://g:1/v1" == bound.get_base_url()
    assert "http://g:1/rollout/r/attempt/r.1/key/agl_t/v1" == bound.get_base_url("r", "r.1")


class Accessor(str):
    """A subclass of ``str``, as LangChain's messages use for their text."""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, AgentResult()),
        (0.5, AgentResult(reward=Reward(value=0.5, name="return"), output=0.5)),
        (True, AgentResult(reward=Reward(value=1.0, name="return"), output=1.0)),
        ({"a": 1, "b": 0.5}, AgentResult(reward=Reward(value=None, name="return", dimensions={"a": 1.0, "b": 0.5}))),
        ("text", AgentResult(output="text")),
        (Accessor("text"), AgentResult(output="text")),
        ({"answer": Accessor("x")}, AgentResult(output={"answer": "x"})),
        ({"answer": "x"}, AgentResult(output={"answer": "x"})),
        ([1, 2], AgentResult(output=[1, 2])),
        (Reward(value=0.1, name="mine"), AgentResult(reward=Reward(value=0.1, name="mine"))),
    ],
)
def test_return_value_is_read(value: Any, expected: AgentResult) -> None:
    assert expected == read_result(value)


@pytest.mark.parametrize(
    "value", [[2**70], {"path": "\udcff"}, 10**400, {"a": -(10**400)}], ids=["list", "half", "huge", "dimension"]
)
def test_return_value_that_no_store_carries_is_refused(value: Any) -> None:
    with pytest.raises(RunError, match=r"^the agent returned (list that no store carries: .*64|dict, which|-?inf)"):
        read_result(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, object()}])
def test_wrong_return_value_says_what_is_accepted(value: Any) -> None:
    with pytest.raises(RunError, match="the agent returned"):
        read_result(value)
