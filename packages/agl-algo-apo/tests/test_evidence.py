"""The evidence of real runs that a critic sees."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agl
from agl import semconv
from agl.contracts import RolloutQuery
from agl.schemas import LLM, Outcome, PromptTemplate, Rollout, Span, new_span_id
from agl.stores import MemoryStore
from agl_algo_apo.measurement.scores import Measured
from agl_algo_apo.proposals.evidence import evidence_text, read_run
from agl_run import Quiet
from agl_testing.model_server import Reply, ScriptedModelServer

WRITER = PromptTemplate(template="You are the writer. Write about {topic}.")
CHECKER = PromptTemplate(template="You are the checker.\nCheck: {draft}")


class Team:
    """Two roles in plain Python; the second one's tool fails."""

    async def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        import openai

        llm = resources["main"]
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key="none") as client:

            async def ask(text: str) -> str:
                answer = await client.chat.completions.create(
                    model=llm.model, messages=[{"role": "user", "content": text}]
                )
                return answer.choices[0].message.content or ""

            with agl.operation("writer"):
                draft = await ask(resources["writer_prompt"].format(topic=task["topic"]))
            with agl.operation("checker"):
                await ask(resources["checker_prompt"].format(draft=draft))
                agl.emit_observation(role="tool", content="spell checker: 3 errors")
        return 0.25


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryStore, str]:
    store = MemoryStore("memory://")
    with ScriptedModelServer(respond=lambda _: Reply(text="A poem on the sea."), models=("m",)) as server:
        trainer = agl.Trainer(
            name="team",
            store=store,
            initial_resources={
                "main": LLM(endpoint=server.base_url, model="m"),
                "writer_prompt": WRITER,
                "checker_prompt": CHECKER,
            },
            hidden=("answer",),
            folder=tmp_path_factory.mktemp("team"),
            progress=Quiet(),
        )
        trainer.fit(Team(), [{"topic": "the sea", "answer": "secret"}])
    rollouts = asyncio.run(store.rollouts(RolloutQuery(experiment="team")))
    return store, rollouts[0].rollout_id


class Context:
    """The part of an algorithm's context that evidence needs."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store


def shown(recorded: tuple[MemoryStore, str], name: str, prompt: PromptTemplate, *, agents: str = "") -> str:
    store, rollout_id = recorded
    measured = Measured(reward=0.25, rollout=rollout_id, feedback="too short")
    context: Any = Context(store)
    run = asyncio.run(read_run(context, measured, name=name, resource=prompt, agents=agents))
    return evidence_text([run])


def test_only_the_calls_that_read_the_text_are_shown_and_it_is_not_repeated(recorded: Any) -> None:
    text = shown(recorded, "checker_prompt", CHECKER)
    assert "You are the checker" not in text
    assert "You are the writer" not in text
    assert "(the text checker_prompt; draft = A poem on the sea.)" in text
    assert "[checker] assistant: A poem on the sea." in text


def test_task_feedback_reward_and_observations_are_shown_and_hidden_keys_are_not(recorded: Any) -> None:
    text = shown(recorded, "writer_prompt", WRITER)
    for part in ("reward 0.25", '"topic":"the sea"', "Feedback: too short", "observed: spell checker: 3 errors"):
        assert part in text
    assert "secret" not in text


def test_results_and_errors_of_tools_are_shown() -> None:
    store = MemoryStore("memory://")

    def span(name: str, **fields: Any) -> Span:
        return Span(rollout_id="r", attempt_id="r.1", span_id=new_span_id(), name=name, **fields)

    async def record() -> None:
        await store.enqueue([Rollout(rollout_id="r", task={"topic": "x"}, experiment="e")])
        (claim,) = await store.claim(worker="w")
        attempt = {"attempt_id": claim.attempt.attempt_id}
        found = span("find", attributes={semconv.TOOL_NAME: "find", semconv.TOOL_RESULT: {"hits": 0}})
        broken = span("look", status="error", status_message="no such table: rooms")
        await store.append_spans([msgspec.structs.replace(item, **attempt) for item in (found, broken)])
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])

    asyncio.run(record())
    text = shown((store, "r"), "writer_prompt", WRITER)
    assert 'tool find returned: {"hits":0}' in text
    assert "error in look: no such table: rooms" in text


def test_agents_can_be_named_and_all_calls_are_shown_where_nobody_reads_the_text(recorded: Any) -> None:
    named = shown(recorded, "other", PromptTemplate(template="Nobody reads this."), agents="writer")
    assert "[writer] assistant" in named
    assert "[checker]" not in named
    everybody = shown(recorded, "other", PromptTemplate(template="Nobody reads this."))
    assert "[writer] assistant" in everybody
    assert "[checker] assistant" in everybody


def test_rollout_that_the_store_does_not_have_leaves_its_feedback() -> None:
    context: Any = Context(MemoryStore("memory://"))
    measured = Measured(reward=0.0, rollout="gone", feedback="wrong")
    run = asyncio.run(read_run(context, measured, name="p", resource=WRITER))
    assert "Feedback: wrong" in run.text(1)


def test_long_messages_are_cut_in_the_middle(tmp_path: Path) -> None:
    measured = Measured(reward=0.0, rollout="r")
    from agl_algo_apo.proposals.evidence import EvidenceRun

    lines = tuple(f"line {n}" for n in range(2000))
    text = EvidenceRun(task="t", measured=measured, lines=lines).text(1)
    assert len(text) < 4200
    assert "line 0\n" in text
    assert "line 1999" in text
    assert "characters left out" in text
