"""An experiment file with a learner, and the plans of the learner's training and replays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from agl import PluginManager
from agl.algorithms import AlgorithmConfig
from agl.contracts import Store
from agl.schemas import Json
from agl_inspect.records.learning import LearningRecords
from agl_run import ExperimentConfig, LearnSettings, Trainer
from agl_run.engine import Plan


@dataclass(frozen=True, kw_only=True)
class LearnerFile:
    """An experiment file with a learner.

    Attributes:
        name: The learner's name.
        settings: The learner's settings.
        config: The experiment.
        folder: The file's folder.
        manager: The plugin manager.
        store: The store that the gateways and the learner share.
    """

    name: str
    settings: LearnSettings
    config: ExperimentConfig
    folder: Path
    manager: PluginManager
    store: Store

    @property
    def records(self) -> LearningRecords:
        """The learner's records in the store."""
        return LearningRecords(self.name)

    @property
    def tuned_policy(self) -> str:
        """The policy whose weights the learner tunes; ``""`` if it tunes texts only."""
        return next((name for name in self.settings.tunes if name in self.config.policy), "")

    def experiment(self, name: str, *, algorithms: Sequence[AlgorithmConfig] = ()) -> ExperimentConfig:
        """Return the experiment under another name, without its tasks, and with these algorithms only."""
        section = msgspec.structs.replace(self.config.experiment, name=name, train="", val="")
        return msgspec.structs.replace(self.config, experiment=section, algorithm=tuple(algorithms))

    def plan(self, config: ExperimentConfig, *, train: Sequence[Json], val: Sequence[Json]) -> Plan:
        """Check an experiment of the learner, and return its plan over the learner's store."""
        trainer = Trainer.from_config(config, folder=self.folder, plugins=self.manager)
        return replace(trainer.plan(None, list(train), list(val)), store=self.store)
