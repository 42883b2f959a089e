"""Rows with pictures: their inputs, their log-probabilities, and the calls that are refused."""

import asyncio
import base64
import json
import random
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

from agl.episodes import make_rows
from agl.errors import DatasetError
from agl.schemas import Blob, Episode, MediaSpan, Rollout, Transition, Weights, digest_of, pack_ids
from agl.stores import MemoryStore
from agl_algo_torch.data.credited_rows import live_rows
from agl_algo_torch.data.dialogues import read_dialogues, tokenize
from agl_algo_torch.learner.batch import RowSample, from_tokens, recompute_logprobs
from agl_algo_torch.learner.model import LoadedModel, load_model
from agl_algo_torch.learner.packing import pack, packs_rows
from agl_algo_torch.learner.pictures import Pictures, RowPictures, expanded
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_algo_torch.learner.replay import ReplayBuffer
from agl_algo_torch.learner.scoring import find_head
from agl_algo_torch.learner.typed_torch import backward
from agl_algo_torch.serving.policy import TorchPolicy
from agl_objectives.settings import Compute, Lora, Optim, Replay
from agl_vision.tiny import make_tiny

from .seeing_world import Talk, blob
from .test_seeing import TURNS, pictures

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

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
    made = load_model(str(folder), device="cpu")
    with torch.no_grad():  # with weights as small as at first, neither pictures nor positions would matter
        for name, parameter in made.model.named_parameters():
            if parameter.ndim > 1 and "embed_tokens" not in name:
                parameter.mul_(6.0)
    return made


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


@pytest.mark.parametrize("count", TURNS)
def test_logprobs_of_the_trainer_are_those_of_the_policy_server(loaded: LoadedModel, connect: Any, count: int) -> None:
    policy = TorchPolicy(name="tiny", model=loaded)
    asyncio.run(policy.start())
    talk = Talk(connect(policy), pictures(count)).run()
    asyncio.run(policy.stop())
    assert loaded.modality is not None
    shown = {one.digest: one for turn in talk.pictures for one in map(blob, turn)}
    rows: list[RowSample] = []
    for answer in talk.answers:
        prompt, said = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        spans = msgspec.convert(answer.get("prompt_media", []), tuple[MediaSpan, ...])
        own = RowPictures(spans=spans, blobs=tuple(shown[s.digest] for s in spans), modality=loaded.modality)
        mask = [0] * len(prompt) + [1] * len(said)
        rows.append(from_tokens("r", [*prompt, *said], mask, pictures=own if spans else None))
    pack(loaded.model)
    found = recompute_logprobs(loaded.model, rows, token_budget=10_000, device=loaded.device)
    for row, answer, found_T in zip(rows, talk.answers, found, strict=True):
        served = [one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]]
        torch.testing.assert_close(found_T[row.mask], torch.tensor(served), atol=1e-5, rtol=0)


def test_logprobs_depend_on_the_picture(loaded: LoadedModel) -> None:
    row = dialogue(loaded, 2)
    assert row.pictures is not None
    blobs = tuple(picture(90 + seed, size=(8 + 8 * seed, 16)) for seed in range(2))
    other = replace(row, pictures=replace(row.pictures, blobs=blobs))
    found = recompute_logprobs(loaded.model, [row, other], token_budget=1, device=loaded.device)
    assert float((found[0] - found[1]).abs().max()) > 1e-4


def test_saved_rollouts_get_their_pictures_back_or_are_dropped(loaded: LoadedModel, tmp_path: Path) -> None:
    modality = loaded.modality
    assert modality is not None
    rows = [replace(row, advantages=row.mask.float()) for row in (dialogue(loaded, count) for count in (0, 1, 2))]
    store, kept = MemoryStore(), ReplayBuffer("grpo", Replay(share=0.5))
    asyncio.run(store.save_blobs([picture(0, size=(8, 16))]))  # the second one of the last rollout is gone
    kept.pool.take("v1", own=1)
    kept.add("v1", rows, uses={row.rollout: () for row in rows})
    kept.save(tmp_path, step=1, keep=2)

    lines: list[str] = []

    def restored(modality: Any) -> list[RowSample]:
        pictures, found = Pictures(modality), ReplayBuffer("grpo", Replay(share=0.5))

        async def shown(spans: Any) -> Pictures:
            await pictures.read(store, spans)
            return pictures

        asyncio.run(found.load(tmp_path, step=1, shown=shown, say=lines.append))
        return found.pool.rows

    assert [row.pictures for row in rows[:2]] == [row.pictures for row in restored(modality)]
    assert [rows[0].rollout] == [row.rollout for row in restored(SimpleNamespace(processor="another"))]
    assert [
        "dropped 1 of 3 rollouts to replay: the store no longer has their pictures",
        "dropped 2 of 3 rollouts to replay: their pictures went through another processor",
    ] == lines


def call(loaded: LoadedModel, blobs: list[Blob], *, answer: str = "ok", number: int = 0) -> Transition:
    """Return a recorded call that shows pictures."""
    assert loaded.modality is not None
    content = [*({"type": "image"} for _ in blobs), {"type": "text", "text": "what?"}]
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids, media = loaded.modality.expand(loaded.tokenizer(text, add_special_tokens=False)["input_ids"], blobs)
    said = loaded.tokenizer(answer, add_special_tokens=False)["input_ids"]
    return Transition(
        rollout_id="r",
        attempt_id="a",
        span_id=f"s{number}",
        agent="",
        path=(),
        turn=number,
        branch=number,
        start=len(ids),
        policy="p",
        model_version="v",
        prompt_ids=pack_ids(ids),
        response_ids=pack_ids(said),
        logprobs=bytes(4 * len(said)),
        media=media,
        processor=loaded.modality.processor,
    )


async def ready(loaded: LoadedModel, calls: list[Transition], stored: list[Blob]) -> tuple[Pictures, Episode]:
    """Return the episode of the calls after its pictures were read from a store that has `stored`."""
    store = MemoryStore()
    await store.save_blobs(stored)
    rollout = Rollout(rollout_id="r", task={}, experiment="e", group_id="g")
    rows = make_rows(calls, group_id="g")
    episode = Episode(rollout=rollout, attempt=None, reward=1.0, rewards=(), transitions=tuple(calls), rows=rows)
    assert loaded.modality is not None
    held = Pictures(loaded.modality)
    (found,) = await held.ready(store, [episode])
    await store.close()
    return held, found


def test_rows_get_their_pictures_from_the_store(loaded: LoadedModel) -> None:
    blobs = [picture(1), picture(2)]
    held, episode = asyncio.run(ready(loaded, [call(loaded, blobs)], blobs))
    (sample,) = live_rows(episode, pictures=held)
    assert sample.pictures is not None
    assert list(sample.pictures.blobs) == blobs
    torch.testing.assert_close(
        recompute_logprobs(loaded.model, [sample], token_budget=1, device=loaded.device)[0],
        plain_logprobs(loaded, sample),
        atol=1e-5,
        rtol=0,
    )


def test_a_call_whose_picture_is_gone_is_refused_and_the_others_train(loaded: LoadedModel) -> None:
    calls = [call(loaded, [picture(1)]), call(loaded, [picture(2)], number=1)]
    held, episode = asyncio.run(ready(loaded, calls, [picture(1)]))
    assert [each.reject for each in episode.transitions] == ["", "non_token_input"]
    assert picture(2).digest in episode.transitions[1].detail
    assert len(live_rows(episode, pictures=held)) == 1


def test_a_sampled_placeholder_is_refused_with_its_reason(loaded: LoadedModel) -> None:
    assert loaded.modality is not None
    for banned in sorted(loaded.modality.banned):
        odd = call(loaded, [picture(1)], answer=loaded.tokenizer.decode([banned]))
        _, episode = asyncio.run(ready(loaded, [odd], [picture(1)]))
        assert "must not be sampled" in episode.transitions[0].detail
        assert episode.rows == ()


def test_an_update_trains_the_language_model_and_leaves_the_vision_tower(folder: Path, tmp_path: Path) -> None:
    for trains_vision in (False, True):
        optim = Optim(lr=1e-2, trains_vision=trains_vision)
        learner = PolicyLearner(
            origin=Weights(uri=str(folder)), settings=LearnerSettings(optim=optim, compute=Compute(device="cpu"))
        )
        before = {name: tensor.clone() for name, tensor in learner.loaded.model.state_dict().items()}
        row = dialogue(learner.loaded, 2)
        for batch in learner.batches([row], [1.0], total=row.trained_tokens):
            backward(-batch.mean(batch.logprobs(learner.loaded.model)))
        learner.apply({})
        moved = {name for name, tensor in learner.loaded.model.state_dict().items() if not tensor.equal(before[name])}
        assert any("vis" in name for name in moved) == trains_vision
        assert any("vis" not in name for name in moved)


def test_exported_weights_load_again_with_their_processor(folder: Path, tmp_path: Path) -> None:
    learner = PolicyLearner(
        origin=Weights(uri=str(folder)), settings=LearnerSettings(optim=Optim(), compute=Compute(device="cpu"))
    )
    again = load_model(learner.export(tmp_path, step=1, keep=1).uri, device="cpu")
    assert again.modality is not None
    assert learner.loaded.modality is not None
    assert learner.loaded.modality.processor == again.modality.processor
    row = dialogue(learner.loaded, 1)
    found = recompute_logprobs(again.model, [row], token_budget=1, device=again.device)[0]
    torch.testing.assert_close(found, learner.logprobs([row])[0])


def test_adapters_leave_the_vision_tower_out(folder: Path) -> None:
    learner = PolicyLearner(
        origin=Weights(uri=str(folder)),
        settings=LearnerSettings(optim=Optim(), lora=Lora(rank=2), compute=Compute(device="cpu")),
    )
    names = [name for name, p in learner.loaded.model.named_parameters() if p.requires_grad]
    assert names
    assert not any("vis" in name for name in names)
    assert learner.logprobs([dialogue(learner.loaded, 1)])[0].isfinite().all()


@pytest.mark.parametrize("is_file", [True, False])
def test_dialogues_bring_pictures_as_data_urls_or_files(loaded: LoadedModel, tmp_path: Path, is_file: bool) -> None:
    blob = picture(3)
    (tmp_path / "red.png").write_bytes(blob.data)
    url = "red.png" if is_file else f"data:image/png;base64,{base64.b64encode(blob.data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]
    line = {"messages": [*turns, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "data.jsonl").write_text(json.dumps(line))
    (dialogue,) = read_dialogues(tmp_path / "data.jsonl")
    (row,) = tokenize(dialogue, tokenizer=loaded.tokenizer, max_tokens=999, modality=loaded.modality)
    assert row.pictures is not None
    assert row.pictures.blobs == (blob,)
    assert loaded.tokenizer.decode(row.ids[row.mask]) == "red<|im_end|>yes<|im_end|>"
    with pytest.raises(DatasetError, match="reads no pictures"):
        tokenize(dialogue, tokenizer=loaded.tokenizer, max_tokens=999)
