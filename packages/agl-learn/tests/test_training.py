"""Rounds of training with `apo` on conversations, in this process over a memory store and apart over SQLite."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agl.algorithms import component
from agl.contracts import RolloutQuery
from agl.schemas import JsonResource, PromptTemplate, ResourceVersion
from agl_learn.contracts import Conversation, Proposal
from agl_learn.settings import LearnerFile
from agl_learn.training import LONGEST, NICE, VALIDATION, TrainerProposer, round_tasks, without_words
from agl_testing.model_server import ScriptedModelServer

from .conftest import POLITE, UseLearner, conversation, publish, run_with

TALKS = [conversation(number) for number in range(12)]
LIVE = {"prompt": "first"}


async def propose(file: LearnerFile, talks: Sequence[Conversation] = TALKS, *, number: int = 1) -> Sequence[Proposal]:
    return await TrainerProposer(file).propose(talks, live=LIVE, number=number)


def test_round_proposes_the_version_that_it_found(with_learner: UseLearner) -> None:
    async def work(file: LearnerFile) -> tuple[Proposal, Any]:
        (proposal,) = await propose(file)
        return proposal, (await file.store.resource("prompt", proposal.versions["prompt"])).resource

    proposal, resource = with_learner(work)

    assert ("apo", PromptTemplate(template=POLITE)) == (proposal.origin, resource)


def test_round_begins_with_the_served_version(with_learner: UseLearner) -> None:
    async def work(file: LearnerFile) -> tuple[Sequence[Proposal], set[str]]:
        await publish(file.store, polite=POLITE)
        found = await TrainerProposer(file).propose(TALKS, live={"prompt": "polite"}, number=1)
        rollouts = await file.store.rollouts(RolloutQuery(experiment="support-learn-1", limit=1_000))
        return found, {rollout.resources["prompt"] for rollout in rollouts}

    assert ([], {"polite"}) == with_learner(work)


def test_finished_round_is_not_trained_again(with_learner: UseLearner, server: ScriptedModelServer) -> None:
    async def work(file: LearnerFile) -> tuple[Any, Any, int]:
        first = await propose(file)
        calls = len(server.calls)
        again = await propose(file, TALKS[:5])
        return first, again, len(server.calls) - calls

    first, again, calls = with_learner(work)

    assert (first, 0) == (again, calls)


def test_error_of_training_is_logged_and_ends_the_round(
    with_learner: UseLearner, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = [Conversation(rollout_id="talk", task={"question": "a task without the hidden key"})]

    with caplog.at_level(logging.WARNING, "agl_learn"):
        found = with_learner(lambda file: propose(file, hidden))

    assert [] == found
    assert "round 1 of training ended: " in caplog.text
    assert "wish" in caplog.text


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="it reads Unix priorities")
def test_training_has_a_lower_priority_than_the_learner(folder: Path) -> None:
    session = Path("/proc/self/autogroup")
    report = f"open('priority', 'w').write(f'{{os.nice(0)}} ' + Path({str(session)!r}).read_text())"
    if not session.exists():
        report = "open('priority', 'w').write(str(os.nice(0)))"
    with (folder / "learn_agent.py").open("a", encoding="utf-8") as agent:
        agent.write(f"\nimport os, sys\nfrom pathlib import Path\nos.chdir({str(folder)!r})\n")
        agent.write(f"if sys.argv[0].endswith('training.py'):\n    {report}\n")

    asyncio.run(run_with(folder, propose))

    found = (folder / "priority").read_text(encoding="ascii")
    assert min(19, os.nice(0) + NICE) == int(found.split()[0])
    assert not session.exists() or found.endswith(f"nice {NICE}\n"), "the kernel ignores priorities between sessions"


async def refuse(file: LearnerFile, *, held_out: Sequence[Conversation] = (), **versions: str) -> str:
    proposer = TrainerProposer(file)
    return await proposer.refusal(Proposal(versions=versions, origin="apo"), live=LIVE, held_out=held_out)


@pytest.mark.parametrize(
    ("resource", "reason"),
    [
        (PromptTemplate(template=POLITE), ""),
        (PromptTemplate(template="Answer politely."), "it lacks the placeholders {question}"),
        (PromptTemplate(template="{question} " + "a" * LONGEST), "it has 4,011 characters, and at most 4,000"),
        (JsonResource(value="{question}"), "it is a JsonResource, and the served version is a PromptTemplate"),
    ],
)
def test_versions_that_cannot_be_tried_are_refused(folder: Path, resource: Any, reason: str) -> None:
    async def work(file: LearnerFile) -> str:
        await file.store.publish([ResourceVersion(name="prompt", version="new", resource=resource)])
        return await refuse(file, prompt="new")

    said = asyncio.run(run_with(folder, work))

    assert said.startswith(f"prompt@new: {reason}" if reason else said)
    assert bool(reason) == bool(said)


def test_unknown_versions_and_resources_are_refused(folder: Path) -> None:
    async def work(file: LearnerFile) -> tuple[str, str]:
        return await refuse(file, prompt="gone"), await refuse(file, llm="gone")

    assert (
        "prompt@gone is not in the store",
        "llm is not among the resources that [learn.support] tunes",
    ) == asyncio.run(run_with(folder, work))


def test_text_that_quotes_a_held_out_conversation_is_refused(folder: Path) -> None:
    secret = "My parcel from Lisbon never came."

    async def work(file: LearnerFile) -> list[str]:
        await publish(file.store, new=f"{POLITE}\nIf they say: {secret}")
        held_out = [conversation(1, question=secret)]
        proposer, proposal = TrainerProposer(file), Proposal(versions={"prompt": "new"}, origin="apo")
        said = [await proposer.refusal(proposal, live=LIVE, held_out=held_out)]
        await proposer.propose([conversation(2, question=secret), *TALKS], live=LIVE, number=1)
        return [*said, await proposer.refusal(proposal, live=LIVE, held_out=held_out)]

    alone, learned_too = asyncio.run(run_with(folder, work, url="memory://"))

    assert f"prompt@new: it quotes a held-out conversation: {secret!r}" == alone
    assert "" == learned_too


def test_text_that_quotes_the_judge_is_refused(folder: Path) -> None:
    rubric = "Give 10 points if the answer says please."
    toml = f'\n[[reward]]\nuse = "judge"\n[reward.params]\nmodel = "llm"\ntemplate = """{{text}}\n{rubric}"""\n'

    async def work(file: LearnerFile) -> str:
        await publish(file.store, new=f"{POLITE}\n{rubric}")
        return await refuse(file, prompt="new")

    assert f"prompt@new: it quotes the judge: {rubric!r}" == asyncio.run(run_with(folder, work, toml=toml))


def test_judges_give_an_optimiser_scores_without_words() -> None:
    judge = {"use": "judge", "weight": 0.3, "params": {"model": "llm"}}
    sql = {"use": "sql", "weight": 0.7}

    assert {"model": "llm", "feedback": False} == without_words(component("judge", model="llm")).params
    assert {
        "parts": {"a": {**judge, "params": {"model": "llm", "feedback": False}}, "b": {**sql, "params": {}}}
    } == without_words(component("composite", parts={"a": judge, "b": sql})).params


def test_tasks_of_one_user_are_either_for_training_or_for_validation() -> None:
    talks = [conversation(number, user=f"u{number % 7}") for number in range(50)]

    tasks = round_tasks(talks, by="user")
    user = {each.task["question"]: each.user for each in talks}
    train, val = ({user[task["question"]] for task in part} for part in (tasks.train, tasks.val))

    assert (5, 2, set()) == (len(train), len(val), train & val)


def test_tasks_of_a_single_user_are_split() -> None:
    tasks = round_tasks([conversation(number, user="ann") for number in range(3)], by="user")

    assert (2, 1) == (len(tasks.train), len(tasks.val))


def test_single_task_serves_for_training_and_validation() -> None:
    tasks = round_tasks([conversation(1)], by="user")

    assert [conversation(1).task] == tasks.train == tasks.val


def test_equal_tasks_of_several_users_are_one_task_on_one_side() -> None:
    talks = [conversation(number % 3, user=f"u{number}") for number in range(9)]

    tasks = round_tasks(talks, by="user")

    assert (2, 1) == (len(tasks.train), len(tasks.val))
    assert not any(task in tasks.train for task in tasks.val)


def test_conversations_of_one_user_are_apart_if_conversations_are_the_units() -> None:
    tasks = round_tasks([conversation(number, user="ann") for number in range(6)], by="conversation")

    assert (4, 2) == (len(tasks.train), len(tasks.val))


def test_round_has_equal_tasks_once_and_validates_on_others() -> None:
    conversations = [Conversation(rollout_id=f"r{n}", user=f"u{n}", task={"question": str(n % 4)}) for n in range(12)]

    found = round_tasks(conversations, by="user")

    assert [1, 3] == sorted([len(found.val), len(found.train)])
    assert [] == [task for task in found.val if task in found.train]


def test_many_conversations_give_a_limited_number_of_validation_tasks() -> None:
    tasks = round_tasks([conversation(number) for number in range(300)], by="user")

    assert (200, VALIDATION) == (len(tasks.train), len(tasks.val))
