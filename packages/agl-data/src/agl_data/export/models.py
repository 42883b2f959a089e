"""Writes trained weights to a new directory, with a model card: as they are, merged, or as a GGUF file for llama.cpp.

Adapters are merged by the plugin that registers the format ``merged``, because that needs the model's library.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from agl import PluginManager, __version__
from agl.contracts import Metric, Store
from agl.errors import ConfigError
from agl.schemas import ResourceVersion, Weights
from agl_inspect.records.metrics import version_of_step
from agl_inspect.versions import ShownVersion

OF_WEIGHTS = ("model", "merged", "gguf")
"""The formats of one version of trained weights."""

_CONVERTER = "convert_hf_to_gguf.py"


def write_model(manager: PluginManager, version: ResourceVersion, card: str, target: Path | None, *, form: str) -> str:
    """Write a version's weights to ``target``, which must not exist; returns a summary for people.

    With ``model`` the files are copied: full weights become a Hugging Face directory, including the tokenizer, and an
    adapter stays an adapter, which names its base model. With ``merged`` an adapter is merged into its base. With
    ``gguf`` the merged weights become one file, by the converter of llama.cpp.

    Raises:
        ConfigError: The version is not weights, its files are gone, ``target`` is ``None`` or exists, or the converter
            is not installed or fails.
    """
    name, weights = f"{version.name}@{version.version}", version.resource
    if not isinstance(weights, Weights):
        raise ConfigError(f"{name} is a {type(weights).__name__}, not weights; --format {form} writes weights")
    if target is None:
        raise ConfigError(
            f"weights are files; name the target: agl data export {name} --format {form} --output "
            f"{'FILE.gguf' if form == 'gguf' else 'DIRECTORY'}"
        )
    if not Path(weights.uri).is_dir():
        raise ConfigError(
            f"the files of {name} are not at {weights.uri}; run this where the run's work directory is, or export a "
            "version that its algorithm still keeps (`keep`)"
        )
    if target.exists():
        raise ConfigError(f"{target} exists; name another target, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        fresh = Path(folder) / "fresh"
        if form == "model":
            shutil.copytree(weights.uri, fresh)
        else:
            manager.resolve(manager.command("export merged"))(weights, fresh)
        (fresh / "README.md").write_text(card, encoding="utf-8")
        if form == "gguf":
            fresh = _as_gguf(fresh, name)
        fresh.rename(target)
    if form == "gguf":
        return f"{name} written to {target}, for llama.cpp"
    is_adapter = form == "model" and weights.format == "lora"
    kind = f"an adapter of {weights.base_model}" if is_adapter else "a Hugging Face directory"
    return f"{name} written to {target}, {kind}"


def _as_gguf(folder: Path, name: str) -> Path:
    converter = shutil.which(_CONVERTER)
    if converter is None:
        raise ConfigError(
            f"llama.cpp's {_CONVERTER} is not on the PATH. Put it there, or run: agl data export {name} --format "
            f"merged --output DIRECTORY; then, in llama.cpp's folder: python {_CONVERTER} DIRECTORY --outfile FILE.gguf"
        )
    target = folder.with_name("model.gguf")
    command = [sys.executable, converter, str(folder), "--outfile", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not target.is_file():
        raise ConfigError(f"{_CONVERTER} could not convert {name}: {done.stderr.strip()[-2000:]}")
    return target


async def model_card(store: Store, found: ShownVersion) -> str:
    """Return a model card in Markdown: base, algorithm, experiment, data, lineage and the curve of the rewards."""
    version = found.version
    versions = {each.version: each for each in await store.resources(version.name)}
    lineage = [version, *(versions[name] for name in found.ancestors)]
    trained = [one for one in lineage if one.algorithm]
    origin = next((one for one in lineage if not one.algorithm), lineage[-1])
    uri = origin.resource.uri if isinstance(origin.resource, Weights) else ""
    base = _hub_name(uri)
    facts = {
        "base model": base or Path(uri).name,
        "algorithm": " after ".join(dict.fromkeys(one.algorithm for one in trained)),
    }
    metrics: list[Metric] = []
    for record in await store.experiments():
        runs = range(1, record.run + 1)
        run = next((n for n in runs if _is_made_by(version, record.name, n)), 0)
        if not run:
            continue
        ledger = (await store.trained(record.name, run=run, algorithm=version.algorithm)).values()
        facts |= {"experiment": f"{record.name}, run {run}", "agent": record.agent}
        facts["rollouts trained on"] = str(sum(step <= version.step for step in ledger))
        metrics = await store.metrics(record.name, name="reward", run=run)
    facts |= {"steps": str(version.step), "version": version.version, "written by": f"agl {__version__}"}
    rewards = [(one.step, f"{one.value:.4f}") for one in metrics if one.algorithm == version.algorithm]
    scores = {score.version: f"{score.mean:.4f}" for score in await store.scores(version.name)}
    measured = [(f"{one.algorithm or 'start'} {one.step or ''}".strip(), scores.get(one.version)) for one in lineage]
    return "\n".join(
        [
            *(["---", f"base_model: {base}", "---", ""] if base else []),
            f"# {version.name}",
            "",
            *_table(("", ""), [(name, value) for name, value in facts.items() if value]),
            *_section("Reward by step", ("step", "reward"), [row for row in rewards if int(row[0]) <= version.step]),
            *_section("Validation", ("version", "score"), [row for row in reversed(measured) if row[1]]),
            "",
        ]
    )


def _hub_name(uri: str) -> str:
    """Return a model's name on the hub, also for a folder of the hub's cache; ``""`` for other folders."""
    if cached := re.search(r"(?:^|/)models--([^/]+)/snapshots/", uri):
        return cached[1].replace("--", "/", 1)
    return "" if Path(uri).is_absolute() or uri.startswith(".") else uri


def _is_made_by(version: ResourceVersion, experiment: str, run: int) -> bool:
    return version.version == version_of_step(experiment, run, version.algorithm, version.step)


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return ["", f"## {title}", "", *_table(head, rows)] if rows else []


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |"
