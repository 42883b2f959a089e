"""``agl data export --format model``: exports trained weights to a new directory."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agl.schemas import PromptTemplate, ResourceVersion, Weights
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose store has a prompt, an adapter, and two versions of weights; the older version has no files."""
    for name in ("new", "adapter"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "model.safetensors").write_text(name)
    versions = [
        ResourceVersion(name="llm", version="v1", resource=Weights(uri=str(tmp_path / "gone"))),
        ResourceVersion(name="llm", version="v2", parent="v1", resource=Weights(uri=str(tmp_path / "new"))),
        ResourceVersion(
            name="small",
            version="v1",
            resource=Weights(uri=str(tmp_path / "adapter"), base_model="base", format="lora"),
        ),
        ResourceVersion(name="prompt", version="v1", resource=PromptTemplate(template="Answer {q}")),
    ]

    async def publish() -> None:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'runs.db'}")
        await store.publish(versions)
        await store.close()

    asyncio.run(publish())
    return tmp_path


def export(folder: Path, *words: str, output: str | None = "out") -> Result:
    where = ["--output", str(folder / output)] if output else []
    store = ["--store", f"sqlite:///{folder / 'runs.db'}"]
    return CliRunner().invoke(cli, ["data", "export", *words, "--format", "model", *where, *store])


def test_the_newest_version_is_copied(folder: Path) -> None:
    result = export(folder, "llm")
    assert (0, True) == (result.exit_code, "llm@v2 written to" in result.output), result.output
    assert "new" == (folder / "out" / "deep" / "model.safetensors").read_text()
    assert [] == [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_an_adapter_names_its_base_model(folder: Path) -> None:
    assert "an adapter of base" in export(folder, "small").output


@pytest.mark.parametrize(
    ("words", "output", "message"),
    [
        (("llm@v1",), "out", "are not at"),
        (("llm",), None, "name the target"),
        (("llm",), "new", "is a directory"),
        (("llm",), "runs.db", "exists"),
        (("llm", "small"), "out", "2 resources are named"),
        (("prompt",), "out", "is a PromptTemplate"),
        ((), "out", "name one"),
    ],
    ids=["gone", "no output", "a directory", "a file", "two", "a prompt", "nothing"],
)
def test_what_cannot_be_copied_is_refused(
    folder: Path, words: tuple[str, ...], output: str | None, message: str
) -> None:
    result = export(folder, *words, output=output)
    assert (True, True) == (result.exit_code != 0, message in result.output), result.output
    assert not (folder / "out").exists()
