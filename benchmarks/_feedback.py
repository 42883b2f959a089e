"""Shared parts of the feedback benchmark: experiments in a folder, what they learned, and the table of their curves."""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GROUP = 8

IMITATE = """data = "{data}"
is_shuffled = false
batch_size = {batch}
updates_per_step = {updates}
optim = {{ lr = {lr}, warmup = 4, betas = [0.9, 0.98] }}
"""
LEARN = """steps = {steps}
tasks_per_step = {tasks}
group_size = {group}
optim = {{ lr = {lr} }}
{params}"""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The rewards of an algorithm's steps, their silent groups, the seconds of a step, and its rollouts."""

    name: str
    rewards: list[float]
    silent: list[float]
    step_s: float
    rollouts: int

    @property
    def final(self) -> float:
        """Mean reward of the last three steps."""
        return statistics.mean(self.rewards[-3:])

    def rollouts_until(self, reward: float) -> float:
        """Rollouts collected before the first step from which on three steps' mean reward is at least `reward`."""
        means = [statistics.mean(self.rewards[step : step + 3]) for step in range(len(self.rewards) - 2)]
        return next((step * self.rollouts for step, found in enumerate(means) if found >= reward), float("inf"))

    def shown(self) -> str:
        """The curve on a line."""
        rewards = " ".join(f"{reward:.2f}" for reward in self.rewards)
        return f"{self.name}: {self.rollouts} rollouts and {self.step_s:.2f} s a step, rewards {rewards}"


@dataclass(frozen=True, kw_only=True)
class World:
    """Experiments that share an agent, tasks and a reward.

    Attributes:
        place: Their folder.
        template: An experiment file with places for `name`, `use`, `seed`, `model` and `params`.
        words: What `sdpo` says to this world's policies, and where it hears it.
    """

    place: Path
    template: str
    words: str

    def imitated(self, name: str, model: str, *, data: str, updates: int, batch: int, lr: float) -> str:
        """Imitate the dialogues in a file and return the folder of the weights."""
        params = IMITATE.format(data=data, updates=updates, batch=batch, lr=lr)
        self._experiment(name, use="sft", seed=0, model=model, params=params)
        return str(max((self.place / name).glob("**/weights/*")))

    def learned(
        self,
        use: str,
        name: str,
        *,
        seed: int,
        model: str,
        tasks: int,
        steps: int,
        group: int = GROUP,
        lr: float = 3e-4,
    ) -> Curve:
        """Train with `grpo` or `sdpo` and return its curve."""
        params = (self.words if use == "sdpo" else "") + "compute = { threads = 1 }\n"
        text = LEARN.format(steps=steps, tasks=tasks, group=group, lr=lr, params=params)
        self._experiment(name, use=use, seed=seed, model=model, params=text)
        lines = (self.place / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]

        def of(metric: str) -> list[float]:
            return [row["value"] for row in rows if (row["algorithm"], row["name"]) == (use, metric)]

        seconds = [collect + update for collect, update in zip(of("collect_s"), of("update_s"), strict=True)]
        curve = Curve(
            name=name,
            rewards=of("reward"),
            silent=[silent / count for silent, count in zip(of("groups_silent"), of("groups"), strict=True)],
            step_s=statistics.median(seconds),
            rollouts=tasks * group,
        )
        print(curve.shown(), flush=True)
        return curve

    def _experiment(self, name: str, *, use: str, seed: int, model: str, params: str) -> None:
        text = self.template.format(name=name, use=use, seed=seed, model=model, params=params)
        (self.place / f"{name}.toml").write_text(text, encoding="utf-8")
        call("-m", "agl", "run", f"{name}.toml", cwd=self.place)


def call(*words: str, cwd: Path) -> None:
    """Run Python; raises RuntimeError with all that it printed when it fails."""
    done = subprocess.run([sys.executable, *words], cwd=cwd, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def write_lines(path: Path, rows: Sequence[object]) -> None:
    """Write one JSON value per line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
