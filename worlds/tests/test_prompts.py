"""The prompt world: its closed form is what happens, and the experiment's parts agree with it."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agl
from agl.contracts import RolloutQuery
from agl.schemas import LLM, Rollout
from agl.stores import MemoryStore
from agl_run import Quiet
from worlds.prompts import (
    PLAIN,
    STYLES,
    TRAP,
    VOCABULARY,
    WORLDS,
    PromptWorld,
    StyleRule,
    complete_order,
    demonstrable,
    easy,
    is_brief,
    judge,
    line_of,
    obeyed_styles,
    order_text,
    prompt_name,
)
from worlds.prompts_run import HIDDEN, TASK_MODEL, model_server, order_agent, order_reward

LINES = st.lists(st.tuples(st.sampled_from([*VOCABULARY, TRAP[0]]), st.sampled_from([*STYLES, TRAP[1]])), max_size=8)


def score_once(world: PromptWorld, prompts: dict[str, str], task: Any, seed: str) -> float:
    answer: dict[str, str] = {}
    is_short = False
    for role, fields in task["fields"].items():
        text = f"{prompts[prompt_name(role)]}\n{order_text(task['order'], fields)}"
        is_short = is_short or is_brief(obeyed_styles(text))
        answer |= complete_order(text, world=world, seed=f"{seed}|{role}")
    return judge(world, task, answer, is_short=is_short, seed=seed)[0]


@settings(max_examples=12)
@given(lines=LINES, name=st.sampled_from([*sorted(WORLDS), "demonstrable"]))
def test_expected_score_is_the_mean_of_many_runs(lines: list[tuple[str, str]], name: str) -> None:
    world = {**WORLDS, "demonstrable": demonstrable}[name](3)
    text = "\n".join(line_of(*line) for line in lines)
    prompts = {prompt_name(role): f"You are the {role}.\n{text}" for role in world.roles}
    tasks = world.val[:8]
    scores = [score_once(world, prompts, task, f"run-{n}") for task in tasks for n in range(250)]
    assert world.expected(prompts, tasks) == pytest.approx(sum(scores) / len(scores), abs=0.06)


@pytest.mark.parametrize("name", sorted(WORLDS.keys() - {"paired"}))
def test_every_rule_raises_the_expected_score_and_the_trap_lowers_it(name: str) -> None:
    world = WORLDS[name]()
    prompts = {resource: prompt.template for resource, prompt in world.seeds().items()}
    scores = [world.expected(prompts)]
    for rule in world.rules:
        prompts[prompt_name(rule.role)] += f"\n{rule.line}"
        scores.append(world.expected(prompts))
    assert sorted(set(scores)) == scores
    assert 1.0 == pytest.approx(world.gap_closed(prompts))
    trapped = {resource: f"{text}\n{line_of(*TRAP)}" for resource, text in prompts.items()}
    assert world.expected(trapped) < 0.8 * scores[-1]
    assert 0.0 == world.gap_closed({resource: prompt.template for resource, prompt in world.seeds().items()})


def test_unsaid_rule_follows_from_an_answer_that_the_prompt_shows_and_from_no_feedback() -> None:
    world = demonstrable()
    prompt = world.seeds()["clerk_prompt"].template
    shown = 'Input: Order train-001. Fields: code.\nOutput: {"code": "upper case", "date": "EUR"}'
    texts = {name: f"{text}\n{prompt}" for name, text in {"shown": shown, "none": ""}.items()}
    assert world.expected({"clerk_prompt": texts["none"]}) < world.expected({"clerk_prompt": texts["shown"]})
    task = {"order": "t", "fields": {"clerk": ["code", "unit", "date"]}, "expected": {"code": "upper case"}}
    order = order_text("t", ["code", "unit", "date"])
    quiet = msgspec.structs.replace(world, noise=0.0, nagging=0.0)
    answers = [complete_order(f"{texts['shown']}\n{order}", world=quiet, seed=f"{n}") for n in range(200)]
    assert {("upper case", "EUR")} == {(answer["code"], answer["date"]) for answer in answers}
    assert 60 == pytest.approx(sum(answer["unit"] == "full words" for answer in answers), abs=25)
    guessed = [complete_order(f"{prompt}\n{order}", world=quiet, seed=f"{n}") for n in range(200)]
    assert 60 == pytest.approx(sum(answer["code"] == "upper case" for answer in guessed), abs=25)
    _, said = judge(quiet, task, {"code": PLAIN}, is_short=True, seed="s")
    assert "[clerk] code: not as it should be." == said


def test_distractors_change_nothing_and_a_later_line_counts() -> None:
    world = easy()
    best = world.solution()["clerk_prompt"].template
    distracted = {"clerk_prompt": f"{best}\nThink hard. {line_of('weather', 'EUR')}"}
    assert world.expected({"clerk_prompt": best}) == world.expected(distracted)
    assert world.expected({"clerk_prompt": f"{best}\n{line_of('date', PLAIN)}"}) < world.expected(distracted)


def test_rule_whose_partner_is_missing_changes_nothing_and_both_together_pay() -> None:
    world = WORLDS["paired"]()
    prompt = world.seeds()["clerk_prompt"].template
    date, amount = (rule.line for rule in world.rules[:2])
    scores = [world.expected({"clerk_prompt": text}) for text in (prompt, f"{prompt}\n{date}", f"{prompt}\n{amount}")]
    assert 1 == len(set(scores))
    assert world.expected({"clerk_prompt": f"{prompt}\n{date}\n{amount}"}) > scores[0] + 0.1


def test_line_that_answers_no_rule_lowers_the_score_of_a_crowded_prompt() -> None:
    world = WORLDS["crowded"]()
    best = world.solution()["clerk_prompt"].template
    assert world.expected({"clerk_prompt": f"{best}\n{line_of('weather', 'EUR')}"}) < world.expected(
        {"clerk_prompt": best}
    )


def test_rule_in_another_roles_prompt_does_nothing() -> None:
    world = WORLDS["two-prompt"]()
    prompts = {resource: prompt.template for resource, prompt in world.seeds().items()}
    checkers = next(rule for rule in world.rules if rule.role == "checker")
    misplaced = {**prompts, "writer_prompt": f"{prompts['writer_prompt']}\n{checkers.line}"}
    assert world.expected(prompts) == world.expected(misplaced)


def test_tasks_of_one_seed_are_equal_and_splits_are_disjoint() -> None:
    world = easy(5)
    assert world.train == easy(5).train
    assert world.train != easy(6).train
    assert not {task["order"] for task in world.train} & {task["order"] for task in world.val}


def test_judge_says_what_was_expected_and_nags_about_length() -> None:
    world = PromptWorld(rules=(StyleRule("date", "EUR"),), nagging=1.0)
    task = {"order": "t", "fields": {"clerk": ["date", "note"]}, "expected": {"date": "EUR", "note": PLAIN}}
    score, said = judge(world, task, {"note": PLAIN}, is_short=False, seed="s")
    assert 0.5 == score
    assert "[clerk] date: expected EUR, found nothing. [clerk] answer: expected brief, found wordy." == said
    assert (1.0, "") == judge(world, task, {"date": "EUR", "note": PLAIN}, is_short=True, seed="s")


def run_world(
    world: PromptWorld, folder: Path, *, runners: int = 8, base_url: str = "", **agent: Any
) -> dict[str, Any]:
    """Rewards and feedback by rollout id, of an experiment that only records."""
    store = MemoryStore("memory://")
    llm = {"main": LLM(endpoint=base_url, model=TASK_MODEL)} if base_url else {}
    trainer = agl.Trainer(
        name="orders",
        store=store,
        n_runners=runners,
        initial_resources={**world.seeds(), **llm},
        rewards=(order_reward(world),),
        gateway="none" if base_url else "auto",
        hidden=HIDDEN,
        progress=Quiet(),
        folder=folder,
        workdir=str(folder / "work"),
    )
    trainer.fit(order_agent(world, **agent), world.train[:12])
    return _rewards(store)


def _rewards(store: MemoryStore) -> dict[str, Any]:
    async def read() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for rollout in await store.rollouts(RolloutQuery(experiment="orders")):
            spans = await store.spans(rollout.rollout_id)
            rewards = [span.reward for span in spans if span.reward is not None]
            found[rollout.rollout_id] = [(reward.value, reward.feedback) for reward in rewards]
        return found

    return asyncio.run(read())


def test_experiment_gives_equal_rewards_whatever_the_concurrency(tmp_path: Path) -> None:
    world = msgspec.structs.replace(WORLDS["two-prompt"](1), noise=0.3)
    one = run_world(world, tmp_path / "one", runners=1)
    assert 12 == len(one)
    assert one == run_world(world, tmp_path / "many", runners=8, latency_s=0.001)
    assert any("expected" in said for rewards in one.values() for _, said in rewards)


def test_model_behind_an_endpoint_answers_as_the_one_in_the_process(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    world = msgspec.structs.replace(easy(1), noise=0.3)
    with model_server(world) as server:
        over_http = run_world(world, tmp_path / "http", base_url=server.base_url)
        assert 12 == len(server.calls)
    assert run_world(world, tmp_path / "here") == over_http


@pytest.mark.parametrize("engine", ["jinja", "plain"])
def test_every_engine_shows_the_model_the_same(engine: Any, tmp_path: Path) -> None:
    if engine == "jinja":
        pytest.importorskip("jinja2")
    world = easy(2)
    same = msgspec.structs.replace(world, engine=engine)
    assert run_world(world, tmp_path / "f-string") == run_world(same, tmp_path / engine)


def test_fault_fails_the_attempt(tmp_path: Path) -> None:
    def fail(rollout: Rollout) -> None:
        if rollout.task["order"] == "train-003":
            raise ConnectionError("the clerk is ill")

    rewards = run_world(easy(), tmp_path, fault=fail)
    assert 1 == sum(not found for found in rewards.values())
