"""Agents of a run before and after training: by their rollouts in validations, and by the credit of their calls."""

from collections.abc import Sequence

from agl.contracts import Moments
from agl_inspect.advice.agent_changes import agent_changes
from agl_inspect.rollouts.step_tallies import AgentTally, StepTally


def moments(values: Sequence[float]) -> Moments:
    found = Moments()
    for value in values:
        found = found.plus(Moments(count=1, mean=value))
    return found


def validation(step: int, **rewards: Sequence[float]) -> StepTally:
    agents = tuple(AgentTally(agent=name, reward=moments(values)) for name, values in rewards.items())
    return StepTally(algorithm="validate", step=step, mode="val", rollouts=10, agents=agents)


def training(step: int, **credits: Sequence[float]) -> StepTally:
    agents = tuple(AgentTally(agent=name, credit=moments(values)) for name, values in credits.items())
    return StepTally(algorithm="grpo", step=step, mode="train", rollouts=10, agents=agents)


LOW, HIGH = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0) * 3, (1.0, 1.0, 1.0, 1.0, 1.0, 0.0) * 3


def test_agent_that_training_hurt_is_named_first_with_the_interval() -> None:
    steps = [validation(0, checker=HIGH, solver=LOW), validation(4, checker=HIGH, solver=LOW)]
    worse, better = agent_changes([*steps, validation(8, checker=LOW, solver=HIGH)])
    assert ("checker", "worse") == (worse.agent, worse.verdict)
    assert worse.words == (
        "got worse: the reward of its rollouts was 0.833 in the first validation and is 0.167 in the last one, "
        "a difference of -0.667 [-0.926, -0.407] over 18 and 18 rollouts"
    )
    assert ("solver", "better") == (better.agent, better.verdict)


def test_credit_is_compared_between_the_first_and_the_last_quarter_of_the_steps() -> None:
    steps = [training(step, solver=HIGH if step > 6 else LOW) for step in range(1, 9)]
    (found,) = agent_changes(steps)
    assert found.verdict == "better"
    assert found.words.endswith("over 36 and 36 answers")


def test_few_or_equal_values_give_no_verdict() -> None:
    few, same = agent_changes([validation(0, few=[0.0] * 4, same=LOW), validation(1, few=[1.0] * 4, same=LOW)])
    assert ("unclear", "unclear") == (few.verdict, same.verdict)
    assert few.words.startswith("cannot be judged with so few rollouts: the reward of its rollouts was 0 in")
    assert same.words.startswith("did not change clearly: ")


def test_run_with_one_validation_or_without_credit_has_no_change() -> None:
    assert [] == agent_changes([validation(0, solver=LOW), training(1), training(2)])
