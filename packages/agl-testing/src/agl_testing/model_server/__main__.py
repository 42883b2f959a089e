"""Runs the canned or the scripted server as a separate process: ``python -m agl_testing.model_server``."""

import argparse
import asyncio
import sys
import threading
from collections.abc import Sequence

from agl_testing.model_server import CannedModelServer, CannedReply, Reply, ScriptedModelServer


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the base URL as the first line on standard output, and serve until interrupted.

    If the port cannot be opened, print one line on standard error and exit with status 1.
    """
    options = _parser().parse_args(arguments)
    try:
        _serve(options)
    except OSError as error:
        sys.exit(
            f"port {options.port} cannot be opened ({error.strerror or error}); stop the program that uses it, give "
            "another with --port, or leave --port out for any free one"
        )


def _serve(options: argparse.Namespace) -> None:
    if options.text is not None:
        with ScriptedModelServer(default=Reply(text=options.text), port=options.port) as server:
            print(server.base_url, flush=True)
            threading.Event().wait()
    else:
        asyncio.run(_serve_canned(options))


async def _serve_canned(options: argparse.Namespace) -> None:
    replies = [
        CannedReply.chat(
            prompt_tokens=options.prompt_tokens,
            response_tokens=options.response_tokens,
            events=options.events,
            seed=seed,
        )
        for seed in range(options.variants)
    ]
    server = CannedModelServer(replies, port=options.port)
    started = threading.Event()
    serving = asyncio.create_task(server.serve(started))
    while not started.is_set() and not serving.done():
        await asyncio.sleep(0.01)
    if started.is_set():
        print(server.base_url, flush=True)
    await serving


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agl_testing.model_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 for any free port")
    parser.add_argument("--text", help="answer every call of every API with this text (scripted, slower)")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--response-tokens", type=int, default=200)
    parser.add_argument("--events", type=int, default=50, help="pieces of a streamed reply")
    parser.add_argument("--variants", type=int, default=1, help="different replies, used in turn")
    return parser


if __name__ == "__main__":
    main()
