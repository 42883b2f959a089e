"""Reading the texts of tokens from the vocabularies of models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError
from agl.schemas import ResourceVersion, Rollout, Weights
from agl.stores import MemoryStore
from agl_console.vocabulary import Vocabulary
from agl_testing.commands import invoke_agl

from .conftest import Open
from .records import Recorder, rollout_name, team

BYTE_LEVEL = {"model": {"type": "BPE", "vocab": {"Hi": 0, "Ġyou": 1, "Ċ": 2, "Ã": 3, "Ã¤": 4}}}
ADDED = [{"id": 9, "content": "<|end|>", "special": True}]


def written(folder: Path, content: dict[str, Any]) -> Path:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def test_byte_level_tokens_are_their_bytes(tmp_path: Path) -> None:
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}
    written(tmp_path, {**BYTE_LEVEL, "decoder": decoder, "added_tokens": ADDED})
    texts = Vocabulary(tmp_path).texts([0, 1, 2, 3, 4, 9, 7])
    assert ["Hi", " you", "⏎", r"\xc3", "ä", "<|end|>", ""] == texts


def test_pieces_of_sentencepiece_have_spaces_and_bytes(tmp_path: Path) -> None:
    vocab = [["<unk>", 0.0], ["▁Hi", -1.0], ["<0x0A>", -2.0]]
    file = written(tmp_path, {"model": {"type": "Unigram", "vocab": vocab}, "decoder": {"type": "Replace"}})
    assert [" Hi", "⏎", "<unk>"] == Vocabulary(file).texts([1, 2, 0])


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": {"vocab": 1}}', b'{"model": {"vocab": {"\xff": 1}}}'])
def test_file_without_a_vocabulary_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match="with a vocabulary"):
        Vocabulary(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read .*missing"):
        Vocabulary(tmp_path / "missing")


def test_tokens_of_a_view_have_their_texts(filled: Path, tmp_path: Path) -> None:
    written(tmp_path, {"model": {"vocab": {"<script>": 100, "▁b": 101}}})
    address = f"/rollouts/{rollout_name(0)}/tokens?row=1"
    words = ("console", str(filled), "--tokenizer", str(tmp_path), "--json", address)
    cells = json.loads(invoke_agl(*words, folder=tmp_path))["cells"]
    assert ["<script>", " b", ""] == [cell["text"] for cell in cells[:3]]


async def test_tokens_have_the_texts_of_the_weights_that_sampled_them(opened: Open, tmp_path: Path) -> None:
    store = MemoryStore()
    versions: list[ResourceVersion] = []
    for name in ("v1", "v2"):
        folder = tmp_path / name
        folder.mkdir()
        written(folder, {"model": {"vocab": {f"of {name}": 100}}})
        versions.append(ResourceVersion(name="small", version=name, resource=Weights(uri=str(folder))))
    await store.publish(versions)
    await store.enqueue([Rollout(rollout_id="r", task=1, resources={"small": "v1"})])
    (claim,) = await store.claim(worker="w")
    recorder = Recorder("r", claim.attempt.attempt_id)
    team(recorder, text="go", reward=None, version="1")
    await store.append_spans(recorder.spans)
    address = "/rollouts/r/tokens?row=1"
    async with opened(store) as client:
        shown = [
            await (await client.get(each + "&format=json")).json()
            for each in (address, "/rollouts/r/spans/5?attempt=1")
        ]
        assert [["of v1", ""]] * 2 == [[cell["text"] for cell in each["cells"][:2]] for each in shown]
        (tmp_path / "v1" / "tokenizer.json").unlink()
        data = await (await client.get(address + "&format=json")).json()
        page = await (await client.get(address)).text()
    assert "of v2" == data["cells"][0]["text"]
    assert re.search(r'<span class="bound">answer</span><span class="t [^>]*data-about="position 20,', page)
