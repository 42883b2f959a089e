"""Runs one vLLM server on this machine for as long as the run lasts, in a separate interpreter.

vLLM is never imported here. It need not share an environment with agl, so its server runs under the Python of the
setting `python`.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from agl.errors import ConfigError, PolicyError
from agl_vllm import guard
from agl_vllm.client import ServerClient
from agl_vllm.settings import VllmSettings

_LOG = logging.getLogger("agl_vllm")
_POLL_S = 0.5
_SAY_EVERY_S = 30.0
_TAIL_LINES = 20
_STOP_S = guard.GRACE_S + 15.0
SLEEP_MODE = "--enable-sleep-mode"
_MAX_LORAS = "4"
"""Adapters in one batch: the served and the previous versions, the candidate, and one variant; vLLM swaps others in."""

_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of CUDA and ROCm, the platforms on which vLLM can sleep."""

_OWN_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of this environment that would mislead another interpreter."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The settings with which all servers of one policy are started.

    Attributes:
        name: Name of the policy, which is also the model name in requests.
        chosen: The user's settings.
        tokens_in: True to accept prompts as token ids (``--enable-scale-out``).
        can_sleep: True to start the server so that it can free and reload its weights (``--enable-sleep-mode``).
    """

    name: str
    chosen: VllmSettings
    tokens_in: bool = False
    can_sleep: bool = False

    def command(self, *, model: str, port: int) -> list[str]:
        """Return the server's command line."""
        python, rank = self.chosen.python, self.chosen.max_lora_rank
        adapters = ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", _MAX_LORAS]
        return [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--served-model-name", self.name, "--dtype", self.chosen.dtype),
            *("--host", "127.0.0.1", "--port", str(port)),
            # otherwise the model's generation_config.json would silently change the distribution
            *("--generation-config", "vllm"),
            # otherwise log-probabilities would be reported at temperature 1, whatever a request's temperature is
            *("--logprobs-mode", "processed_logprobs"),
            *(adapters if rank else ()),
            *(("--enable-scale-out",) if self.tokens_in else ()),
            *((SLEEP_MODE,) if self.can_sleep and SLEEP_MODE not in self.chosen.args else ()),
            *self.chosen.args,
        ]

    def environment(self, *, device: str) -> dict[str, str]:
        """Return the server's environment: this process's own, with weight updates enabled and telemetry disabled."""
        found = environment_for(self.chosen.python)
        found.pop("VLLM_API_KEY", None)  # meant for another server; this one would require it
        found |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if self.chosen.max_lora_rank:
            found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if device:
            found["CUDA_VISIBLE_DEVICES"] = device
        return found | self.chosen.env


class LocalServer:
    """Starts and stops one vLLM server, any number of times, at one address.

    Args:
        settings: The settings with which the server is started.
        log: File to which the server's output is appended.
        device: ``CUDA_VISIBLE_DEVICES``; ``""`` leaves the variable unchanged.
    """

    def __init__(self, settings: LaunchSettings, *, log: Path, device: str) -> None:
        self._settings = settings
        self._log = log
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        # While this is bound to the port, no program that asks for any free port gets it; vLLM may listen there, as it
        # sets the option too.
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self._port = int(self._reservation.getsockname()[1])
        timeout_s = settings.chosen.sync_timeout_s
        self.client = ServerClient(f"http://127.0.0.1:{self._port}/v1", timeout_s=timeout_s)

    @property
    def is_running(self) -> bool:
        """True if the server's process is running."""
        return self._process is not None and self._process.poll() is None

    async def start(self, *, model: str) -> None:
        """Serve ``model``; returns once the server is healthy.

        Raises:
            PolicyError: The server ended or took too long (the message has the last lines that it printed), or another
                program already answers at its address, which is possible when it starts again.
        """
        try:
            await self._launch(model)
        finally:
            self._reservation.close()

    async def _launch(self, model: str) -> None:
        if await self.client.is_healthy():
            raise PolicyError(
                f"policy {self._settings.name!r}: another program answers at {self.client.base_url}, where its vLLM "
                "server is to start; stop that program, or run again, which takes another port"
            )
        command = self._settings.command(model=model, port=self._port)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                # isolated, because the environment may point to modules of the interpreter that has vLLM
                [sys.executable, "-I", guard.__file__, *command],
                stdin=subprocess.PIPE,  # never written to: its end tells the guard that this process is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._settings.environment(device=self._device),
                start_new_session=True,
            )
        try:
            await self._wait_healthy(self._process)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the server and its children; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        await asyncio.to_thread(_wait, process)

    async def _wait_healthy(self, process: subprocess.Popen[bytes]) -> None:
        started = said = time.monotonic()
        while not await self.client.is_healthy():
            now = time.monotonic()
            if process.poll() is not None:
                raise PolicyError(self._failure(f"ended with exit code {process.returncode} while it started"))
            if now - started > self._settings.chosen.start_timeout_s:
                raise PolicyError(
                    self._failure(f"did not serve within {self._settings.chosen.start_timeout_s:g} s (start_timeout_s)")
                )
            if now - said > _SAY_EVERY_S:
                said = now
                _LOG.warning(
                    "policy %r: vLLM has been starting for %.0f s; it prints to %s",
                    self._settings.name,
                    now - started,
                    self._log,
                )
            await asyncio.sleep(_POLL_S)

    def _failure(self, what: str) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        tail = "\n".join(lines) or "nothing"
        return (
            f"policy {self._settings.name!r}: the vLLM server {what}; look for the reason in its last lines and change "
            f"model, args or python. Its whole output is in {self._log}; the last lines are:\n{tail}"
        )


def require_vllm(python: str, *, name: str) -> None:
    """Raise :class:`ConfigError` unless the interpreter can find vLLM; does not import it."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    found = subprocess.run([python, "-c", code], check=False, capture_output=True, env=environment_for(python))
    if found.returncode:
        raise ConfigError(
            f"policy {name!r}: vLLM is not installed for {python}; install it there (pip install vllm), or name the "
            'interpreter of an environment that has it with python = "..."'
        )


def can_take_tokens(python: str) -> bool:
    """Return true if the interpreter's vLLM has ``--enable-scale-out``; searches its source without importing it."""
    return _has_option(python, "enable_scale_out", folder="entrypoints", file="cli_args.py")


def can_sleep(python: str) -> bool:
    """Return true if the interpreter's vLLM has ``--enable-sleep-mode``, and this machine a device that supports it."""
    has_device = any(Path(device).exists() for device in _DEVICES)
    return has_device and _has_option(python, "enable_sleep_mode", folder="engine", file="arg_utils.py")


def _has_option(python: str, option: str, *, folder: str, file: str) -> bool:
    code = (
        "import importlib.util, pathlib; "
        "found = importlib.util.find_spec('vllm').submodule_search_locations; "
        f"files = [file for place in found for file in pathlib.Path(place, {folder!r}).rglob({file!r})]; "
        f"print(any({option!r} in file.read_text(encoding='utf-8') for file in files))"
    )
    found = subprocess.run([python, "-c", code], check=False, capture_output=True, env=environment_for(python))
    return found.stdout.strip() == b"True"


def environment_for(python: str) -> dict[str, str]:
    """Return this process's environment, without the variables that would mislead another interpreter."""
    misleading = () if python == sys.executable else _OWN_PYTHON
    return {key: value for key, value in os.environ.items() if key not in misleading}


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
