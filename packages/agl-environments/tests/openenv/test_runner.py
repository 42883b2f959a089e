"""The runner with servers whose answers are right, wrong, late, too large or missing."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agl.errors import ConfigError, RunError
from agl.schemas import Attempt, Claim, Rollout
from agl.stores import MemoryStore
from agl_environments.openenv.runner import OpenEnvRunner
from agl_environments.openenv.session import ServerLostError
from agl_run import AgentSpec, RunContext, Trainer

from .conftest import ASYNC_AGENT, SYNC_AGENT, guessing, observed, playing, serving, spans_of

Make = Callable[..., Trainer]

CALL = """    import openai
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "Hello"}])
"""

TWO_EPISODES = """
    await env.reset()
    await env.step({})
    await env.reset()
    await env.step({})
    await env.step({})
"""

SWALLOWING = """

class Tried:
    def __init__(self, env):
        self.env = env

    async def reset(self, **arguments):
        try:
            return await self.env.reset(**arguments)
        except Exception:
            import types

            return types.SimpleNamespace(done=True)
"""


def setup_of(agent: Callable[..., Any]) -> RunContext:
    """Return the context of a run for an agent without resources."""

    async def resources(_: Rollout) -> dict[str, Any]:
        return {}

    return RunContext(agent=AgentSpec.of(agent), store=MemoryStore(), secret=b"0" * 32, resources=resources)


def claim(number: int) -> Claim:
    """Return the claim of an attempt at one rollout."""
    rollout = Rollout(rollout_id="ro-1", task={"word": "red"})
    attempt = Attempt(rollout_id="ro-1", attempt_id=f"ro-1.{number}", number=number, worker="one")
    return Claim(rollout=rollout, attempt=attempt)


def only(trainer: Trainer) -> Any:
    """Return the only episode of a dry run."""
    (episode,) = trainer.dev(tasks=1).episodes
    return episode


@pytest.mark.parametrize("agent", [ASYNC_AGENT, SYNC_AGENT], ids=["coroutine", "function"])
def test_agent_gets_a_session_of_a_server_that_runs(trainer: Make, tmp_path: Path, agent: str) -> None:
    with serving(playing(guessing)) as url:
        episode = only(trainer(f'{{ url = "{url}" }}', agent=agent))
    assert ("succeeded", 1.0) == (episode.rollout.status, episode.reward)
    names = [span.name for span in spans_of(tmp_path, episode)]
    assert ["execute_tool reset", "execute_tool step"] == sorted(n for n in names if n.startswith("execute_tool"))


@pytest.mark.parametrize(("rule", "reward"), [("sum", -0.5), ("last", 0.5)])
def test_reward_is_that_of_the_newest_episode(trainer: Make, rule: str, reward: float) -> None:
    rewards = iter([9.0, -1.0, 0.5])
    agent = "async def play(task, llm, env):\n" + CALL + TWO_EPISODES
    answers = playing(lambda kind, _: observed(next(rewards)) if kind == "step" else guessing(kind, {}))
    with serving(answers) as url:
        assert reward == only(trainer(f'{{ url = "{url}", reward = "{rule}" }}', agent=agent)).reward


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        ("<html>", "answered '<html>', which is not a JSON object"),
        ([1], "answered '[1]', which is not a JSON object"),
        ({"type": "observation", "data": {"observation": "red"}}, "which is not an observation"),
        ('{"type": "observation", "data": {"observation": {}, "reward": NaN}}', "rewarded a step with nan"),
        ({"type": "error", "data": {"message": "out of order", "code": "SESSION_ERROR"}}, "refused step: out of order"),
        (observed(text="x" * 2_000_000), "raise max_message_mb in [runner] params"),
    ],
    ids=["text", "list", "shape", "nan", "error", "giant"],
)
def test_wrong_answer_fails_the_rollout_and_says_why(trainer: Make, step: Any, cause: str) -> None:
    answers = playing(lambda kind, data: step if kind == "step" else guessing(kind, data))
    with serving(answers) as url:
        episode = only(trainer(f'{{ url = "{url}", max_message_mb = 1 }}'))
    assert "failed" == episode.rollout.status
    assert cause in episode.attempt.error.message


def test_long_observation_is_whole_for_the_agent_and_short_in_the_record(trainer: Make, tmp_path: Path) -> None:
    text = "y" * 5_000_000
    agent = "async def play(task, llm, env):\n" + CALL + '    return len((await env.reset()).observation["text"])\n'
    with serving(playing(lambda kind, data: observed(text=text) if kind == "reset" else guessing(kind, data))) as url:
        episode = only(trainer(f'{{ url = "{url}" }}', agent=agent))
    assert len(text) == episode.reward
    (span,) = (span for span in spans_of(tmp_path, episode) if span.name == "execute_tool reset")
    result: Any = span.attributes["gen_ai.tool.call.result"]
    assert len(result["observation"]) < 40_000
    assert "characters left out" in result["observation"]


def test_refused_action_is_an_answer(trainer: Make, tmp_path: Path) -> None:
    wrong = {"loc": ["guess"], "msg": "too long"}
    refusal = {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [wrong]}}
    with serving(playing(lambda kind, data: refusal if kind == "step" else guessing(kind, data))) as url:
        episode = only(trainer(f'{{ url = "{url}" }}'))
    (root,) = (span for span in spans_of(tmp_path, episode) if span.parent_id is None and span.reward is None)
    assert ("succeeded", "Invalid message; guess: too long") == (episode.rollout.status, root.attributes["agl.output"])


def test_server_that_never_answers_fails_the_rollout(trainer: Make) -> None:
    async def silent(socket: web.WebSocketResponse) -> None:
        await socket.send_str(json.dumps(guessing("state", {})))
        await asyncio.sleep(600)

    with serving(silent) as url:
        episode = only(trainer(f'{{ url = "{url}", timeout_s = 0.5 }}'))
    assert "did not answer reset within 0.5 s" in episode.attempt.error.message


def test_time_limit_of_the_attempt_ends_a_step(trainer: Make) -> None:
    async def slow(socket: web.WebSocketResponse) -> None:
        await socket.send_str(json.dumps(guessing("state", {})))
        await asyncio.sleep(600)

    with serving(slow) as url:
        episode = only(trainer(f'{{ url = "{url}" }}', agent=SYNC_AGENT, timeout_s=1))
    assert "timeout" == episode.attempt.status


def test_session_that_breaks_off_repeats_the_attempt_even_if_the_agent_goes_on(trainer: Make) -> None:
    opened: list[int] = []

    async def broken(socket: web.WebSocketResponse) -> None:
        opened.append(1)
        await playing(guessing)(socket) if len(opened) > 2 else await first(socket)

    async def first(socket: web.WebSocketResponse) -> None:
        await socket.send_str(json.dumps(guessing("state", {})))
        await socket.close()

    agent = ASYNC_AGENT.replace("await env.reset", "await Tried(env).reset")
    agent = agent.replace('return (await env.state())["step_count"]', "return None") + SWALLOWING
    with serving(broken) as url:
        episode = only(trainer(f'{{ url = "{url}" }}', agent=agent))
    assert (3, "succeeded", 1.0) == (episode.attempt.number, episode.rollout.status, episode.reward)


def test_second_attempt_at_a_rollout_has_a_session_of_its_own_while_the_first_one_stops() -> None:
    """This happens after a lost lease, if the worker that stops the old attempt claims the new one."""
    has_second_begun = asyncio.Event()
    sessions: list[Any] = []

    async def agent(task: Any, env: Any) -> None:
        sessions.append(env)
        if len(sessions) == 1:
            await has_second_begun.wait()
            return
        await env.reset()
        has_second_begun.set()
        await asyncio.wait_for(first, 10)
        await env.step({})

    async def play(url: str) -> list[str]:
        nonlocal first
        runner = OpenEnvRunner(setup_of(agent), url=url)
        await runner.start()
        first = asyncio.create_task(runner.execute(claim(1)))
        outcomes = await asyncio.gather(first, runner.execute(claim(2)))
        await runner.stop()
        return [outcome.status for outcome in outcomes]

    first: Any = None
    with serving(playing(guessing)) as url:
        assert ["succeeded", "succeeded"] == asyncio.run(play(url))
    assert sessions[0] is not sessions[1]


@pytest.mark.parametrize("is_in_thread", [True, False])
def test_function_that_returns_a_coroutine_is_rewarded_or_told_why_it_cannot_wait(is_in_thread: bool) -> None:
    def agent(task: Any, env: Any) -> Any:
        async def work() -> None:
            await asyncio.to_thread(env.step, {}) if is_in_thread else env.step({})

        return work()

    async def play(url: str) -> Any:
        runner = OpenEnvRunner(setup_of(agent), url=url)
        await runner.start()
        outcome = await asyncio.wait_for(runner.execute(claim(1)), 10)
        await runner.stop()
        return outcome

    with serving(playing(guessing)) as url:
        outcome = asyncio.run(play(url))
    assert ("succeeded" if is_in_thread else "failed") == outcome.status
    if is_in_thread:
        assert {"span", "rollout"} == {span.reward.scope for span in outcome.spans if span.reward}
    else:
        assert "write it as async def" in outcome.error.message


def test_server_that_is_away_for_the_whole_wait_is_not_called_full() -> None:
    async def play() -> None:
        runner = OpenEnvRunner(setup_of(lambda task, env: None), url="http://127.0.0.1:9", wait_s=0.2)
        await runner.start()
        try:
            await runner.execute(claim(1))
        finally:
            await runner.stop()

    with pytest.raises(ServerLostError, match="cannot be reached"):
        asyncio.run(play())


def test_full_server_is_waited_for(trainer: Make) -> None:
    active: list[web.WebSocketResponse] = []
    most: list[int] = []

    async def one_at_a_time(socket: web.WebSocketResponse) -> None:
        if active:
            full = {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": 1}
            await socket.send_str(json.dumps({"type": "error", "data": full}))
            return
        active.append(socket)
        most.append(len(active))
        try:
            await playing(guessing)(socket)
        finally:
            active.remove(socket)

    with serving(one_at_a_time) as url:
        episodes = trainer(f'{{ url = "{url}" }}', words=("a", "b", "c")).dev(tasks=3).episodes
        assert [1.0] * 3 == [episode.reward for episode in episodes]
        assert [1] * 3 == most


@pytest.mark.parametrize(
    ("params", "cause"),
    [
        ("{}", "needs a server: write params = { url"),
        ('{ url = "x", command = ["y"] }', "needs a server"),
        ('{ url = "localhost:8000" }', "write http://HOST:PORT"),
        ('{ link = "x" }', "has no parameter 'link'; there are command, "),
        ('{ url = "http://x", reward = "mean" }', 'runner.params.reward is "mean"; write one of '),
        ('{ command = ["server"] }', 'has no {port}; write the port as "{port}"'),
        ('{ command = ["no-such-program", "{port}"] }', "cannot be started: no-such-program"),
        ('{ command = ["sh", "-c", "echo no module {port}; exit 2"] }', "ended with exit code 2 after its start"),
    ],
)
def test_wrong_parameters_are_refused(trainer: Make, params: str, cause: str) -> None:
    with pytest.raises((ConfigError, RunError)) as refused:
        trainer(params).dev(tasks=1)
    assert cause in str(refused.value)


def test_address_without_an_openenv_server_is_named(trainer: Make, model: Any) -> None:
    episode = only(trainer(f'{{ url = "{model.base_url}" }}'))
    assert "so it is not an OpenEnv server; check url" in episode.attempt.error.message


def test_agent_without_env_is_refused(trainer: Make) -> None:
    with pytest.raises(ConfigError, match="takes task, llm and no env, so"):
        trainer('{ url = "http://127.0.0.1:9" }', agent="async def play(task, llm):\n    return 1.0\n").dev(tasks=1)
