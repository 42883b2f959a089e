"""Plugins that fail: each error names distribution, version and remedy, and other plugins are not affected."""

import logging
import subprocess
import sys
from typing import get_args

import pytest

from agl import PluginManager, contracts
from agl._plugins import manager as manager_module
from agl.contracts import Kind
from agl.errors import BrokenPluginError, DuplicateComponentError, PluginError, UnknownComponentError

REWARD = """
from agl import RewardEntry, hookimpl

@hookimpl
def agl_rewards():
    yield RewardEntry(name="{name}", factory="math:sqrt")
"""
RAISES = "raise RuntimeError('no such device')\n"
MISSPELLED = """
from agl import RewardEntry, hookimpl

@hookimpl
def agl_reward():
    yield RewardEntry(name="never", factory="math:sqrt")
"""


def status(manager: PluginManager, name: str):
    return next(found for found in manager.status() if found.name == name)


def test_plugin_that_raises_on_import_is_quarantined_and_others_work(install_plugin, caplog):
    install_plugin("agl-aaa", RAISES, entry="aaa", version="2.3")
    install_plugin("agl-fine", REWARD.format(name="fine"), entry="fine")
    with caplog.at_level(logging.WARNING, "agl._plugins"):
        manager = PluginManager.from_environment()
    assert status(manager, "fine").state == "loaded"
    assert manager.reward("fine").name == "fine"
    broken = status(manager, "aaa")
    assert broken.state == "broken"
    for part in (
        "'aaa' (agl-aaa 2.3)",
        "RuntimeError: no such device",
        "--upgrade agl-aaa",
        "AGL_DISABLED_PLUGINS=aaa",
    ):
        assert part in broken.error
    assert [broken.error] == [record.getMessage() for record in caplog.records if "aaa" in record.getMessage()]


def test_component_of_quarantined_plugin_raises_its_error(install_plugin):
    install_plugin("agl-langchain", RAISES, entry="langchain")
    manager = PluginManager.from_environment()
    with pytest.raises(BrokenPluginError, match="no such device") as caught:
        manager.tracer("langgraph")  # known to be in agl-langchain
    assert isinstance(caught.value.__cause__, BrokenPluginError)
    assert isinstance(caught.value.__cause__.__cause__, RuntimeError)
    with pytest.raises(BrokenPluginError, match="no such device"):
        manager.tracer("langchain")


def test_unknown_name_chains_the_plugins_that_failed(install_plugin):
    install_plugin("agl-aaa", RAISES, entry="aaa")
    manager = PluginManager.from_environment()
    with pytest.raises(UnknownComponentError, match=r"'aaa' \(agl-aaa 1.0\)") as caught:
        manager.reward("whatever")
    assert caught.value.__cause__ is not None
    assert "no such device" in str(caught.value.__cause__)
    install_plugin("agl-bbb", MISSPELLED, entry="bbb")
    with pytest.raises(UnknownComponentError) as caught:
        PluginManager.from_environment().reward("whatever")
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 2


def test_misspelled_hook_is_refused_with_the_close_match(install_plugin):
    install_plugin("agl-typo", MISSPELLED, entry="typo")
    error = status(PluginManager.from_environment(), "typo").error
    assert "agl_reward is not a hook; did you mean 'agl_rewards'?" in error
    assert "'typo' (agl-typo 1.0)" in error


def test_duplicate_name_is_refused_naming_both_distributions(install_plugin):
    install_plugin("agl-one", REWARD.format(name="same"), entry="one")
    install_plugin("agl-two", REWARD.format(name="same"), entry="two", version="0.2")
    manager = PluginManager.from_environment()
    assert (status(manager, "one").state, status(manager, "two").state) == ("loaded", "broken")
    with pytest.raises(DuplicateComponentError) as caught:
        manager.reward("same")
    for part in ("'one' (agl-one 1.0)", "'two' (agl-two 0.2)", "AGL_DISABLED_PLUGINS=two"):
        assert part in str(caught.value)
    assert PluginManager.from_environment(disabled=["two"]).reward("same").name == "same"


def test_plugin_cannot_take_a_name_of_ours(install_plugin):
    source = REWARD.format(name="exact-match")
    install_plugin("agl-thief", source, entry="thief")
    manager = PluginManager.from_environment()
    assert "'run' (agl-run" in status(manager, "thief").error
    assert manager.reward("exact-match").factory == "agl_run.builtin:ExactMatch"


def test_other_components_of_a_refused_duplicate_are_broken_too(install_plugin):
    more = REWARD.format(name="exact-match") + '    yield RewardEntry(name="extra", factory="math:sqrt")\n'
    install_plugin("agl-thief", more, entry="thief")
    with pytest.raises(BrokenPluginError, match="registered by two plugins"):
        PluginManager.from_environment().reward("extra")


@pytest.mark.parametrize("bound", ["agl-core>=99", "agl_core >=99,<100", "AGL.Core>=99; python_version>='3'"])
def test_incompatible_bound_is_refused_before_the_import(install_plugin, bound):
    install_plugin("agl-future", RAISES, entry="future", version="7.1", requires=("msgspec", bound))
    error = status(PluginManager.from_environment(), "future").error
    assert "no such device" not in error
    for part in ("'future' (agl-future 7.1)", ">=99", "agl-core 0.1.0", "pip install --upgrade agl-core agl-future"):
        assert part in error


@pytest.mark.parametrize("bound", ["agl-core>=0.1,<0.2", "agl-core>=99; extra == 'later'", "agl-core-extras>=9"])
def test_fitting_bound_is_accepted(install_plugin, bound):
    install_plugin("agl-fits", REWARD.format(name="fits"), entry="fits", requires=(bound,))
    assert PluginManager.from_environment().reward("fits").name == "fits"


def test_unreadable_requirement_is_named(install_plugin):
    install_plugin("agl-odd", REWARD.format(name="odd"), entry="odd", requires=("agl-core >>> 1",))
    assert "unreadable requirement" in status(PluginManager.from_environment(), "odd").error


def test_same_entry_point_name_twice_is_refused_naming_both(install_plugin):
    install_plugin("agl-first", REWARD.format(name="first"), entry="twin")
    install_plugin("agl-second", REWARD.format(name="second"), entry="twin")
    errors = [found.error for found in PluginManager.from_environment().status() if found.state == "broken"]
    assert len(errors) == 1
    assert "agl-first 1.0" in errors[0]
    assert "agl-second 1.0" in errors[0]


REFUSED = {
    "@hookimpl\nasync def agl_rewards(): ...": "agl_rewards is async",
    "def agl_rewards(): ...": "agl_rewards is not marked",
    "@hookimpl\ndef agl_step_finished(reprot): ...": "reprot",
    "@hookimpl(wrapper=True)\ndef agl_rewards(): yield": "is a wrapper",
    "@hookimpl\ndef agl_rewards(): return 3": "returned int; yield RewardEntry",
    "@hookimpl\ndef agl_rewards(): yield 'contains'": "yielded a str; yield agl.contracts.RewardEntry",
    "@hookimpl\ndef agl_rewards(): yield RewardEntry(name='Bad Name', factory=print)": "names a component 'Bad Name'",
    "@hookimpl\ndef agl_rewards(): yield RewardEntry(name='bad', factory='a.b')": "not of the form",
    "@hookimpl\ndef agl_rewards(): yield RewardEntry(name='bad', factory=3)": "pass a callable",
    "@hookimpl\ndef agl_rewards(): yield StoreEntry(name='bad', factory=print)": "yield agl.contracts.RewardEntry",
    "@hookimpl\ndef agl_rewards():\n    yield from [RewardEntry(name='twice', factory=print)] * 2": "'twice' twice",
    "import sys\nsys.exit(3)": "SystemExit: 3",
    "import a_module_that_nobody_has": "ModuleNotFoundError",
}


@pytest.mark.parametrize(("source", "expected"), REFUSED.items())
def test_hook_that_would_do_nothing_is_refused(install_plugin, source, expected):
    install_plugin("agl-odd", "from agl import RewardEntry, StoreEntry, hookimpl\n\n" + source, entry="odd")
    found = status(PluginManager.from_environment(), "odd")
    assert expected in found.error
    assert "agl-odd 1.0" in found.error
    assert found.error.count("\n") == 0


def test_optional_hook_of_another_release_is_accepted(install_plugin):
    install_plugin(
        "agl-new",
        "from agl import hookimpl\n\n@hookimpl(optionalhook=True)\ndef agl_things(): ...\n",
        entry="new",
    )
    assert status(PluginManager.from_environment(), "new").state == "loaded"


BROKEN = {
    "raises": (RAISES, ()),
    "typo": (MISSPELLED, ()),
    "duplicate": (REWARD.format(name="exact-match"), ()),
    "incompatible": (REWARD.format(name="future"), ("agl-core>=99",)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_strict_raises_at_once(install_plugin, monkeypatch, name):
    source, requires = BROKEN[name]
    install_plugin(f"agl-{name}", source, entry=name, requires=requires)
    monkeypatch.setenv("AGL_PLUGINS_STRICT", "1")
    with pytest.raises(PluginError) as caught:
        PluginManager.from_environment()
    for part in (f"'{name}' (agl-{name} 1.0)", f"AGL_DISABLED_PLUGINS={name}"):
        assert part in str(caught.value)
    monkeypatch.setenv("AGL_DISABLED_PLUGINS", f"{name}, other")
    assert status(PluginManager.from_environment(), name).state == "disabled"


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("strict", ["", "1"])
def test_command_line_names_every_broken_plugin(install_plugin, monkeypatch, name, strict):
    source, requires = BROKEN[name]
    install_plugin(f"agl-{name}", source, entry=name, requires=requires)
    monkeypatch.setenv("AGL_PLUGINS_STRICT", strict)
    done = subprocess.run([sys.executable, "-m", "agl", "plugins", "list"], capture_output=True, text=True, timeout=60)
    assert (1 if strict else 0) == done.returncode
    output = done.stderr if strict else done.stdout
    for part in (f"agl-{name} 1.0", f"AGL_DISABLED_PLUGINS={name}"):
        assert part in output
    assert "Traceback" not in done.stderr


def test_component_whose_module_quits_is_named(install_plugin, agl_plugins):
    (agl_plugins.folder / "quits.py").write_text("raise SystemExit(3)")
    install_plugin("agl-lazy", REWARD.format(name="lazy").replace("math:sqrt", "quits:make"), entry="lazy")
    manager = PluginManager.from_environment()
    with pytest.raises(
        BrokenPluginError, match=r"'quits:make' of the plugin 'lazy' \(agl-lazy 1.0\) raised SystemExit: 3"
    ):
        manager.build(manager.reward("lazy"))


LACKS = {
    "algorithm": "restore",
    "credit": "assign",
    "exporter": "export",
    "gateway": "settle",
    "modality": "expand",
    "policy": "resource",
    "redactor": "redact",
    "reward": "__call__",
    "runner": "execute",
    "store": "close",
    "tracer": "uninstall",
}
"""One method of each contract, by the kind of the component."""

LACKING = """
from agl import contracts, hookimpl

class Half:
    def begun(self): ...

def make():
    return Half()

@hookimpl
def {hook}():
    entry = contracts.{record}Entry
    yield entry(name="as-class", factory=Half)
    yield entry(name="as-object", factory=make)
"""


@pytest.mark.parametrize("kind", LACKS)
def test_component_without_a_method_of_its_contract_is_refused_with_its_name(install_plugin, kind):
    hook = {"policy": "agl_policies", "modality": "agl_modalities"}.get(kind, f"agl_{kind}s")
    install_plugin("agl-half", LACKING.format(hook=hook, record=kind.capitalize()), entry="half")
    manager = PluginManager.from_environment()
    lacks = rf"the {kind} 'as-\w+' of the plugin 'half' \(agl-half 1.0\) lacks [\w, ]*{LACKS[kind]}[\w, ]*, which"
    with pytest.raises(BrokenPluginError, match=lacks):
        manager.check(manager.entry(kind, "as-class"))
    with pytest.raises(BrokenPluginError, match=lacks):
        manager.build(manager.entry(kind, "as-object"))


DERIVED = """
from agl import TracerEntry, hookimpl
from agl.contracts import Tracer

class Half(Tracer):
    def install(self): ...
    def uninstal(self): ...

@hookimpl
def agl_tracers():
    yield TracerEntry(name="half", factory=Half)
"""


def test_tracer_that_derives_from_the_contract_and_misspells_a_method_is_refused(install_plugin):
    install_plugin("agl-half", DERIVED, entry="half")
    manager = PluginManager.from_environment()
    for act in (manager.check, manager.build):
        with pytest.raises(BrokenPluginError, match=r"'half' of the plugin 'half' \(agl-half 1.0\) lacks .*uninstall"):
            act(manager.tracer("half"))


def test_every_kind_of_component_except_commands_has_a_contract():
    assert {"command", *LACKS} == set(get_args(Kind))


RAISING = REWARD.format(name="lazy").replace("math:sqrt", "agl_lazy:make")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "raise ValueError('no device')",
            "calling 'agl_lazy:make' of the plugin 'lazy' .* raised ValueError: no device;",
        ),
        ("raise SystemExit(3)", "raised SystemExit: 3;"),
        ("raise GeneratorExit", "raised GeneratorExit;"),
        ("import absent_module", "needs the Python module 'absent_module', which is not installed; run: pip install"),
    ],
)
def test_factory_that_raises_names_its_plugin(install_plugin, body, says):
    install_plugin("agl-lazy", f"{RAISING}\ndef make():\n    {body}\n", entry="lazy")
    manager = PluginManager.from_environment()
    with pytest.raises(PluginError, match=says):
        manager.build(manager.reward("lazy"))


def test_plugin_that_still_loads_after_a_while_is_named(install_plugin, caplog, monkeypatch):
    monkeypatch.setattr(manager_module, "SLOW_S", 0.01)
    install_plugin("agl-slow", "import time\ntime.sleep(0.2)\n", entry="slow")
    with caplog.at_level(logging.WARNING, "agl._plugins"):
        PluginManager.from_environment()
    assert any("the plugin 'slow' (agl-slow 1.0) still loads; " in record.getMessage() for record in caplog.records)


ENDLESS = """
import itertools
from agl import RewardEntry, hookimpl

@hookimpl
def agl_rewards():
    for number in itertools.count():
        yield RewardEntry(name=f"r{number}", factory=print)
"""


@pytest.mark.parametrize(
    ("text", "says"), [(ENDLESS, "yields more than 1000 components"), ("raise GeneratorExit\n", "GeneratorExit")]
)
def test_plugin_that_never_ends_or_ends_a_generator_is_quarantined(install_plugin, text, says):
    install_plugin("agl-odd", text, entry="odd")
    assert says in status(PluginManager.from_environment(), "odd").error


def test_what_a_plugin_prints_while_it_loads_is_not_in_the_output(install_plugin, capsys):
    install_plugin("agl-loud", "print('hello')\n", entry="loud")
    PluginManager.from_environment()
    assert ("", "hello\n") == capsys.readouterr()


class Half:
    """Has no method of any contract."""


class Tracing(contracts.Tracer):
    def install(self, *args, **kwargs):
        pass


def test_class_that_leaves_a_method_of_its_contract_empty_is_named_before_it_is_called():
    with pytest.raises(BrokenPluginError, match="the tracer 'mine' lacks uninstall, which"):
        PluginManager().build(contracts.TracerEntry(name="mine", factory=Tracing))


@pytest.mark.parametrize("kind", LACKS)
def test_component_that_an_experiment_brings_itself_is_checked_for_its_contract(kind):
    entry = getattr(contracts, f"{kind.capitalize()}Entry")(name="mine", factory=Half)
    with pytest.raises(
        BrokenPluginError, match=rf"the {kind} 'mine' lacks [\w, ]*{LACKS[kind]}[\w, ]*, which .*; correct it$"
    ):
        PluginManager().build(entry)
