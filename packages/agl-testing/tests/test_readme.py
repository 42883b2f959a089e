"""The README's code runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_readme_has_both_examples() -> None:
    assert ["ScriptedModelServer", "StoreConformance"] == [
        name for block, name in zip(BLOCKS, ("ScriptedModelServer", "StoreConformance"), strict=True) if name in block
    ]


@pytest.mark.long
@pytest.mark.parametrize("block", BLOCKS, ids=["server", "conformance"])
def test_readme_block_runs(block: str, tmp_path: Path) -> None:
    file = tmp_path / "test_block.py"
    file.write_text(block, encoding="utf-8")
    runner = ["-m", "pytest", "-q", "-k", "queue or enqueue or weakened"] if "class Test" in block else []
    run = subprocess.run([sys.executable, *runner, str(file)], capture_output=True, text=True, cwd=tmp_path)
    assert (0, "") == (run.returncode, run.stderr), run.stdout
