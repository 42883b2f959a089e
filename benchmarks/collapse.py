"""``python -m benchmarks.collapse [--variants NAME ...]``: why training forgets what it had learned, in miniature.

A lead and a clerk share one small transformer, as in ``examples/crew``. The lead gives up or passes on four digits, the
clerk looks them up, and both repeat the three digits of the answer. The lead's tokens are trained with the reward "the
answer is right", from a start that mostly gives up; the clerk's are not trained. Steps are long on purpose: what few
runs of the example show, many of these do. All variants begin with the same weights, are asked the same, and draw from
the same generators.

The estimator is that of `agl-objectives`; the loss and the update are written out, because nothing else is needed: one
update a step, averaged over all tokens of the step, silent groups included, clipped and given to AdamW. It needs
agl-objectives and torch, and a run takes about six seconds of CPU.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from agl_objectives.contract import Scores
from agl_objectives.registry import find_estimator

DIGITS, COUNT = 4, 3
GIVE_UP, GO, END, LEAD, CLERK, ASK, FOUND = range(10, 17)
WORDS, LENGTH, TEMPERATURE = 17, 22, 0.7
OPENING, FIRST, SECOND = slice(0, 6), slice(6, 12), slice(17, 21)
"""The places of a conversation: role and digits, the first answer, then after what was found the second one."""

GROUPS, GROUP_SIZE, VALIDATION = 8, 8, 128
WARM_UP, BATCH, WARM_RATE = 700, 24, 2e-3
CAUSES = ("right", "gave up", "wrong question", "clerk wrong", "wrong copy")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings of the training of one variant; the defaults are those of ``grpo`` but for ``lr``."""

    lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.95)
    estimator: str = "grpo"
    decay: bool = False
    by_loud: bool = False
    anchor: float = 0.0
    trains_clerk: bool = False
    max_grad_norm: float = 1.0
    steps: int = 40


VARIANTS = {
    "as it was": Variant(),
    "no momentum": Variant(betas=(0.0, 0.95)),
    "betas 0.9, 0.999": Variant(betas=(0.9, 0.999)),
    "no division by the deviation": Variant(estimator="dr_grpo"),
    "rate times the share of loud groups": Variant(by_loud=True),
    "linear decay": Variant(decay=True),
    "half the rate": Variant(lr=2e-3),
    "clerk anchored": Variant(anchor=0.1),
    "clerk trained too": Variant(trains_clerk=True),
}


class Layer(nn.Module):
    """One layer of the transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.silu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Two layers, 70 thousand weights."""

    def __init__(self, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        nn.init.normal_(self.word.weight, std=0.5)
        nn.init.normal_(self.place.weight, std=0.5)
        self.layers = nn.ModuleList([Layer(width, heads), Layer(width, heads)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.word(ids) + self.place.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def logprobs(self, ids: Tensor, *, temperature: float) -> Tensor:
        """Log-probability of each token but the first, [rows, length - 1]."""
        spread = torch.log_softmax(self(ids[:, :-1]) / temperature, -1)
        return spread.gather(2, ids[:, 1:, None])[..., 0]


@dataclass(frozen=True, kw_only=True)
class Played:
    """The tokens of rollouts: the ids of either conversation, the sampled tokens in them, and how each ended."""

    lead: Tensor  # [rollouts, 21]
    lead_mask: Tensor  # bool
    clerk: Tensor
    clerk_mask: Tensor
    cause: Tensor  # [rollouts], index in CAUSES

    @property
    def rewards(self) -> Tensor:
        return (self.cause == 0).float()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def look_up(part: Tensor) -> Tensor:
    """The three digits that belong to four, [rows, 3]."""
    mixed = ((part * torch.tensor([7919, 104729, 1299709, 15485863])).sum(1) * 2654435761) % 2**31
    return torch.stack([(mixed >> shift) % 10 for shift in (4, 11, 18)], 1)


def column(word: int, *, like: Tensor) -> Tensor:
    return torch.full((len(like), 1), word)


def opening(role: int, part: Tensor) -> Tensor:
    return torch.cat([column(role, like=part), part, column(ASK, like=part)], 1)


def dialogue(role: int, part: Tensor, *, goes: Tensor) -> tuple[Tensor, Tensor]:
    """A teacher's conversations and the places of the answers; where it does not go, it gives up."""
    found, end = look_up(part), column(END, like=part)
    start = [opening(role, part), column(GO, like=part), part, end]
    ids = torch.cat([*start, column(FOUND, like=part), found, column(ASK, like=part), found, end], 1)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, FIRST] = mask[:, SECOND] = True
    ids[~goes, 6], ids[~goes, 7:] = GIVE_UP, END
    mask[~goes, 8:] = False
    return ids, mask


@cache
def warm_up(seed: int) -> Model:
    """A model that imitates a teacher whose clerk is diligent and whose lead gives up more and more."""
    torch.manual_seed(seed)
    model, draws = Model(), generator(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for update in range(WARM_UP):
        optimizer.param_groups[0]["lr"] = WARM_RATE * min(1.0, (update + 1) / 20)
        part = torch.randint(0, 10, (BATCH, DIGITS), generator=draws)
        goes = torch.rand(BATCH, generator=draws) < (0.8 if update < 0.85 * WARM_UP else 0.25)
        both = [dialogue(LEAD, part, goes=goes), dialogue(CLERK, part, goes=torch.ones_like(goes))]
        ids, mask = (torch.cat(parts) for parts in zip(*both, strict=True))
        chosen = model.logprobs(ids, temperature=1.0)[mask[:, 1:]]
        optimizer.zero_grad()
        (-chosen.mean()).backward()
        optimizer.step()
    return model


@torch.no_grad()
def sample(model: Model, ids: Tensor, *, tokens: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """The ids with an answer, filled up with END, and the mask of the answer's tokens."""
    is_open, masks = torch.ones(len(ids), dtype=torch.bool), [torch.zeros(ids.shape, dtype=torch.bool)]
    for _ in range(tokens):
        spread = torch.softmax(model(ids)[:, -1] / TEMPERATURE, -1)
        drawn = torch.where(is_open, torch.multinomial(spread, 1, generator=draws)[:, 0], END)
        masks.append(is_open[:, None])
        is_open = is_open & (drawn != END)
        ids = torch.cat([ids, drawn[:, None]], 1)
    return ids, torch.cat(masks, 1)


def is_number(answer: Tensor) -> Tensor:
    """True for rows whose answer is digits and then END."""
    return (answer[:, :-1] < 10).all(1) & (answer[:, -1] == END)


def ask(model: Model, role: int, part: Tensor, *, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A first answer: ids, mask, whether it passes digits on, and these, zeros where it does not."""
    ids, mask = sample(model, opening(role, part), tokens=6, draws=draws)
    goes = (ids[:, 6] == GO) & is_number(ids[:, 7:12])
    return ids, mask, goes, ids[:, 7:11] * goes[:, None]


def tell(
    model: Model, ids: Tensor, mask: Tensor, found: Tensor, *, counts: Tensor, draws: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """The second answer, after what was found: ids, mask, and whether it is a number; only `counts` rows have one."""
    ids = torch.cat([ids, column(FOUND, like=found), found, column(ASK, like=found)], 1)
    ids, said = sample(model, ids, tokens=4, draws=draws)
    said = said & counts[:, None]
    said[:, : mask.shape[1]] = mask
    return ids, said, counts & is_number(ids[:, SECOND])


@torch.no_grad()
def play(model: Model, part: Tensor, *, draws: torch.Generator) -> Played:
    """Run the crew once for each part."""
    lead, lead_mask, goes, asked = ask(model, LEAD, part, draws=draws)
    clerk, clerk_mask, looks, wanted = ask(model, CLERK, asked, draws=draws)
    found = look_up(wanted) * looks[:, None]
    clerk, clerk_mask, tells = tell(model, clerk, clerk_mask, found, counts=looks, draws=draws)
    told = clerk[:, 17:20] * tells[:, None]
    lead, lead_mask, ends = tell(model, lead, lead_mask, told, counts=goes & tells, draws=draws)
    is_right = (lead[:, 17:20] == look_up(part)).all(1) & ends
    faults = [~goes, (asked != part).any(1), (told != look_up(asked)).any(1) | ~tells, ~is_right]
    cause = torch.zeros(len(part), dtype=torch.int64)
    for index, fault in reversed(list(enumerate(faults, start=1))):
        cause = torch.where(fault, index, cause)
    cause = torch.where(is_right, 0, cause)
    return Played(lead=lead, lead_mask=lead_mask, clerk=clerk, clerk_mask=clerk_mask & goes[:, None], cause=cause)


def advantages(rewards: Tensor, *, estimator: str) -> Tensor:
    group = torch.arange(GROUPS).repeat_interleave(GROUP_SIZE)
    scores = Scores(scores_S=rewards, group_S=group, tokens_S=torch.ones_like(group))
    return find_estimator(estimator, None).call(scores).found_S


def distance(model: Model, start: Model, ids: Tensor, mask: Tensor) -> Tensor:
    """The estimate `k3` of the KL to the start, in nats per token."""
    with torch.no_grad():
        before = start.logprobs(ids, temperature=TEMPERATURE)
    log = before - model.logprobs(ids, temperature=TEMPERATURE)
    return ((log.exp() - log - 1.0) * mask[:, 1:]).sum() / mask.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training: the mean validation reward before it and after every second step, and what ended wrong then."""

    rewards: list[float]
    causes: list[list[int]]

    @property
    def drop(self) -> float:
        """The largest fall below the best validation so far."""
        return max(max(self.rewards[: i + 1]) - reward for i, reward in enumerate(self.rewards))


def train(seed: int, variant: Variant) -> Curve:
    """Train from the warm-up of a seed."""
    start = warm_up(seed)
    model = copy.deepcopy(start)
    asked, held_out = generator(seed + 1000), generator(seed + 99)
    parts = torch.randint(0, 10, (variant.steps, GROUPS, DIGITS), generator=asked)
    validation = torch.randint(0, 10, (VALIDATION, DIGITS), generator=held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=variant.lr, betas=variant.betas, weight_decay=0.0)
    validations = [play(model, validation, draws=generator(5))]
    for step in range(variant.steps):
        played = play(model, parts[step].repeat_interleave(GROUP_SIZE, 0), draws=generator(seed * 10_000 + step))
        update(model, optimizer, played, variant=variant, step=step, start=start)
        if step % 2:
            validations.append(play(model, validation, draws=generator(5)))
    causes = [torch.bincount(one.cause, minlength=len(CAUSES)).tolist() for one in validations]
    return Curve(rewards=[float(one.rewards.mean()) for one in validations], causes=causes)


def policy_loss(model: Model, ids: Tensor, mask: Tensor, advantage: Tensor) -> Tensor:
    """Minus the advantage of every sampled token, with the gradient of its probability, added up."""
    kept = advantage != 0
    logp = model.logprobs(ids[kept], temperature=TEMPERATURE)
    return -(advantage[kept][:, None] * mask[kept][:, 1:] * torch.exp(logp - logp.detach())).sum()


def update(
    model: Model, optimizer: torch.optim.AdamW, played: Played, *, variant: Variant, step: int, start: Model
) -> None:
    """One update of the lead; none when all groups are silent."""
    advantage = advantages(played.rewards, estimator=variant.estimator)
    loud = advantage.view(GROUPS, GROUP_SIZE).abs().amax(1) > 0
    if not bool(loud.any()):
        return
    trained = [(played.lead, played.lead_mask)]
    trained += [(played.clerk, played.clerk_mask)] if variant.trains_clerk else []
    total = sum(int(mask.sum()) for _, mask in trained)
    loss = torch.stack([policy_loss(model, ids, mask, advantage) for ids, mask in trained]).sum() / total
    if variant.anchor:
        loss = loss + variant.anchor * distance(model, start, played.clerk, played.clerk_mask)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), variant.max_grad_norm)
    left = 1.0 - step / variant.steps if variant.decay else 1.0
    share = float(loud.float().mean()) if variant.by_loud else 1.0
    optimizer.param_groups[0]["lr"] = variant.lr * left * share
    optimizer.step()


def row(name: str, curves: Sequence[Curve]) -> str:
    """A variant's line of the table: means over seeds, and the causes in the second half of the validations."""
    best, end = [max(curve.rewards) for curve in curves], [curve.rewards[-1] for curve in curves]
    off = sum(e < b - 0.05 for e, b in zip(end, best, strict=True))
    half = [causes for curve in curves for causes in curve.causes[len(curve.causes) // 2 :]]
    shares = [statistics.fmean(causes[i] for causes in half) / VALIDATION for i in range(1, len(CAUSES))]
    numbers = [statistics.fmean(best), statistics.fmean(end), statistics.fmean(curve.drop for curve in curves)]
    words = " | ".join(f"{number:.2f}" for number in (*numbers, *shares))
    return f"| {name} | {off} of {len(curves)} | {words} |"


def header() -> str:
    names = ("Variant", "Off at the end", "Best", "End", "Largest fall", *(cause.capitalize() for cause in CAUSES[1:]))
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collapse", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)), help="0 to 7 by default")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of all learning rates")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    torch.set_num_threads(1)  # the fastest for a model of this size
    print(header(), flush=True)
    for name in options.variants:
        variant = replace(VARIANTS[name], lr=VARIANTS[name].lr * options.rate)
        print(row(name, [train(seed, variant) for seed in options.seeds]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
