"""Fits a judge's template to people's ratings, by a prompt search in which the judge is the agent.

The rated rollouts are divided into three parts. The search reads its failures from the first and races its candidates
on the second; its reward is 1 where judge and person agree. The third, half of the rollouts, takes no part in the
search: on it, Cohen's kappa is measured for the old and the new template.

Limit: the search maximises the share of rollouts on which both agree. If nearly all ratings are equal, a judge that
always says the same has a high share and a kappa of 0, so the new template is then not accepted.
"""

import asyncio
import inspect
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from agl import PluginManager, semconv
from agl.algorithms import algorithm
from agl.contracts import Recording, RolloutQuery, SpanQuery, Store
from agl.episodes import final_text
from agl.errors import AglError, ConfigError, RewardError
from agl.hints import count_of
from agl.schemas import Json, PromptTemplate, Reward, Rollout, Span
from agl.stores import read_recordings
from agl_inspect.records.gold import rating_of
from agl_replay.rescoring import Rescorer, make_rescorer, rewards_plan
from agl_replay.reward_change import GOOD, Agreement, agreement
from agl_run import ExperimentConfig, Trainer
from agl_run.engine import default_progress, score_options

RESOURCE = "judge_template"
"""The name of the template in the search's experiment."""

FEWEST = 20
"""The fewest rated tasks that people call good, and that they do not: so that half of each show an agreement."""


class Rated(NamedTuple):
    """A recorded rollout with a person's rating of it."""

    recording: Recording
    rating: Reward

    @property
    def is_good(self) -> bool:
        """True if the person's rating counts as good."""
        return (self.rating.value or 0.0) >= GOOD


class Parts(NamedTuple):
    """The rated rollouts by their use: to read failures from, to race candidates on, and to measure on."""

    train: list[Rated]
    val: list[Rated]
    held: list[Rated]


async def rated_rollouts(store: Store, experiment: str) -> list[Rated]:
    """Return one rated rollout of each task, with the newest rating by a person."""
    rated: dict[str, Rated] = {}
    query = RolloutQuery(experiment=experiment, status=("succeeded",))
    async for one in read_recordings(store, query, spans=SpanQuery(kind="reward")):
        if rating := rating_of(span.reward for span in one.spans if span.reward is not None):
            rated[one.rollout.group_id or one.rollout.rollout_id] = Rated(one, rating)
    ratings = {one.recording.rollout.rollout_id: one.rating for one in rated.values()}
    whole = read_recordings(store, RolloutQuery(ids=tuple(ratings)), spans="deciding") if ratings else None
    return [Rated(one, ratings[one.rollout.rollout_id]) async for one in whole] if whole else []


def divide(rated: Sequence[Rated]) -> Parts:
    """Divide the rollouts in an order that is random and the same each time, with as many good ones in each part.

    Raises:
        ConfigError: There are too few of a kind.
    """
    ordered = sorted(rated, key=lambda one: blake2b(one.recording.rollout.rollout_id.encode()).digest())
    good, bad = ([one for one in ordered if one.is_good is kind] for kind in (True, False))
    if min(len(good), len(bad)) < FEWEST:
        raise ConfigError(
            f"people rated {count_of(len(rated), 'task')}, {len(good)} good and {len(bad)} not; fitting a judge takes "
            f"{FEWEST} of each at least: rate more rollouts with agl runs rate, or in the console"
        )
    train, val, held = ([*good[part], *bad[part]] for part in (slice(0, None, 4), slice(2, None, 4), slice(1, None, 2)))
    return Parts(train, val, held)


class TemplateJudge:
    """Judges recordings with any template of an experiment's judge, which is the only reward with ``use = "judge"``.

    Attributes:
        entry: The judge in the experiment.
        template: Its own template.

    Raises:
        ConfigError: The experiment has no such reward, or several.
    """

    def __init__(self, config: ExperimentConfig, *, folder: Path, manager: PluginManager) -> None:
        judges = [one for one in config.reward if one.use == "judge"]
        if len(judges) != 1:
            raise ConfigError(
                f'the experiment has {count_of(len(judges), "[[reward]]")} with use = "judge"; leave the one to fit'
            )
        (self.entry,) = judges
        factory = manager.resolve(manager.reward("judge"))
        own = self.entry.params.get("template", inspect.signature(factory).parameters["template"].default)
        self.template = str(own)
        self._config, self._folder, self._manager = config, folder, manager
        self._rescorers: dict[str, Rescorer] = {}

    async def judge(self, template: str, recording: Recording) -> Reward:
        """Return the judge's reward, without a value if the model gave no score; raises :class:`RewardError`."""
        if template not in self._rescorers:
            entry = replace(self.entry, params={**self.entry.params, "template": template})
            plan = rewards_plan(replace(self._config, reward=(entry,)), folder=self._folder, manager=self._manager)
            self._rescorers[template] = await make_rescorer(plan, before=score_options(self._config.experiment))
        found = await self._rescorers[template].rescore(recording)
        if found.errors:
            raise RewardError(found.errors[0].message)
        return found.rewards[0]

    async def measure(self, template: str, rated: Sequence[Rated]) -> list[Reward]:
        """Return the judge's rewards in order; raises the first :class:`RewardError`."""
        return await asyncio.gather(*(self.judge(template, one.recording) for one in rated))


def agreements(rated: Sequence[Rated], *measured: Sequence[Reward]) -> list[Agreement]:
    """Return the agreement of each measurement with people, on the rollouts that have a score in all of them.

    Raises:
        AglError: People call none of these rollouts good, or all.
    """
    missing = {at: one.feedback for given in measured for at, one in enumerate(given) if one.value is None}
    labels = {at: float(one.is_good) for at, one in enumerate(rated) if at not in missing}
    found = [agreement([(given[at].value or 0.0, label) for at, label in labels.items()]) for given in measured]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        raise AglError(
            f"the judge scored {len(labels)} of {count_of(len(rated), 'rated rollout')}, too few to measure its "
            f"agreement with people: {next(iter(missing.values()))}"
        )
    return known


def search_template(
    judge: TemplateJudge,
    parts: Parts,
    *,
    config: ExperimentConfig,
    store: str,
    optimizer: Json,
    budget: int,
    folder: Path,
    manager: PluginManager,
) -> str:
    """Search as the experiment ``NAME-judge`` of the same store; return the version of the best template.

    Args:
        judge: The judge.
        parts: The rated rollouts.
        config: The experiment of the judge.
        store: URL of the store.
        optimizer: The model that writes templates: the name of a policy, or an endpoint.
        budget: The most verdicts.
        folder: Base of relative paths.
        manager: The plugin manager.
    """
    known = {one.recording.rollout.rollout_id: one for one in (*parts.train, *parts.val)}

    async def verdict(task: Any, judge_template: PromptTemplate) -> dict[str, Json]:
        reward = await judge.judge(judge_template.template, known[task["rollout"]].recording)
        if reward.value is None:
            raise AglError(reward.feedback)
        return {"score": reward.value, "said": reward.feedback}

    def agreed(rollout: Rollout, spans: Sequence[Span]) -> Reward:
        output = next(span.attributes[semconv.OUTPUT] for span in spans if semconv.OUTPUT in span.attributes)
        given, rated = cast("dict[str, Any]", output), known[cast("dict[str, str]", rollout.task)["rollout"]]
        said = f" and said: {rated.rating.feedback}" if rated.rating.feedback else ""
        feedback = (
            f"A person rated the work {rated.rating.value:g}{said}. The judge gave {given['score']:g}; from {GOOD} on "
            f"it calls the work good. It said: {given['said']}"
        )
        return Reward(value=float((given["score"] >= GOOD) == rated.is_good), feedback=feedback)

    template = PromptTemplate(template=judge.template)
    apo = algorithm(
        "apo",
        tunes=RESOURCE,
        optimizer=optimizer,
        budget=budget,
        scoring={"error": 1.0, "test": 0.0},  # kappa on the held-out part decides instead
        texts={"filled": sorted(template.fields)},
    )
    trainer = Trainer(
        name=f"{config.experiment.name}-judge",
        store=store,
        algorithm=apo,
        initial_resources={RESOURCE: template},
        policies={optimizer: config.policy[optimizer]} if isinstance(optimizer, str) else {},
        rewards=[agreed],
        n_runners=8,
        progress=default_progress(),
        plugins=manager,
        folder=folder,
        unseen_calls="accept",  # of the judge
    )
    train, val = ([_task_of(one) for one in part] for part in (parts.train, parts.val))
    result = trainer.fit(verdict, train, val, fresh=True)
    return result.resources[RESOURCE]


def _task_of(rated: Rated) -> dict[str, Json]:
    """Return what the search's critic reads: the task as the judge sees it, and the work."""
    rollout, spans = rated.recording.rollout, rated.recording.spans
    output = next((span.attributes[semconv.OUTPUT] for span in spans if semconv.OUTPUT in span.attributes), None)
    return {"rollout": rollout.rollout_id, "task": rollout.task, "work": final_text(spans) or output}
