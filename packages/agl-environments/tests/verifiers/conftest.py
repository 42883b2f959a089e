"""Environments made with verifiers' own classes, each a module next to an experiment file, and the experiment."""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from agl.schemas import Episode, Span
from agl.stores import all_spans
from agl_run import Trainer, load_config
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer

IS_CLASSIC = version("verifiers").startswith("0.3.")
"""Environments with ``load_environment`` exist up to verifiers 0.3, and tasksets as they are tested here from 0.4."""

CLASSIC = """
import asyncio
from pathlib import Path
import verifiers as vf
from datasets import Dataset

ROWS = [
    {"question": "Say red.", "answer": "red", "info": {"letters": 3}},
    {"question": "Say blue.", "answer": "blue", "info": {"letters": 4}},
]

def said(completion):
    return completion[-1]["content"] if completion else ""

async def exact(completion, answer, **kwargs):
    return 1.0 if said(completion) == answer else 0.0

def short(completion, info, **kwargs):
    return 1.0 if len(said(completion)) <= info["letters"] else 0.0

def broken(completion, **kwargs):
    raise KeyError("missing")

def nothing(completion, **kwargs):
    return float("nan")

def wordless(completion, **kwargs):
    return None

def together(completions, **kwargs):
    return [0.0 for _ in completions]

def add(a: int, b: int) -> int:
    '''Add two numbers.'''
    if a < 0:
        raise ValueError("a is negative")
    return a + b

def remember(word: str, notes: list) -> str:
    '''Note a word.'''
    notes.append(word)
    return f"noted {len(notes)}"

class Cleaned(vf.Rubric):
    @vf.cleanup
    async def forget(self, state):
        Path(__file__).with_name("cleaned").touch()

class Notes(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(remember, args_to_skip=["notes"])

    async def setup_state(self, state, **kwargs):
        state["notes"] = []
        return await super().setup_state(state, **kwargs) or state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "notes": state["notes"]}

class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Again."}]

class Gone(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        raise vf.SandboxError("the sandbox is gone") if self.tries() == 1 else vf.ToolError("no such tool")

    def tries(self):
        self.count = getattr(self, "count", 0) + 1
        return self.count

class Slow(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        await asyncio.sleep(600)

def load_environment(kind="single", rows=2, reward=""):
    data = Dataset.from_list(ROWS[:rows]) if rows else Dataset.from_dict({"question": [], "answer": []})
    rubric = vf.Rubric(funcs=[exact, short], weights=[1.0, 0.25])
    if reward:
        rubric = Cleaned(funcs=[globals()[reward]])
    common = dict(dataset=data, eval_dataset=data, rubric=rubric, system_prompt="Be brief.")
    if kind == "tool":
        return vf.ToolEnv(tools=[add], max_turns=4, **common)
    classes = {"multi": Again, "gone": Gone, "slow": Slow, "notes": Notes}
    if kind in classes:
        return classes[kind](max_turns=3, **common)
    return vf.SingleTurnEnv(**common)
"""

TASKSET = """
import sys
import verifiers.v1 as vf

PROGRAM = '''
import json, sys, urllib.request

url, key, model, prompt = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
try:
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
except urllib.error.HTTPError as error:
    sys.exit(error.read().decode())
'''

class WordData(vf.TaskData):
    word: str = ""

class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace):
        return 1.0 if trace.last_reply == self.data.word else 0.0

    @vf.reward(weight=0.25)
    async def short(self, trace):
        return 1.0 if len(trace.last_reply) <= len(self.data.word) else 0.0

    @vf.metric
    async def letters(self, trace):
        return float(len(trace.last_reply))

class WordsConfig(vf.TasksetConfig):
    words: list[str] = ["red", "blue"]

class Words(vf.Taskset[WordTask, WordsConfig]):
    def load(self):
        for word in self.config.words:
            yield WordTask(WordData(prompt=f"Say {word}.", word=word), self.config.task)

class Caller(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        words = [sys.executable, "-c", PROGRAM, f"{endpoint}/chat/completions", secret, ctx.model, data.prompt]
        return await runtime.run(words, {})

__all__ = ["Words", "Caller"]
"""

FILE = """
[experiment]
name = "words"
agent = "verifiers:NAME"
agent_args = ARGS

[runner]
concurrency = 4
timeout_s = 60

[policy.main]
use = "openai"
model = "scripted"
base_url = "BASE_URL"
api_key_env = ""
has_token_ids = true
"""


def spans_of(folder: Path, episode: Episode) -> list[Span]:
    """Return the spans of an episode from the store of the experiment in a folder."""

    async def read() -> list[Span]:
        store = SQLiteStore(f"sqlite:///{folder / 'runs' / 'agl.db'}")
        try:
            return await all_spans(store, episode.rollout.rollout_id, episode.attempt.attempt_id)
        finally:
            await store.close()

    return asyncio.run(read())


@pytest.fixture
def model() -> Iterator[ScriptedModelServer]:
    """A model that answers ``red``, unless a test gives it a script."""
    with ScriptedModelServer(default=Reply(text="red")) as server:
        yield server


@pytest.fixture
def words(tmp_path: Path) -> str:
    """The name of an environment whose module is next to the experiment file."""
    name = f"words_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(CLASSIC if IS_CLASSIC else TASKSET)
    return name


@pytest.fixture
def trainer(tmp_path: Path, model: ScriptedModelServer) -> Callable[..., Trainer]:
    """A function that makes the trainer of an experiment with an environment, with changes to the experiment file."""

    def make(name: str, *, args: str = "{}", timeout_s: int = 60, more: str = "") -> Trainer:
        text = FILE.replace("NAME", name).replace("ARGS", args).replace("BASE_URL", model.base_url)
        text = text.replace("timeout_s = 60", f"timeout_s = {timeout_s}") + more
        (tmp_path / "experiment.toml").write_text(text)
        return Trainer.from_config(load_config(tmp_path / "experiment.toml"), folder=tmp_path)

    return make
