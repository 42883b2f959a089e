"""A run that tunes a text which no model call contains ends after its first rollouts."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from agl import AlgorithmEntry, PluginManager, Trainer, hookimpl
from agl.contracts import AlgorithmContext, StepReport
from agl.errors import ConfigError
from agl.schemas import JsonResource, PromptTemplate, Resource
from agl_inspect.terminal.program import cli
from agl_run import Quiet, policy
from agl_run.watch import arrival
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


def fit(folder: Path, server: ScriptedModelServer, resource: Resource, agent: Any, *, store: str = "memory://") -> None:
    manager = PluginManager.from_environment()
    manager.register(CollectingPlugin(), name="collecting")
    Trainer(
        algorithm="collecting",
        initial_resources={"clerk": resource},
        policies={"llm": policy("openai", base_url=server.base_url, model="scripted", api_key_env="")},
        gateway="none",
        store=store,
        folder=folder,
        plugins=manager,
        progress=Quiet(),
    ).fit(agent, train_dataset=["2 pens", "3 cups"])


async def ask(llm: Any, text: str) -> float:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key="none") as client:
        await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": text}])
    return 1.0


CLERK = PromptTemplate(template="You are a shop clerk.\nAdd up {order}.")
TOOLS: Any = JsonResource(value=[{"name": "add", "description": "Adds the prices of two articles."}])


@pytest.fixture
def two_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "ENOUGH", 2)


@pytest.mark.usefixtures("two_are_enough")
@pytest.mark.parametrize("resource", [CLERK, TOOLS])
def test_tuned_text_that_appears_in_no_request_ends_the_run(
    resource: Resource, tmp_path: Path, model_server: ScriptedModelServer
) -> None:
    async def forgets(task: str, llm: Any) -> float:
        return await ask(llm, "You sell things. Use the tool add.")

    with pytest.raises(ConfigError, match="nothing of 'clerk', which an algorithm tunes, is in any model call"):
        fit(tmp_path, model_server, resource, forgets)


def test_text_that_few_rollouts_lack_is_only_reported_and_logged_for_suggestions(
    tmp_path: Path, model_server: ScriptedModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def forgets(task: str, llm: Any) -> float:
        return await ask(llm, "You sell things.")

    store = f"sqlite:///{tmp_path}/runs.db"
    fit(tmp_path, model_server, CLERK, forgets, store=store)
    shown = CliRunner().invoke(cli, ["metrics", "--suggest", "--store", store]).output
    assert "a tuned text is in no model call" in shown
    assert "nothing of 'clerk', which an algorithm tunes, is in any model call of the first 2 rollouts" in caplog.text


@pytest.mark.usefixtures("two_are_enough")
@pytest.mark.parametrize(
    ("resource", "request_"),
    [
        (CLERK, {"prompt": [1, 2, 3]}),
        (JsonResource(value={"strategy": "majority vote"}), {"prompt": "Add up."}),
        (PromptTemplate(template="Don't guess & answer."), {"prompt": "Don&#x27;t guess &amp; answer."}),
        (PromptTemplate(template='Sag "Guten Tag".'), {"prompt": json.dumps({"rule": 'Sag "Guten Tag".'})}),
    ],
    ids=["token ids", "setting", "html", "json"],
)
def test_text_in_another_form_and_values_that_are_no_sentences_end_no_run(
    resource: Resource, request_: dict[str, Any], tmp_path: Path, model_server: ScriptedModelServer
) -> None:
    async def completes(task: str, llm: Any) -> float:
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key="none") as client:
            await client.completions.create(model=llm.model, **request_)
        return 1.0

    fit(tmp_path, model_server, resource, completes)


@pytest.mark.usefixtures("two_are_enough")
def test_tuned_text_that_appears_in_part_or_in_json_is_found(tmp_path: Path, model_server: ScriptedModelServer) -> None:
    async def fills(task: str, llm: Any, clerk: str = "You sell things.") -> float:
        return await ask(llm, clerk.format(order=task).replace("clerk", "keeper"))

    async def quotes(task: str, llm: Any, clerk: Any) -> float:
        return await ask(llm, f"Tools: {clerk}")

    fit(tmp_path / "part", model_server, CLERK, fills)
    fit(tmp_path / "json", model_server, TOOLS, quotes)
