"""Gives TRL's ``GRPOTrainer`` rollouts: recorded ones from a store, or new ones that agl runs when TRL asks for them.

Both classes are a ``rollout_func``: TRL passes prompts, repeating each for every completion it wants, and gets one row
per prompt. The completion of a row starts at the first sampled token, and ``env_mask`` is 1 for the tokens that the
model sampled. TRL has no place for pictures here, so calls with pictures are left out. The rewards are in the column
``agl_reward``, which :func:`reward` returns to TRL. This module imports neither TRL nor torch.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeVar, cast

from agl import PluginManager
from agl.contracts import RolloutQuery, Store
from agl.episodes import build_episode
from agl.errors import ConfigError
from agl.schemas import Episode, Json, Row, to_json, unpack_floats, unpack_ids
from agl.stores import read_recordings
from agl_inspect.exports import Losses
from agl_inspect.stores import as_url, build_store
from agl_run import Agent, Trainer

__all__ = ["LiveRollouts", "RecordedRollouts", "Rows", "prompt_of", "reward"]

T = TypeVar("T")

Rows = Literal["only", "longest"]
"""How to choose the row of a rollout with several rows: ``only`` raises an error, ``longest`` takes the row with the
most sampled tokens and counts the others as losses."""

_LOST_ROWS = "rows of rollouts with several: TRL takes one for each completion"
_LOST_ROLLOUTS = "rollouts without a row to train on: left out"
_PAGE = 100


def reward(prompts: Sequence[Any], completions: Sequence[Any], **fields: Any) -> list[float | None]:
    """Return each rollout's recorded reward, ``None`` without one; pass this function to TRL in ``reward_funcs``."""
    return list(fields["agl_reward"])


def prompt_of(task: Json) -> Any:
    """Return a task's prompt: the field ``prompt`` if there is one, the task itself if it is text, else JSON."""
    if isinstance(task, dict) and "prompt" in task:
        return cast("dict[str, Any]", task)["prompt"]
    return task if isinstance(task, str) else to_json(task).decode()


class RecordedRollouts:
    """A ``rollout_func`` that returns recorded rollouts of a prompt's task in turn, and starts over when all are used.

    Args:
        store: URL of the store, or a SQLite file.
        experiment: Only rollouts of this experiment.
        agents: Regular expression for agent names; only calls of matching agents are in the rows.
        rows: How to choose the row of a rollout with several rows.

    Attributes:
        dataset: One ``{"prompt": ...}`` per task with rollouts to train on; pass it to ``datasets.Dataset.from_list``.
        losses: Counts the rows and rollouts that TRL does not get.

    Raises:
        ConfigError: There is no rollout to train on, or one has several rows and ``rows`` is ``only``.
    """

    def __init__(
        self, store: str, *, experiment: str | None = None, agents: str | None = None, rows: Rows = "only"
    ) -> None:
        self._url, self._experiment, self._agents = as_url(store), experiment, agents
        self._rows: Rows = rows
        self.losses = Losses()
        self._ids: dict[str, list[str]] = defaultdict(list)
        self._taken: dict[str, int] = defaultdict(int)
        prompts: dict[str, Any] = {}
        for key, prompt, rollout_id in _run(self._survey()):
            prompts[key] = prompt
            self._ids[key].append(rollout_id)
        self.dataset = [{"prompt": prompt} for prompt in prompts.values()]
        if not prompts:
            raise ConfigError(
                f"{store} has no rollout with token ids{f' in {experiment!r}' if experiment else ''} to train on; "
                "agl why ROLLOUT says why its calls are in no row"
            )

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return a recorded row for each prompt; raises :class:`ConfigError` for a prompt that no recorded task has."""
        chosen: list[str] = []
        for prompt in prompts:
            key = _key(prompt)
            if key not in self._ids:
                raise ConfigError(
                    f"no rollout is recorded for the prompt {str(prompt)[:80]!r}; train on the attribute dataset, "
                    "which has the prompts of the recorded tasks"
                )
            ids = self._ids[key]
            chosen.append(ids[self._taken[key] % len(ids)])
            self._taken[key] += 1
        found = _run(self._read(sorted(set(chosen))))
        return _columns([found[rollout_id] for rollout_id in chosen])

    async def _survey(self) -> list[tuple[str, Any, str]]:
        return [
            (_key(prompt), prompt, episode.rollout.rollout_id)
            async for episode in self._episodes(())
            if _chosen_row(episode, self._rows, self.losses) is not None
            and (prompt := prompt_of(episode.rollout.visible_task)) is not None
        ]

    async def _read(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        async for episode in self._episodes(tuple(ids)):
            row = _chosen_row(episode, self._rows, Losses())
            if row is not None:
                found[episode.rollout.rollout_id] = _fields(episode, row)
        return found

    async def _episodes(self, ids: tuple[str, ...]) -> AsyncIterator[Episode]:
        store: Store = build_store(PluginManager.from_environment(), self._url)
        try:
            query = RolloutQuery(experiment=self._experiment, ids=ids, limit=_PAGE)
            async for each in read_recordings(store, query, spans="all"):
                attempt = next((a for a in each.attempts if a.attempt_id == each.rollout.attempt_id), None)
                yield build_episode(each.rollout, attempt, each.spans, agent_match=self._agents)
        finally:
            await store.close()


class _HasEos(Protocol):
    eos_token_id: int


class LiveRollouts:
    """A ``rollout_func`` that runs an agent on each prompt and returns the recorded rows.

    The model server configured in ``runs`` answers the agent's calls. It should serve the weights that TRL trains; if
    it serves others, the recorded log-probabilities come from those. A rollout without a row becomes a single token
    with mask 0 and no reward.

    Args:
        runs: An agl trainer with the agent's policy and rewards; only :meth:`agl.Trainer.dev` is called on it.
        agent: The agent to run.
        task_of: Converts a prompt to the agent's task; by default the task is ``{"prompt": prompt}``.
        rows: How to choose the row of a rollout with several rows.

    Attributes:
        losses: Counts the rows and rollouts that TRL does not get.
    """

    def __init__(
        self, runs: Trainer, agent: Agent, *, task_of: Callable[[Any], Json] | None = None, rows: Rows = "only"
    ) -> None:
        self._runs, self._agent = runs, agent
        self._rows: Rows = rows
        self._task_of = task_of or _as_task
        self.losses = Losses()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Run the agent on every prompt, several at once, and return one row per prompt.

        Raises:
            ConfigError: :meth:`agl.Trainer.dev` refuses its configuration, or a rollout has several rows and ``rows``
                is ``only``.
        """
        tasks: list[Json] = [self._task_of(prompt) for prompt in prompts]
        mode = "train" if trainer.model.training else "test"
        found = self._runs.dev(self._agent, tasks, tasks=len(tasks), mode=mode).episodes
        return _columns([self._row(episode, trainer.processing_class) for episode in found])

    def _row(self, episode: Episode, tokenizer: _HasEos) -> dict[str, Any]:
        row = _chosen_row(episode, self._rows, self.losses)
        if row is not None:
            return _fields(episode, row)
        empty = {"prompt_ids": [tokenizer.eos_token_id], "completion_ids": [tokenizer.eos_token_id], "logprobs": [0.0]}
        return {**empty, "env_mask": [0], **_about(episode), "agl_reward": None}


def _chosen_row(episode: Episode, rows: Rows, losses: Losses) -> Row | None:
    """Return the row to train on for a rollout; ``None`` if it has no row or is not finished."""
    rollout = episode.rollout
    if not rollout.is_finished or not episode.rows:
        losses.add(_LOST_ROLLOUTS, rollout.rollout_id)
        return None
    if len(episode.rows) > 1 and rows == "only":
        raise ConfigError(
            f"rollout {rollout.rollout_id} has {len(episode.rows)} rows, and TRL takes one for each completion; choose "
            'one agent with agents=, or pass rows="longest", which leaves the others out, or train with grpo or verl '
            "of agl, which take all of them"
        )
    losses.add(_LOST_ROWS, rollout.rollout_id, len(episode.rows) - 1)
    return max(episode.rows, key=lambda row: (sum(row.mask), -row.branch))


def _fields(episode: Episode, row: Row) -> dict[str, Any]:
    start, ids = row.mask.index(1), unpack_ids(row.ids)
    return {
        "prompt_ids": ids[:start],
        "completion_ids": ids[start:],
        "logprobs": unpack_floats(row.logprobs)[start:],
        "env_mask": list(row.mask[start:]),
        **_about(episode),
    }


def _about(episode: Episode) -> dict[str, Any]:
    rollout = episode.rollout
    about = {"agl_reward": episode.reward, "agl_rollout_id": rollout.rollout_id, "agl_group_id": rollout.group_id}
    return {**about, "agl_task": rollout.task}


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[name].append(value)
    return dict(columns)


def _as_task(prompt: Any) -> Json:
    return {"prompt": prompt}


def _key(prompt: Any) -> str:
    return to_json(prompt).decode()


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a separate thread, because a notebook already runs an event loop here; returns the result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
