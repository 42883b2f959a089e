"""The drawing of the architecture is what the packages declare."""

import re
import tomllib
from itertools import pairwise
from xml.etree import ElementTree

from tools.architecture import CONTRACTS, TARGET
from tools.components import by_kind
from tools.public import ROOT

FILES = sorted(ROOT.glob("packages/*/pyproject.toml"))
DEPENDENCIES = {file.parent.name: tomllib.loads(file.read_text())["project"]["dependencies"] for file in FILES}
DRAWING = list(ElementTree.parse(TARGET).iter())


def arrows(kind: str) -> set[tuple[str, str]]:
    return {(path.attrib["data-from"], path.attrib["data-to"]) for path in DRAWING if path.get("class") == kind}


def texts(kind: str) -> list[str]:
    return [item.text or "" for item in DRAWING if item.get("class") == kind]


def test_drawing_has_every_package():
    assert sorted(set(DEPENDENCIES) - {"agl-core"}) == sorted(texts("package"))


def test_solid_arrows_are_the_contracts_that_packages_fill():
    assert set(by_kind()) == arrows("fills")


def test_dashed_arrows_are_the_packages_that_packages_need():
    expected = {
        (name, match[1])
        for name, lines in DEPENDENCIES.items()
        for line in lines
        if (match := re.match(r"(agl-[\w-]+)", line)) and match[1] != "agl-core"
    }
    assert expected == arrows("needs")


def test_every_provider_hook_has_a_contract_in_the_drawing():
    plural = {"policy": "policies", "modality": "modalities"}
    hooks = re.findall(r"^### `agl_(\w+)\(\) ->", (ROOT / "docs/reference/hooks.md").read_text(), re.MULTILINE)
    assert hooks == [plural.get(kind, f"{kind}s") for kind in CONTRACTS]
    assert list(CONTRACTS) == texts("contract")


def test_boxes_do_not_overlap():
    boxes = [item for item in DRAWING if item.tag.endswith("rect")][1:]
    places = sorted((float(box.attrib["x"]), float(box.attrib["y"]), float(box.attrib["height"])) for box in boxes)
    assert [] == [(one, two) for one, two in pairwise(places) if one[0] == two[0] and one[1] + one[2] > two[1]]
