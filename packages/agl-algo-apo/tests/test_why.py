"""Why each candidate was accepted or refused: the stored records, and how the commands show them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agl.schemas import LLM
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore
from worlds.prompts import demonstrable, easy, noisy
from worlds.prompts_optimizer import ScriptedOptimizer
from worlds.prompts_run import model_server

Optimize = Callable[..., Any]
PRICES = {"input": 1.0, "output": 2.0, "rollout": 0.001}


@pytest.fixture
def searched(optimize: Optimize, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs a search on a SQLite store; it returns the run and a function for commands there."""

    def run(*args: Any, **params: Any) -> tuple[Any, Callable[..., Result]]:
        path = tmp_path / "runs.db"
        store = SQLiteStore(f"sqlite:///{path}")
        found = optimize(*args, store=store, **params)
        asyncio.run(store.close())
        return found, lambda *words: CliRunner().invoke(cli, [*words, "--store", str(path)], catch_exceptions=False)

    return run


@pytest.mark.parametrize(("use", "budget"), [("apo", 240), ("gepa", 190), ("random", 190)])
def test_every_candidate_is_listed_with_its_checks_and_all_of_its_costs(
    searched: Callable[..., Any], use: str, budget: int
) -> None:
    if use == "gepa":
        pytest.importorskip("gepa", reason="needs gepa")
    run, agl = searched(noisy(3), use=use, budget={"rollouts": budget, "prices": PRICES})
    listed = json.loads(agl("resources", "list", "clerk_prompt", "--why", "--json").stdout)
    assert [row["id"] for row in run.lineage] == [candidate["id"] for candidate in listed]
    spent = run.result["spent"]
    after = len([r for r in run.rollouts if r.rollout_id.startswith("orders-1-validate-val-")]) - 2
    assert spent["rollouts"] - after == sum(c["agent"]["rollouts"] for c in listed)
    assert spent["calls"] >= sum(c["optimizer"]["calls"] for c in listed) > len(listed) / 2
    assert all(c["optimizer"]["tokens"] > 100 for c in listed if c["optimizer"]["calls"])
    assert 0 < sum(c["agent"]["money"] + c["optimizer"]["money"] for c in listed) <= spent["money"]
    compared = [check for c in listed for check in c["checks"] if check["score"] is not None]
    assert compared
    assert all(check["gain"]["low"] <= check["gain"]["mean"] <= check["gain"]["high"] for check in compared)
    assert all(abs(check["score"] - check["rival_score"] - check["gain"]["mean"]) < 1e-9 for check in compared)
    accepted = [c for c in listed[1:] if c["status"] == "pool"]
    assert accepted
    assert all(any(check["has_passed"] and check["gain"] for check in c["checks"]) for c in accepted)
    lost = [c for c in listed if c["status"] == "beaten" and not c["reason"].startswith("became part")]
    assert all(any(not check["has_passed"] for check in c["checks"]) for c in lost)


def test_detail_of_a_version_holds_critique_rollouts_checks_and_scores_of_its_candidate(
    searched: Callable[..., Any],
) -> None:
    run, agl = searched(budget=250)
    edits = [row for row in run.lineage if row.get("operator") == "edit"]
    assert all(row["journal"]["evidence"] and row["critique"].startswith("Advice: Write the") for row in edits)
    parents = {row["id"]: row["versions"] for row in run.lineage}
    shown = {r.rollout_id: r for r in run.rollouts}
    for row in edits:
        behind = [shown[rollout] for rollout in row["journal"]["evidence"]]
        assert {"train"} == {rollout.mode for rollout in behind}
        assert {parents[row["parents"][0]]["clerk_prompt"]} == {r.resources["clerk_prompt"] for r in behind}
    text = agl("resources", "show", "clerk_prompt", edits[0]["versions"]["clerk_prompt"]).stdout
    assert f"candidate {edits[0]['id']} (edit of {edits[0]['parents'][0]}, step {edits[0]['step']})" in text
    assert f"from the rollouts: {', '.join(edits[0]['journal']['evidence'])}" in text
    assert f"critique: {edits[0]['critique']}" in text
    assert "passed static checks\n" in text
    assert "1 question to the optimiser's model with" in text
    by_id = agl("resources", "show", "clerk_prompt", edits[0]["id"]).stdout
    assert text == by_id
    live = run.fit.resources["clerk_prompt"]
    detail = agl("resources", "show", "clerk_prompt", live).stdout
    assert ": accepted: better by +" in detail
    assert "passed race against the parent: " in detail
    assert "passed final measurement (test tasks): " in detail
    assert "score on validation tasks: " in detail
    assert "score on test tasks: " in detail
    story = agl("show", "clerk_prompt").stdout
    line = next(line for line in story.splitlines() if line.startswith(f"- {live} "))
    assert "; accepted: better by +" in line
    assert "; beaten: " in story
    report = agl("resources", "report", "clerk_prompt").stdout
    assert "|  | validation tasks | test tasks |\n" in report
    assert "\nThe winner passed final measurement (test tasks): " in report
    assert f"- {run.result['spent']['rollouts']} rollouts of the agent, 0 tokens" in report
    assert f"## Winner {run.result['winner']}\n\n```text\n{run.best['clerk_prompt']}\n```\n" in report
    assert all(f"\n| {row['id']} | " in report for row in run.lineage)


def test_refused_candidate_is_shown_with_the_rule_that_it_breaks_and_no_rollout(searched: Callable[..., Any]) -> None:
    run, agl = searched(budget=120, script=ScriptedOptimizer(mode="broken"))
    table = agl("resources", "list", "clerk_prompt", "--why").stdout.splitlines()
    assert len(run.lineage) + 1 == len(table)
    refused = [row for row in run.lineage if row["status"] == "rejected"]
    for row in refused:
        line = next(line for line in table if line.startswith(row["id"]))
        assert ["refused", row["reason"], "0"] == [cell.strip() for cell in line.split("  ") if cell][4:7]
    detail = agl("resources", "show", "clerk_prompt", refused[0]["id"]).stdout
    assert f": refused: {refused[0]['reason']}" in detail
    assert "cost: 0 rollouts of the agent" in detail
    assert detail.endswith(f"\n{refused[0]['texts']['clerk_prompt']}\n")


def test_demonstrations_are_listed_and_shown_with_their_rollouts_and_checks(searched: Callable[..., Any]) -> None:
    run, agl = searched(demonstrable(2), budget=300, demonstrations={"most": 3}, seed=2)
    drawn = next(row for row in run.lineage if row.get("operator") == "demonstrate" and row["status"] == "pool")
    table = agl("resources", "list", "clerk_prompt", "--why").stdout.splitlines()
    cells = next([cell for cell in line.split("  ") if cell.strip()] for line in table if line.startswith(drawn["id"]))
    assert "demonstrate" == cells[2].strip()
    detail = agl("resources", "show", "clerk_prompt", drawn["id"]).stdout
    assert f"candidate {drawn['id']} (demonstrate of {drawn['parents'][0]}, step {drawn['step']}): accepted: " in detail
    assert f"from the rollouts: {', '.join(drawn['journal']['evidence'])}" in detail
    assert "passed trial on failures of its parent: " in detail
    assert "\nExamples of good answers:\n\nInput: " in detail
    report = agl("resources", "report", "clerk_prompt").stdout
    assert f"\n| {drawn['id']} | " in report


@pytest.mark.long
def test_tokens_of_the_agents_recorded_calls_are_counted(searched: Callable[..., Any]) -> None:
    world = easy(1)
    with model_server(world) as server:
        llm = LLM(endpoint=server.base_url, model="clerk")
        _, agl = searched(
            world,
            resources={**world.seeds(), "llm": llm},
            tunes=("clerk_prompt",),
            train=world.train[:8],
            val=world.val[:9],
            budget=54,
            gradient_batch_size=4,
        )
    listed = json.loads(agl("resources", "list", "clerk_prompt", "--why", "--json").stdout)
    per_rollout = [c["agent"]["tokens"] / c["agent"]["rollouts"] for c in listed if c["agent"]["rollouts"]]
    assert per_rollout
    assert all(5 < tokens < 500 for tokens in per_rollout)
