"""Runs the server until a signal stops it."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from agl.errors import ConfigError
from agl_algo_torch.serving.hosting import HostedModel
from agl_tinker.server.app import TinkerApp
from agl_tinker.server.service import TinkerService


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The options of ``agl tinker serve``, under the same names."""

    model: str
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    folder: Path
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    token_budget: int = 16_384
    most_models: int = 8
    samplers: int = 4
    max_mb: int = 64


def make_app(settings: ServeSettings, *, key: str) -> tuple[web.Application, str]:
    """Load the model; return the application and the model's name for clients.

    The application closes the model and its other resources. Raises :class:`ConfigError` if the model cannot be loaded.
    """
    place = Path(settings.model).expanduser()
    path = str(place.absolute()) if place.is_dir() else settings.model
    model = HostedModel(path, device=settings.device, dtype=settings.dtype, token_budget=settings.token_budget)
    service = TinkerService(
        model,
        name=settings.name or path,
        folder=settings.folder.absolute(),
        threads=settings.threads,
        samplers=settings.samplers,
        most_models=settings.most_models,
    )
    return TinkerApp(service, key=key, most_bytes=settings.max_mb * 2**20).app(), service.name


def run_server(settings: ServeSettings, *, key: str, source: str, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; raises :class:`ConfigError` if the model or the port cannot be used."""
    app, name = make_app(settings, key=key)

    async def serve() -> None:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0, auto_decompress=False)
        await runner.setup()
        try:
            url = await listen(runner, host=settings.host, port=settings.port)
            say(f"serving {name} at {url}")
            say(f"clients need TINKER_BASE_URL={url} and the key in {source}; checkpoints are in {settings.folder}")
            await _stop_signal()
        finally:
            await runner.cleanup()

    asyncio.run(serve())


async def listen(runner: web.AppRunner, *, host: str, port: int) -> str:
    """Open the port and return the URL; raises :class:`ConfigError` if the server cannot listen there."""
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(
            f"the server cannot listen on {host}:{port} ({error}); choose another --port, or 0 for a free one"
        ) from error
    return f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"


async def _stop_signal() -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
