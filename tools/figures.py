"""Draws the figures of the page about losses and estimators: ``python -m tools.figures [--check]``.

Every curve and bar is computed by the loss or the estimator itself, with its default parameters unless the caption on
the page says otherwise. The curves of Kuhn poker come from its benchmark. Needs torch.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from agl.schemas import CallCredit
from agl_objectives.advantages import call_advantages
from agl_objectives.contract import Scores, TokenBatch, surveyed
from agl_objectives.registry import find_estimator, find_loss
from tools.public import ROOT

FOLDER = ROOT / "docs" / "images" / "objectives"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 200, 46, 20, 12, 34
BLUE, RED, GREEN, GREY = "#1f6feb", "#cf222e", "#1a7f37", "#8c959f"
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The ranges of a figure, from data to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel of a point."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def frame(self, label: str) -> list[str]:
        """Return the lines and numbers of both axes, and the label of the x axis."""
        zero = self.at(self.x[0], 0.0)[1]
        parts = [f'<path d="M{LEFT} {zero:.1f}H{WIDTH - RIGHT}M{LEFT} {TOP}V{HEIGHT - BOTTOM}" stroke="{GREY}"/>']
        for value in (self.y[0], 0.0, self.y[1]):
            parts.append(_text(LEFT - 6, self.at(self.x[0], value)[1] + 4, f"{value:g}", anchor="end"))
        middle = (self.x[0] + self.x[1]) / 2
        for value in (self.x[0], middle, self.x[1]):
            parts.append(_text(self.at(value, 0.0)[0], HEIGHT - BOTTOM + 14, f"{value:g}", anchor="middle"))
        return [*parts, _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, label, anchor="middle")]


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _svg(parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="{GREY}">'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _line(axes: Axes, points: Points, *, colour: str) -> str:
    pixels = [axes.at(x, max(axes.y[0], min(axes.y[1], y))) for x, y in points]
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'


def forces(
    name: str, params: Mapping[str, Any], *, logp: torch.Tensor, old: torch.Tensor, adv: torch.Tensor
) -> list[float]:
    """Return how strongly each token's log-probability is pushed up: minus the loss's derivative by it.

    Every token is a rollout of its own.
    """
    leaf, places = logp.clone().requires_grad_(), torch.arange(len(logp))
    tokens = TokenBatch(
        logp_M=leaf,
        old_M=old,
        behaviour_M=old,
        advantages_M=adv,
        weight_M=torch.ones_like(logp),
        row_M=places,
        rollout_M=places,
    )
    loss = find_loss(name, params).call
    (gradient,) = torch.autograd.grad(loss(surveyed(loss, tokens)).loss_M.sum(), leaf)
    return (-gradient).tolist()


def by_ratio(name: str, *, to: float = 0.0, reach: float = 1.0, up: float = 2.0, **params: Any) -> str:
    """Draw the push on a token against its ratio, blue for an advantage of 1 and red for one of -1."""
    axes = Axes(x=(1.0 - reach, to or 1.0 + reach), y=(-up, up))
    ratio = torch.linspace(max(axes.x[0], 1e-3), axes.x[1], 241, dtype=torch.float64)
    old = torch.full_like(ratio, -3.0)
    parts = axes.frame("ratio of the token")
    for adv, colour in ((1.0, BLUE), (-1.0, RED)):
        push = forces(name, params, logp=old + ratio.log(), old=old, adv=torch.full_like(old, adv))
        parts.append(_line(axes, list(zip(ratio.tolist(), push, strict=True)), colour=colour))
    return _svg(parts)


def by_probability(name: str, **params: Any) -> str:
    """Draw the push on a token that had the probability 0.4, against the one that it has now."""
    axes = Axes(x=(0.0, 1.0), y=(-2.5, 2.5))
    now = torch.linspace(1e-3, 0.999, 241, dtype=torch.float64)
    old = torch.full_like(now, math.log(0.4))
    parts = axes.frame("probability of the token, 0.4 before the step")
    for adv, colour in ((1.0, BLUE), (-1.0, RED)):
        push = forces(name, params, logp=now.log(), old=old, adv=torch.full_like(old, adv))
        parts.append(_line(axes, list(zip(now.tolist(), push, strict=True)), colour=colour))
    return _svg(parts)


def by_covariance(name: str, **params: Any) -> str:
    """Draw the push on every token of one update against its covariance."""
    draw = torch.Generator().manual_seed(1)
    noise, adv, moved = torch.randn(3, 60, generator=draw, dtype=torch.float64)
    logp = (-2.0 - 1.5 * noise).clamp(max=-0.05)
    push = forces(name, params, logp=logp, old=logp - 0.1 * moved, adv=adv)
    away = (adv - adv.mean()) * (logp - logp.mean())
    axes = Axes(x=(-4.0, 4.0), y=(-3.0, 3.0))
    parts = axes.frame("covariance of the token")
    for x, y, a in zip(away.clamp(-4.0, 4.0).tolist(), push, adv.tolist(), strict=True):
        across, up = axes.at(x, max(-3.0, min(3.0, y)))
        parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{BLUE if a > 0 else RED}"/>')
    return _svg(parts)


SCORES = ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.5, 0.0))
"""The scores of two tasks, one hard and one easier, with 4 rollouts each."""


def bars(name: str) -> str:
    """Draw the advantages of 8 rollouts of two tasks."""
    scores = torch.tensor([score for group in SCORES for score in group], dtype=torch.float64)
    found = find_estimator(name).call(
        Scores(
            scores_S=scores,
            group_S=torch.tensor([0] * 4 + [1] * 4),
            tokens_S=torch.tensor([10, 20, 30, 40, 10, 40, 20, 30]),
            baseline_S=torch.tensor([0.0] * 4 + [0.5] * 4, dtype=torch.float64),
            roles_S=("first", "second") * 4,
        )
    )
    return _bars(found.found_S.tolist(), words=("task 1", "task 2"))


def within_a_rollout() -> str:
    """Draw the advantages of 4 proposals of one task, and of 4 attempts at one proposal."""

    def calls(role: str, values: Sequence[float]) -> list[CallCredit]:
        return [CallCredit(span_id=f"{n}", value=value, baseline=role, role=role) for n, value in enumerate(values)]

    proposals, attempts = SCORES
    found = call_advantages(
        [*(calls("proposer", [value]) for value in proposals), calls("solver", attempts)],
        groups=[0] * 5,
        tokens={},
        estimator=find_estimator("hierarchical_grpo").call,
    )
    return _bars([value for rollout in found for value in rollout.values()], words=("proposals", "attempts"))


def _bars(advantages: Sequence[float], *, words: tuple[str, str]) -> str:
    """Draw two groups of four advantages; the grey outlines are their scores."""
    axes = Axes(x=(0.0, 10.0), y=(-2.0, 2.0))
    parts = axes.frame("")[:-4]  # rollouts have no numbers
    for at, (score, advantage) in enumerate(zip(chain(*SCORES), advantages, strict=True)):
        left = at + (0.5 if at < 4 else 1.5)
        for value, style in ((score, f'fill="none" stroke="{GREY}"'), (advantage, f'fill="{BLUE}" fill-opacity="0.7"')):
            value = min(value, axes.y[1])
            x, y = axes.at(left, max(value, 0.0))
            height = abs(axes.at(0, value)[1] - axes.at(0, 0)[1])
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="22" height="{height:.1f}" {style}/>')
    labels = [
        _text(axes.at(at, 0)[0], HEIGHT - 12, text, anchor="middle") for at, text in zip((2.4, 7.4), words, strict=True)
    ]
    return _svg([*parts, *labels])


def exploitabilities(*names: str) -> str:
    """Draw curves of Kuhn poker that the benchmark `kuhn` has measured, with a legend."""
    measured = json.loads((ROOT / "benchmarks" / "kuhn.json").read_text(encoding="utf-8"))
    axes = Axes(x=(0.0, 200.0), y=(0.0, 0.4))
    parts = axes.frame("steps")
    for place, (name, colour) in enumerate(zip(names, (BLUE, RED, GREEN, GREY), strict=False)):
        y = TOP + 10 + 14 * place
        parts.append(_line(axes, measured[name], colour=colour))
        parts.append(f'<path d="M150 {y - 4}H170" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(176, y, name, anchor="start"))
    return _svg(parts)


FIGURES: dict[str, Callable[[], str]] = {
    "kuhn-settings": lambda: exploitabilities(
        "bonus, no division", "control: division, no bonus", "no bonus", "division"
    ),
    "kuhn-order": lambda: exploitabilities("bonus, no division", "in turns", "in turns, against the last 20"),
    "loss-ppo-clip": lambda: by_ratio("ppo-clip", to=4.0, up=4.0, clip_dual=3.0),
    "loss-gspo": lambda: by_ratio("gspo", reach=0.001),
    "loss-gmpo": lambda: by_ratio("gmpo"),
    "loss-cispo": lambda: by_ratio("cispo"),
    "loss-sapo": lambda: by_ratio("sapo", to=4.0),
    "loss-clip-cov": lambda: by_covariance("clip-cov", ratio=0.1),
    "loss-kl-cov": lambda: by_covariance("kl-cov", ratio=0.1),
    "loss-dppo": lambda: by_probability("dppo"),
    "loss-gpg": lambda: by_ratio("gpg"),
    "loss-dro": lambda: by_ratio("dro", beta=1.0),
    "estimator-grpo": lambda: bars("grpo"),
    "estimator-dr_grpo": lambda: bars("dr_grpo"),
    "estimator-rloo": lambda: bars("rloo"),
    "estimator-opo": lambda: bars("opo"),
    "estimator-gpg": lambda: bars("gpg"),
    "estimator-grpo_passk": lambda: bars("grpo_passk"),
    "estimator-reinforce-plus-plus": lambda: bars("reinforce++"),
    "estimator-reinforce-plus-plus-baseline": lambda: bars("reinforce++-baseline"),
    "estimator-remax": lambda: bars("remax"),
    "estimator-max_rl": lambda: bars("max_rl"),
    "estimator-rae": lambda: bars("rae"),
    "estimator-hierarchical_grpo": within_a_rollout,
}


def stale() -> list[tuple[Path, str]]:
    """Return the figures that are not on disk as they would be drawn now, with their text."""
    drawn = [(FOLDER / f"{name}.svg", draw()) for name, draw in FIGURES.items()]
    return [(path, text) for path, text in drawn if not path.exists() or path.read_text(encoding="utf-8") != text]


def main() -> int:
    """Write the figures, or check them."""
    is_check, found = "--check" in sys.argv[1:], stale()
    for path, text in found:
        print(path.relative_to(ROOT), "is not up to date; run: python -m tools.figures" if is_check else "written")
        if not is_check:
            path.write_text(text, encoding="utf-8")
    return 1 if is_check and found else 0


if __name__ == "__main__":
    sys.exit(main())
