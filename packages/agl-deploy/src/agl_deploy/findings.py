"""Checks whether an experiment can run on other machines, and whether its files contain credentials."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from agl.errors import ConfigError
from agl.urls import shown_url
from agl_run import ExperimentConfig, GatewayConfig

_KEY = re.compile(
    r"\b(sk-[\w-]{16,}|hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|lsv2_\w{20,})"
)
"""Matches API keys of providers, by their usual prefixes."""

_SECRET_NAME = re.compile(r"(^|[_-])(api[_-]?key|token|password|passwd|secret)$", re.IGNORECASE)
_SECRET_OPTION = re.compile(r"(api[_-]?key|token|password|passwd|secret)$", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PASSWORD = re.compile(r"://[^/@:\s]*:[^/@\s]+@")
_SYSTEM = ("/bin/", "/usr/bin/")
"""Folders of programs that exist in every image."""

_KIND = re.compile(r"[a-z][a-z0-9_-]+:(?!//)")
"""Matches the prefix of tasks and workspaces that a plugin reads, such as ``harbor:`` in ``harbor:FOLDER``."""

_OWN_HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def refuse(config: ExperimentConfig, data: Mapping[str, Any], folder: Path) -> None:
    """Raise an error if an experiment cannot be deployed.

    Args:
        config: The experiment.
        data: The experiment's file as plain data.
        folder: The folder of the experiment's file.

    Raises:
        ConfigError: The store or the gateway cannot be shared, a path leads out of the folder, or the file contains a
            credential. The message names the key of a credential and never its value.
    """
    _refuse_credentials(data)
    section = config.experiment
    scheme = section.store.partition(":")[0]
    if scheme not in ("sqlite", "postgresql", "postgres"):
        raise ConfigError(
            f"[experiment] store is {shown_url(section.store)}, which a deployment cannot share: its parts share one "
            "PostgreSQL. Write the URL of your database, such as postgresql://agl@db.example/runs, or a sqlite:/// "
            "one for your own machine, in whose place a deployment takes the PostgreSQL that comes with it"
        )
    _refuse_gateway(config.gateway)
    for word in section.agent if isinstance(section.agent, tuple) else ():
        is_outside = word.startswith(("/", "~")) or (".." in PurePosixPath(word).parts and not _is_inside(word, folder))
        if is_outside and not word.startswith(_SYSTEM):
            raise ConfigError(
                f"[experiment] agent runs {word!r}, a path of this machine that no image has; put the program into "
                f"{str(folder)!r} and name it relative to the experiment's file, or name a program on the PATH"
            )
    for key in ("train", "val", "workspace", "harness"):
        path = getattr(section, key)
        if path and not _is_inside(_KIND.sub("", path, count=1), folder):
            raise ConfigError(
                f"[experiment] {key} is {path!r}, a path outside of {str(folder)!r}, which is all that the images get; "
                "move it there, and name it relative to the experiment's file"
            )


def _refuse_gateway(gateway: GatewayConfig) -> None:
    if gateway.use == "none":
        raise ConfigError(
            '[gateway] use = "none" makes workers call the models themselves with keys of their own, and a deployment '
            "keeps keys where the trainer is; remove it, so that the gateway relays the calls"
        )
    if given := [key for key in ("tls_cert", "tls_key") if gateway.params.get(key)]:
        raise ConfigError(
            f"[gateway] params has {given[0]!r}, and the parts of a deployment call each other without TLS on a "
            "network of their own; remove it, and encrypt in front of them, where callers come in"
        )


def warnings(config: ExperimentConfig, folder: Path, files: Iterable[str]) -> Iterator[str]:
    """Yield warnings about settings that may not work on other machines, and about files that seem to contain keys.

    Args:
        config: The experiment.
        folder: The folder of the experiment's file.
        files: Files of the agent's modules, relative to the folder.
    """
    section = config.experiment
    if section.harness:
        yield (
            f"[experiment] harness is {section.harness!r}, whose program the image of the workers does not have: add "
            "a line to the Dockerfile that installs it there"
        )
    if section.workspace.startswith("git:"):
        yield (
            f"[experiment] workspace is {section.workspace!r}, and the images have no .git folders: name a folder, or "
            "take **/.git out of Dockerfile.dockerignore"
        )
    yield from _of_policies(config)
    host = _host(section.store)
    if host in _OWN_HOSTS or (section.store.startswith("postgres") and not host):
        yield "[experiment] store is a database of this machine, which containers do not reach by this name"
    for file in files:
        if _KEY.search((folder / file).read_text(encoding="utf-8", errors="replace")):
            yield f"{file} has what looks like a key of a provider, which everybody who gets the image can read"


def _of_policies(config: ExperimentConfig) -> Iterator[str]:
    """Yield warnings about policies that depend on this machine."""
    for name, policy in config.policy.items():
        for key, value in _texts(policy.params):
            host = _host(value)
            if host in _OWN_HOSTS:
                yield (
                    f"[policy.{name}] {key} is {value}: in a container {host} is the container itself; name a host "
                    "that the trainer reaches"
                )
        model = policy.params.get("model")
        if isinstance(model, str) and model.startswith(("/", "~")):
            yield f"[policy.{name}] model is {model!r}, a path of this machine: mount the folder where the trainer runs"
        if policy.use == "vllm" and "base_url" not in policy.params:
            yield (
                f"[policy.{name}] starts vLLM next to the trainer, whose image lacks it: start its servers where the "
                "GPUs are, with /data of the trainer, and name their base_url"
            )


def variables(value: Any) -> Iterator[str]:
    """Yield the environment variables that a section of an experiment names in keys such as ``api_key_env``.

    Raises:
        ConfigError: A value is not a valid name of a variable.
    """
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            if key.endswith("_env") and isinstance(item, str):
                yield from ([_variable(key, item)] if item else [])
            else:
                yield from variables(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from variables(item)


def _variable(key: str, name: str) -> str:
    if _VARIABLE.fullmatch(name):
        return name
    raise ConfigError(
        f"the {key} in the experiment's file is not the name of a variable; write letters, digits and '_', "
        "as in OPENAI_API_KEY"
    )


def _refuse_credentials(data: Mapping[str, Any]) -> None:
    for place, text in _texts(data):
        key = place.rpartition(".")[2]
        if _has_password(text):
            raise ConfigError(
                f"{place} in the experiment's file has a password in its URL, which would stand in every image; remove "
                "it there, and give it as PGPASSWORD to the database and by an api_key_env elsewhere"
            )
        if _KEY.search(text) or (_SECRET_NAME.search(key) and text):
            raise ConfigError(
                f"{place} in the experiment's file looks like a credential, which would stand in every image; put it "
                "into an environment variable, and name that with the key that ends in _env, such as api_key_env"
            )


def _texts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield all texts within plain data, each with its dotted key, as in ``--set``."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            yield from _texts(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _texts(item, f"{place}.{index}")


def _has_password(text: str) -> bool:
    """Return true for a URL with a password before the host or in the query."""
    if _PASSWORD.search(text):
        return True
    try:
        url = urlsplit(text)
        is_url = text.startswith(f"{url.scheme}://")
        return is_url and bool(url.password or any(_SECRET_OPTION.search(name) for name, _ in parse_qsl(url.query)))
    except ValueError:
        return False


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_inside(path: str, folder: Path) -> bool:
    return not PurePosixPath(path).is_absolute() and (folder / path).resolve().is_relative_to(folder.resolve())
