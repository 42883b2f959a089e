"""What ``agl`` offers by name, and that specifications are resolved by the plugin manager."""

import ast
import sys
from pathlib import Path

import msgspec
import pytest

import agl
from agl import AlgorithmSpec, ConfigError, PluginManager, Spec, UnknownComponentError


def test_all_is_sorted_and_without_doubles():
    assert sorted(set(agl.__all__)) == agl.__all__


@pytest.mark.parametrize("name", agl.__all__)
def test_every_public_name_resolves(name):
    assert getattr(agl, name) is not None
    assert name in dir(agl)


def test_type_checkers_see_exactly_the_public_names():
    tree = ast.parse(Path(agl.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == agl.__all__
    homes = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    for name, module in homes.items():
        value = getattr(agl, name)
        assert getattr(sys.modules[module or ""], name) is value


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'agl' has no attribute 'Traner'"):
        _ = agl.Traner  # type: ignore[attr-defined]


def test_every_public_error_hangs_below_the_root():
    names = [name for name in agl.__all__ if name.endswith("Error")]
    assert len(names) >= 18
    assert all(issubclass(getattr(agl, name), agl.AglError) for name in names)


@pytest.mark.parametrize("name", ["VERL", "APO", "GEPA", "GRPO", "SFT", "PPO", "DPO"])
def test_algorithm_specification_takes_a_mapping_or_keywords(name):
    make = getattr(agl, name)
    expected = AlgorithmSpec(name=name.lower(), params={"lr": 0.1}, tunes=("main_llm",), agents="write")
    assert expected == make({"lr": 0.1}, tunes="main_llm", agents="write")
    assert expected == make(lr=0.1, tunes=["main_llm"], agents="write")
    assert AlgorithmSpec(name=name.lower()) == make()


def test_specification_refuses_a_parameter_given_twice():
    with pytest.raises(ConfigError, match="'lr'"):
        agl.GRPO({"lr": 0.1}, lr=0.2)


def test_specifications_of_other_kinds():
    assert Spec(kind="policy", name="torch", params={"model": "m"}) == agl.Policy("torch", model="m")
    assert Spec(kind="runner", name="process", params={"name": "x"}) == agl.Runner("process", name="x")
    assert Spec(kind="credit", name="turn", params={"gamma": 0.9}) == agl.Credit("turn", gamma=0.9)


def test_specification_is_frozen():
    with pytest.raises(AttributeError):
        agl.VERL().name = "other"  # type: ignore[misc]
    assert AlgorithmSpec(name="verl") == msgspec.json.decode(msgspec.json.encode(agl.VERL()), type=AlgorithmSpec)


def test_missing_package_of_a_specification_says_what_to_install():
    spec = agl.VERL({"trainer": {"n_gpus_per_node": 8}})
    with pytest.raises(UnknownComponentError, match="pip install agl-algo-verl"):
        PluginManager().entry(spec.kind, spec.name)
