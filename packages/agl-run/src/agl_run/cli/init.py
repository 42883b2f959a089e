"""``agl init``: write a folder with a small experiment that runs."""

import shlex
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import click

from agl.errors import ConfigError
from agl.hints import pip_install
from agl_inspect.text import visible

FOLDER = Path(__file__).parents[1] / "templates"


@dataclass(frozen=True, kw_only=True)
class Template:
    """A kind of experiment that ``agl init`` writes.

    The record holds its summary, the distributions it needs, a step to do before it runs, the command that does the
    step, if one does, and the folder with the files that it shares.
    """

    summary: str
    needs: tuple[str, ...]
    before: str
    command: str = ""
    shared: str = "common"


API = "set OPENAI_API_KEY, or another base_url in experiment.toml"
TEMPLATES = {
    "measure": Template(
        summary="measure an agent behind an API", needs=("agl-run", "agl-gateway", "openai"), before=API
    ),
    "prompt": Template(
        summary="tune its prompt", needs=("agl-run", "agl-gateway", "agl-algo-apo", "openai"), before=API
    ),
    "weights": Template(
        summary="train a small model on this machine",
        needs=("agl-run", "agl-gateway", "agl-algo-torch", "openai"),
        before="the model of experiment.toml is downloaded when the run starts",
    ),
    "tiny": Template(
        summary="train a tiny model from random weights, in about a minute on a CPU",
        needs=("agl-run", "agl-gateway", "agl-algo-torch", "openai"),
        before="make_model.py makes the model of experiment.toml; nothing is downloaded",
        command="python make_model.py",
    ),
    "langgraph": Template(
        summary="measure a graph node by node",
        needs=("agl-run", "agl-gateway", "agl-langchain", "langgraph", "langchain-openai"),
        before=API,
    ),
    "weights-langgraph": Template(
        summary="train a tiny model as a node of a graph, in about two minutes on a CPU",
        needs=("agl-run", "agl-gateway", "agl-algo-torch", "agl-langchain", "langgraph", "langchain-openai"),
        before="make_model.py makes the model of experiment.toml; nothing is downloaded",
        command="python make_model.py",
        shared="tiny",
    ),
}


@click.command(epilog="; ".join(f"{name}: {template.summary}" for name, template in TEMPLATES.items()))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option(
    "-t", "--template", type=click.Choice(list(TEMPLATES)), default="measure", show_default=True, help="The template."
)
def init(folder: Path, template: str) -> None:
    """Write an agent, its tasks and an experiment file into FOLDER, the current one by default."""
    files = _files(template)
    present = [file.name for file in files if (folder / file.name).exists()]
    if present:
        raise ConfigError(
            f"{str(folder)!r} has {', '.join(present)} already, and agl init overwrites nothing; name a new folder: "
            f"agl init NAME --template {template}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            (folder / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write into {str(folder)!r}: {error.strerror or error}; name another folder"
        ) from error
    written = ", ".join(file.name for file in files)
    click.echo(visible(f"wrote {written} into {folder}\n{_next_steps(folder, TEMPLATES[template])}"))


def _files(template: str) -> list[Path]:
    """Return the template's own files, and the shared files whose names the template does not have."""
    found = {file.name: file for name in (TEMPLATES[template].shared, template) for file in (FOLDER / name).glob("*.*")}
    return [found[name] for name in sorted(found)]


def _next_steps(folder: Path, template: Template) -> str:
    missing = [name for name in template.needs if not _is_installed(name)]
    steps = (
        *map(pip_install, missing),  # before cd, because a checkout's packages are named from here
        *([f"cd {shlex.quote(str(folder))}"] if folder != Path() else []),
        *filter(None, [template.command]),
        "agl check experiment.toml",
        "agl dev experiment.toml",
        "agl run experiment.toml",
    )
    return "\n".join([f"next ({template.before}):", *(f"  {step}" for step in steps)])


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
