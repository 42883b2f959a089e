"""Checks the weights that policies start from, before a library loads them.

``model`` of a policy that trains is a folder or the name of a model on a hub. Libraries take a folder that does not
exist for the name of a model, and if the hub cannot be reached, they wait for about a minute. Here both mistakes are
found at once. The cache and the environment variables are those of Hugging Face's libraries.
"""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_run.plan import Plan

HUB = "https://huggingface.co"

ANSWER_S = 5.0
"""Seconds to wait for the hub's answer."""

_FORMAT = (
    "Give a folder in Hugging Face's format (config.json, model.safetensors, tokenizer.json), relative to the "
    "experiment's file, or the name of a model on the hub"
)
_ELSEWHERE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_USE_MODELSCOPE", "VERL_USE_MODELSCOPE")
"""Environment variables that make libraries look for models elsewhere than on the Hugging Face hub."""


def policy_params(plan: Plan, name: str) -> dict[str, Any]:
    """Return a policy's parameters, with an absolute path if ``model`` is a folder; may take some seconds.

    Raises:
        ConfigError: The policy loads weights, and ``model`` is the path of a folder that does not exist, or the name
            of a model that is not on this machine while the hub cannot be reached.
    """
    config = plan.config.policy[name]
    model = config.params.get("model")
    if not isinstance(model, str):
        return dict(config.params)
    # Absolute, because servers that are started for the policy have a working directory of their
    # own.
    path = (plan.folder / Path(model).expanduser()).absolute()
    if path.is_dir():
        return {**config.params, "model": str(path)}
    # A server that runs elsewhere looks for its model there.
    if plan.manager.policy(config.use).trains and "base_url" not in config.params:
        asked = f"[policy.{name}] model = {model!r}"
        if _is_path(model, plan.folder):
            raise ConfigError(f"{asked}: {_missing(path)} {_FORMAT}")
        own: Any = config.params.get("env")  # of a server that the policy starts
        _check_hub(asked, model, path, environ={**os.environ, **(own or {})})
    return dict(config.params)


def _is_path(model: str, folder: Path) -> bool:
    """Return true if ``model`` has too many slashes for a hub's name, or starts with an existing folder."""
    path = Path(model)
    begins_here = len(path.parts) == 2 and (folder / path.parts[0]).is_dir()
    return model.startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2 or begins_here


def _missing(path: Path) -> str:
    """Name the first component of a path that does not exist, and the existing folder with the closest name."""
    if path.is_file():
        return f"{str(path)!r} is a file, and a model is the folder {str(path.parent)!r}."
    parent = next(parent for parent in path.parents if parent.is_dir())
    name = path.relative_to(parent).parts[0]
    there = sorted(each.name for each in parent.iterdir() if each.is_dir() and each.name[0] not in "._")
    listed = f"it has {', '.join(there[:8])}." if there else "it has no folders."
    return f"there is no {name!r} in {str(parent)!r}; {did_you_mean(name, there, otherwise=listed)}"


def _check_hub(asked: str, model: str, path: Path, *, environ: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` if a model is not in the cache and the hub does not answer."""
    if "://" in model or any(environ.get(name, "0").lower() not in ("", "0", "false") for name in _ELSEWHERE):
        return
    home = environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    # The layout of huggingface_hub's cache, read without importing it.
    if (cache / f"models--{model.replace('/', '--')}" / "snapshots").is_dir():
        return
    hub = environ.get("HF_ENDPOINT") or HUB
    try:
        urlopen(f"{hub.rstrip('/')}/api/models/{model}", timeout=ANSWER_S).close()  # the hub of the environment
    except HTTPError:
        return  # it answers; whether it has the model depends on the person's token, with which the library asks
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLError):
            return  # the libraries may know other certificates
        raise ConfigError(
            f"{asked}: there is no folder {str(path)!r}; no model of that name is in the cache {str(cache)!r}, and the "
            f"hub {hub} does not answer ({reason}). Give the path of a folder that has the model, or connect this "
            "machine to the hub (HF_ENDPOINT names another one)"
        ) from None
