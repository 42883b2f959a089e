"""An agent class of Agent Lightning 1.0 runs unchanged as a command, and its reward arrives."""

import subprocess
import sys
from pathlib import Path

from agl_run import Trainer, policy, runner
from agl_testing.model_server import Reply, ScriptedModelServer

AGENT = """
import os
import httpx
from openai import AsyncOpenAI

class ChatAgent:
    async def run(self):
        async with AsyncOpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"]) as client:
            messages = [{"role": "user", "content": os.environ["QUESTION"]}]
            answer = await client.chat.completions.create(model="auto", messages=messages)
        reward = float(answer.choices[0].message.content == os.environ["ANSWER"])
        httpx.post(
            os.environ["AGL_EVENT_URL"],
            json={"event_type": "reward", "data": {"value": reward}},
            headers={"Authorization": f"Bearer {os.environ['AGL_KEY']}"},
        ).raise_for_status()
"""


def test_agent_class_of_release_1_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "their_agent.py").write_text(AGENT)
    fields = ["QUESTION=input.question", "ANSWER=answer"]
    command = [sys.executable, "-m", "agl_lightning.job", "their_agent.ChatAgent", *fields]
    tasks = [{"question": "What is 40 + 2?", "answer": answer} for answer in ("42", "43")]

    with ScriptedModelServer(default=Reply(text="42")) as server:
        result = Trainer(
            runner=runner("command", timeout_s=60),
            policies={"auto": policy("openai", model="auto", base_url=server.base_url, api_key_env="")},
            store=f"sqlite:///{tmp_path}/runs.db",
            folder=tmp_path,
        ).dev(command, tasks, tasks=2)

    assert [1.0, 0.0] == [episode.reward for episode in result.episodes]
    assert [1, 1] == [len(episode.transitions) for episode in result.episodes]


def test_start_by_hand_says_where_the_program_belongs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agl_lightning.job", "a.B"], capture_output=True, text=True, check=False
    )
    assert (1, True) == (done.returncode, done.stderr.startswith("name this program as the agent: agent = ["))
