"""Frameworks that can report spans themselves do so in rollouts, without any code in the agent."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agl.schemas import LLM
from agl.tracing import OtelTracer, WireTracer
from agl_run.tracers.module_tracer import OwnSpans
from agl_testing.model_server import ScriptedModelServer
from tests.adapters import play

DOCS = Path(__file__).parents[3] / "docs"
IMPORTED = {"pydantic_ai": "pydantic_ai", "agent_framework": "agent_framework.observability"}


@pytest.fixture(params=IMPORTED)
def framework(request: pytest.FixtureRequest) -> Iterator[str]:
    """An installed framework whose own spans are off."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    module = importlib.import_module(IMPORTED[request.param])
    switch(module, on=False)
    yield request.param
    switch(module, on=False)


def switch(module: Any, *, on: bool) -> None:
    if module.__name__ == "pydantic_ai":
        module.Agent.instrument_all(on)
    else:
        module.OBSERVABILITY_SETTINGS.enable_instrumentation = on


def is_on(framework: str) -> bool:
    module: Any = sys.modules[IMPORTED[framework]]
    if framework == "pydantic_ai":
        return module.Agent._instrument_default is not False
    return module.OBSERVABILITY_SETTINGS.enable_instrumentation


async def pydantic_ai(task: Any, llm: LLM) -> str:
    import openai
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as api:
        model = OpenAIChatModel(llm.model, provider=OpenAIProvider(openai_client=api))
        return str((await Agent(model, name="calc").run(task["marker"])).output)


async def agent_framework(task: Any, llm: LLM) -> str:
    import openai
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient

    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as api:
        client = OpenAIChatCompletionClient(model=llm.model, async_client=api)
        return (await Agent(client, "Add.", name="calc").run(task["marker"])).text


AGENTS = {"pydantic_ai": pydantic_ai, "agent_framework": agent_framework}


def test_calls_carry_the_names_of_their_agents(framework: str, model_server: ScriptedModelServer) -> None:
    tracers = [OwnSpans(), OtelTracer(), WireTracer()]
    (played,) = play(AGENTS[framework], [{"marker": "task-0;"}], server=model_server, tracers=tracers)
    assert ("succeeded", ["calc"]) == (played.outcome.status, played.agents), played.outcome.error
    assert not is_on(framework)


def test_spans_stay_on_until_the_last_tracer_goes(framework: str) -> None:
    one, other = OwnSpans(), OwnSpans()
    one.install()
    other.install()
    one.uninstall()
    assert is_on(framework)
    other.uninstall()
    assert not is_on(framework)


def test_setting_of_the_user_stays(framework: str) -> None:
    switch(sys.modules[IMPORTED[framework]], on=True)
    tracer = OwnSpans()
    tracer.install()
    tracer.uninstall()
    assert is_on(framework)


def test_spans_that_the_user_disabled_stay_off(model_server: ScriptedModelServer) -> None:
    observability = pytest.importorskip("agent_framework.observability", reason="agent_framework is not installed")
    observability.disable_instrumentation()
    tracer = OwnSpans()
    try:
        tracer.install()
        assert not observability.OBSERVABILITY_SETTINGS.enable_instrumentation
    finally:
        tracer.uninstall()
        observability.enable_instrumentation(force=True)


def smolagents(task: Any, llm: LLM) -> str:
    from smolagents import OpenAIModel, ToolCallingAgent

    model = OpenAIModel(model_id=llm.model, api_base=llm.base_url, api_key="none")
    agent = ToolCallingAgent(tools=[], model=model, max_steps=1, verbosity_level=0, name="calc", description="Adds.")
    return str(agent.run(task["marker"]))


def test_agents_of_a_framework_without_spans_are_named_by_openinference(model_server: ScriptedModelServer) -> None:
    pytest.importorskip("openinference.instrumentation.smolagents", reason="OpenInference is not installed")
    tracers = [OwnSpans(), OtelTracer(), WireTracer()]
    (played,) = play(smolagents, [{"marker": "task-0;"}], server=model_server, tracers=tracers)
    assert ("succeeded", {"calc"}) == (played.outcome.status, set(played.agents)), played.outcome.error


def test_framework_whose_agents_are_not_named_is_reported_with_the_package_that_names_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "openinference.instrumentation.dspy", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "dspy", ModuleType("dspy"))
    tracer = OwnSpans()
    tracer.install()
    tracer.uninstall()
    assert "dspy does not name the agents of its calls; to record them, pip install openinference-" in caplog.text


def test_page_of_frameworks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pydantic_ai", "agent_framework", "smolagents", "litellm"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    spec = importlib.util.spec_from_file_location("agl_docs_runner", DOCS / "tests" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, pages)
    spec.loader.exec_module(pages)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_PLUGINS_STRICT", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runner = pages.PageRunner(tmp_path)
    try:
        for block in pages.blocks_of(DOCS / "how-to" / "frameworks.md"):
            runner.run(block)
    finally:
        runner.close()
