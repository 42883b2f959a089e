"""``Trainer`` within a notebook: its event loop runs already, and cells are executed one after the other."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

AGENT = """
import agl
from agl_run import Quiet

async def solve(task):
    agl.emit_message(task)
    return float(task == "good")

def trainer(**settings):
    return agl.Trainer(store="sqlite:///runs/notebook.db", progress=Quiet(), **settings)
"""

FIT = """
import asyncio
assert asyncio.get_running_loop().is_running()
result = trainer(name="plain").fit(solve, val_dataset=["good", "bad"])
print("fit", result.before)
"""

AWAIT = """
result = await trainer(name="awaited").fit_async(solve, val_dataset=["good", "good"])
print("awaited", result.before)
"""

DEV = """
result = trainer(name="dry").dev(solve, train_dataset=["good", "bad"])
print("dev", [episode.reward for episode in result.episodes])
"""

WRONG = """
try:
    trainer(name="wrong", runnr="async").fit(solve)
except agl.ConfigError as error:
    print("refused", error)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the notebook libraries' own
def test_notebook_runs_fit_and_dev_within_its_running_loop(tmp_path: Path) -> None:
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(source) for source in (AGENT, FIT, AWAIT, DEV, WRONG)]
    file = tmp_path / "train.ipynb"
    nbformat.write(book, file)

    client = NotebookClient(
        nbformat.read(file, as_version=4),
        timeout=60,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    done = client.execute()

    printed, warned = (
        [
            "".join(output.get("text", "") for output in cell.outputs if output.get("name") == name)
            for cell in done.cells
        ]
        for name in ("stdout", "stderr")
    )
    assert [False, True, True, True, False] == ["rollouts made no recorded model call" in text for text in warned]
    assert ["", "fit 0.5\n", "awaited 1.0\n", "dev [1.0, 0.0]\n"] == printed[:4]
    assert "refused Trainer got the unknown argument 'runnr'; did you mean 'runner'?\n" == printed[4]
    assert (tmp_path / "runs" / "notebook.db").exists()


BOOKS = Path(__file__).parents[1] / "examples" / "notebook"


def outputs(book: Any) -> list[list[str]]:
    """The outputs and results of the code cells."""
    return [
        [str(output.get("text") or output["data"]["text/plain"]) for output in cell.outputs]
        for cell in book.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the notebook libraries' own
@pytest.mark.parametrize("name", sorted(path.name for path in BOOKS.glob("*.ipynb")))
def test_example_notebook_gives_the_outputs_that_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    shown = nbformat.read(BOOKS / name, as_version=4)
    expected = outputs(shown)
    client = NotebookClient(shown, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    assert expected == outputs(client.execute())
    assert any(expected)
