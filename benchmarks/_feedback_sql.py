"""The SQL example for the feedback benchmark: its tasks, databases, checker, reward, tokenizer and random weights.

The agent is the example's with `openai` in the place of LangChain and a loop in the place of LangGraph, so that the
benchmark needs neither; nodes, prompts, databases and the bound of two rewrites are read from the example's file.
What the reward says is `sql-match`'s own: the database's error, or the rows that were expected. As in the calculator's
world the warm-up also shows how to take such words, and then mostly guesses a column, as the example's teacher does.
"""

from pathlib import Path

from benchmarks._feedback import World, call

SQL = Path(__file__).parent.parent / "examples" / "sql"
DIALOGUES = Path(__file__).with_name("_feedback_sql_data.py")

FRAMEWORK = (
    "from langchain_openai import ChatOpenAI\n",
    "from langgraph.graph import END, START, StateGraph\n",
    "from langgraph.graph.state import CompiledStateGraph\n",
)
LOOP = """

from openai import AsyncOpenAI

END = ""


@cache
def client():
    return AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ.get("OPENAI_API_KEY", "none"))


async def ask(system, user, *, temperature=TEMPERATURE):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    name = "check_llm" if system == CHECK else MODEL
    answer = await client().chat.completions.create(model=name, messages=messages, temperature=temperature)
    return answer.choices[0].message.content or ""


async def solve(task):
    state = asked(str(DATABASES / task["database"]), task["question"])
    state |= await write(state)
    while True:
        state |= execute(state)
        state |= await check(state)
        if after_check(state) == END:
            return state["query"]
        state |= await rewrite(state)
"""
EXPERIMENT = """
[experiment]
name = "{name}"
agent = "agent:solve"
store = "memory://"
workdir = "."
train = "out/data/train.jsonl"
hidden = ["query"]
seed = {seed}
reward_weights = {{ syntax = 0.3, execution = 0.4, goal = 0.3 }}

[runner]
use = "async"
concurrency = 64
timeout_s = 600

[[reward]]
use = "sql-match"
params = {{ database = "out/data/{{database}}", answer = "query", source = "output" }}

[policy.main_llm]
use = "torch"
model = "{model}"
max_tokens = 48
threads = 1

[policy.check_llm]
use = "torch"
model = "CHECKER"
max_tokens = 12
threads = 1

[[algorithm]]
use = "{use}"
tunes = "main_llm"

[algorithm.params]
{params}
"""
WORDS = """teacher.sibling_words = "Right: {sibling}"
teacher.feedback_words = "Wrong: {feedback}"
teacher.closing_words = ""
teacher.max_tokens = 48
"""


def light_agent(text: str) -> str:
    """Return the example's agent without its framework; raises ValueError if the example has changed."""
    for line in FRAMEWORK:
        if line not in text:
            raise ValueError(f"{SQL / 'agent.py'} has no line {line!r} any more; look at FRAMEWORK in {__file__}")
        text = text.replace(line, "")
    body, _, _ = text.partition('\n\nif __name__ == "__main__":')
    # Annotations name the framework's classes; this keeps them from being looked up.
    return f"from __future__ import annotations\n\n{body}{LOOP}"


def prepared(place: Path, *, dialogues: int) -> tuple[World, str]:
    """Make databases, tasks and two random models, teach the checker, and the writer the skill and the bad habit.

    Half of `dialogues` show the skill alone, the others after a word about what was wrong, or right. Returns the world
    and the weights to start from.
    """
    (place / "agent.py").write_text(light_agent((SQL / "agent.py").read_text(encoding="utf-8")), encoding="utf-8")
    make(place, "databases", count=0)
    make(place, "skilled", count=dialogues)
    make(place, "low", count=dialogues // 7)
    call("../make_model.py", "--out", str(place / "out"), cwd=SQL)
    untaught = World(place=place, template=EXPERIMENT.replace("CHECKER", "out/checker"), words=WORDS)
    as_checker = World(place=place, template=EXPERIMENT.replace("CHECKER", "out/writer"), words=WORDS)
    checker = as_checker.imitated("checker", "out/checker", data="out/data/check.jsonl", updates=100, batch=16, lr=3e-3)
    skilled = untaught.imitated(
        "skilled", "out/writer", data="out/data/skilled.jsonl", updates=dialogues // 24, batch=24, lr=2e-3
    )
    low = untaught.imitated("low", skilled, data="out/data/low.jsonl", updates=dialogues // 7 // 24, batch=24, lr=1e-3)
    return World(place=place, template=EXPERIMENT.replace("CHECKER", checker), words=WORDS), low


def make(place: Path, what: str, *, count: int) -> None:
    """Write databases and tasks, or `count` dialogues, with the light agent in the place of the example's."""
    call(str(DIALOGUES), "--place", str(place), "--example", str(SQL), "--what", what, "--count", str(count), cwd=place)
