"""TRL and VERL make of exported pictures what agl trains on: equal ids, tensors and positions (``nox -s trl``)."""

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl.contracts import Recording
from agl.schemas import Blob, digest_of, unpack_ids

from .conftest import episode_of
from .picture_world import answered, call_of, recording_of_calls, shown, written

pytestmark = pytest.mark.filterwarnings("default")

torch: Any = pytest.importorskip("torch")
vision: Any = pytest.importorskip("agl_vision.modality", reason="agl-vision is not installed; nox -s trl has it")


@pytest.fixture(scope="module", params=["qwen2-vl", "idefics3"])
def modality(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from agl_vision.tiny import make_tiny

    try:
        made = make_tiny(tmp_path_factory.mktemp("models"), family=request.param)
    except ImportError:
        pytest.skip("this release of transformers reads the pictures of Idefics3 with torchvision only")
    found = vision.TransformersVision(model=str(made))
    found.folder = made
    return found


def picture(colour: str, size: tuple[int, int]) -> Blob:
    from PIL import Image

    file = io.BytesIO()
    Image.effect_mandelbrot(size, (-2, -1, 1, 1), 50).convert("RGB").save(file, "PNG")
    image = Image.blend(Image.open(io.BytesIO(file.getvalue())), Image.new("RGB", size, colour), 0.5)
    file = io.BytesIO()
    image.save(file, "PNG")
    return Blob(digest=digest_of(file.getvalue()), media_type="image/png", data=file.getvalue())


def conversation(modality: Any) -> tuple[Recording, list[Blob]]:
    """Return three turns, the first two with a picture, as the policy server and the gateway record them."""
    tokenizer = modality._processor.tokenizer
    blobs = [picture("red", (16, 24)), picture("blue", (30, 9))]
    talk = [
        *(shown(blobs[0], "What is it?"), answered("A cat.")),
        *(shown(blobs[1], "And this?"), answered("A dog.")),
        *({"role": "user", "content": "Sure?"}, answered("Yes.")),
    ]
    calls, ids = [], []
    for turn in (2, 4, 6):
        asked = [
            {**each, "content": [{"type": "image"}, *each["content"][1:]]}
            if isinstance(each["content"], list)
            else each
            for each in talk[turn - 2 : turn - 1]
        ]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        ids += tokenizer(("\n" if ids else "") + text)["input_ids"]
        prompt, media = modality.expand(ids, blobs[: min(turn // 2, 2)])
        answer = tokenizer(talk[turn - 1]["content"] + tokenizer.eos_token)["input_ids"]
        calls.append(call_of(talk[:turn], prompt, answer, media, processor=modality.processor))
        ids += answer
    return recording_of_calls(calls), blobs


def expected(modality: Any, recording: Recording, blobs: list[Blob]) -> tuple[list[int], dict[str, Any], Any]:
    """Return the ids, the tensors and the positions of the conversation's row, as the algorithms of agl make them."""
    (row,) = episode_of(recording).rows
    ids = unpack_ids(row.ids)
    return ids, modality.features(blobs, row.media), modality.positions(ids, row.media)


def equal(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def test_inputs_of_trl_are_those_of_the_row(modality: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed; nox -s trl installs it")
    from datasets import Dataset
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    recording, blobs = conversation(modality)
    path = tmp_path / "dialogues.parquet"
    assert 1 == asyncio.run(written("trl", path, recording, blobs))
    data = Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    processor = modality._processor
    processor.chat_template = processor.tokenizer.chat_template
    batch = DataCollatorForVisionLanguageModeling(processor, max_length=None)([data[0]])

    ids, features, _ = expected(modality, recording, blobs)
    found = batch["input_ids"][0].tolist()
    assert ids == found[: len(ids)]
    assert "\n" == processor.tokenizer.decode(found[len(ids) :])  # with which the template closes the last answer
    for name, tensor in features.items():
        assert equal(tensor, batch[name]), name


def test_trainer_of_trl_learns_from_the_exported_pictures(modality: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed; nox -s trl installs it")
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText
    from trl import SFTConfig, SFTTrainer

    path = tmp_path / "dialogues.parquet"
    asyncio.run(written("trl", path, *conversation(modality)))
    model = AutoModelForImageTextToText.from_pretrained(modality.folder)
    args = SFTConfig(
        output_dir=str(tmp_path / "out"), max_length=None, max_steps=3, learning_rate=1e-2, use_cpu=True, report_to=[]
    )
    processor = modality._processor
    processor.chat_template = processor.tokenizer.chat_template
    data = Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    trainer = SFTTrainer(model, args=args, train_dataset=data, processing_class=processor)
    first = trainer.evaluate(data)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(data)["eval_loss"] < first - 0.1


@pytest.mark.parametrize("modality", ["qwen2-vl"], indirect=True)  # VERL drops the placeholders of the other
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_inputs_of_verl_are_those_of_the_row(modality: Any, tmp_path: Path, suffix: str) -> None:
    loops = pytest.importorskip(
        "verl.experimental.agent_loop.agent_loop", reason="VERL is not installed; nox -s trl installs it"
    )
    import pyarrow.parquet as parquet
    from transformers import AutoModelForImageTextToText
    from transformers.image_utils import load_image

    recording, blobs = conversation(modality)
    path = tmp_path / f"rows{suffix}"
    assert 1 == asyncio.run(written("verl", path, recording, blobs))
    if suffix == ".jsonl":
        record = json.loads(path.read_bytes())
    else:
        (record,) = parquet.read_table(path).to_pylist()
        record["extra_fields"] = json.loads(record["extra_fields"])
    record["multi_modal_data"] = {"images": [load_image(url) for url in record["multi_modal_data"]["images"]]}
    output = loops.AgentLoopOutput(**record)

    ids, features, positions = expected(modality, recording, blobs)
    assert ids == [*output.prompt_ids, *output.response_ids]
    worker: Any = SimpleNamespace(processor=modality._processor, tokenizer=modality._processor.tokenizer)
    worker._get_mm_processor_kwargs = lambda audios: {}
    inputs = loops.AgentLoopWorker._compute_multi_modal_inputs(worker, output, torch.tensor([ids]))
    for name, tensor in features.items():
        assert equal(tensor, inputs[name]), name
    model = AutoModelForImageTextToText.from_pretrained(modality.folder)
    worker.processor.get_rope_index = model.model.get_rope_index  # as VERL's workers bind it
    mask = torch.ones(1, len(ids), dtype=torch.long)
    made = loops.AgentLoopWorker._compute_position_ids(worker, torch.tensor([ids]), mask, inputs)
    assert equal(positions, made[0, 1:])  # before them VERL puts the plain positions
