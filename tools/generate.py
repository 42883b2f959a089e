"""Writes the files of this repository that are made from its sources: ``python tools/generate.py [--check]``.

With ``--check`` nothing is written; the exit status is 1 when a file is not what it would be made now.
"""

import sys
from pathlib import Path

import components
from public import ROOT


def generated() -> dict[Path, str]:
    """Every generated file with its text."""
    return {components.TARGET: components.text()}


def main() -> int:
    """Write the files, or check them."""
    files = generated()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    is_check = "--check" in sys.argv[1:]
    for path in stale:
        said = "is not up to date; run: python tools/generate.py" if is_check else "written"
        print(path.relative_to(ROOT), said)
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
