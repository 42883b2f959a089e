"""Scripts in the manner of Agent Lightning's examples and guide: only the import line is another."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict, cast

import openai
import pytest

import agl_lightning as agl
from agl.errors import RunError
from agl_run import Quiet
from agl_testing.model_server import Reply, ScriptedModelServer


class MathProblem(TypedDict):
    """A word problem with its result."""

    question: str
    result: str


PROBLEMS: agl.Dataset[MathProblem] = [
    {"question": "How many eggs are 3 boxes of 6?", "result": "18"},
    {"question": "How many legs have 4 dogs?", "result": "16"},
    {"question": "How many days are 2 weeks?", "result": "15"},
]


def answered(request: Any) -> Reply:
    numbers = [int(word) for word in re.findall(r"\d+", request.turns[-1].text)]
    words = {"legs": 4, "weeks": 7}
    numbers += [value for word, value in words.items() if word in request.turns[-1].text]
    return Reply(text=f"I think it is <answer>{numbers[0] * numbers[1]}</answer>")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedModelServer]:
    """A model that multiplies, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with ScriptedModelServer(respond=answered) as server:
        yield server


def served(server: ScriptedModelServer) -> dict[str, agl.ResourceUnion]:
    return {"main_llm": agl.LLM(endpoint=server.base_url, model="scripted", sampling_parameters={"temperature": 1.0})}


def grade(text: str | None, expected: str) -> float:
    found = re.search(r"<answer>(.*?)</answer>", text or "")
    return 1.0 if found and found[1].strip() == expected else 0.0


@agl.rollout
async def calculator(task: MathProblem, llm: agl.LLM) -> None:
    """Asks once, and reports its reward."""
    client = openai.AsyncOpenAI(base_url=llm.endpoint, api_key="token-of-nobody")
    answer = await client.chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": task["question"]}],
        temperature=llm.sampling_parameters.get("temperature", 0.7),
    )
    agl.emit_reward(grade(answer.choices[0].message.content, task["result"]))


def test_calculator_runs_on_every_task_of_both_data_sets(model: ScriptedModelServer) -> None:
    trainer = agl.Trainer(n_workers=2, initial_resources=served(model), progress=Quiet())

    result = trainer.dev(calculator, PROBLEMS[:2], val_dataset=PROBLEMS[2:])

    assert [("train", 1.0), ("train", 1.0), ("val", 0.0)] == [
        (episode.rollout.mode, episode.reward) for episode in result.episodes
    ]
    assert 3 == len(model.calls) == sum(len(episode.transitions) for episode in result.episodes)


def test_calculator_is_debugged_step_by_step(model: ScriptedModelServer) -> None:
    async def debug() -> tuple[agl.AttemptedRollout, list[agl.Span]]:
        tracer = agl.OtelTracer()
        runner = agl.LitAgentRunner[MathProblem](tracer)
        store = agl.InMemoryLightningStore()
        with runner.run_context(agent=calculator, store=store):
            first = await runner.step(PROBLEMS[0], resources=served(model))
            await runner.step(PROBLEMS[1], resources=served(model))
        return first, await store.query_spans(first.rollout_id)

    rollout, spans = asyncio.run(debug())

    (conversation,) = agl.TraceToMessages().adapt(spans)
    (triplet,) = agl.TracerTraceToTriplet().adapt(spans)
    assert ("succeeded", 1) == (rollout.status, rollout.attempt.sequence_id)
    assert ["user", "assistant"] == [message["role"] for message in conversation["messages"]]
    assert 1.0 == agl.find_final_reward(spans) == triplet.reward
    assert {"token_ids": [], "logprobs": []} == triplet.response  # nothing trains this model


def test_step_of_a_runner_raises_what_the_agent_raised(model: ScriptedModelServer) -> None:
    @agl.rollout
    def broken(task: MathProblem) -> float:
        return float(task["missing"])  # pyright: ignore[reportTypedDictNotRequiredAccess, reportGeneralTypeIssues]

    async def debug() -> None:
        runner = agl.LitAgentRunner[MathProblem](agl.AgentOpsTracer())
        with runner.run_context(agent=broken, store=agl.InMemoryLightningStore()):
            await runner.step(PROBLEMS[0])

    with pytest.raises(RunError, match="the agent raised KeyError: 'missing'"):
        asyncio.run(debug())


class Solver(agl.LitAgent[dict[str, Any]]):
    """Trains warm and validates cold; its client cannot carry a key."""

    def __init__(self, trained_agents: str | None = None) -> None:
        super().__init__(trained_agents=trained_agents)
        self.seen: list[tuple[str, float]] = []

    def ask(self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout, heat: float) -> float:
        llm = cast("agl.LLM", resources["main_llm"])
        rollout = cast("agl.AttemptedRollout", rollout)
        assert task == rollout.input
        self.seen.append((str(rollout.mode), heat))
        client = openai.OpenAI(
            base_url=llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id), api_key="unused"
        )
        replies: list[str | None] = []
        for name in ("draft", "review"):
            with agl.operation(name=name, **{"gen_ai.agent.name": name}):
                answer = client.chat.completions.create(
                    model=llm.model, messages=[{"role": "user", "content": task["question"]}], temperature=heat
                )
            replies.append(answer.choices[0].message.content)
        return grade(replies[-1], task["result"])

    def training_rollout(self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        return self.ask(task, resources, rollout, 1.0)

    def validation_rollout(self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        return self.ask(task, resources, rollout, 0.0)


@pytest.mark.parametrize("given", ["adapter", "exporter", "agent"])
def test_agent_of_the_guide_trains_the_agents_that_match(given: str, model: ScriptedModelServer) -> None:
    agent = Solver(trained_agents="draft" if given == "agent" else None)
    exporter = agl.TracerTraceToTriplet(agent_match="draft") if given == "exporter" else None
    trainer = agl.Trainer(
        algorithm=agl.Baseline(),
        n_runners=2,
        initial_resources=served(model),
        store=agl.InMemoryLightningStore(),
        adapter={"agent_match": "draft"} if given == "adapter" else None,
        triplet_exporter=exporter,
        progress=Quiet(),
    )

    result = trainer.dev(agent, dev_dataset=PROBLEMS[:1], val_dataset=PROBLEMS[1:2])

    assert [("train", 1.0), ("val", 0.0)] == agent.seen
    assert [1.0, 1.0] == [episode.reward for episode in result.episodes]
    assert ["draft", "review"] == [call.agent for call in result.episodes[0].transitions]


@agl.llm_rollout
def without_httpx(task: MathProblem, llm: agl.LLM) -> float:
    """Asks with a client that no hook reaches, and that has no key."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": task["question"]}]}
    request = urllib.request.Request(
        f"{llm.endpoint}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return grade(json.load(answer)["choices"][0]["message"]["content"], task["result"])


def test_endpoint_of_a_marked_function_names_the_attempt_for_every_client(model: ScriptedModelServer) -> None:
    trainer = agl.Trainer(n_runners=2, initial_resources=served(model), progress=Quiet())

    result = trainer.dev(without_httpx, PROBLEMS[:2])

    assert [1.0, 1.0] == [episode.reward for episode in result.episodes]
    assert [1, 1] == [len(episode.transitions) for episode in result.episodes]


@agl.rollout
def talkative(task: str) -> None:
    """Reports one of everything."""

    @agl.operation(category="arithmetic")
    def double(number: int) -> int:
        return 2 * number

    @agl.reward
    def score(number: int) -> float:
        return number / 8

    with agl.operation(name="outer") as span:
        span.set_input(text=task)
        span.set_output(double(2))
    agl.emit_message("hello", attributes={"kind": "greeting"})
    agl.emit_message("secret", propagate=False)
    agl.emit_object({"a": 1})
    agl.emit_annotation({"b": 2})
    agl.emit_exception(ValueError("handled"))
    score(4)
    agl.emit_reward({"goal": 1.0, "style": 0.5}, primary_key="goal")


def test_emitters_record_what_their_arguments_say(model: ScriptedModelServer) -> None:
    store = agl.InMemoryLightningStore()

    (episode,) = agl.Trainer(store=store, progress=Quiet()).dev(talkative, ["do it"]).episodes
    spans = asyncio.run(store.query_spans(episode.rollout.rollout_id, "latest"))

    named = {span.name: span for span in spans}
    assert {"text": "do it", "output": 4} == named["outer"].attributes
    assert {"category": "arithmetic", "args": [2], "output": 4} == named["double"].attributes
    assert named["outer"].span_id == named["double"].parent_id
    assert [("hello", "greeting")] == [
        (text, span.attributes["kind"]) for span in spans if (text := agl.get_message_value(span))
    ]
    assert [{"a": 1}, {"b": 2}] == [value for span in spans if (value := agl.get_object_value(span))]
    assert [0.5, 1.0] == [agl.get_reward_value(span) for span in agl.find_reward_spans(spans)]
    assert 1.0 == agl.find_final_reward(spans)


def test_dev_of_a_trainer_takes_tasks_and_resources_of_a_loader(model: ScriptedModelServer) -> None:
    loader = agl.DevTaskLoader(tasks=[*PROBLEMS], resources=served(model))
    trainer = agl.Trainer(dev=True, max_tasks=2, n_workers=1, progress=Quiet())

    result = trainer.fit(calculator, "http://nowhere", dev_dataset=loader)

    assert [1.0, 1.0] == [episode.reward for episode in result.episodes]


class Squares:
    """A data set with a length and items, and no end."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any, /) -> int:
        return index**2


@pytest.mark.parametrize("method", ["dev", "fit"])
def test_data_set_needs_only_a_length_and_items(method: str, model: ScriptedModelServer) -> None:
    seen: list[int] = []
    trainer = agl.Trainer(n_runners=1, progress=Quiet())

    getattr(trainer, method)(agl.rollout(lambda task: seen.append(task) or 1.0), val_dataset=Squares())

    assert {0, 1} == set(seen)
