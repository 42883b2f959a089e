"""The commands that show a learner and steer it, on a store that simulated customers filled."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from agl_inspect.ownership import Ownership
from agl_inspect.records.learning import LearningRecords
from agl_inspect.records.splits import HOSTED, HostedVersions
from agl_inspect.terminal.program import cli
from agl_store_sqlite import SQLiteStore
from worlds.customers import Customers, settings


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store in which `c1` was promoted, and the canary of `c2` runs."""
    url = f"sqlite:///{tmp_path_factory.mktemp('learn')}/runs.db"

    def propose(train: object) -> str:
        return "better" if len(customers.past) < 200 else "best"

    def liked(version: str, kind: str, number: int) -> float:
        return {"old": 0.1, "better": 0.5, "best": 0.9}[version]

    customers = Customers(liked=liked, propose=propose, settings=settings(units=40), store=SQLiteStore(url), seed=2)

    async def work() -> None:
        learner = await customers.open("old")
        await customers.serve(400, until=lambda: learner.state.current == "c2" and len(learner.split.shares) > 1)
        await customers.serve(10)
        await customers.store.close()  # type: ignore[attr-defined]

    asyncio.run(work())
    return url


def agl(store: str, *words: str) -> Result:
    return CliRunner().invoke(cli, ["learn", *words, "--store", store])


def test_status_shows_what_is_served_and_the_evidence(store: str) -> None:
    result = agl(store, "status")

    assert 0 == result.exit_code, result.output
    assert "50% candidate: prompt@best" in result.output
    assert "c2 (prompt@best) canary" in result.output
    assert "needs 20 to 1" in result.output


def test_promotion_while_no_learner_runs_says_what_gateways_serve(store: str, tmp_path: Path) -> None:
    copy = f"sqlite:///{tmp_path}/copy.db"
    (tmp_path / "copy.db").write_bytes(Path(store.removeprefix("sqlite:///")).read_bytes())
    for word in (["promote", "prompt", "old"], ["promote", "prompt", "better"]):
        done = CliRunner().invoke(cli, ["resources", *word, "--store", copy])
        assert 0 == done.exit_code, done.output
        assert ("old" == word[2]) == ("gateways serve better until agl learn" in done.output)


def test_log_lists_every_move_and_the_error_spent(store: str) -> None:
    output = agl(store, "log").output

    assert ["replay", "canary", "watch", "accepted"] == [
        line.split()[3] for line in output.splitlines() if " c1 " in line
    ]
    assert "2 candidates so far" in output


@pytest.mark.parametrize("name", ["c1", "better"])
def test_why_explains_a_candidate_by_its_id_or_version(store: str, name: str) -> None:
    output = agl(store, "why", name).output

    assert "c1: prompt@better instead of prompt@old, by the world" in output
    assert "c1-replay: better" in output


def test_why_names_the_command_for_an_unknown_version(store: str) -> None:
    result = agl(store, "why", "nothing")

    assert 1 == result.exit_code
    assert "agl learn log" in result.output


def test_replay_confirms_a_decision(store: str) -> None:
    assert "to the last digit" in agl(store, "replay", "c1-replay").output


def test_replay_refuses_a_decision_whose_observations_were_changed(store: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes(Path(store.removeprefix("sqlite:///")).read_bytes())

    async def forge() -> None:
        opened = SQLiteStore(f"sqlite:///{copy}")
        shelf = LearningRecords("support").pairs("c1")
        name, pair = next(iter((await shelf.read(opened)).items()))
        await shelf.add(opened, {name: msgspec.structs.replace(pair, new=1 - pair.new)})
        await opened.close()

    asyncio.run(forge())
    result = agl(f"sqlite:///{copy}", "replay", "c1-replay")

    assert 1 == result.exit_code
    assert "cannot be confirmed" in result.output


def test_wishes_of_people_are_saved(store: str) -> None:
    for words in (("pause",), ("reject", "c2", "--reason", "rude")):
        assert 0 == agl(store, *words).exit_code

    control = msgspec.json.decode(agl(store, "status", "--json").output)["control"]

    assert (True, {"c2": "rude"}) == (control["is_paused"], control["rejected"])
    assert 0 == agl(store, "resume").exit_code


def test_ended_candidate_can_not_be_rejected(store: str) -> None:
    assert "has ended already" in agl(store, "reject", "c1").output


def test_store_without_a_learner_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/empty.db"
    asyncio.run(SQLiteStore(url).close())

    assert "agl learn FILE" in agl(url, "status").output


def test_missing_file_is_named() -> None:
    result = CliRunner().invoke(cli, ["learn", "suport.toml"])

    assert 1 == result.exit_code
    assert "suport.toml" in result.output


def test_split_of_a_stopped_learner_can_be_ended(store: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes(Path(store.removeprefix("sqlite:///")).read_bytes())

    assert "not served any more" in agl(f"sqlite:///{copy}", "end").output
    assert "% production" not in agl(f"sqlite:///{copy}", "status").output


def test_split_is_not_ended_while_a_host_serves_its_weights(store: str, tmp_path: Path) -> None:
    copy = f"sqlite:///{tmp_path}/copy.db"
    (tmp_path / "copy.db").write_bytes(Path(store.removeprefix("sqlite:///")).read_bytes())

    async def work() -> dict[str, HostedVersions]:
        opened = SQLiteStore(copy)
        await HOSTED.add(opened, {"prompt": HostedVersions(models={"old": "prompt@old"})})
        async with Ownership(opened, "host-prompt", workdir=tmp_path):
            refused = await asyncio.to_thread(agl, copy, "end")
        assert "the untrained weights of 'prompt' would answer" in refused.output
        assert "% production" in (await asyncio.to_thread(agl, copy, "status")).output
        assert "not served any more" in (await asyncio.to_thread(agl, copy, "end")).output
        left = await HOSTED.read(opened)
        await opened.close()
        return left

    assert {} == asyncio.run(work())


def test_misspelt_command_is_no_file(store: str) -> None:
    assert "stauts" in CliRunner().invoke(cli, ["learn", "stauts"]).output
    assert "status" in CliRunner().invoke(cli, ["learn", "stauts"]).output
