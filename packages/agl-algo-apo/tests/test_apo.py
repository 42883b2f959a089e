"""`apo` and `random` as whole experiments in the scripted world: what they find, what they pay, why they stop."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from agl.errors import AglError, ConfigError, RunError
from agl.schemas import JsonResource, PromptTemplate, Rollout
from agl_algo_apo.proposals.answers import extract
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply
from worlds.prompts import WORLDS, PromptWorld, StyleRule, easy, line_of
from worlds.prompts_optimizer import ScriptedOptimizer

Optimize = Callable[..., Any]


@pytest.mark.parametrize(("name", "budget"), [("easy", 400), ("two-prompt", 500)])
def test_apo_finds_the_rules_and_makes_them_live(optimize: Optimize, name: str, budget: int) -> None:
    world = WORLDS[name](1)
    run = optimize(world, budget=budget)
    assert world.gap_closed(run.best) > 0.95
    assert run.result["texts"] == run.best
    assert run.result["gain"]["low"] > 0
    assert abs(run.result["score"]["mean"] - world.expected(run.best)) < 0.15
    live = {name: version for name, version in run.fit.resources.items() if name in world.seeds()}
    assert all("-apo-" in version for version in live.values())
    assert len(run.paid) <= budget


@pytest.mark.parametrize("engine", ["jinja", "plain"])
def test_apo_tunes_templates_of_every_engine(optimize: Optimize, engine: Any) -> None:
    world = msgspec.structs.replace(easy(1), engine=engine)
    run = optimize(world, budget=350)
    assert world.gap_closed(run.best) > 0.5


def test_candidates_are_versions_with_their_parents_and_are_not_live(optimize: Optimize) -> None:
    run = optimize(budget=200)
    pinned = {r.resources["clerk_prompt"] for r in run.paid if r.metadata["algorithm"] == "apo"}
    known = {row["versions"]["clerk_prompt"] for row in run.lineage if row["versions"]}
    assert pinned <= known
    ids = {row["id"] for row in run.lineage}
    assert all(set(row.get("parents", [])) <= ids for row in run.lineage)
    assert ["seed"] == [row.get("operator", "seed") for row in run.lineage if not row.get("parents")]


@pytest.mark.long
def test_random_is_worse_than_apo_at_equal_budget(optimize: Optimize) -> None:
    gaps = {use: [] for use in ("apo", "random")}
    for seed in range(3):
        world = easy(seed)
        for use in gaps:
            run = optimize(world, use=use, seed=seed, budget=300, folder=f"{use}-{seed}")
            gaps[use].append(world.gap_closed(run.best))
            assert len(run.paid) <= 300
    assert sum(gaps["apo"]) / 3 > sum(gaps["random"]) / 3 + 0.3


@pytest.mark.parametrize("budget", [101, 113, 140, 171, 222])
def test_budget_in_rollouts_is_never_exceeded(optimize: Optimize, budget: int) -> None:
    run = optimize(budget=budget)
    assert len(run.paid) <= budget
    assert run.state["spent"]["rollouts"] == len(run.paid)
    assert run.stop_reason.startswith("budget:")


@pytest.mark.parametrize("use", ["apo", "random", "gepa"])
def test_budget_counts_the_validations_of_the_trainer_and_the_first_prompt_is_paid_once(
    optimize: Optimize, use: str
) -> None:
    run = optimize(use=use, budget=170, validation_limit=0)
    assert len(run.rollouts) == run.state["spent"]["rollouts"] <= 170
    first = [row for row in run.state["scores"] if row[0] == run.lineage[0]["id"] and row[1] in ("val", "test")]
    first = [row for row in first if row[3] == 0]
    assert 32 == len(first)
    assert all(row[4]["rollout"].startswith("orders-1-validate-val-00000-") for row in first)
    plan = next(line for line in run.said if "plan:" in line)
    assert "32 on the first prompt" in plan
    assert "32 on the validation at the end" in plan


def test_budget_in_calls_tokens_and_money_is_never_exceeded(optimize: Optimize) -> None:
    prices = {"input": 1.0, "output": 2.0, "rollout": 0.001}
    calls = optimize(budget={"calls": 9}, folder="calls")
    assert calls.state["spent"]["calls"] <= 9
    tokens = optimize(budget={"tokens": 9000}, script=ScriptedOptimizer(), folder="tokens")
    assert tokens.state["spent"]["tokens"] <= 9000
    money = optimize(budget={"money": 0.15, "prices": prices}, folder="money")
    assert money.state["spent"]["money"] <= 0.15
    for run in (calls, tokens, money):
        assert run.stop_reason.startswith("budget:")
        assert run.result["is_fresh"] is True


def test_plan_is_said_before_the_first_rollout(optimize: Optimize) -> None:
    run = optimize(budget=150)
    plans = [line for line in run.said if "plan: at most 150 rollouts" in line]
    assert 1 == len(plans)
    assert plans[0] == run.said[0], "the validation before the first step comes after it"


def test_broken_templates_cost_no_rollout_and_end_the_search(optimize: Optimize) -> None:
    world = easy(1)
    run = optimize(world, budget=300, script=ScriptedOptimizer(mode="broken"))
    tried = {rollout.resources["clerk_prompt"] for rollout in run.paid}
    assert {run.lineage[0]["versions"]["clerk_prompt"]} == tried
    rejected = [row for row in run.lineage if row["status"] == "rejected"]
    assert rejected
    assert all("lost the placeholders" in row["reason"] or "first version lacks" in row["reason"] for row in rejected)
    assert run.stop_reason.startswith("no_proposals:")
    assert dict(run.best) == {name: prompt.template for name, prompt in world.seeds().items()}


def test_lost_invariant_is_rejected_and_the_kept_one_survives(optimize: Optimize) -> None:
    run = optimize(budget=250, texts={"invariants": {"clerk_prompt": ["Complete the order."]}})
    assert "Complete the order." in run.best["clerk_prompt"]


@pytest.mark.parametrize(("mode", "reason"), [("dead", "optimizer_unreachable"), ("corrupt", "optimizer_unreachable")])
def test_optimizer_that_dies_ends_the_search_and_what_was_found_is_kept(
    optimize: Optimize, mode: Any, reason: str
) -> None:
    world = easy(1)
    run = optimize(world, budget=400, script=ScriptedOptimizer(mode=mode, after=5))
    assert run.stop_reason.startswith(f"{reason}:")
    assert world.gap_closed(run.best) > 0.3
    assert run.fit.resources["clerk_prompt"].startswith("orders-1-apo-")
    assert len(run.paid) < 250


@pytest.mark.parametrize(("mode", "use"), [("garbage", "apo"), ("silent", "apo"), ("garbage", "random")])
def test_optimizer_that_talks_nonsense_ends_the_search(optimize: Optimize, mode: Any, use: str) -> None:
    run = optimize(use=use, budget=400, script=ScriptedOptimizer(mode=mode))
    assert run.stop_reason.startswith("optimizer_garbage:")
    assert len(run.paid) < 150
    assert run.progress["unusable"] >= 6


def test_search_that_gets_cut_answers_only_says_so(optimize: Optimize) -> None:
    class Cut(ScriptedOptimizer):
        def respond(self, request: Any) -> Any:
            return Reply(text="First I think about it", finish_reason="length")

    run = optimize(budget=400, script=Cut())
    assert run.stop_reason.startswith("optimizer_garbage:")
    assert "raise max_tokens" in run.stop_reason
    assert 1 == sum("raise max_tokens" in line for line in run.said if "plan:" not in line and "step" not in line)


def test_perfect_score_ends_the_search(optimize: Optimize) -> None:
    world = PromptWorld(rules=(StyleRule("date", "ISO 8601"),), noise=0.0, nagging=0.0, most=3, seed=2)
    run = optimize(world, budget=500)
    assert run.stop_reason.startswith("perfect:")
    assert line_of("date", "ISO 8601") in run.best["clerk_prompt"]
    assert len(run.paid) < 250


def test_perfect_first_prompt_costs_one_measurement(optimize: Optimize) -> None:
    world = PromptWorld(rules=(StyleRule("date", "ISO 8601"),), noise=0.0, nagging=0.0, most=3, seed=2)
    run = optimize(world, resources=dict(world.solution()), budget=500)
    assert run.stop_reason.startswith("perfect:")
    assert 24 + 2 + 1 == len(run.paid), "the search's tasks, and of the trainer's validations one of a test task"


def test_patience_ends_the_search(optimize: Optimize) -> None:
    world = easy(1)
    run = optimize(world, resources=dict(world.solution()), budget=2000, patience=3)
    assert run.stop_reason.startswith("patience:")
    assert len(run.paid) < 500


@pytest.mark.parametrize("parents", [{"p_best": 1}, {"p_best": 0}, {"selector": "beam"}])
def test_every_choice_of_parents_finds_something(optimize: Optimize, parents: dict[str, Any]) -> None:
    world = easy(1)
    run = optimize(world, budget=200, parents=parents)
    assert world.gap_closed(run.best) > 0.3


def test_own_requests_are_sent(optimize: Optimize, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/critique.txt").write_text("Sing about $component.\n$text\n$evidence", encoding="utf-8")
    heard: list[str] = []

    class Listener(ScriptedOptimizer):
        def respond(self, request: Any) -> Any:
            heard.append(request.last_text)
            return super().respond(request)

    optimize(budget=120, script=Listener(), requests={"critique": "critique.txt"})
    assert heard[0].startswith("Sing about clerk_prompt.\nYou are the clerk.")
    assert "# Runs that fell short" in heard[0]


def test_editor_merges_texts_that_are_in_each_others_way(optimize: Optimize) -> None:
    """The editor writes everything on one line, so any two edits conflict."""
    kinds: list[str] = []

    class OneLine(ScriptedOptimizer):
        def respond(self, request: Any) -> Any:
            text = request.last_text
            kinds.append(text.splitlines()[0])
            answer = self.answer(text, model="editor", seed=request.body["seed"])
            new = extract(answer)
            return Reply(text=answer if new is None else f"<new_text>{' '.join(new.splitlines())}</new_text>")

    world = easy(1)
    seed = {name: PromptTemplate(template=p.template.replace("\n", " ")) for name, p in world.seeds().items()}
    run = optimize(world, resources=seed, budget=250, script=OneLine())
    merges = [row for row in run.lineage if row["operator"] == "merge"]
    assert "# Job: merge" in kinds
    assert merges
    assert world.gap_closed(run.best) > 0.3


def test_rounds_end_the_search(optimize: Optimize) -> None:
    run = optimize(budget=2000, beam_rounds=2)
    assert run.stop_reason.startswith("rounds:")
    assert 4 == run.progress["step"]


@pytest.mark.long
@pytest.mark.parametrize("use", ["apo", "random"])
def test_equal_seeds_give_equal_runs_whatever_the_concurrency(optimize: Optimize, use: str) -> None:
    one, eight = (optimize(use=use, budget=220, runners=n, folder=f"with-{n}") for n in (1, 8))
    assert one.lineage == eight.lineage
    assert one.result == eight.result
    assert [r.rollout_id for r in one.rollouts] == [r.rollout_id for r in eight.rollouts]
    other = optimize(use=use, budget=220, seed=1, folder="other-seed")
    assert one.lineage != other.lineage


def test_infrastructure_failures_are_started_again_and_never_scored(optimize: Optimize) -> None:
    from httpx import Request
    from openai import APIConnectionError

    def fault(rollout: Rollout) -> None:
        if re.search(r"-0-[0-9a-f]{10}-0-\d*[16]-000$", rollout.rollout_id):  # a first attempt
            raise APIConnectionError(request=Request("POST", "http://nowhere"))

    run = optimize(budget=300, fault=fault)
    broken = [rollout for rollout in run.paid if rollout.status == "failed"]
    assert broken
    rows = run.state["scores"]
    assert not {rollout.rollout_id for rollout in broken} & {row[4]["rollout"] for row in rows}
    assert 24 == len([row for row in rows if row[0] == run.lineage[0]["id"] and row[1] == "val" and row[3] == 0])
    assert len(run.paid) == run.state["spent"]["rollouts"] <= 300


def test_search_ends_when_the_agents_model_is_gone_and_keeps_what_it_found(optimize: Optimize) -> None:
    started: list[str] = []

    def fault(rollout: Rollout) -> None:
        started.append(rollout.rollout_id)
        if len(started) > 200:
            raise ConnectionRefusedError("the model's server is gone")

    world = easy(1)
    run = optimize(world, budget=600, fault=fault, runners=1)
    assert run.stop_reason.startswith("infrastructure:")
    assert world.gap_closed(run.best) > 0.3
    assert len(run.paid) < 400


def test_agents_own_failures_are_scored_and_shown_to_the_critic(optimize: Optimize) -> None:
    def fault(rollout: Rollout) -> None:
        if rollout.task["order"].endswith("3"):
            raise ValueError("the order has no end")

    run = optimize(budget=150, fault=fault, scoring={"failure": -0.5})
    rows = [row[4] for row in run.state["scores"] if row[4].get("status") == "failed"]
    assert rows
    assert {-0.5} == {row["reward"] for row in rows}
    assert {"ValueError: the order has no end"} == {row["feedback"] for row in rows}


def test_agent_that_never_gives_a_reward_is_an_error_that_says_so(optimize: Optimize) -> None:
    def fault(rollout: Rollout) -> None:
        raise ConnectionError("no route to host")

    with pytest.raises(RunError, match="none of 24 rollouts could be scored"):
        optimize(budget=300, fault=fault)


def test_publish_at_the_end_leaves_the_live_prompt_until_then(optimize: Optimize) -> None:
    run = optimize(budget=250, publish="end")
    assert f"orders-1-apo-{run.progress['step']}" == run.fit.resources["clerk_prompt"]


def test_show_prints_the_score_that_did_not_select_the_winner(optimize: Optimize, tmp_path: Path) -> None:
    store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")
    run = optimize(budget=250, store=store)
    asyncio.run(store.close())
    shown = CliRunner().invoke(cli, ["show", "clerk_prompt", "--store", f"{tmp_path}/runs.db"])
    told = [line for line in shown.output.splitlines() if line.startswith("- orders-1-")]
    lines = {line.split()[1]: line.partition("; ")[0] for line in told}  # without the decision
    winner = next(row for row in run.lineage if row["id"] == run.result["winner"])

    def words(score: dict[str, Any], how: str) -> str:
        return f"score {score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}] n={score['n']} ({how})"

    assert words(run.result["score"], "test tasks") in lines[run.fit.resources["clerk_prompt"]]
    assert lines[winner["versions"]["clerk_prompt"]].endswith(words(run.result["score"], "test tasks"))
    assert lines["orders-1-initial"].endswith(words(run.result["seed_score"], "test tasks"))
    raced = [row for row in run.lineage if row["score"] and row["id"] not in (winner["id"], run.lineage[0]["id"])]
    assert raced
    assert all(lines[row["versions"]["clerk_prompt"]].endswith(words(row["score"], "selection")) for row in raced)
    assert "\n+Write the " in shown.output


def test_tool_descriptions_are_tuned_and_keep_their_structure(optimize: Optimize) -> None:
    world = easy(1)
    tools = JsonResource(value=[{"name": "lookup", "description": "You are the clerk. Looks up."}])
    prompts = {**world.seeds(), "tools": tools}
    run = optimize(world, resources=prompts, tunes=("tools",), budget=140, settings={"trust_agent_rewards": False})
    assert "lookup" in run.best["tools"]
    assert run.stop_reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 60}, "needs at least"),
        ({"budget": {"calls": 2}}, "calls of the optimiser's model and needs at least 3"),
        ({"budget": {}}, "has no budget"),
        ({"budget": {"tokens": 3000}}, "one question to the optimiser's model takes up to 1.. tokens"),
        ({"budget": {"money": 0.05, "prices": {"rollout": 0.001}}}, "needs at least 0.074, for 74 rollouts"),
        ({"budget": {"money": 1.0}}, "no prices"),
        ({"optimizer": {"base_url": "http://127.0.0.1:9/v1", "model": "x"}}, "does not answer"),
        ({"optimizer": {"base_url": "nowhere", "model": "x"}}, "is not a URL"),
        ({"optimizer": {"base_url": "http://x/v1", "model": "x", "api_key_env": "NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
        ({"optimizer": "nobody"}, "there is no policy 'nobody'"),
        ({"requests": {"poem": "a.txt"}}, "the kinds of request are"),
        ({"requests": {"edit": "missing.txt"}}, "cannot read requests.edit"),
        ({"texts": {"invariants": {"clerk_prompt": ["Sing."]}}}, "breaks a rule itself"),
        ({"texts": {"invariants": {"nobody": ["Sing."]}}}, "this algorithm tunes"),
        ({"branch_factor": 0}, ">= 1"),
        ({"parents": {"selector": "best-of"}}, "selector"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_paid(
    optimize: Optimize, change: dict[str, Any], message: str
) -> None:
    started: list[str] = []

    def fault(rollout: Rollout) -> None:
        started.append(rollout.rollout_id)

    with pytest.raises(AglError, match=message):
        optimize(fault=fault, **{"budget": 300, **change})
    assert [] == started


def test_bad_tasks_and_templates_are_refused(optimize: Optimize) -> None:
    world = easy(1)
    with pytest.raises(ConfigError, match="32 of 32 validation tasks are training tasks too"):
        optimize(world, train=[*world.train, *world.val], budget=300)
    asks = {"clerk_prompt": PromptTemplate(template="You are the clerk. {order} for {customer}")}
    with pytest.raises(ConfigError, match="customer"):
        optimize(world, resources=asks, budget=300, folder="fields")
    broken = {"clerk_prompt": PromptTemplate(template="You are the clerk. {order")}
    with pytest.raises(ConfigError, match="no valid template"):
        optimize(world, resources=broken, budget=300, folder="broken")
