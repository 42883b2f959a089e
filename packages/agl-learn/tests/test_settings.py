import pytest

from agl.errors import ConfigError
from agl_learn.settings import learner_of
from agl_run import ExperimentConfig, ExperimentSection

SECTION = ExperimentSection(agent="agent:solve")


def test_learner_of_reads_the_table() -> None:
    given = {"tunes": ["prompt"], "gate": {"canary": {"share": [0.1, 0.5]}, "error": 0.1}}

    name, settings = learner_of(ExperimentConfig(experiment=SECTION, learn={"support": given}))

    assert ("support", ("prompt",), (0.1, 0.5)) == (name, settings.tunes, settings.gate.canary.share)


def test_learner_of_names_the_wrong_key() -> None:
    with pytest.raises(ConfigError, match=r"learn\.support"):
        learner_of(ExperimentConfig(experiment=SECTION, learn={"support": {"tunes": ["prompt"], "evry": 3}}))
