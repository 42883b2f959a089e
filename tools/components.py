"""Writes the core's table of well-known components: which of our distributions registers which.

The plugin modules that the packages' entry points name are imported, which are light by rule, and nothing that they
name.
"""

import importlib
import inspect
import json
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

from tools.public import ROOT, folders
from tools.release import projects

TARGET = ROOT / "packages/agl-core/src/agl/_plugins/packages.json"


def text() -> str:
    """The table as it has to be, a line for each distribution."""
    table: dict[str, dict[str, list[str]]] = {}
    for (distribution, kind), names in by_kind().items():
        extras = projects()[distribution].get("optional-dependencies", {})
        for name in names:
            extra = name.split()[-1]
            home = f"{distribution}[{extra}]" if extra in extras else distribution
            table.setdefault(home, {}).setdefault(kind, []).append(name)
    for kinds in table.values():
        for names in kinds.values():
            names.sort()
    lines = [f"  {json.dumps(home)}: {json.dumps(kinds, sort_keys=True)}" for home, kinds in sorted(table.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def by_kind() -> dict[tuple[str, str], list[str]]:
    """Names of components by distribution and kind, such as ``("agl-rewards", "reward")``."""
    found: dict[tuple[str, str], list[str]] = {}
    for distribution, entry in entries():
        kind, name = kind_of(entry), f"{getattr(entry, 'parent', '')} {entry.name}".strip()
        found.setdefault((distribution, kind), []).append(name)
    return found


def kind_of(entry: Any) -> str:
    """The kind of a component by its record: ``reward`` for a ``RewardEntry``."""
    return type(entry).__name__.removesuffix("Entry").lower()


def entries() -> Iterator[tuple[str, Any]]:
    """Everything that our plugins register with the core's hooks, with the distribution.

    Hooks of other packages, such as those for losses, are marked optional and left out.
    """
    for folder in folders().values():
        sys.path.append(str(folder.parent))
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for value in project.get("entry-points", {}).get("agl", {}).values():
            for name, hook in vars(importlib.import_module(value)).items():
                if not name.startswith("agl_") or hook.agl_impl["optionalhook"]:
                    continue
                if not inspect.signature(hook).parameters:
                    yield from ((project["name"], entry) for entry in hook())
