"""Rollouts that `sdpo` needs on the calculator example beside `grpo`, from a warm start and from a silent one.

The agent, tasks, tokenizer, template and random weights are those of `examples/calc`, and so is the reward, with a word
about what went wrong. All runs share one warm-up, in which the model imitates the format and the skill, and then mostly
or always to give up. Its teacher also answers a user who says what was wrong, because a model of a million random
weights does not understand feedback before it was shown any; a pretrained one does. Where rollouts are counted, `sdpo`
collects a quarter of those that `grpo` collects per step, whose number is the example's.

Run alone: ``python -m benchmarks.bench_feedback --seeds 5``.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks._harness import Figure, table

CALC = Path(__file__).parent.parent / "examples" / "calc"
NO_TOOL, WRONG = "call the tool", "say the result"
STEPS, TASKS, FEW, GROUP = 12, 8, 2, 8
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
workdir = "{name}"
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
threads = 1
{params}
"""
IMITATE = """data = "data/dialogues.jsonl"
is_shuffled = false
batch_size = 16
updates_per_step = {updates}
lr = {lr}
warmup = 4
betas = [0.9, 0.98]
"""
LEARN = """steps = {steps}
tasks_per_step = {tasks}
group_size = {group}
lr = 3e-4
"""
WORDS = 'sibling_words = "Right: {sibling}"\nfeedback_words = "Wrong: {feedback}"\nclosing_words = ""\n'


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The rewards of an algorithm's steps, their silent groups, and the seconds of a step."""

    rewards: list[float]
    silent: list[float]
    step_s: float

    @property
    def final(self) -> float:
        """Mean reward of the last three steps."""
        return statistics.mean(self.rewards[-3:])

    def rollouts_until(self, reward: float, *, tasks: int) -> float:
        """Rollouts collected before the first step from which on three steps' mean reward is at least `reward`."""
        means = [statistics.mean(self.rewards[step : step + 3]) for step in range(len(self.rewards) - 2)]
        return next((step * tasks * GROUP for step, found in enumerate(means) if found >= reward), float("inf"))


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none without the packages that train."""
    if not all(map(find_spec, ("agl_algo_torch", "agl_gateway", "openai"))):
        return []
    return figures(1 if quick else 5)


def figures(seeds: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        skilled = prepared(place)
        low = imitated(place, "low", skilled, care=0.25, updates=24, lr=5e-4)
        mute = imitated(place, "mute", low, care=0.0, updates=48, lr=1e-3)
        warm = [compare(place, "low", low, seed=seed, tasks=FEW) for seed in range(seeds)]
        silent = [compare(place, "mute", mute, seed=seed, tasks=TASKS) for seed in range(seeds)]
    targets = [max(0.5, 0.9 * grpo.final) for grpo, _ in warm]  # a grpo that learned nothing is no yardstick
    needed = [
        sdpo.rollouts_until(target, tasks=FEW) / max(GROUP, grpo.rollouts_until(target, tasks=TASKS))
        for target, (grpo, sdpo) in zip(targets, warm, strict=True)
    ]
    return [
        Figure(
            name=f"sdpo's rollouts to 0.9 of grpo's final reward over grpo's, worst of {seeds} seeds",
            value=max(needed),
            unit="x",
            bar=0.5,
            better="lower",
            baseline=1.0,
            baseline_name="grpo",
        ),
        Figure(
            name=f"sdpo's reward from a silent start, worst of {seeds} seeds",
            value=min(sdpo.final for _, sdpo in silent),
            unit="reward",
            bar=0.6,
            better="higher",
            baseline=max(grpo.final for grpo, _ in silent),
            baseline_name=f"grpo, best; silent groups at the start: {min(g.silent[0] for g, _ in silent):.0%} or more",
        ),
        Figure(
            name="sdpo's time of a step over grpo's with as many rollouts, median",
            value=statistics.median(sdpo.step_s / grpo.step_s for grpo, sdpo in silent),
            unit="x",
            bar=1.6,
            better="lower",
            baseline=1.0,
            baseline_name="grpo",
        ),
    ]


def compare(place: Path, start: str, model: str, *, seed: int, tasks: int) -> tuple[Curve, Curve]:
    """The curves of `grpo`, and of `sdpo` with `tasks` per step, from one model."""
    grpo = learned(place, "grpo", f"{start}-grpo-{seed}", seed=seed, model=model, tasks=TASKS)
    sdpo = learned(place, "sdpo", f"{start}-sdpo-{seed}", seed=seed, model=model, tasks=tasks, params=WORDS)
    for name, curve in (("grpo", grpo), ("sdpo", sdpo)):
        shown = " ".join(f"{reward:.2f}" for reward in curve.rewards)
        print(f"{start}, seed {seed}, {name}: {curve.step_s:.2f} s a step, rewards {shown}", flush=True)
    return grpo, sdpo


def prepared(place: Path) -> str:
    """Make data and a random model, and teach it the format, the skill and how to take feedback; returns its folder."""
    call("make_data.py", "--out", str(place / "data"), "--seed", "0", cwd=CALC)
    (place / "told.py").write_text(REWARD, encoding="utf-8")
    (place / "agent.py").write_text((CALC / "agent.py").read_text(encoding="utf-8"), encoding="utf-8")
    lines = (place / "data" / "dialogues.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["messages"][1]["content"] for line in lines]
    (place / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
    write_dialogues(place, care=0.8, count=len(lines))
    call("make_model.py", "--data", str(place / "data"), "--out", str(place / "model"), "--seed", "0", cwd=CALC)
    return imitated(place, "skilled", "model", care=0.8, updates=len(lines) // 8, lr=2e-3)


def imitated(place: Path, name: str, model: str, *, care: float, updates: int, lr: float) -> str:
    """Imitate a teacher who uses the tool with chance `care`, and always where a user has said more."""
    write_dialogues(place, care=care, count=updates * 8)
    experiment(place, "sft", name, seed=0, model=model, params=IMITATE.format(updates=updates, lr=lr))
    return str(max((place / name).glob("**/weights/*")))


def write_dialogues(place: Path, *, care: float, count: int) -> None:
    """Write `count` dialogues about the example's questions, and as many in which a user has said what was wrong."""
    rng = random.Random(str(care))
    questions = json.loads((place / "questions.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = []
    for question in questions[:count]:
        found += [answered(question, uses_tool=rng.random() < care), corrected(question, rng=rng)]
    path = place / "data" / "dialogues.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in found), encoding="utf-8")


def answered(question: str, *, uses_tool: bool) -> dict[str, Any]:
    asked = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": question}]
    if not uses_tool:
        return {"messages": [*asked, {"role": "assistant", "content": "I am not sure."}], "tools": [TOOL]}
    call, result = tool_call(question)
    said = {"role": "assistant", "content": f"It is {result['content']}."}
    return {"messages": [*asked, call, result, said], "tools": [TOOL]}


def corrected(question: str, *, rng: random.Random) -> dict[str, Any]:
    """A dialogue in which a user says what was wrong, or right, before the first answer and perhaps before the last."""
    system, user, call, result, said = answered(question, uses_tool=True)["messages"]
    written = json.dumps({"expression": expression(question)})
    right = f'Right: <tool_call>{{"name": "calc", "arguments": {written}}}</tool_call>\n{said["content"]}'
    told = rng.choice([f"Wrong: {NO_TOOL}", f"Wrong: {WRONG}", right, f"{right}\n\nWrong: {NO_TOOL}"])
    lesson = {"role": "user", "content": told}
    again = [lesson] if rng.random() < 0.5 else []
    return {"messages": [system, user, lesson, call, result, *again, said], "tools": [TOOL]}


def expression(question: str) -> str:
    return question.removeprefix("What is ").removesuffix("?")


def tool_call(question: str) -> tuple[dict[str, Any], dict[str, Any]]:
    text = expression(question)
    function = {"name": "calc", "arguments": json.dumps({"expression": text})}
    value = str(int(eval(text, {"__builtins__": {}})))  # three digits and two operators
    call = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    return call, {"role": "tool", "tool_call_id": "call_1", "content": value}


def learned(place: Path, use: str, name: str, *, seed: int, model: str, tasks: int, params: str = "") -> Curve:
    shared = LEARN.format(steps=STEPS, tasks=tasks, group=GROUP)
    experiment(place, use, name, seed=seed, model=model, params=shared + params)
    rows = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def of(metric: str) -> list[float]:
        return [row["value"] for row in rows if (row["algorithm"], row["name"]) == (use, metric)]

    steps = [collect + update for collect, update in zip(of("collect_s"), of("update_s"), strict=True)]
    return Curve(
        rewards=of("reward"),
        silent=[silent / count for silent, count in zip(of("groups_silent"), of("groups"), strict=True)],
        step_s=statistics.median(steps),
    )


def experiment(place: Path, use: str, name: str, *, seed: int, model: str, params: str) -> None:
    text = EXPERIMENT.format(name=name, use=use, seed=seed, model=model, params=params)
    (place / f"{name}.toml").write_text(text, encoding="utf-8")
    call("-m", "agl", "run", f"{name}.toml", cwd=place)


def call(*words: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, *words], cwd=cwd, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    print(table(figures(parser.parse_args().seeds)))
