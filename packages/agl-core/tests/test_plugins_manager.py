"""The plugin manager: the plugins that it finds, the components that it builds, the observers that it calls."""

import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pluggy
import pytest

import agl
from agl import ConfigError, PluginManager, RewardEntry, hookimpl
from agl.contracts import StepReport
from agl.errors import BrokenPluginError, DuplicateComponentError, PluginError, UnknownComponentError
from agl.hints import pip_install

PLUGIN = """
from agl import RewardEntry, hookimpl

@hookimpl
def agl_rewards():
    yield RewardEntry(name="{name}", factory="{factory}")
"""


class Rewards:
    """A plugin object with one reward."""

    def __init__(self, factory: Any, name: str = "toy") -> None:
        self.entry = RewardEntry(name=name, factory=factory)

    @hookimpl
    def agl_rewards(self):
        return [self.entry]


@dataclass(frozen=True)
class Scaled:
    scale: float
    labels: tuple[str, ...] = ()
    mode: Literal["sum", "mean"] = "sum"
    check: Any = None

    def __call__(self, rollout: object, spans: object) -> float:
        return self.scale


def with_reward(factory: Any) -> tuple[PluginManager, RewardEntry]:
    manager = PluginManager()
    manager.register(Rewards(factory), name="toy")
    return manager, manager.reward("toy")


def test_core_registers_its_own_components_through_the_hooks():
    manager = PluginManager()
    assert manager.store_entry("memory").factory == "agl.stores:MemoryStore"
    assert manager.credit("episode").factory == "agl.episodes:EpisodeCredit"
    assert manager.tracer("otel").factory == "agl.tracing:OtelTracer"
    assert manager.status()[0].name == "core"


def test_components_of_agl_run_are_there_without_loading_plugins():
    manager = PluginManager(disabled=["*"])
    assert manager.store_entry("sqlite").factory == "agl_store_sqlite:SQLiteStore"
    assert manager.runner("async").factory == "agl_run.runners.local:AsyncRunner"
    assert manager.command("plugins").factory == "agl_inspect.cli.plugins:plugins"
    assert ["core", "inspect", "run", "store-sqlite"] == [status.name for status in manager.status()]


def test_every_component_of_the_core_resolves():
    manager = PluginManager()
    for kind in ("store", "tracer", "reward", "credit", "runner", "policy", "command"):
        for entry in manager.entries(kind):
            assert callable(manager.resolve(entry))


def test_installed_plugins_load_in_order_of_name(install_plugin):
    for name in ("zeta", "alpha", "mid"):
        source = f"import agl\nagl.order = [*getattr(agl, 'order', []), '{name}']\n"
        install_plugin(f"agl-{name}", source, entry=name)
    PluginManager.from_environment()
    try:
        assert agl.order == ["alpha", "mid", "zeta"]  # type: ignore[attr-defined]
    finally:
        del agl.order  # type: ignore[attr-defined]


def test_plugins_that_are_installed_one_after_the_other_are_found(install_plugin):
    for name in ("first", "second"):
        install_plugin(f"agl-{name}", PLUGIN.format(name=name, factory="math:sqrt"), entry=name)
        assert name in [status.name for status in PluginManager.from_environment().status()]


def test_status_tells_distribution_version_and_components(install_plugin):
    install_plugin("agl-toy", PLUGIN.format(name="contains", factory="math:sqrt"), entry="toy", version="3.2")
    found = {status.name: status for status in PluginManager.from_environment().status()}["toy"]
    assert (
        found.distribution,
        found.version,
        found.module,
        found.state,
    ) == ("agl-toy", "3.2", "agl_toy", "loaded")
    assert found.components == ("reward contains",)


@pytest.mark.parametrize("names", ["toy", "agl-toy", "other, toy", "*"])
def test_disabled_plugin_is_not_imported(install_plugin, monkeypatch, names):
    install_plugin("agl-toy", "raise RuntimeError('imported')", entry="toy")
    monkeypatch.setenv("AGL_DISABLED_PLUGINS", names)
    manager = PluginManager.from_environment(strict=True)
    assert "disabled" in [status.state for status in manager.status() if status.name == "toy"]
    with pytest.raises(UnknownComponentError, match="which is disabled"):
        manager.reward("toy")


def test_load_false_leaves_out_every_installed_plugin(install_plugin):
    install_plugin("agl-toy", "raise RuntimeError('imported')", entry="toy")
    states = {status.name: status.state for status in PluginManager.from_environment(load=False).status()}
    assert (states["core"], states["toy"]) == ("loaded", "disabled")


def test_worker_env_gives_a_child_the_same_choice(install_plugin):
    install_plugin("agl-toy", "raise RuntimeError('imported')", entry="toy")
    first = PluginManager.from_environment(["toy"], strict=True)
    child = PluginManager.from_environment(environ=first.worker_env())
    assert first.status() == child.status()
    assert child.worker_env() == {"AGL_DISABLED_PLUGINS": "toy", "AGL_PLUGINS_STRICT": "1"}


def test_unmatched_names_of_disabled_plugins_are_told():
    assert PluginManager.from_environment(["tpyo"]).unmatched == ["tpyo"]


@pytest.mark.parametrize(
    ("kind", "name", "package"),
    [
        ("algorithm", "grpo", "agl-algo-torch"),
        ("algorithm", "verl", "agl-algo-verl"),
        ("algorithm", "apo", "agl-algo-apo"),
        ("tracer", "langgraph", "agl-langchain"),
        ("tracer", "autogen", "agl-autogen"),
        ("tracer", "openai-agents", "agl-openai-agents"),
        ("tracer", "crewai", "agl-crewai"),
        ("store", "postgresql", "agl-store-postgres"),
        ("store", "redis", "agl-store-redis"),
        ("algorithm", "rft", "agl-algo-torch"),
        ("policy", "vllm", "agl-vllm"),
        ("reward", "judge", "agl-rewards"),
        ("credit", "turn", "agl-rewards"),
        ("gateway", "gateway", "agl-gateway"),
        ("exporter", "otlp", "agl-sinks[otlp]"),
        ("runner", "ray", "agl-ray"),
        ("command", "serve", "agl-gateway"),
        ("command", "doctor", "agl-gateway"),
        ("command", "console", "agl-console"),
        ("command", "deploy", "agl-deploy"),
    ],
)
def test_missing_component_names_the_package_to_install(kind, name, package):
    with pytest.raises(UnknownComponentError, match=f"no {kind} is named '{name}'.*{re.escape(pip_install(package))}$"):
        PluginManager().entry(kind, name)


@pytest.mark.parametrize(("kind", "name"), [("store", "mongo"), ("runner", "slurm"), ("command", "fly")])
def test_missing_component_of_no_known_package_is_sent_nowhere(kind, name):
    with pytest.raises(UnknownComponentError, match=f"no {kind} is named '{name}'") as raised:
        PluginManager().entry(kind, name)
    assert "pip install" not in str(raised.value)


def test_mistyped_name_gets_the_close_match_and_the_available_ones():
    with pytest.raises(UnknownComponentError, match=r"did you mean 'episode'\?.*available: episode"):
        PluginManager().credit("epsiode")
    command = re.escape(pip_install("agl-algo-torch"))
    with pytest.raises(UnknownComponentError, match=rf"did you mean 'grpo'\? Then run: {command}"):
        PluginManager().algorithm("gpro")


def test_registering_an_object_raises_at_once_and_leaves_nothing_behind():
    manager = PluginManager()
    before = manager.status()
    with pytest.raises(DuplicateComponentError, match="'thief'"):
        manager.register(Rewards(print, "exact-match"), name="thief")
    with pytest.raises(BrokenPluginError, match="'odd' failed to load"):
        manager.register(Rewards(3), name="odd")
    assert before == manager.status()
    manager.register(Rewards(print), name="odd")
    assert print == manager.reward("toy").factory


def test_build_imports_the_factory_and_passes_parameters():
    manager, entry = with_reward("unittest.mock:Mock")
    assert 2 == manager.build(entry, base=2).base
    manager, entry = with_reward(Scaled)
    assert Scaled(2.0, ("a", "b")) == manager.build(entry, scale=2, labels=["a", "b"])


def test_build_names_an_unknown_parameter_with_its_close_match():
    manager, entry = with_reward(Scaled)
    with pytest.raises(ConfigError, match=r"'scael'; did you mean 'scale'.*scale, labels, mode, check"):
        manager.build(entry, scael=1)


class Rate(msgspec.Struct):
    lr: float = 0.1


class Learner:
    def __init__(self, *, lora: str = "", optim: Rate) -> None:
        pass


def test_build_names_the_table_to_which_a_parameter_belongs():
    manager, entry = with_reward(Learner)
    with pytest.raises(ConfigError, match=r"no parameter 'lr'; did you mean 'optim.lr'\?"):
        manager.build(entry, lr=1)


class Stepping:
    state: Rate

    def __init__(self, lr_start: float = 0.1) -> None:
        pass


def rate(lr_start: float = 0.1) -> Rate:
    return Rate(lr=lr_start)


@pytest.mark.parametrize("factory", [Stepping, rate])
def test_build_names_only_parameters_as_tables(factory):
    manager, entry = with_reward(factory)
    with pytest.raises(ConfigError, match=r"no parameter 'lr'; .*parameters are: lr_start"):
        manager.build(entry, lr=1)


def test_build_names_a_missing_parameter():
    manager, entry = with_reward(Scaled)
    with pytest.raises(ConfigError, match="the reward 'toy' needs the parameter 'scale'"):
        manager.build(entry)


@pytest.mark.parametrize("params", [{"scale": "1"}, {"scale": True}, {"scale": 1.0, "mode": "median"}])
def test_build_refuses_a_value_of_the_wrong_type(params):
    manager, entry = with_reward(Scaled)
    name = list(params)[-1]
    with pytest.raises(ConfigError, match=f"the reward 'toy': {name} is .*; write "):
        manager.build(entry, **params)


def test_build_leaves_objects_to_the_factory():
    manager, entry = with_reward(Scaled)
    lock = threading.Lock()
    assert lock is manager.build(entry, scale=1.0, check=lock).check


def test_build_names_the_package_of_a_missing_module(install_plugin, agl_plugins):
    install_plugin(
        "agl-toy",
        PLUGIN.format(name="toy", factory="agl_toy_impl:Reward"),
        entry="toy",
        requires=("agl-core>=0.1", "absent-thing>=2", "rare.kind; extra == 'gpu'"),
    )
    manager = PluginManager.from_environment(strict=True)
    for module, command in (
        ("absent_thing.deep", "pip install --upgrade agl-toy"),
        ("rare_kind", r"pip install 'agl-toy\[gpu\]'"),
        ("unheard_of", "pip install unheard_of"),
    ):
        (agl_plugins.folder / "agl_toy_impl.py").write_text(f"import {module}\n", encoding="utf-8")
        with pytest.raises(PluginError, match=f"'{module.partition('.')[0]}', which is not installed; run: {command}"):
            manager.build(manager.reward("toy"))


def test_build_names_the_plugin_whose_factory_does_not_exist():
    manager, entry = with_reward("agl_nowhere.deep:Thing")
    with pytest.raises(BrokenPluginError, match=r"the plugin 'toy' names 'agl_nowhere\.deep:Thing', which does not"):
        manager.build(entry)
    manager, entry = with_reward("collections:Countr")
    with pytest.raises(BrokenPluginError, match="no 'Countr' in collections; did you mean 'Counter'"):
        manager.build(entry)


def test_build_names_the_plugin_whose_module_raises(install_plugin, agl_plugins):
    install_plugin("agl-toy", PLUGIN.format(name="toy", factory="agl_toy_impl:Reward"), entry="toy")
    (agl_plugins.folder / "agl_toy_impl.py").write_text("1 / 0\n", encoding="utf-8")
    manager = PluginManager.from_environment(strict=True)
    with pytest.raises(BrokenPluginError, match=r"agl-toy 1.0.* raised ZeroDivisionError: division by zero"):
        manager.build(manager.reward("toy"))


class Observer:
    def __init__(self, seen: list[str], name: str, error: Exception | None = None) -> None:
        self.seen, self.name, self.error = seen, name, error

    @hookimpl
    def agl_step_finished(self, algorithm: str) -> None:
        self.seen.append(f"{self.name} {algorithm}")
        if self.error is not None:
            raise self.error


def finished(algorithm: str) -> dict[str, Any]:
    """Return the arguments that observers of a finished step receive."""
    counts = {"run": 1, "experiment_step": 1}
    return {"experiment": "sql", "algorithm": algorithm, "report": StepReport(step=1), "workdir": Path("run"), **counts}


def test_observer_that_raises_is_logged_once_and_harms_nobody(caplog, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    manager = PluginManager()
    manager.register(Observer(seen, "one", ValueError("watcher fell asleep")), name="one")
    manager.register(Observer(seen, "two"), name="two")
    with caplog.at_level(logging.ERROR, "agl._plugins"):
        for number in "ab":
            manager.notify("agl_step_finished", **finished(number))
    assert seen == ["one a", "two a", "one b", "two b"]
    assert len(caplog.records) == 1
    assert "plugin 'one'" in caplog.text
    assert "ValueError: watcher fell asleep" in caplog.text
    assert {"one": 2} == {status.name: status.failures for status in manager.status() if status.failures}


def test_observer_takes_the_arguments_it_wants(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    manager = PluginManager()
    manager.register(Observer(seen, "one"))
    manager.notify("agl_step_finished", **finished("grpo"))
    assert seen == ["one grpo"]


def test_observers_are_told_in_order_of_registration_unless_they_ask_to_be_first_or_last(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def observer(name: str, **marks: bool) -> object:
        @hookimpl(**marks)
        def agl_step_finished(report):
            seen.append(name)

        plugin = type(name, (), {})()
        plugin.agl_step_finished = agl_step_finished
        return plugin

    manager = PluginManager()
    for name, marks in (("last", {"trylast": True}), ("a", {}), ("b", {}), ("first", {"tryfirst": True})):
        manager.register(observer(name, **marks), name=name)
    manager.notify("agl_step_finished", **finished("grpo"))
    assert ["first", "a", "b", "last"] == seen


def test_notify_refuses_what_is_no_observer_hook():
    with pytest.raises(PluginError, match="'agl_rewards' is not an observer hook"):
        PluginManager().notify("agl_rewards")


def test_two_managers_share_nothing():
    first = PluginManager()
    first.register(Rewards(print), name="toy")
    with pytest.raises(UnknownComponentError):
        PluginManager().reward("toy")


def test_pluggy_keeps_what_the_manager_relies_on():
    class Lazy:
        @property
        def agl_heavy(self):
            raise AssertionError("evaluated while scanning")

    hooks = pluggy.PluginManager("agl")
    hooks.register(Lazy())
    with pytest.raises(ValueError, match="name"):
        hooks.register(Lazy(), name=hooks.list_name_plugin()[0][0])
    assert len(hooks.get_plugins()) == 1
