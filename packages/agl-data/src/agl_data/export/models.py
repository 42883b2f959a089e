"""Exports trained weights: copies the files of a policy's version to a new directory."""

import shutil
from pathlib import Path

from agl.errors import ConfigError
from agl.schemas import ResourceVersion, Weights


def copy_model(version: ResourceVersion, target: Path | None) -> str:
    """Copy a version's weights to ``target``, which must not exist; returns a summary.

    Full weights are a Hugging Face directory, tokenizer included. An adapter stays one and names its base model.

    Raises:
        ConfigError: The version holds no weights, its files are gone, or ``target`` is missing or in use.
    """
    name, weights = f"{version.name}@{version.version}", version.resource
    if not isinstance(weights, Weights):
        raise ConfigError(f"{name} is a {type(weights).__name__}, not weights; --format model copies weights")
    if target is None:
        raise ConfigError(
            f"weights are a directory; name the target: agl data export {name} --format model --output DIRECTORY"
        )
    source = Path(weights.uri)
    if not source.is_dir():
        raise ConfigError(
            f"the files of {name} are not at {weights.uri}; run this where the run's work directory is, or export a "
            "version that its algorithm still keeps (`keep`)"
        )
    if target.exists():
        raise ConfigError(f"{target} exists; name a directory that does not, or remove it")
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh)
    fresh.rename(target)
    kind = f"an adapter of {weights.base_model}" if weights.format == "lora" else "a Hugging Face directory"
    return f"{name} written to {target}, {kind}"
