"""Finds the sizes of a model, on which memory and time depend.

They come from the model's ``config.json``, or from a few given numbers. No model hub is asked, and no weights are read.
The sizes describe decoders with grouped-query attention and a gated feed-forward network, such as Llama, Qwen and
Mistral, with or without experts; they approximate other models.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Record

_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_VOCABULARY = 128_256
_HEAD = 128
"""The width of a head that is assumed if only a number of weights is given; it is that of Llama 3."""

_FARTHEST = 0.1
"""The most by which an assumed model may deviate from the given number of weights, as a share of that number."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("layers", "num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden", "hidden_size", "n_embd", "d_model"),
    "heads": ("heads", "num_attention_heads", "n_head"),
    "kv_heads": ("kv_heads", "num_key_value_heads"),
    "head": ("head", "head_dim"),
    "feed_forward": ("feed_forward", "intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocabulary", "vocab", "vocab_size"),
    "experts": ("experts", "num_experts", "num_local_experts", "n_routed_experts"),
    "experts_used": ("experts_used", "num_experts_per_tok"),
    "expert_feed_forward": ("expert_feed_forward", "moe_intermediate_size"),
}
_TIED = ("tie_word_embeddings", "is_tied")
_FORMS = (
    "give the folder of a model or its config.json, a TOML file with the same keys, a number of weights such as 7B, or "
    "layers=28,hidden=3584,heads=28,kv_heads=4,feed_forward=18944,vocabulary=152064"
)


class ModelShape(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The sizes of a decoder.

    Attributes:
        name: The usual name of the model.
        layers: Number of layers.
        hidden: Hidden size: the width of the activations between layers.
        heads: Number of query heads of attention.
        kv_heads: Number of KV heads, which the query heads share.
        head: Width of a head.
        feed_forward: Width of the gated feed-forward network, or of one expert if there are experts.
        vocabulary: Number of tokens in the vocabulary.
        is_tied: Whether input and output share one embedding matrix.
        experts: Number of experts per layer; 0 without experts.
        experts_used: Number of experts that a token uses per layer; 0 without experts.
        is_supposed: Whether the sizes are assumed, because only a number of weights was given.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int
    vocabulary: int
    is_tied: bool = False
    experts: int = 0
    experts_used: int = 0
    is_supposed: bool = False

    @property
    def queries(self) -> int:
        """Total width of the queries over all heads."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Total width of the keys over all KV heads; the values have the same width."""
        return self.kv_heads * self.head

    @property
    def weights(self) -> int:
        """Total number of weights."""
        return self._layers(max(1, self.experts)) + self._embeddings

    @property
    def used(self) -> int:
        """Number of weights with which each token is multiplied: all except input embeddings and unused experts."""
        return self._layers(max(1, self.experts_used)) + self.vocabulary * self.hidden

    def adapters(self, rank: int) -> int:
        """Return the number of weights in LoRA adapters of this rank on every linear layer except the head."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        return self.layers * rank * (attention + max(1, self.experts) * 3 * (self.hidden + self.feed_forward))

    @property
    def _embeddings(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2)

    def _layers(self, experts: int) -> int:
        attention = 2 * self.hidden * self.queries + 2 * self.hidden * self.keys
        router = self.experts * self.hidden
        norms = 2 * self.hidden
        return self.layers * (attention + experts * 3 * self.hidden * self.feed_forward + router + norms)


def shape_of_model(given: str, *, folder: Path) -> ModelShape:
    """Return the shape of a model.

    Args:
        given: A folder with ``config.json``, that file, a TOML file, a number of weights, or sizes by name.
        folder: Base of relative paths.

    Raises:
        ConfigError: ``given`` has none of these forms, or lacks a size.
    """
    if re.fullmatch(r"[0-9]*\.?[0-9]+\s*[kKmMbBtT]", given):
        return _supposed(given)
    path = folder / given
    if "=" in given and not path.exists():
        return shape_from(_sizes(given), name="the given sizes")
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"--model {given!r} is neither a file or folder here nor a size; {_FORMS}")
    try:
        text = path.read_text(encoding="utf-8")
        values: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a model's configuration: {error}; {_FORMS}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no object, and so no model's configuration; {_FORMS}")
    found = cast("dict[str, Any]", values)
    name = path.parent.name if path.name == "config.json" else path.stem
    inner: Any = found.get("text_config")
    return shape_from({**found, **cast("dict[str, Any]", inner)} if isinstance(inner, dict) else found, name=name)


def _sizes(given: str) -> dict[str, str]:
    """Parse sizes such as ``layers=28,hidden=3584``; raises :class:`ConfigError` for an unknown name."""
    found = {name.strip(): value.strip() for name, _, value in (part.partition("=") for part in given.split(","))}
    known = [*(name for names in _NAMES.values() for name in names), *_TIED]
    for name in found:
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f"there are {', '.join([*_NAMES, _TIED[-1]])}")
            raise ConfigError(f"--model {given!r}: there is no size {name!r}; {hint}")
    return found


def shape_from(values: Mapping[str, Any], *, name: str) -> ModelShape:
    """Return the shape that a configuration describes; raises :class:`ConfigError` if a necessary size is missing."""
    sizes = {key: _number(values, key, name) for key in _NAMES}
    layers, hidden, heads = (sizes[key] for key in ("layers", "hidden", "heads"))
    missing = [key for key in ("layers", "hidden", "heads", "vocabulary") if not sizes[key]]
    if missing:
        wanted = ", ".join(" or ".join(_NAMES[key][:2]) for key in missing)
        raise ConfigError(f"{name} does not say {wanted}, which memory and time follow from; {_FORMS}")
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=sizes["kv_heads"] or heads,
        head=sizes["head"] or max(1, hidden // heads),
        feed_forward=(sizes["expert_feed_forward"] if sizes["experts"] else 0) or sizes["feed_forward"] or 4 * hidden,
        vocabulary=sizes["vocabulary"],
        is_tied=str(next((values[name] for name in _TIED if name in values), False)).lower() == "true",
        experts=sizes["experts"],
        experts_used=sizes["experts_used"],
    )


def _number(values: Mapping[str, Any], key: str, name: str) -> int:
    found: Any = next((values[each] for each in _NAMES[key] if values.get(each) is not None), 0)
    try:
        number = int(found)
    except (OverflowError, TypeError, ValueError):
        number = -1
    if number < 0:
        raise ConfigError(f"{name} gives {key} as {found!r}, which is not a whole number; {_FORMS}")
    return number


def _supposed(given: str) -> ModelShape:
    """Return the sizes of a usual model with about the given number of weights.

    The model is 128 times as wide as deep, as Llama 3 8B is. Raises :class:`ConfigError` if no such model comes close
    enough to the number.
    """
    wanted = float(given.strip()[:-1]) * _UNITS[given.strip()[-1].lower()]
    tied = wanted < 3e9  # small models usually share one matrix between input and output

    def sized(hidden: int) -> ModelShape:
        width = hidden - hidden % 64 or 64
        heads = max(1, width // _HEAD)
        return ModelShape(
            name=f"a usual model of {given.strip().upper()} weights",
            layers=max(1, round(width / 128)),
            hidden=width,
            heads=heads,
            kv_heads=max(1, heads // 4),
            head=_HEAD,
            feed_forward=round(3.5 * width),
            vocabulary=_VOCABULARY,
            is_tied=tied,
            is_supposed=True,
        )

    found = min((sized(64 * step) for step in range(1, 600)), key=lambda shape: abs(shape.weights - wanted))
    layer = found.weights - replace(found, layers=found.layers - 1).weights
    found = replace(found, layers=max(1, found.layers + round((wanted - found.weights) / layer)))
    if abs(found.weights - wanted) > _FARTHEST * wanted:
        raise ConfigError(
            f"no usual model has {given} weights: with a vocabulary of {_VOCABULARY:,} the closest one has "
            f"{found.weights / 1e6:.0f}M; give its sizes: layers=...,hidden=...,heads=...,vocabulary=..."
        )
    return found
