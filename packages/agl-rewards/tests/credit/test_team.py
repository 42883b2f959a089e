"""Counterfactual credit from end to end: agent, client, capture, store, replays, algorithm."""

import asyncio
import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import agl
from agl import PluginManager
from agl.algorithms import algorithm, component
from agl.contracts import REPLAY_VERSION, RolloutQuery, StepReport, fork_of, replay_of
from agl.episodes import Enclosing
from agl.errors import CaptureError, ConfigError, RunError
from agl.stores import MemoryStore
from agl_run import Quiet, policy
from worlds.team import ROLES
from worlds.team_run import TeamGradient, TeamPlugin, play, tasks

pytest.importorskip("openai", exc_type=ImportError)


COUNTERFACTUAL = component("leave-one-out", baseline="counterfactual")


class Stopping(TeamGradient):
    """Stops in the middle of a step, after all its rollouts were paid for."""

    is_on = False

    async def step(self) -> StepReport:
        await self._context.collect(self._context.train, step=1, n=self._size)
        if self.is_on:
            raise RunError("stopped")
        return await super().step()

    @staticmethod
    @agl.hookimpl
    def agl_algorithms() -> Any:
        yield agl.AlgorithmEntry(name="stopping", factory=Stopping)


class Team:
    """An experiment with the toy team, and the contents of its store."""

    def __init__(self, folder: Path) -> None:
        self.store, self.folder = MemoryStore("memory://"), folder

    def trainer(self, credit: Any, *, runner: str = "async", gateway: str = "none", **params: Any) -> agl.Trainer:
        plugins = PluginManager.from_environment()
        plugins.register(TeamPlugin(), name="team")
        plugins.register(Stopping, name="stopping")
        settings = {"use": "team-gradient", "lr": 0.0, "steps": 1, "group_size": 2, **params}
        return agl.Trainer(
            algorithm=algorithm(settings.pop("use"), tunes="team", **settings),
            policies={"team": policy("team-table", seed=1)},
            credit=credit,
            gateway=gateway,
            plugins=plugins,
            store=self.store,
            folder=self.folder,
            runner=runner,
            n_runners=1,
            progress=Quiet(),
        )

    def fit(self, credit: Any, *, agent: Any = play, is_chained: bool = False, **settings: Any) -> Any:
        return self.trainer(credit, **settings).fit(agent, train_dataset=tasks(is_chained=is_chained))

    def metric(self, name: str) -> list[float]:
        return [metric.value for metric in asyncio.run(self.store.metrics("experiment", name=name))]

    def rollouts(self, **query: Any) -> Any:
        return asyncio.run(self.store.rollouts(RolloutQuery(experiment="experiment", limit=10_000, **query)))

    def versions(self, rollout: Any) -> dict[str, str]:
        """Return the model version of every role's call in a rollout."""
        spans = asyncio.run(self.store.spans(rollout.rollout_id))
        enclosing = Enclosing(spans)
        return {enclosing.who(span).agent: span.call.model_version for span in spans if span.call is not None}


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Team:
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Team(tmp_path)


@pytest.mark.parametrize(("name", "per_step"), [("leave-one-out", 8 * 3), ("shapley", 8 * 6 + 4)])
def test_signs_are_right_and_the_others_answers_come_from_the_record(team: Team, name: str, per_step: int) -> None:
    team.fit(component(name, baseline="counterfactual"), steps=2)
    assert [1.0, 1.0] == team.metric("signs_right")
    assert [float(per_step)] * 2 == team.metric("replays")
    assert [0.0, 0.0] == team.metric("replays_failed")
    replays = team.rollouts(mode="test")
    assert 2 * per_step == len(replays)
    for replay in replays[:20]:
        plan = replay_of(replay)
        assert plan is not None
        expected = {role: f"{REPLAY_VERSION}{'silent' if role in plan.replaced else 'recorded'}" for role in ROLES}
        assert expected == team.versions(replay)


def test_replays_are_never_trained_and_are_visible_as_rollouts_of_their_own(team: Team) -> None:
    team.fit("leave-one-out")
    assert 8 == len(team.rollouts(mode="train"))
    replays = team.rollouts(mode="test")
    assert all("-replay-00001-" in rollout.rollout_id and rollout.status == "succeeded" for rollout in replays)
    assert {"team-gradient"} == {rollout.metadata["algorithm"] for rollout in replays}


def test_an_agent_that_is_asked_something_else_answers_anew(team: Team) -> None:
    team.fit("leave-one-out", is_chained=True)
    for replay in team.rollouts(mode="test"):
        (replaced,) = replay_of(replay).replaced
        versions, place = team.versions(replay), ROLES.index(replaced)
        assert [f"{REPLAY_VERSION}recorded"] * place == [versions[role] for role in ROLES[:place]]
        assert f"{REPLAY_VERSION}silent" == versions[replaced]
        assert not any(versions[role].startswith(REPLAY_VERSION) for role in ROLES[place + 1 :])


def test_siblings_stand_in_for_each_other(team: Team) -> None:
    team.fit(component("leave-one-out", replace="sibling"))
    for replay in team.rollouts(mode="test"):
        assert f"{REPLAY_VERSION}sibling" == team.versions(replay)[replay_of(replay).replaced[0]]


def test_replays_run_in_child_processes_too(team: Team) -> None:
    team.fit(COUNTERFACTUAL, agent="worlds.team_run:play", runner="process")
    assert [1.0] == team.metric("signs_right")
    assert [24.0] == team.metric("replays")


def test_a_repeated_step_finds_its_replays_paid_for(team: Team) -> None:
    Stopping.is_on = True
    with pytest.raises(RunError, match="stopped"):
        team.fit(COUNTERFACTUAL, use="stopping")
    before = {rollout.rollout_id for rollout in team.rollouts()}
    assert 8 + 24 == len(before)
    Stopping.is_on = False
    team.trainer(COUNTERFACTUAL, use="stopping").fit(play, train_dataset=tasks(), resume=True)
    assert before == {rollout.rollout_id for rollout in team.rollouts()}
    assert [1.0] == team.metric("signs_right")


def test_a_runner_that_cannot_replay_is_refused_before_the_first_rollout(team: Team) -> None:
    trainer = team.trainer("leave-one-out", runner="command")
    with pytest.raises(ConfigError, match="'command' runner cannot do"):
        trainer.fit(["true"], train_dataset=tasks())
    assert [] == team.rollouts()


async def past_the_hook(task: Any, team: Any) -> float:
    """Call the gateway over a separate connection, with a header that names the agent."""
    address = urlsplit(team.base_url)
    body = json.dumps({"model": team.model, "messages": [{"role": "user", "content": f"hero/{task['room']}"}]})
    with agl.operation("hero") as hero:
        connection = HTTPConnection(address.netloc)
        headers = {"Authorization": f"Bearer {team.api_key}", "X-Agl-Span-Id": hero.span_id or ""}
        await asyncio.to_thread(connection.request, "POST", "/v1/chat/completions", body, headers)
        await asyncio.to_thread(lambda: connection.getresponse().read())
        connection.close()
    return 0.0


def test_a_client_that_the_hook_does_not_see_is_an_error_instead_of_a_wrong_credit(team: Team) -> None:
    pytest.importorskip("agl_gateway")
    with pytest.raises(CaptureError, match="a model answered for the agent 'hero' in the replay"):
        team.fit("leave-one-out", agent=past_the_hook, gateway="auto")


def test_forks_stay_in_the_budget_and_change_one_answer(team: Team) -> None:
    team.fit("fork", group_size=3)
    plain = 4 * 3 * 3  # rooms, rollouts of each, agents
    assert team.metric("replay_calls")[0] <= 0.5 * plain
    assert [0.0] == team.metric("replays_failed")
    assert team.metric("signs_right_of_choice")[0] > 0.6  # of the rider's, a third of all, every one
    forks = team.rollouts(mode="test")
    assert len(forks) == team.metric("replays")[0]
    sources = {"": 0, "sibling": 0}
    for fork in forks:
        plan, versions = fork_of(fork), team.versions(fork)
        assert plan is not None
        found = [version.removeprefix(REPLAY_VERSION) for version in versions.values()]
        assert 2 == found.count("recorded")
        sources["sibling" if plan.answer_rollout else ""] += 1
        assert plan.answer_rollout != "" or 1 == sum(
            not version.startswith(REPLAY_VERSION) for version in versions.values()
        )
    assert all(sources.values())


def test_repeated_step_finds_its_forks_paid_for(team: Team) -> None:
    Stopping.is_on = True
    with pytest.raises(RunError, match="stopped"):
        team.fit("fork", use="stopping")
    before = {rollout.rollout_id for rollout in team.rollouts()}
    Stopping.is_on = False
    team.trainer("fork", use="stopping").fit(play, train_dataset=tasks(), resume=True)
    assert before == {rollout.rollout_id for rollout in team.rollouts()}


def test_forks_of_agents_that_hear_each_other_stay_in_the_budget(team: Team) -> None:
    team.fit("fork", is_chained=True)
    assert 0 < team.metric("replay_calls")[0] <= 0.5 * 4 * 2 * 3
    assert [0.0] == team.metric("replays_failed")


@pytest.mark.long
def test_training_takes_at_most_half_the_steps_of_the_episodes_return(team: Team) -> None:
    steps = team.fit(COUNTERFACTUAL, lr=4.0, steps=40).steps["team-gradient"]
    assert steps < 40
    team.store = MemoryStore("memory://")
    team.fit("episode", lr=4.0, steps=2 * steps)
    assert max(team.metric("expected_reward")) < 0.9
