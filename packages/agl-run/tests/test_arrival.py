"""A run that tunes a text which no model call contains ends after its first rollouts."""

from pathlib import Path
from typing import Any

import openai
import pytest

from agl import AlgorithmEntry, PluginManager, Trainer, hookimpl
from agl.contracts import AlgorithmContext, StepReport
from agl.errors import ConfigError
from agl.schemas import JsonResource, PromptTemplate, Resource
from agl_run import Quiet, policy
from agl_testing.model_server import ScriptedModelServer


class Collecting:
    """Collects the rollouts of one step and publishes nothing."""

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context

    async def step(self) -> StepReport:
        await self._context.collect(self._context.train, step=1)
        return StepReport(step=1, is_finished=True, metrics={}, trained=())

    def state(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...


class CollectingPlugin:
    @hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        tunes = ("prompt_template", "json")
        return [AlgorithmEntry(name="collecting", factory=Collecting, tunes=tunes, needs_token_ids=False)]


def fit(folder: Path, server: ScriptedModelServer, resource: Resource, agent: Any) -> None:
    manager = PluginManager.from_environment()
    manager.register(CollectingPlugin(), name="collecting")
    Trainer(
        algorithm="collecting",
        initial_resources={"clerk": resource},
        policies={"llm": policy("openai", base_url=server.base_url, model="scripted", api_key_env="")},
        gateway="none",
        store="memory://",
        folder=folder,
        plugins=manager,
        progress=Quiet(),
    ).fit(agent, train_dataset=["2 pens", "3 cups"])


async def ask(llm: Any, text: str) -> float:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key="none") as client:
        await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": text}])
    return 1.0


CLERK = PromptTemplate(template="You are a shop clerk.\nAdd up {order}.")
TOOLS: Any = JsonResource(value=[{"name": "add", "description": "Adds two prices."}])


@pytest.mark.parametrize("resource", [CLERK, TOOLS])
def test_tuned_text_that_appears_in_no_request_ends_the_run(
    resource: Resource, tmp_path: Path, model_server: ScriptedModelServer
) -> None:
    async def forgets(task: str, llm: Any) -> float:
        return await ask(llm, "You sell things. Use the tool add.")

    with pytest.raises(ConfigError, match="nothing of 'clerk', which an algorithm tunes, is in any model call"):
        fit(tmp_path, model_server, resource, forgets)


def test_tuned_text_that_appears_in_part_or_in_json_is_found(tmp_path: Path, model_server: ScriptedModelServer) -> None:
    async def fills(task: str, llm: Any, clerk: str = "You sell things.") -> float:
        return await ask(llm, clerk.format(order=task).replace("clerk", "keeper"))

    async def quotes(task: str, llm: Any, clerk: Any) -> float:
        return await ask(llm, f"Tools: {clerk}")

    fit(tmp_path / "part", model_server, CLERK, fills)
    fit(tmp_path / "json", model_server, TOOLS, quotes)
