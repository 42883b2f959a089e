"""Chooses the versions that are live when an experiment ends, from all validated ones.

If other versions scored better than the last ones and are close to each other, they run on the validation tasks once
more: the highest of many measurements is biased upwards, and fresh rollouts are not. This costs rollouts that are in no
budget, so it happens only in experiments that validate between steps; in other experiments the last versions stay live
unless the gate finds them worse than the first. There are only two measurements then, and the best one is not the
luckiest of many, so less evidence suffices than for a fall.
"""

from statistics import fmean

from agl.contracts import Metric, Store
from agl.schemas import Record
from agl_inspect.records.validations import Validation, rewards_of
from agl_run.plan import VALIDATION
from agl_run.run.driver import Driver
from agl_run.run.opponents import lost_weights

_ODDS = 20.0
"""The odds from which the last of only two validations counts as worse than the first."""

_KEY = "final"
"""Part of the ids of the rollouts that compare the finalists."""


class Choice(Record, frozen=True, kw_only=True):
    """The versions that are live at the end of an experiment.

    Attributes:
        turn: The number of steps of all algorithms together before these versions were validated.
        reward: The mean validation reward of the versions, on fresh rollouts if fresh rollouts decided.
        is_last: Whether they are the versions of the last step.
    """

    turn: int
    reward: float
    is_last: bool


async def choose(driver: Driver) -> Choice | None:
    """Choose the versions that end the experiment, and make them live; ``None`` if nothing was validated."""
    last = driver.validations.at(driver.state.turn)
    if last is None:
        return None
    # The default, and all there is with ``final = "last"``.
    chosen, reward = last, last.mean
    if driver.running.plan.config.experiment.final == "best":
        finalists = await _available(driver, last)
        # Only where chance could have chosen are fresh rollouts worth their price.
        if len(finalists) > 1:
            chosen, reward = await _measured(driver, finalists)
        else:
            chosen, reward = finalists[0], finalists[0].mean
        # Measuring the finalists left the last of them live.
        await driver.running.go_back(chosen.versions)
        await driver.validations.label(chosen, f"live at the end of experiment {driver.name}: {reward:.3f}")
    return Choice(turn=chosen.turn, reward=reward, is_last=chosen.versions == last.versions)


async def missing_files(store: Store, one: Validation) -> str:
    """Return the reason why a validation's versions cannot be made live again; ``""`` if they can."""
    for name, version in one.versions.items():
        found = await store.resource(name, version)
        if path := lost_weights(found):
            return f"the weights of {name}@{version} are no longer in {path}; raise `keep` of {found.algorithm}"
    return ""


async def _available(driver: Driver, last: Validation) -> list[Validation]:
    """Return the validations whose versions may be live at the end, best first; the list is never empty."""
    best = driver.validations.best
    if best.versions == last.versions:
        return [last]
    if not driver.running.plan.config.experiment.validate_every:
        return [best if driver.validations.evidence_of_fall(last) >= _ODDS else last]
    found: list[Validation] = []
    for one in driver.validations.finalists():
        missing = await missing_files(driver.running.store, one)
        if missing:
            driver.progress.say(f"the versions with validation reward {one.words} cannot be live again: {missing}")
        else:
            found.append(one)
    return found or [last]


async def _measured(driver: Driver, finalists: list[Validation]) -> tuple[Validation, float]:
    """Run every finalist on the validation tasks again; return the best one with its new mean reward.

    Of equal rewards, the one with the higher earlier reward is best.
    """
    names = ", ".join(one.words for one in finalists)
    driver.progress.say(f"validation rewards that are close to each other: {names}; fresh rollouts decide")
    collector = driver.collector(VALIDATION, None)
    found: list[tuple[float, float, Validation]] = []
    for one in finalists:
        await driver.running.go_back(one.versions)
        collected = await collector(
            driver.validation_tasks, step=one.turn, mode="val", resources=one.versions, key=_KEY
        )
        rewards = rewards_of(collected.episodes)
        # The fresh score is stored apart from the first one, which selection has biased upwards.
        await driver.validations.score(one, collected.episodes, is_fresh=True)
        reward = Metric(
            experiment=driver.name,
            run=driver.state.run,
            algorithm=VALIDATION,
            step=one.turn,
            experiment_step=one.turn,
            name="final_reward",
            value=fmean(rewards),
        )
        await driver.running.store.log_metrics([reward])
        found.append((fmean(rewards), one.mean, one))
        driver.progress.say(f"fresh rollouts of the versions {one.place}: {fmean(rewards):.3f}")
    # Ties go to the better first measurement, which is independent of the fresh one.
    reward, _, chosen = max(found, key=lambda item: item[:2])
    driver.progress.update(f"{VALIDATION} rollouts", 0, 0)
    return chosen, reward
