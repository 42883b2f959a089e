"""The modality of transformers' processors gives what they give, for both families; broken pictures are refused."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, Qwen2Config

from agl import PluginManager
from agl.errors import ConfigError
from agl_testing.conformance import ModalityCase, ModalityConformance, PluginConformance
from agl_vision import pictures
from agl_vision.modality import TransformersVision
from agl_vision.tiny import Family, make_tiny

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agl.schemas import Blob


class TestPlugin(PluginConformance):
    module = "agl_vision.plugin"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    """One tiny model of each family."""
    families: tuple[Family, ...] = ("qwen2-vl", "idefics3")
    return {family: make_tiny(tmp_path_factory.mktemp("tiny"), family=family) for family in families}


def case_of(folder: Path) -> ModalityCase:
    """The family's processor as the reference: it gets the whole text and all pictures at once."""
    manager = PluginManager.from_environment()
    modality = manager.build(manager.modality("transformers"), model=str(folder))
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    processor = modality._processor

    def reference(ids: Sequence[int], blobs: Sequence[Blob]) -> dict[str, Any]:
        shown = [Image.open(io.BytesIO(blob.data)) for blob in blobs]
        text = processor.tokenizer.decode(ids)
        found = dict(processor(text=[text], images=shown or None, return_tensors="pt", add_special_tokens=False))
        tokens, types = found.pop("input_ids"), found.pop("mm_token_type_ids", None)
        found.pop("attention_mask")
        positions = None
        if hasattr(model.model, "get_rope_index"):
            grid = found.get("image_grid_thw")
            types = torch.zeros_like(tokens) if types is None else types
            positions = model.model.get_rope_index(tokens, mm_token_type_ids=types, image_grid_thw=grid)[0][:, 0]
        return {"ids": tokens[0].tolist(), "positions": positions, **found}

    return ModalityCase(
        modality=modality, placeholder=model.config.image_token_id, words=range(64, 90), reference=reference
    )


@pytest.fixture(scope="session")
def cases(folders: dict[str, Path]) -> dict[str, ModalityCase]:
    return {family: case_of(folder) for family, folder in folders.items()}


class TestQwen2VL(ModalityConformance):
    @pytest.fixture
    def case(self, cases):
        return cases["qwen2-vl"]


class TestIdefics3(ModalityConformance):
    @pytest.fixture
    def case(self, cases):
        return cases["idefics3"]


def test_processor_names_its_settings(folders, tmp_path):
    names = [TransformersVision(model=str(folders[family])).processor for family in ("qwen2-vl", "idefics3")]
    other = TransformersVision(model=str(make_tiny(tmp_path, picture=16))).processor
    assert ["Qwen2VLProcessor", "Idefics3Processor"] == [name.split()[0] for name in names]
    assert names[0].rpartition(" ")[0] == other.rpartition(" ")[0]
    assert names[0] != other
    assert names[0] == TransformersVision(model=str(folders["qwen2-vl"])).processor


def test_words_are_tokens(tmp_path):
    processor = TransformersVision(model=str(make_tiny(tmp_path, words=["red", "green"])))._processor
    assert 3 == len(processor.tokenizer("redgreenx")["input_ids"])


def test_model_of_text_is_refused(tmp_path):
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no processor"):
        TransformersVision(model=str(tmp_path))


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("kind", pictures.FORMATS)
def test_picture_of_each_format_is_read(kind):
    assert (5, 3) == pictures.decode(saved(Image.new("RGB", (5, 3), "red"), kind)).size


def test_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (255, 0, 0) == pictures.decode(data).getpixel((0, 0))


def test_turned_photograph_is_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    assert (3, 5) == pictures.decode(saved(Image.new("RGB", (5, 3)), "JPEG", exif=exif)).size


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"<svg/>", "is not a PNG"),
        (saved(Image.new("RGB", (9, 9)), "BMP"), "is not a PNG"),
        (saved(Image.effect_noise((64, 64), 90), "PNG")[:2000], "damaged"),
        (saved(Image.new("1", (6000, 6000)), "PNG"), "6000 by 6000"),
    ],
)
def test_picture_out_of_bounds_is_refused(data, says):
    with pytest.raises(ValueError, match=says):
        pictures.decode(data)
