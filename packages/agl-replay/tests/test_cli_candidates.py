"""``agl resources`` on the candidates in the saved state of any search algorithm."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agl.contracts import ExperimentRecord
from agl.schemas import Json, PromptTemplate, ResourceVersion, to_json
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore

SEED = {"id": "aa", "texts": {"prompt": "Go.", "other": "O"}, "versions": {"prompt": "v0"}, "status": "pool"}
TRIED = {
    "id": "bb",
    "texts": {"prompt": "Go on.\n```\ncode", "other": "O"},
    "versions": {"prompt": "e-1-search-2-bb"},
    "parents": ["aa"],
    "operator": "edit",
    "step": 2,
    "status": "beaten",
    "critique": "Too short.",
}
REFUSED = {
    **TRIED,
    "id": "cc",
    "texts": {"prompt": "", "other": "O"},
    "versions": {},
    "status": "rejected",
    "reason": "empty",
}
ELSEWHERE = {**TRIED, "id": "dd", "texts": {"prompt": "Go.", "other": "P"}, "versions": {"prompt": "v0"}}
CHECK = {
    "name": "race",
    "has_passed": False,
    "step": 2,
    "rival": "aa",
    "score": 0.25,
    "rival_score": 0.5,
    "gain": {"mean": -0.25, "low": -0.5, "high": 0.125, "n": 8},
}
SCORE = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 8}
STATE: Json = {
    "step": 2,
    "stop_reason": "budget: no room",
    "state": {
        "progress": {"winner": "bb", "rounds": 1},
        "spent": {"rollouts": 12, "calls": 3, "tokens": 200, "money": 1.5},
        "lineage": [SEED, TRIED, REFUSED, ELSEWHERE],
        "journal": {
            "aa": {"scores": {"validation tasks": {**SCORE, "mean": 0.375}}},
            "bb": {
                "scores": {"validation tasks": SCORE, "test tasks": SCORE},
                "evidence": ["r1", "r2"],
                "checks": [CHECK],
                "agent": {"rollouts": 9, "tokens": 70, "money": 0.5},
                "optimizer": {"calls": 1, "tokens": 80, "money": 0.25},
            },
        },
    },
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Fill a store with a search's state, and with the state of an algorithm that tries no candidates."""
    path = tmp_path / "runs.db"

    async def fill() -> None:
        made = SQLiteStore(f"sqlite:///{path}")
        text = PromptTemplate(template="Go.")
        tried = ResourceVersion(name="prompt", version="e-1-search-2-bb", parent="v0", resource=text)
        await made.publish([ResourceVersion(name="prompt", version="v0", resource=text), tried])
        other = to_json({"step": 1, "state": {"weights": [1, 2]}})
        states = {"experiment/e/1/algorithm/search": to_json(STATE), "experiment/e/1/algorithm/other": other}
        await made.save_state(states, experiment=ExperimentRecord(name="e"))
        await made.close()

    asyncio.run(fill())
    return path


def agl(store: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["resources", *words, "--store", str(store)])


def test_candidates_of_one_resource_are_a_table_with_decisions_and_costs(store: Path) -> None:
    rows = [line.split() for line in agl(store, "list", "prompt", "--why").stdout.splitlines()]
    assert ["aa", "bb", "cc"] == [row[0] for row in rows[1:]], "one that changed another text is not listed here"
    why = "failed race: 0.250 against 0.500 of aa, -0.250 [-0.500, +0.125] on 8 pairs"
    assert ["bb", "aa", "edit", "2", "beaten", *why.split(), "9", "70", "1", "80", "0.75"] == rows[2]
    assert ["cc", "aa", "edit", "2", "refused", "empty", "0", "0", "0", "0", "0"] == rows[3]
    found = json.loads(agl(store, "list", "prompt", "--why", "--json").stdout)
    assert [("e", 1, "search")] * 3 == [(c["experiment"], c["run"], c["algorithm"]) for c in found]


def test_detail_of_a_version_or_of_a_candidate_tells_its_story(store: Path) -> None:
    lines = agl(store, "show", "prompt", "e-1-search-2-bb").stdout.splitlines()
    assert [
        "candidate bb (edit of aa, step 2): "
        "beaten: failed race: 0.250 against 0.500 of aa, -0.250 [-0.500, +0.125] on 8 pairs",
        "from the rollouts: r1, r2",
        "critique: Too short.",
        "step 2: failed race: 0.250 against 0.500 of aa, -0.250 [-0.500, +0.125] on 8 pairs",
        "score on validation tasks: 0.500 [0.250, 0.750] n=8",
        "score on test tasks: 0.500 [0.250, 0.750] n=8",
        "cost: 9 rollouts of the agent with 70 tokens, 1 question to the optimiser's model with 80 tokens, "
        "0.75 in money",
    ] == lines[2:9]
    refused = agl(store, "show", "prompt", "cc").stdout
    assert refused.startswith("candidate cc (edit of aa, step 2): refused: empty\n")
    assert "e-1-search-2-bb" == json.loads(agl(store, "show", "prompt", "bb", "--json").stdout)["version"]["version"]


def test_candidates_without_a_resource_or_without_a_search_are_answered(store: Path) -> None:
    unnamed = agl(store, "list", "--why")
    wanted = "--why lists the candidates of one resource; write agl resources list NAME --why"
    assert (1, f"Error: {wanted}\n") == (unnamed.exit_code, unnamed.output)
    none = agl(store, "list", "nothing", "--why")
    assert "no prompt search has tried candidates of 'nothing' in this store\n" == none.output


REPORT = """\
# prompt: search in e, run 1

Ended by budget: no room

## Scores

|  | validation tasks | test tasks |
|---|---|---|
| first text | 0.375 [0.250, 0.750] n=8 | - |
| winner | 0.500 [0.250, 0.750] n=8 | 0.500 [0.250, 0.750] n=8 |

## Costs

- 12 rollouts of the agent, 70 tokens in the recorded model calls of the candidates
- 3 questions to the optimiser's model, 200 tokens
- 1.5 in money

## First text

```text
Go.
```

## Winner bb

````text
Go on.
```
code
````

## Changes

````diff
--- aa
+++ bb
@@ -1 +1,3 @@
-Go.
+Go on.
+```
+code
````

## Candidates

"""


def test_report_holds_scores_costs_both_texts_their_difference_and_all_candidates(store: Path, tmp_path: Path) -> None:
    printed = agl(store, "report", "prompt").stdout
    assert REPORT == printed[: len(REPORT)]
    rows = printed[len(REPORT) :].splitlines()
    assert ["aa", "bb", "cc"] == [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]]
    path = tmp_path / "report.md"
    assert f"report on prompt in {path}\n" == agl(store, "report", "prompt", "--output", str(path)).stdout
    assert printed.rstrip() == path.read_text().rstrip()


def test_report_without_a_search_or_with_several_says_what_to_name(store: Path) -> None:
    none = agl(store, "report", "nothing")
    assert "Error: no prompt search has tuned 'nothing'; agl resources list shows what there is\n" == none.output
    elsewhere = agl(store, "report", "prompt", "--experiment", "f")
    assert "Error: no prompt search has tuned 'prompt' in the experiment 'f'; it was tuned in: e\n" == elsewhere.output

    async def again() -> None:
        made = SQLiteStore(f"sqlite:///{store}")
        await made.save_state(
            {"experiment/f/1/algorithm/search": to_json(STATE)}, experiment=ExperimentRecord(name="f")
        )
        await made.close()

    asyncio.run(again())
    several = agl(store, "report", "prompt")
    assert "Error: 'prompt' was tuned in several experiments; name one of e, f by --experiment\n" == several.output
    assert agl(store, "report", "prompt", "--experiment", "f").stdout.startswith("# prompt: search in f, run 1\n")
