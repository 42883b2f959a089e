"""The public names of ``agl``, and the records that name an algorithm or another component."""

import ast
import inspect
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

import agl
from agl import ConfigError, PluginManager, errors
from agl.algorithms import AlgorithmConfig, ComponentConfig, algorithm, component
from agl.errors import UnknownComponentError
from agl.hints import pip_install

MODULES = [
    "agl",
    "agl.algorithms",
    "agl.contracts",
    "agl.dialects",
    "agl.episodes",
    "agl.errors",
    "agl.hints",
    "agl.schemas",
    "agl.stores",
    "agl.tracing",
]


@pytest.mark.parametrize("module", MODULES)
def test_all_names_everything_once(module):
    names = import_module(module).__all__
    assert sorted(set(names)) == sorted(names)
    assert [] == [name for name in names if not hasattr(import_module(module), name)]


def test_no_more_names_than_an_author_types():
    assert len(agl.__all__) <= 41


def test_no_function_shares_its_name_with_a_contract():
    def values(module):
        return {name: getattr(import_module(module), name) for name in import_module(module).__all__}

    protocols = {name for name, value in values("agl.contracts").items() if getattr(value, "_is_protocol", False)}
    functions = {name for module in MODULES for name, value in values(module).items() if inspect.isfunction(value)}
    assert {"Algorithm", "Policy", "Runner", "Credit"} <= protocols
    assert set() == protocols & functions


@pytest.mark.parametrize("name", agl.__all__)
def test_every_public_name_resolves(name):
    assert getattr(agl, name) is not None
    assert name in dir(agl)


def test_type_checkers_see_exactly_the_public_names():
    tree = ast.parse(Path(agl.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == sorted(agl.__all__)
    homes = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    for name, module in homes.items():
        value = getattr(agl, name)
        assert getattr(sys.modules[module or ""], name) is value


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'agl' has no attribute 'Traner'"):
        _ = agl.Traner  # type: ignore[attr-defined]


def test_trainer_says_what_to_install_where_agl_run_is_missing():
    code = "import sys; sys.modules['agl_run'] = None; import agl; agl.LLM; agl.Trainer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    said = f"agl.Trainer is in the distribution agl-run, which is not installed; run: {pip_install('agl-run')}"
    assert f"ImportError: {said}" == done.stderr.splitlines()[-1]


def test_every_error_hangs_below_the_root():
    assert len(errors.__all__) >= 18
    assert all(issubclass(getattr(errors, name), agl.AglError) for name in errors.__all__)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_the_way_to_another_process(name):
    kind = getattr(errors, name)
    parts = ("rollout", "r", "look again") if kind is errors.NotFoundError else ("what was found",)
    error = kind(*parts, **({"is_passing": True, "retry_after_s": 2.0} if kind is errors.ExportError else {}))
    error.add_note("a note")
    arrived = pickle.loads(pickle.dumps(error))
    assert (kind, str(error), vars(error)) == (type(arrived), str(arrived), vars(arrived))


@pytest.mark.parametrize("name", ["VERL", "APO", "GEPA", "GRPO", "SFT", "PPO", "DPO"])
def test_algorithm_takes_a_mapping_or_keywords(name):
    make = getattr(agl, name)
    expected = AlgorithmConfig(use=name.lower(), params={"lr": 0.1}, tunes=("main_llm",), agents="write")
    assert expected == make({"lr": 0.1}, tunes="main_llm", agents="write")
    assert expected == make(lr=0.1, tunes=["main_llm"], agents="write")
    assert AlgorithmConfig(use=name.lower()) == make()


def test_algorithm_refuses_a_parameter_given_twice():
    with pytest.raises(ConfigError, match="'lr'"):
        agl.GRPO({"lr": 0.1}, lr=0.2)


def test_algorithm_of_any_name_has_its_place_in_the_experiment():
    found = algorithm("rft", tunes="a", name="second", source=["first"], credit="turn", min_reward=1.0)
    assert (
        AlgorithmConfig(
            use="rft",
            tunes=("a",),
            name="second",
            source=("first",),
            credit=ComponentConfig(use="turn"),
            params={"min_reward": 1.0},
        )
        == found
    )


def test_algorithm_is_called_by_its_registered_name_unless_it_has_another():
    assert "grpo" == AlgorithmConfig(use="grpo").name
    assert "grpo" == msgspec.convert({"use": "grpo"}, AlgorithmConfig).name
    assert "late" == AlgorithmConfig(use="grpo", name="late").name


def test_component_takes_any_parameter():
    assert ComponentConfig(use="turn", params={"gamma": 0.9, "name": "x"}) == component("turn", gamma=0.9, name="x")


def test_configuration_is_frozen_and_survives_json():
    with pytest.raises(AttributeError):
        agl.VERL().name = "other"  # type: ignore[misc]
    assert agl.VERL(tunes="a") == msgspec.json.decode(msgspec.json.encode(agl.VERL(tunes="a")), type=AlgorithmConfig)


def test_contract_of_algorithms_answers_a_guess_with_what_works():
    with pytest.raises(ConfigError, match=r"write agl\.Trainer\(algorithm='apo'\)"):
        agl.Algorithm("apo", beam=2)  # type: ignore[abstract]

    class Mine(agl.Algorithm):
        def __init__(self, *, steps: int) -> None:
            self.steps = steps

    assert 3 == Mine(steps=3).steps


def test_missing_package_of_an_algorithm_says_what_to_install():
    with pytest.raises(UnknownComponentError, match=re.escape(pip_install("agl-algo-verl"))):
        PluginManager().algorithm(agl.VERL().use)
