"""Reward emitters that use their experiment."""

from pathlib import Path

import agl
from agl import PluginManager
from agl.contracts import RewardSetup, Upstream
from agl.schemas import Rollout
from agl_run import parse_config
from agl_run.builtin import ExactMatch
from agl_run.parts.build import build_rewards


class Asking:
    """A reward emitter that takes the setup, and reports its contents."""

    def __init__(self, *, setup: RewardSetup, part: str = "") -> None:
        self.setup = setup
        self.part = setup.build(part, {}) if part else None

    def __call__(self, rollout: Rollout, spans: object) -> float:
        return float(self.part is not None)


class AskingPlugin:
    @agl.hookimpl
    def agl_rewards(self) -> list[agl.RewardEntry]:
        return [agl.RewardEntry(name="asking", factory=Asking, takes_setup=True)]


def test_emitter_that_asks_for_it_learns_about_its_experiment(tmp_path: Path) -> None:
    manager = PluginManager()
    manager.register(AskingPlugin(), name="asking")
    policy = {"use": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1"}
    config = parse_config(
        {
            "experiment": {"agent": "agent:solve"},
            "policy": {"judge": policy},
            "reward": [{"use": "asking", "params": {"part": "exact-match"}}, {"use": "exact-match"}],
        }
    )
    plan = agl.Trainer.from_config(config, folder=tmp_path, plugins=manager).plan(lambda task: None, [{"q": 1}])
    up = Upstream(name="judge", base_url="http://127.0.0.1:9/v1", model="m", api_key_env="KEY")
    for upstreams, endpoint in (((), ""), ((up,), up.base_url)):
        (name, asking), (other, _) = build_rewards(plan, upstreams)
        assert isinstance(asking, Asking)
        assert ("asking", "exact-match", tmp_path) == (name, other, asking.setup.folder)
        assert (["judge"], endpoint) == (list(asking.setup.policies), asking.setup.policies["judge"].endpoint)
        assert isinstance(asking.part, ExactMatch)
