"""Generates the files of a deployment: images, compose file, Helm chart, RayJob, SkyPilot file, and a served model.

Every function for a kind of deployment fills this package's templates with an experiment's needs, and returns the
contents of the files by path.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from typing import Any

from jinja2 import Environment, StrictUndefined

from agl.errors import ConfigError
from agl.hints import pip_install
from agl_deploy.needs import PARTS, Needs, deployed_name
from agl_deploy.parts import CONSOLE_PORT, GATEWAY_PORT, HEALTH, TRAINER_PORT, Part, parts_of, secrets_of
from agl_inspect.records.labels import LABEL

_SPECIAL = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), 0xFEFF)}
"""Escapes for characters that JSON allows unescaped, and YAML or a terminal does not."""


def quoted(value: Any) -> str:
    """Return a value as JSON on one line, which is also valid YAML."""
    return json.dumps(value, ensure_ascii=False).translate(_SPECIAL)


def in_compose(value: Any) -> str:
    """Return a value for a compose file, with each ``$`` doubled, because a single one starts a variable."""
    return quoted(value).replace("$", "$$")


_ENVIRONMENT = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
_ENVIRONMENT.filters |= {"json": quoted, "yaml": in_compose}


def template(name: str) -> str:
    """Return the text of a file in the package's folder ``templates``, unfilled."""
    return (files("agl_deploy") / "templates" / name).read_text(encoding="utf-8")


def fill(name: str, /, **values: Any) -> str:
    """Return a template with the values filled in; raises an error if a value is missing."""
    return _ENVIRONMENT.from_string(template(name)).render(**values)


_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def trainer_image(gpus: int) -> str:
    """Return the Dockerfile target of the trainer's image: for CUDA, or for CPUs if ``gpus`` is 0."""
    return "trainer-cuda" if gpus else "trainer-cpu"


def image_files(needs: Needs, folder: str) -> dict[str, str]:
    """Return the Dockerfile, the requirements, and the files that the images need, by path.

    Args:
        needs: The needs of the experiment.
        folder: The folder for these files, relative to the experiment's folder.
    """
    dockerfile = fill(
        "Dockerfile",
        folder=folder,
        name=needs.name,
        python=_PYTHON,
        health=HEALTH,
        parts=parts_of(needs),
        gateway_port=GATEWAY_PORT,
        trainer_port=TRAINER_PORT,
        console_port=CONSOLE_PORT,
    )
    return {
        "Dockerfile": dockerfile,
        "Dockerfile.dockerignore": template("Dockerfile.dockerignore"),
        "health.py": template("health.py"),
        **requirement_files(needs, parts=PARTS),
    }


def requirement_files(needs: Needs, *, parts: Iterable[str]) -> dict[str, str]:
    """Return by path the requirements file of each part, a folder for wheels, and a ``.gitignore``."""
    return {
        **{f"requirements/{part}.txt": _requirements(needs, part) for part in parts},
        "wheels/.gitkeep": "",
        ".gitignore": ".env\nwheels/*\n!wheels/.gitkeep\n",
    }


def wheel_command(needs: Needs, folder: str) -> list[str]:
    """Return the command that builds wheels of distributions without a release; empty if there are none.

    Environments that uv made have no pip; there, uv runs one.
    """
    if not needs.sources:
        return []
    pip = ["python", "-m", "pip"] if find_spec("pip") else ["uvx", "--python", _PYTHON, "pip"]
    return [*pip, "wheel", "--no-deps", "--wheel-dir", f"{folder}/wheels", *needs.sources]


def _requirements(needs: Needs, part: str) -> str:
    lines = [pin.line + ("  # a wheel in the folder wheels" if pin.source else "") for pin in needs.pins[part]]
    return "\n".join([f"# What was installed when agl deploy wrote this, for the {part}.", *lines, ""])


WORKERS = 2

_RUNS = {
    "gateway": {"networks": ["data", "agents"], "restart": "unless-stopped", "volume": "spool"},
    "trainer": {"networks": ["data", "agents"], "restart": "on-failure:5", "volume": "trained", "start_period": "15m"},
    "worker": {"networks": ["agents"], "restart": "on-failure"},
    "console": {"networks": ["data"], "restart": "unless-stopped"},
}
_PORTS = {"gateway": GATEWAY_PORT, "console": CONSOLE_PORT}


def compose_files(needs: Needs, folder: str, *, gpus: int) -> dict[str, str]:
    """Return the compose file and an example of ``.env``, by path.

    Args:
        needs: The needs of the experiment.
        folder: The folder for these files, relative to the experiment's folder.
        gpus: Number of GPUs of the trainer; 0 for the image for CPUs.

    Raises:
        ConfigError: The runner is ``ray``, which starts agents itself instead of the compose file's workers.
    """
    if needs.ray is not None and needs.ray.runs_agents:
        raise ConfigError(
            f'[runner] use = "ray" in {needs.file.name} has Ray start the agents, which a compose file starts itself; '
            "take agl deploy ray, or another runner such as async"
        )
    is_bundled = not needs.store
    parts = {
        name: _service(part, needs, is_bundled=is_bundled, gpus=gpus if name == "trainer" else 0)
        for name, part in parts_of(needs).items()
    }
    up = "/".join([".."] * (folder.count("/") + 1))
    text = fill("compose.yaml", name=needs.name, folder=folder, context=up, parts=parts, bundled=is_bundled)
    return {"compose.yaml": text, "env.example": env_example(needs, folder)}


def _service(part: Part, needs: Needs, *, is_bundled: bool, gpus: int) -> dict[str, Any]:
    after = {"gateway": "service_healthy"}
    if part.name == "gateway":
        after = {"postgres": "service_healthy"} if is_bundled else {}
    port = _PORTS.get(part.name)
    target = trainer_image(gpus) if part.name == "trainer" else part.name
    return {
        "service": part.name,
        "target": target,
        "image": f"{needs.name}-{target}:local",
        "command": part.command,
        "health": list(part.health),
        "secrets": part.secrets,
        "ports": f"127.0.0.1:{port}:{port}" if port else "",
        "volume": "",
        "start_period": "60s",
        "after": after,
        "replicas": WORKERS if part.name == "worker" else 1,
        "gpus": gpus,
        **_RUNS[part.name],
    }


def env_example(needs: Needs, folder: str) -> str:
    """Return the text of ``env.example``: every variable that needs a value, with an empty value."""
    lines = [f"# Copy to {folder}/.env, which git and the images leave out, and give every variable a value."]
    for name, use in secrets_of(needs).items():
        lines += [f"# {use}", f"{name}="]
    return "\n".join([*lines, ""])


CHART = "chart"
"""The folder of the chart, in the templates and in the output."""

_FILLED = ("Chart.yaml", "values.yaml")
"""Files of the chart that depend on the experiment; the others are the same for every experiment."""


def chart_files(needs: Needs, *, gpus: int) -> dict[str, str]:
    """Return the files of the Helm chart by path.

    Args:
        needs: The needs of the experiment.
        gpus: Number of GPUs of the trainer; 0 for the image for CPUs.
    """
    own = {"file": needs.file.name, "gpus": gpus, "version": version("agl-core")}
    values = {**{key: getattr(needs, key) for key in ("name", "experiment", "store", "variables")}, **own}
    return {
        path: fill(path, **values) if path.rpartition("/")[2] in _FILLED else template(path)
        for path in _paths(files("agl_deploy") / "templates" / CHART, CHART)
    }


def _paths(folder: Traversable, path: str) -> Iterator[str]:
    """Yield the paths of all files below a folder of the package, sorted."""
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        below = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _paths(entry, below)
        else:
            yield below


AGENTS = "agl_agents"
"""The custom Ray resource of the nodes for agents; it keeps agents off the head, which has the providers' keys."""

_SHARE = 0.001
_DATABASE_PORT = 5432


def rayjob_files(needs: Needs, folder: str, *, gpus: int) -> dict[str, str]:
    """Return the RayJob's manifest by path.

    Args:
        needs: The needs of the experiment.
        folder: The folder for this file, relative to the experiment's folder.
        gpus: Number of GPUs of the head; 0 for the image for CPUs.

    Raises:
        ConfigError: Nothing in the experiment uses Ray, or Ray's server for jobs is not installed here.
    """
    ray = needs.ray
    if ray is None:
        raise ConfigError(
            f'nothing in {needs.file.name} uses Ray; write [runner] use = "ray", which runs the agents there, or take '
            "agl deploy helm"
        )
    if not ray.takes_jobs:
        raise ConfigError(
            "the images pin what is installed here, and Ray's server for jobs is not; run: "
            f"{pip_install('ray[default]')}"
        )
    text = fill(
        "rayjob.yaml",
        name=needs.name,
        folder=folder,
        bundled=not needs.store,
        image=f"{needs.name}-{trainer_image(gpus)}:local",
        entrypoint=_entrypoint(needs),
        version=ray.version,
        gpus=gpus,
        shared=ray.shares_files,
        room=shlex.quote(json.dumps({AGENTS: 1})) if ray.runs_agents else "",
        head_secrets=dict.fromkeys(["AGL_SECRET", "PGPASSWORD", *needs.variables["trainer"]]),
        agent_secrets=dict.fromkeys(["PGPASSWORD", *needs.variables["worker"]]),
        port=TRAINER_PORT,
        database_ports=_database_ports(needs.store),
    )
    return {"rayjob.yaml": text}


def _database_ports(store: str) -> list[int]:
    """Return the ports in a database URL, which may name several hosts."""
    place = re.split("[/?]", store.partition("://")[2])[0]
    hosts = place.rpartition("@")[2].split(",")
    found = [re.search(r":(\d+)$", host) for host in hosts]
    return sorted({int(port[1]) if port else _DATABASE_PORT for port in found})


def _entrypoint(needs: Needs) -> str:
    """Return the shell command that the head runs, including the change to the experiment's folder."""
    words = ["agl", "run", needs.file.name, "--resume", "--quiet"]
    settings = {
        "experiment.store": needs.store or f"postgresql://agl@{needs.name}-postgres/agl",
        "experiment.workdir": "/data/runs",
        "gateway.advertise": f"{needs.name}-ray",
        "gateway.params.host": "0.0.0.0",
        "gateway.params.port": str(TRAINER_PORT),
        "gateway.params.spool": "/data/spool",
    }
    if needs.ray is not None and needs.ray.runs_agents:
        words += ["--ray", "auto"]
        settings[f"runner.resources.custom.{AGENTS}"] = str(_SHARE)
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return f"cd /app && PATH=/opt/agl/venv/bin:$PATH exec {shlex.join(words)}"


def skypilot_files(needs: Needs, folder: str, *, gpus: int) -> dict[str, str]:
    """Return the SkyPilot file and the requirements by path.

    Args:
        needs: The needs of the experiment.
        folder: The folder for these files, relative to the experiment's folder.
        gpus: Number of GPUs of the machine; 0 for a machine without GPUs.
    """
    secrets = ["AGL_SECRET", *(["PGPASSWORD"] if needs.store else []), *needs.variables["trainer"]]
    text = fill(
        "sky.yaml",
        name=needs.name,
        folder=folder,
        gpus=gpus,
        secrets=dict.fromkeys(secrets),
        python=_PYTHON,
        run=_run_line(needs),
    )
    return {"sky.yaml": text, **requirement_files(needs, parts=["trainer"])}


def _run_line(needs: Needs) -> str:
    """Return the shell command that runs the experiment on the machine, with its data in the home folder."""
    store = '"experiment.store=sqlite:///$HOME/agl-data/agl.db"'
    if needs.store:
        store = shlex.quote(f"experiment.store={needs.store}")
    workdir = '"experiment.workdir=$HOME/agl-data/runs"'
    run = f"~/agl/bin/agl run {shlex.quote(needs.file.name)} --resume --quiet"
    return f"mkdir -p ~/agl-data && {run} --set {store} --set {workdir}"


SCRIPT = "serve_model.py"
_WEIGHTS = "/models/served"
_TAKEN = ("postgres", "gateway", "trainer", "worker", "console", "database", "spool", "trained", "dashboard", "ray")
"""Names that a deployment uses for its own parts and volumes."""


def parse_model(text: str, needs: Needs) -> tuple[str, str]:
    """Split ``NAME@LABEL`` into policy and label.

    Raises:
        ConfigError: The text has another form, or the experiment has no trained policy of that name.
    """
    policy, at, label = text.partition("@")
    if not (at and LABEL.fullmatch(label)):
        raise ConfigError(
            f"{text!r} is not NAME@LABEL, such as main_llm@production; agl resources promote gives a version a label"
        )
    if policy not in needs.trained:
        known = f"trained are {', '.join(needs.trained)}" if needs.trained else "none of its policies can be trained"
        raise ConfigError(f"{needs.file.name} has no policy {policy!r} whose weights are trained; {known}")
    return policy, label


def serving_files(needs: Needs, model: str, folder: str, *, gpus: int) -> dict[str, str]:
    """Return the files that serve a labelled version, for compose and for Kubernetes, by path.

    Args:
        needs: The needs of the experiment.
        model: The policy and the label, as ``NAME@LABEL``.
        folder: The folder for these files, relative to the experiment's folder.
        gpus: Number of GPUs of the server.
    """
    policy, label = parse_model(model, needs)
    own = deployed_name(policy)
    own = f"{own}-model" if own in _TAKEN else own
    script = template(SCRIPT)
    common = {
        "policy": policy,
        "label": label,
        "name": needs.name,
        "folder": folder,
        "file": f"model-{own}",
        "gpus": gpus,
        "image": f"{needs.name}-gateway:local",
        "script": script,
        "serve": ["python3", f"/opt/agl/{SCRIPT}", _WEIGHTS, policy],
    }
    return {
        SCRIPT: script,
        f"model-{own}.compose.yaml": fill("model.compose.yaml", service=own, fetch=_fetch(model, "gateway"), **common),
        f"model-{own}.kubernetes.yaml": fill(
            "model.kubernetes.yaml",
            service=f"{needs.name}-{own}",
            fetch=_fetch(model, f"{needs.name}-gateway"),
            **common,
        ),
    }


def _fetch(model: str, gateway: str) -> list[str]:
    """Return the command that copies a labelled version's weights; the label is read when the command runs."""
    store = f"http://{gateway}:{GATEWAY_PORT}"
    export = f"agl data export {shlex.quote(model)} --store {store} --format model --output {_WEIGHTS}"
    return ["sh", "-c", f"rm -rf {_WEIGHTS} && {export}"]
