"""The context that a run gives to algorithms and agents: the agents whose calls train, and the gateway."""

from pathlib import Path
from typing import Any

import pytest

from agl import AlgorithmEntry, PluginManager, hookimpl
from agl.algorithms import algorithm
from agl.contracts import AlgorithmContext, StepReport
from agl.schemas import PromptTemplate
from agl.stores import MemoryStore
from agl_run import Quiet, Trainer
from agl_run.runners.setup import without_proxy


class Asks:
    """An algorithm that reports the agents whose calls train."""

    async def setup(self, context: AlgorithmContext) -> None:
        context.say(f"trains {context.agents!r}")

    async def step(self) -> StepReport:
        return StepReport(step=1, is_finished=True)

    def state(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...


class AsksPlugin:
    @hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        return [AlgorithmEntry(name="asks", factory=Asks, tunes=("prompt_template",), needs_token_ids=False)]


class Said(Quiet):
    """Collects the lines that a run shows."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("own", "adapter", "expected"),
    [({"agents": "judge"}, None, "judge"), ({}, {"agent_match": "write"}, "write"), ({}, None, "")],
)
def test_it_names_the_agents_of_the_algorithm_or_of_the_adapter(
    own: dict[str, str], adapter: dict[str, str] | None, expected: str, tmp_path: Path
) -> None:
    manager, said = PluginManager(), Said()
    manager.register(AsksPlugin(), name="asks")
    trainer = Trainer(
        name="agents",
        algorithm=algorithm("asks", **own),
        adapter=adapter,
        initial_resources={"prompt": PromptTemplate(template="none")},
        store=MemoryStore(),
        folder=tmp_path,
        plugins=manager,
        progress=said,
    )
    trainer.fit(lambda task: None, [{"q": 1}])
    assert f"asks: trains {expected!r}" in said.lines


def test_calls_to_the_gateway_do_not_go_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert {} == without_proxy("http://10.0.0.1:4747")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "intern")
    assert "intern,10.0.0.1" == without_proxy("http://10.0.0.1:4747")["NO_PROXY"]
