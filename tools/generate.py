"""Writes the files of this repository that are made from its sources: ``python -m tools.generate [--check]``.

With ``--check`` nothing is written; the exit status is 1 when a file is not what it would be made now.
"""

import sys
from pathlib import Path

from tools import algorithms, architecture, components, reference, stub
from tools.public import ROOT


def generated() -> dict[Path, str]:
    """Every generated file with its text."""
    pages = (algorithms, architecture, components, stub)
    return {**{page.TARGET: page.text() for page in pages}, **licences(), **reference.files()}


def licences() -> dict[Path, str]:
    """The licence in every package, whose wheel and source distribution can hold only what is in its folder."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return {file.parent / "LICENSE": text for file in ROOT.glob("packages/*/pyproject.toml")}


def superfluous() -> list[Path]:
    """Pages of modules that are no longer public."""
    return sorted(set(reference.FOLDER.glob("*.md")) - set(reference.files()))


def main() -> int:
    """Write the files, or check them."""
    files, is_check = generated(), "--check" in sys.argv[1:]
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in [*stale, *superfluous()]:
        said = (
            "is not up to date; run: python -m tools.generate"
            if is_check
            else "written"
            if path in files
            else "removed"
        )
        print(path.relative_to(ROOT), said)
        if is_check:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in files:
            path.write_text(files[path], encoding="utf-8")
        else:
            path.unlink()
    return 1 if is_check and (stale or superfluous()) else 0


if __name__ == "__main__":
    sys.exit(main())
