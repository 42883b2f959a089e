"""Every hook, implemented by one plugin: what it registers is found, what happens is told."""

import pytest

import agl
from agl import PluginManager, hookimpl
from agl._plugins.hooks import HOOKS, OBSERVERS, PROVIDERS
from agl.contracts import StepReport


class Everything:
    """A plugin with all hooks."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    @hookimpl
    def agl_tracers(self):
        yield agl.TracerEntry(name="mine", factory="m:tracer", frameworks=("echo",))

    @hookimpl
    def agl_rewards(self):
        yield agl.RewardEntry(name="mine", factory="m:reward")

    @hookimpl
    def agl_stores(self):
        yield agl.StoreEntry(name="mine", factory="m:store")

    @hookimpl
    def agl_algorithms(self):
        yield agl.AlgorithmEntry(name="mine", factory="m:algorithm", tunes=("json",), needs_token_ids=False)

    @hookimpl
    def agl_credits(self):
        yield agl.CreditEntry(name="mine", factory="m:credit")

    @hookimpl
    def agl_runners(self):
        yield agl.RunnerEntry(name="mine", factory="m:runner")

    @hookimpl
    def agl_policies(self):
        yield agl.PolicyEntry(name="mine", factory="m:policy", trains=True)

    @hookimpl
    def agl_gateways(self):
        yield agl.GatewayEntry(name="mine", factory="m:gateway")

    @hookimpl
    def agl_loggers(self):
        yield agl.LoggerEntry(name="mine", factory="m:logger")

    @hookimpl
    def agl_commands(self):
        yield agl.CommandEntry(name="mine", factory="m:command")

    @hookimpl
    def agl_rollout_started(self, rollout, attempt):
        self.seen.append((rollout, attempt))

    @hookimpl
    def agl_rollout_finished(self, rollout):
        self.seen.append((rollout,))

    @hookimpl
    def agl_resources_published(self, version):
        self.seen.append((version,))

    @hookimpl
    def agl_step_finished(self, algorithm, report):
        self.seen.append((algorithm, report))


@pytest.fixture
def plugin() -> Everything:
    return Everything()


@pytest.fixture
def manager(plugin: Everything) -> PluginManager:
    manager = PluginManager()
    manager.register(plugin, name="everything")
    return manager


def test_plugin_of_this_test_has_every_hook(plugin):
    assert set(HOOKS) == {name for name in dir(plugin) if name.startswith("agl_")}


@pytest.mark.parametrize("hook", PROVIDERS)
def test_what_a_provider_hook_yields_is_found_by_kind_and_name(manager, plugin, hook):
    (expected,) = getattr(plugin, hook)()
    kind = expected.factory.partition(":")[2]
    find = manager.store_entry if kind == "store" else getattr(manager, kind)
    assert expected == find("mine")
    assert expected == manager.entry(kind, "mine")
    assert expected in manager.entries(kind)
    assert f"{kind} mine" in manager.status()[1].components


VALUES = {
    "agl_rollout_started": {
        "rollout": agl.Rollout(rollout_id="r", task=1),
        "attempt": agl.Attempt(attempt_id="r.1", rollout_id="r", number=1, worker="w"),
    },
    "agl_rollout_finished": {"rollout": agl.Rollout(rollout_id="r", task=1, status="failed")},
    "agl_resources_published": {
        "version": agl.ResourceVersion(name="n", version="1", resource=agl.JsonResource(value=2))
    },
    "agl_step_finished": {"algorithm": "grpo", "report": StepReport(step=3)},
}


@pytest.mark.parametrize("hook", OBSERVERS)
def test_observer_hook_is_told(manager, plugin, hook):
    manager.notify(hook, **VALUES[hook])
    assert [tuple(VALUES[hook].values())] == plugin.seen
    assert 0 == manager.status()[1].failures
