"""Finds the learner of an experiment file."""

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_run import ExperimentConfig, LearnSettings


def learner_of(config: ExperimentConfig) -> tuple[str, LearnSettings]:
    """Return the name and the settings of the learner in an experiment file.

    Raises:
        ConfigError: The file has no ``[learn.NAME]`` or several of them, or no algorithm tunes one of its resources.
    """
    if len(config.learn) != 1:
        there = f"has {len(config.learn)}: {', '.join(config.learn)}" if config.learn else "has none"
        raise ConfigError(f"a learner needs one table [learn.NAME], and the file {there}")
    ((name, settings),) = config.learn.items()
    tuned = sorted({target for algorithm in config.algorithm for target in algorithm.tunes})
    has_targets = all(algorithm.tunes for algorithm in config.algorithm)  # else the plan finds the only one there is
    for target in settings.tunes:
        if has_targets and target not in tuned:
            hint = did_you_mean(target, tuned, otherwise=f"the algorithms tune {', '.join(tuned) or 'nothing'}")
            raise ConfigError(f"learn.{name}.tunes has {target!r}, which no [[algorithm]] of the file tunes; {hint}")
    return name, settings
