"""Fork credit on a team with known contributions: are the signs right, and how many model calls does it take?

Every run is a whole experiment, as in :mod:`benchmarks.bench_credit`, with a policy that says every word equally often.
A sign is right if the advantage of a call has that of the word's true advantage: what the word contributed less what
the role's words contribute on average. Words that are exactly average have no sign and are left out.

Two baselines run beside it: `episode`, which makes no further calls, and full re-runs, which run every rollout again
as often as it has calls, all of them anew, and compare each call with one of these runs.

Run alone: ``python -m benchmarks.bench_fork``.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

import agl
from agl import PluginManager
from agl.algorithms import ComponentConfig, algorithm, component
from agl.contracts import ForkPlan, ReplayFn
from agl.schemas import CallCredit, Episode, Reward
from agl.stores import MemoryStore
from agl_run import Quiet, policy
from benchmarks._harness import Figure, table
from worlds.team_run import TeamPlugin, play, tasks

ROOMS = 4
AGENTS = 3
GROUP = 16
GROUPS = (8, 4)
FORK = component("fork", max_replays=100_000)


class FullReruns:
    """A credit that compares each call with one more run of the task, in which everything is new."""

    async def prepare(self, episodes: Sequence[Episode], *, step: int, replay: ReplayFn) -> list[Episode]:
        """Run each episode again once for each call."""
        plans = {
            call.span_id: ForkPlan(
                rollout_id=episode.rollout.rollout_id, span_id=episode.transitions[0].span_id, sample=sample
            )
            for episode in episodes
            for sample, call in enumerate(episode.transitions)
        }
        runs = dict(zip(plans, await replay(list(plans.values())), strict=True))
        return [_with_differences(episode, runs) for episode in episodes]

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """Return the differences."""
        return [
            [
                CallCredit(
                    span_id=call.span_id,
                    value=episode.rewards[-1].dimensions[call.span_id] or 0.0,
                    baseline="none",
                    is_advantage=True,
                )
                for call in episode.transitions
            ]
            for episode in group
        ]


def _with_differences(episode: Episode, runs: Mapping[str, Episode]) -> Episode:
    values = {
        call.span_id: (episode.reward or 0.0) - (runs[call.span_id].reward or 0.0) for call in episode.transitions
    }
    reward = Reward(value=None, name="reruns", dimensions=dict(values), source="hook")
    return msgspec.structs.replace(episode, rewards=(*episode.rewards, reward))


class RerunPlugin:
    """Registers the credit ``full-reruns``."""

    @agl.hookimpl
    def agl_credits(self) -> Iterable[agl.CreditEntry]:
        """Register full re-runs."""
        yield agl.CreditEntry(name="full-reruns", factory=FullReruns)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one experiment: the share of right signs, and per training rollout what its credit took."""

    signs: float
    calls: float
    forks: float
    cpu_s: float

    @property
    def factor(self) -> float:
        """Model calls for each one of the training rollouts."""
        return 1.0 + self.calls / AGENTS


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table."""
    steps = 1 if quick else 4
    size = 4 if quick else GROUP
    play_team("episode", size=2, steps=1)  # what is imported on the first run is not measured
    episode, fork = play_team("episode", size=size, steps=steps), play_team(FORK, size=size, steps=steps)
    reruns = play_team("full-reruns", size=size, steps=steps)
    return [
        signs(f"signs right, groups of {size}", fork, episode, "episode", bar=None if quick else 0.95),
        signs(
            f"signs right, groups of {size}, full re-runs", fork, reruns, f"full re-runs, {reruns.factor:.3g} x calls"
        ),
        Figure(
            name="model calls",
            value=fork.factor,
            unit="x plain rollouts",
            bar=1.5,
            better="lower",
            baseline=reruns.factor,
            baseline_name="full re-runs",
        ),
        Figure(
            name="CPU for the credit",
            value=1e3 * (fork.cpu_s - episode.cpu_s),
            unit="ms per rollout",
            better="lower",
            baseline=1e3 * episode.cpu_s,
            baseline_name=f"the rollout itself; {fork.forks:.3g} forks for each",
        ),
        *([] if quick else smaller(steps)),
    ]


def smaller(steps: int) -> list[Figure]:
    """Smaller groups, and a team in which every agent hears the others."""
    found = [
        signs(
            f"signs right, groups of {size}",
            play_team(FORK, size=size, steps=steps * GROUP // size),
            play_team("episode", size=size, steps=steps * GROUP // size),
            "episode",
        )
        for size in GROUPS
    ]
    heard = play_team("episode", size=GROUP, steps=steps, is_chained=True)
    for calls in (None, 3.0 * AGENTS):
        fork = component("fork", max_replays=100_000, calls_per_rollout=calls) if calls else FORK
        chained = play_team(fork, size=GROUP, steps=steps, is_chained=True)
        name = f"signs right, every agent hears the others, {chained.factor:.3g} x calls"
        found.append(signs(name, chained, heard, "episode"))
    return found


def signs(name: str, one: Run, other: Run, baseline: str, *, bar: float | None = None) -> Figure:
    return Figure(name=name, value=one.signs, unit="of calls", bar=bar, baseline=other.signs, baseline_name=baseline)


def play_team(credit: str | ComponentConfig, *, size: int, steps: int, is_chained: bool = False) -> Run:
    """One experiment, in this process, with one attempt at a time, so that equal seeds give equal runs."""
    plugins = PluginManager.from_environment()
    plugins.register(TeamPlugin(), name="team")
    plugins.register(RerunPlugin(), name="reruns")
    store, started = MemoryStore("memory://"), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        agl.Trainer(
            algorithm=algorithm("team-gradient", tunes="team", lr=0.0, steps=steps, group_size=size),
            policies={"team": policy("team-table", seed=0)},
            credit=credit,
            gateway="none",
            plugins=plugins,
            store=store,
            folder=folder,
            n_runners=1,
            progress=Quiet(),
        ).fit(play, train_dataset=tasks(is_chained=is_chained))
    cpu_s = time.process_time() - started
    values: dict[str, list[float]] = {}
    for metric in asyncio.run(store.metrics("experiment")):
        values.setdefault(metric.name, []).append(metric.value)
    rollouts = steps * size * ROOMS
    return Run(
        signs=statistics.fmean(values["signs_right_of_choice"]),
        calls=sum(values.get("replay_calls", ())) / rollouts,
        forks=sum(values.get("replays", ())) / rollouts,
        cpu_s=cpu_s / rollouts,
    )


if __name__ == "__main__":
    print(table(run(quick=False)))
