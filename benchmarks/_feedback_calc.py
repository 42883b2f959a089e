"""The calculator example for the feedback benchmark: its agent, tasks, tokenizer, template, random weights and reward.

The reward says what went wrong as well. The warm-up imitates the format and the skill, and then mostly, or always, to
give up. Its teacher also answers a user who says what was wrong, because a model of a million random weights does not
understand feedback before it was shown any; a pretrained one does.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._feedback import World, call, write_lines

CALC = Path(__file__).parent.parent / "examples" / "calc"
NO_TOOL, WRONG = "call the tool", "say the result"
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calc", "description": "Evaluate an arithmetic expression.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}

REWARD = f"""
import re
from agl.schemas import Reward


class Told:
    def __call__(self, rollout, spans):
        messages = [span.call.response["choices"][0]["message"] for span in spans if span.call and span.call.response]
        if not any(message.get("tool_calls") for message in messages):
            return Reward(value=0.0, source="evaluator", feedback={NO_TOOL!r})
        numbers = re.findall(r"-?\\d+", messages[-1].get("content") or "")
        is_right = bool(numbers) and numbers[-1] == rollout.task["answer"]
        return Reward(value=float(is_right), source="evaluator", feedback="" if is_right else {WRONG!r})
"""
EXPERIMENT = """
[experiment]
name = "{name}"
agent = "agent:solve"
store = "memory://"
workdir = "."
train = "data/train.jsonl"
hidden = ["answer"]
seed = {seed}

[runner]
use = "async"
concurrency = 64

[[reward]]
use = "told:Told"

[policy.calc-lm]
use = "torch"
model = "{model}"
threads = 1

[[algorithm]]
use = "{use}"
tunes = "calc-lm"

[algorithm.params]
{params}
"""
WORDS = 'teacher = { sibling_words = "Right: {sibling}", feedback_words = "Wrong: {feedback}", closing_words = "" }\n'


@dataclass(frozen=True, kw_only=True)
class Starts:
    """The world, and the models that its runs start from: mostly and always giving up."""

    world: World
    low: str
    mute: str


def prepared(place: Path) -> Starts:
    """Make data and a random model, and teach it the format, the skill, how to take feedback, and to give up."""
    world = World(place=place, template=EXPERIMENT, words=WORDS)
    call("make_data.py", "--out", str(place / "data"), "--seed", "0", cwd=CALC)
    (place / "told.py").write_text(REWARD, encoding="utf-8")
    (place / "agent.py").write_text((CALC / "agent.py").read_text(encoding="utf-8"), encoding="utf-8")
    dialogues = place / "data" / "dialogues.jsonl"
    questions = [json.loads(line)["messages"][1]["content"] for line in dialogues.read_text("utf-8").splitlines()]

    def taught(name: str, model: str, *, care: float, updates: int, lr: float) -> str:
        write_dialogues(dialogues, questions[: updates * 8], care=care)
        return world.imitated(name, model, data="data/dialogues.jsonl", updates=updates, batch=16, lr=lr)

    write_dialogues(dialogues, questions, care=0.8)
    call("../make_model.py", "--out", str(place), cwd=CALC)
    skilled = taught("skilled", "model", care=0.8, updates=len(questions) // 8, lr=2e-3)
    low = taught("low", skilled, care=0.25, updates=24, lr=5e-4)
    return Starts(world=world, low=low, mute=taught("mute", low, care=0.0, updates=48, lr=1e-3))


def write_dialogues(path: Path, questions: list[str], *, care: float) -> None:
    """Write a dialogue about each question, and as many in which a user has said what was wrong.

    Their teacher uses the tool with chance `care`, and always where a user has said more.
    """
    rng = random.Random(str(care))
    found: list[dict[str, Any]] = []
    for question in questions:
        found += [answered(question, uses_tool=rng.random() < care), corrected(question, rng=rng)]
    write_lines(path, found)


def answered(question: str, *, uses_tool: bool) -> dict[str, Any]:
    asked = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": question}]
    if not uses_tool:
        return {"messages": [*asked, {"role": "assistant", "content": "I am not sure."}], "tools": [TOOL]}
    used, result = tool_call(question)
    said = {"role": "assistant", "content": f"It is {result['content']}."}
    return {"messages": [*asked, used, result, said], "tools": [TOOL]}


def corrected(question: str, *, rng: random.Random) -> dict[str, Any]:
    """A dialogue in which a user says what was wrong, or right, before the first answer and perhaps before the last."""
    system, user, used, result, said = answered(question, uses_tool=True)["messages"]
    written = json.dumps({"expression": expression(question)})
    right = f'Right: <tool_call>{{"name": "calc", "arguments": {written}}}</tool_call>\n{said["content"]}'
    told = rng.choice([f"Wrong: {NO_TOOL}", f"Wrong: {WRONG}", right, f"{right}\n\nWrong: {NO_TOOL}"])
    lesson = {"role": "user", "content": told}
    again = [lesson] if rng.random() < 0.5 else []
    return {"messages": [system, user, lesson, used, result, *again, said], "tools": [TOOL]}


def expression(question: str) -> str:
    return question.removeprefix("What is ").removesuffix("?")


def tool_call(question: str) -> tuple[dict[str, Any], dict[str, Any]]:
    text = expression(question)
    function = {"name": "calc", "arguments": json.dumps({"expression": text})}
    value = str(int(eval(text, {"__builtins__": {}})))  # three digits and two operators
    used = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    return used, {"role": "tool", "tool_call_id": "call_1", "content": value}
