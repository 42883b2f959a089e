"""Every hook, implemented by one plugin: its components are found, and its observers are called."""

from pathlib import Path

import pytest

import agl
from agl import PluginManager, hookimpl
from agl._plugins.hooks import HOOKS, OBSERVERS, PROVIDERS
from agl.contracts import ExporterEntry, GatewayEntry, ModalityEntry, RedactorEntry, RunnerEntry, StepReport


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
        yield RunnerEntry(name="mine", factory="m:runner")

    @hookimpl
    def agl_policies(self):
        yield agl.PolicyEntry(name="mine", factory="m:policy", trains=True)

    @hookimpl
    def agl_modalities(self):
        yield ModalityEntry(name="mine", factory="m:modality")

    @hookimpl
    def agl_gateways(self):
        yield GatewayEntry(name="mine", factory="m:gateway")

    @hookimpl
    def agl_redactors(self):
        yield RedactorEntry(name="mine", factory="m:redactor")

    @hookimpl
    def agl_exporters(self):
        yield ExporterEntry(name="mine", factory="m:exporter")

    @hookimpl
    def agl_commands(self):
        yield agl.CommandEntry(name="mine", factory="m:command")

    @hookimpl
    def agl_step_finished(self, experiment, run, algorithm, report, experiment_step, workdir):
        self.seen.append((experiment, run, algorithm, report, experiment_step, workdir))

    @hookimpl
    def agl_alert_raised(self, experiment, run, kind, rule, algorithm, step, evidence, change):
        self.seen.append((experiment, run, kind, rule, algorithm, step, evidence, change))


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
    "agl_step_finished": {
        "experiment": "sql",
        "run": 2,
        "algorithm": "grpo",
        "report": StepReport(step=3),
        "experiment_step": 5,
        "workdir": Path("runs/sql"),
    },
    "agl_alert_raised": {
        "experiment": "sql",
        "run": 2,
        "kind": "suggestion",
        "rule": "silent-groups",
        "algorithm": "grpo",
        "step": 3,
        "evidence": "80% of the rollouts taught nothing",
        "change": "easier tasks",
    },
}


@pytest.mark.parametrize("hook", OBSERVERS)
def test_observer_hook_is_told(manager, plugin, hook, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    manager.notify(hook, **VALUES[hook])
    assert [tuple(VALUES[hook].values())] == plugin.seen
    assert 0 == manager.status()[1].failures
