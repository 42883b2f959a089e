"""The drawing of the architecture is what the packages declare."""

import re
import tomllib

from tools.architecture import CONTRACTS, TARGET
from tools.components import by_kind
from tools.public import ROOT

FILES = sorted(ROOT.glob("packages/*/pyproject.toml"))
DEPENDENCIES = {file.parent.name: tomllib.loads(file.read_text())["project"]["dependencies"] for file in FILES}
TEXT = TARGET.read_text()


def arrows(kind: str) -> set[tuple[str, str]]:
    found = re.findall(rf"^  (\w+) {re.escape(kind)} (\w+)$", TEXT, re.MULTILINE)
    return {(left.replace("_", "-"), right.replace("_", "-")) for left, right in found}


def test_drawing_has_every_package():
    drawn = re.findall(r'\["(agl-[\w-]+)"\]', TEXT)
    assert sorted(set(DEPENDENCIES) - {"agl-core"}) == sorted(drawn)


def test_solid_arrows_are_the_contracts_that_packages_fill():
    assert set(by_kind()) == arrows("-->")


def test_dashed_arrows_are_the_packages_that_packages_need():
    expected = {
        (name, match[1])
        for name, lines in DEPENDENCIES.items()
        for line in lines
        if (match := re.match(r"(agl-[\w-]+)", line)) and match[1] != "agl-core"
    }
    assert expected == arrows("-. needs .->")


def test_every_provider_hook_has_a_contract_in_the_drawing():
    plural = {"policy": "policies", "command": "commands"}
    hooks = re.findall(r"^### `agl_(\w+)\(\) ->", (ROOT / "docs/reference/hooks.md").read_text(), re.MULTILINE)
    assert hooks == [plural.get(kind, f"{kind}s") for kind in CONTRACTS]
    assert list(CONTRACTS) == re.findall(r'^    (\w+)\(\["\1"\]\)$', TEXT, re.MULTILINE)
