"""The settings of a ``[policy.NAME]`` table with ``use = "vllm"``, checked before anything is started."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from agl.errors import ConfigError
from agl.hints import check_table, did_you_mean
from agl.schemas import Record
from agl.urls import base_url_of

Sync = Literal["auto", "sleep", "reload", "restart"]
_OWN_ARGS = (
    *("--model", "--served-model-name", "--host", "--port", "--dtype", "--max-lora-rank"),
    *("--generation-config", "--logprobs-mode"),
)
"""Arguments of vLLM's server that agl sets itself."""

_START_ONLY = ("python", "args", "env", "replicas", "devices", "dtype", "lora_rank", "start_timeout_s", "log_dir")
"""Settings that have no effect on servers that already run."""

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's ``--max-lora-rank`` accepts."""


class VllmSettings(Record, frozen=True, kw_only=True):
    """The arguments of :class:`agl_vllm.policy.VLLMPolicy`; see there for their meaning."""

    model: str
    base_url: str | tuple[str, ...] = ()
    served_model: str = ""
    api_key_env: str = ""
    python: str = sys.executable
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    replicas: int = 1
    devices: tuple[str, ...] = ()
    dtype: str = "auto"
    lora_rank: int = 0
    sync: Sync = "auto"
    tokens_in: bool | None = None
    probe: bool = True
    probe_tolerance: float | None = None
    start_timeout_s: float = 900.0
    sync_timeout_s: float = 600.0
    log_dir: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the servers to attach to; empty if servers are started."""
        return (self.base_url,) if isinstance(self.base_url, str) else self.base_url

    @property
    def max_lora_rank(self) -> int:
        """The smallest rank at or above ``lora_rank`` that vLLM accepts; 0 without adapters."""
        return next((rank for rank in _RANKS if rank >= self.lora_rank), 0) if self.lora_rank else 0

    @property
    def key(self) -> str:
        """The servers' API key; ``""`` for none."""
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""


def read_settings(name: str, values: Mapping[str, Any]) -> VllmSettings:
    """Return the settings of policy ``name``.

    Raises :class:`ConfigError` for keys that are unknown or would be ignored, and for values that cannot work.
    """
    known = VllmSettings.__struct_fields__
    unknown = sorted(values.keys() - set(known))
    if unknown:
        hint = did_you_mean(unknown[0], known, otherwise=f"use some of {', '.join(known)}")
        raise ConfigError(f"policy {name!r}: vllm does not know {unknown}; {hint}")
    if "model" not in values:
        raise ConfigError(f"policy {name!r}: vllm needs model, the directory or hub name of the weights")
    settings = check_table(values, VllmSettings, f"policy {name!r}: ")
    if settings.urls:
        _check_attached(name, settings, values)
    else:
        _check_started(name, settings)
    if settings.api_key_env and not settings.key:
        raise ConfigError(f"policy {name!r} takes its key from {settings.api_key_env}, which is not set; export it")
    return settings


def _check_attached(name: str, settings: VllmSettings, values: Mapping[str, Any]) -> None:
    ignored = sorted(values.keys() & set(_START_ONLY))
    if ignored:
        raise ConfigError(
            f"policy {name!r} attaches to servers that run already (base_url), so {ignored} would change nothing; "
            "remove them, or remove base_url to let agl start the servers"
        )
    if settings.sync == "restart":
        raise ConfigError(
            f"policy {name!r} attaches to {settings.urls[0]}, which agl cannot restart; "
            'use sync = "reload", or remove base_url to let agl start the server'
        )
    for url in settings.urls:
        base_url_of(url, who=f"policy {name!r}: base_url")


def _check_started(name: str, settings: VllmSettings) -> None:
    if sys.platform == "win32":
        raise ConfigError(f"policy {name!r}: vLLM does not run on Windows; attach to a server elsewhere with base_url")
    if settings.served_model or settings.api_key_env:
        raise ConfigError(
            f"policy {name!r}: served_model and api_key_env belong to servers that run already; give base_url, or "
            "remove them"
        )
    if settings.replicas < 1 or not 0 <= settings.lora_rank <= _RANKS[-1]:
        raise ConfigError(f"policy {name!r}: replicas must be 1 or more, and lora_rank from 0 to {_RANKS[-1]}")
    if settings.devices and len(settings.devices) != settings.replicas:
        raise ConfigError(
            f"policy {name!r} has {settings.replicas} replicas and devices for {len(settings.devices)}; give one entry "
            'per replica, such as devices = ["0", "1"]'
        )
    if shutil.which(settings.python) is None:
        raise ConfigError(
            f"policy {name!r}: there is no interpreter {settings.python!r}; give the path of the Python that has vLLM"
        )
    # vLLM reads --served_model_name as --served-model-name.
    taken = [word for word in settings.args if word.partition("=")[0].replace("_", "-") in _OWN_ARGS]
    if taken:
        raise ConfigError(f"policy {name!r}: agl sets {taken} itself; remove them from args (dtype has its own key)")
    if settings.model.startswith((".", "/", "~")) and not Path(settings.model).is_dir():
        raise ConfigError(f"policy {name!r}: there is no directory {settings.model}; give one, or a hub name")
