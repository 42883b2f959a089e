"""Makes tiny vision-language models on the spot, for tests and examples: about 0.2 million random weights each.

The folder has all that a real model's has: weights, tokenizer, chat template and processor; nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Sequence

_hf = cast("Any", transformers)  # whose classes take untyped settings

Family = Literal["qwen2-vl", "idefics3"]
"""The families of which tiny models can be made."""

_TURN, _END, _PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

# ChatML with tools, in which any message but the assistant's may have pictures.
_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ PICTURE if part.type == 'image' else part.text }}{% endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_PATCH, _TILE = 4, 16
_MARKS: dict[Family, tuple[list[str], str]] = {
    "qwen2-vl": (
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "idefics3": (
        ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
        + [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
        "<image>",
    ),
}


def make_tiny(
    folder: str | Path,
    *,
    family: Family = "qwen2-vl",
    words: Sequence[str] = (),
    hidden: int = 64,
    layers: int = 3,
    picture: int = 32,
    context: int = 1024,
    seed: int = 0,
) -> Path:
    """Write a tiny model with random weights to `folder`, and return the folder.

    Args:
        folder: The directory to write.
        family: `qwen2-vl` has three-dimensional positions, and a token for 8 by 8 pixels; pictures keep about their
            size. `idefics3` has plain positions, and 4 tokens for a tile of 16 by 16 pixels; pictures are scaled until
            their longer side is `picture`, and one of more than a tile gets a tile of the whole picture besides.
        words: Texts that become one token each, such as the words of the tasks; all other texts are bytes.
        hidden: Width of the language model, a multiple of 16.
        layers: Number of its layers.
        picture: Largest side of a picture in pixels; larger ones are scaled down.
        context: Largest number of tokens.
        seed: Seed of the weights.
    """
    tokenizer = _tokenizer(family, words)
    cast("Any", torch).manual_seed(seed)
    model, processor = (_qwen2_vl if family == "qwen2-vl" else _idefics3)(
        tokenizer, _text(tokenizer, hidden, layers, context), picture
    )
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = _hf.GenerationConfig(do_sample=True, **ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    if family == "idefics3":
        settings = {"processor_class": "Idefics3Processor", "image_seq_len": (_TILE // _PATCH // 2) ** 2}
        Path(folder, "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return Path(folder)


def _tokenizer(family: Family, words: Sequence[str]) -> Any:
    marks, shown = _MARKS[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = cast("Any", Tokenizer)(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    return _hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=_END,
        pad_token=_PAD,
        additional_special_tokens=[_TURN, *marks],
        chat_template=_TEMPLATE.replace("PICTURE", repr(shown)),
    )


def _text(tokenizer: Any, hidden: int, layers: int, context: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }


def _qwen2_vl(tokenizer: Any, text: dict[str, Any], picture: int) -> tuple[Any, Any]:
    # The sections of the time, the height and the width add up to half of a head.
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    side = 3 * half // 8
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [half - 2 * side, side, side]}
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": text["hidden_size"],
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": _PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
    }
    config = _hf.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        **{name: tokenizer.convert_tokens_to_ids(mark) for name, mark in _QWEN2_VL.items()},
        tie_word_embeddings=True,
    )
    size = {"shortest_edge": (2 * _PATCH) ** 2, "longest_edge": picture**2}
    processor = _hf.Qwen2VLImageProcessorPil(patch_size=_PATCH, merge_size=2, temporal_patch_size=1, size=size)
    return _hf.Qwen2VLForConditionalGeneration(config), processor


_QWEN2_VL = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def _idefics3(tokenizer: Any, text: dict[str, Any], picture: int) -> tuple[Any, Any]:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": _TILE,
        "patch_size": _PATCH,
    }
    config = _hf.Idefics3Config(
        text_config={"model_type": "llama", **text},
        vision_config=vision,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
    )
    processor = _hf.Idefics3ImageProcessorPil(size={"longest_edge": picture}, max_image_size={"longest_edge": _TILE})
    return _hf.Idefics3ForConditionalGeneration(config), processor
