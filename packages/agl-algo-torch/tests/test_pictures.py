"""Rows with pictures: their inputs, their log-probabilities, and the calls that are refused."""

import random
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from agl.schemas import Blob, digest_of
from agl_algo_torch.learner.batch import RowSample, from_tokens, recompute_logprobs
from agl_algo_torch.learner.model import LoadedModel, load_model
from agl_algo_torch.learner.packing import pack, packs_rows
from agl_algo_torch.learner.pictures import expanded
from agl_algo_torch.learner.scoring import find_head
from agl_vision.tiny import make_tiny

FAMILIES = ("qwen2-vl", "idefics3")


def picture(seed: int, *, size: tuple[int, int] = (16, 16)) -> Blob:
    """Return a picture of one random colour."""
    colour = tuple(random.Random(seed).randbytes(3))
    file = BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return Blob(digest=digest_of(file.getvalue()), media_type="image/png", data=file.getvalue())


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / request.param, family=request.param, layers=2, context=2048)


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu")


def dialogue(loaded: LoadedModel, pictures: int, *, turns: int = 3) -> RowSample:
    """Return a row of several turns whose pictures are spread over the turns; the answers train."""
    blobs = [picture(seed, size=(8 + 8 * (seed % 3), 16)) for seed in range(pictures)]
    ids: list[int] = []
    mask: list[int] = []
    for turn in range(turns):
        seen = len(blobs[turn::turns])
        content = [{"type": "image"}] * seen + [{"type": "text", "text": f"turn {turn}"}]
        text = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        asked = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = loaded.tokenizer(f"answer {turn}<|im_end|>", add_special_tokens=False)["input_ids"]
        ids += [*asked, *answer]
        mask += [0] * len(asked) + [1] * len(answer)
    ordered = [blob for turn in range(turns) for blob in blobs[turn::turns]]
    assert loaded.modality is not None
    whole, grown, own = expanded(ids, mask, ordered, loaded.modality)
    return from_tokens(f"rollout-{pictures}", whole, grown, pictures=own)


@torch.no_grad()
def plain_logprobs(loaded: LoadedModel, row: RowSample) -> torch.Tensor:
    """Return log-probabilities by one pass of the model as transformers documents it, [T]."""
    inputs: dict[str, Any] = {"input_ids": row.ids[None]}
    if row.pictures is not None:
        inputs |= row.pictures.modality.features(row.pictures.blobs, row.pictures.spans)
        is_picture = torch.isin(row.ids, torch.tensor(loaded.model.config.image_token_id))
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = is_picture[None].int()
    logits = loaded.model(**inputs, use_cache=False).logits[0, :-1]
    logits[:, sorted(loaded.modality.banned)] = -torch.inf
    found = torch.zeros(len(row.ids))
    found[1:] = logits.log_softmax(-1).gather(1, row.ids[1:, None])[:, 0]
    return found.where(row.trained, 0.0)


@pytest.mark.parametrize("is_packed", [True, False])
def test_logprobs_of_rows_with_pictures_are_those_of_the_model_itself(loaded: LoadedModel, is_packed: bool) -> None:
    rows = [dialogue(loaded, count) for count in (0, 1, 2, 6)]
    expected = [plain_logprobs(loaded, row) for row in rows]
    loaded.model.base_model.rope_deltas = None  # what the model remembers of its own pass
    assert find_head(loaded.model) == ""
    if is_packed:
        assert pack(loaded.model) == ""
    assert packs_rows(loaded.model) == is_packed
    found = recompute_logprobs(loaded.model, rows, token_budget=10_000, device=loaded.device)
    alone = recompute_logprobs(loaded.model, rows, token_budget=1, device=loaded.device)
    for one, other, single in zip(expected, found, alone, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0)
        torch.testing.assert_close(single, one, atol=1e-5, rtol=0)


def test_logprobs_depend_on_the_picture(loaded: LoadedModel) -> None:
    row = dialogue(loaded, 2)
    assert row.pictures is not None
    blobs = tuple(picture(90 + seed, size=(8 + 8 * seed, 16)) for seed in range(2))
    other = replace(row, pictures=replace(row.pictures, blobs=blobs))
    found = recompute_logprobs(loaded.model, [row, other], token_budget=1, device=loaded.device)
    assert float((found[0] - found[1]).abs().max()) > 1e-4
