"""Pictures in chats: random ones as data URLs, conversations of three turns, and the model's own log-probabilities."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from agl.schemas import Blob, MediaSpan, digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import openai

    from agl_algo_torch.learner.model import LoadedModel


def picture(seed: int, *, side: int = 0) -> bytes:
    """Return a random picture as PNG, of a random size unless `side` is given."""
    random = np.random.default_rng(seed)
    height, width = (side, side) if side else random.integers(6, 40, 2)
    pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def part(data: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def blob(data: bytes) -> Blob:
    return Blob(digest=digest_of(data), media_type="image/png", data=data)


def said(text: str, *pictures: bytes) -> list[dict[str, Any]]:
    """Return the content of a message in which the pictures stand between two texts."""
    return [{"type": "text", "text": text}, *map(part, pictures), {"type": "text", "text": "?"}]


@dataclass
class Talk:
    """A conversation; `pictures` has those of each user turn."""

    client: openai.OpenAI
    pictures: Sequence[Sequence[bytes]]
    name: str = "hello"
    seed: int = 0
    answers: list[Any] = field(default_factory=list)

    def run(self) -> Talk:
        messages: list[Any] = []
        for turn, pictures in enumerate(self.pictures):
            messages.append({"role": "user", "content": said(f"{self.name} {turn}", *pictures)})
            body = {"return_token_ids": True}
            answer = self.client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=6, logprobs=True, seed=self.seed + turn, extra_body=body
            )
            self.answers.append(answer.model_dump())
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return self

    def check(self, loaded: LoadedModel, *, limit: float = 1e-5) -> float:
        """Check every turn against one forward pass over its tokens; returns the largest difference."""
        shown = [blob(data) for pictures in self.pictures for data in pictures]
        worst, before = 0.0, []
        for turn, answer in enumerate(self.answers):
            prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
            assert before == prompt[: len(before)], "the prompt does not continue the tokens of the last turn"
            before = [*prompt, *ids]
            blobs = shown[: sum(map(len, self.pictures[: turn + 1]))]
            media = [MediaSpan(**{**span, "grid": tuple(span["grid"])}) for span in answer.get("prompt_media", [])]
            assert [one.digest for one in blobs] == [span.digest for span in media]
            assert (answer.get("processor") == loaded.modality.processor) == bool(blobs)
            expected = logprobs(loaded, prompt, ids, blobs, media)
            found = torch.tensor([one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]])
            worst = max(worst, float((expected - found).abs().max()))
        assert worst < limit
        return worst


@torch.no_grad()
def logprobs(loaded: Any, prompt: list[int], ids: list[int], blobs: Sequence[Blob], media: Sequence[MediaSpan]) -> Any:
    """Return the log-probabilities of a response by one pass, with the positions of transformers' own function."""
    tokens = torch.tensor([[*prompt, *ids]])
    inputs = dict(loaded.modality.features(blobs, media))
    if "image_grid_thw" in inputs:
        types = (tokens == loaded.model.config.image_token_id).int()
        rope = loaded.model.model.get_rope_index(
            tokens, mm_token_type_ids=types, image_grid_thw=inputs["image_grid_thw"]
        )
        inputs["position_ids"] = rope[0]
    logits = loaded.model(input_ids=tokens, use_cache=False, **inputs).logits[0, len(prompt) - 1 : -1]
    logits[:, sorted(loaded.modality.banned)] = -torch.inf
    return logits.log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0]
