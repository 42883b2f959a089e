"""The settings that a resumed run compares: their saved form, and the text about a change."""

from typing import Any

from agl.algorithms import algorithm
from agl_run.config.sections import ExperimentConfig, ExperimentSection
from agl_run.config.training_settings import changed_settings, training_settings

SECRET = "not-for-a-store"


def settings(**params: Any) -> dict[str, str]:
    section = ExperimentSection(agent="agent:solve")
    return training_settings(ExperimentConfig(experiment=section), algorithm("grpo", **params))


def test_settings_keep_no_secret_and_still_show_that_it_changed() -> None:
    before, now = settings(optimizer={"api_key": SECRET}), settings(optimizer={"api_key": "another"})
    assert SECRET not in str(before)
    assert ["optimizer.api_key another value (was another value)"] == changed_settings(before, now)


def test_settings_that_were_added_or_removed_are_named() -> None:
    before, now = settings(lr=0.1, api_key_env="KEY"), settings(estimator="rloo", api_key_env="KEY")
    assert ["lr not set (was 0.1)", 'estimator "rloo" (was not set)'] == changed_settings(before, now)


def test_a_state_of_an_older_release_is_compared_with_nothing() -> None:
    assert [] == changed_settings({}, settings(lr=0.1))
