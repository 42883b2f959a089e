"""Runs a model server that gives every call one text, in a process: ``python -m agl_testing.model_server``."""

import argparse
import sys
import threading
from collections.abc import Sequence

from agl_testing.model_server import Reply, ScriptedModelServer


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the base URL as the first line on standard output, and serve until interrupted.

    If the port cannot be opened, print one line on standard error and exit with status 1.
    """
    parser = argparse.ArgumentParser(prog="python -m agl_testing.model_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 for any free port")
    parser.add_argument("--text", required=True, help="the answer to every call of every API")
    options = parser.parse_args(arguments)
    try:
        with ScriptedModelServer(default=Reply(text=options.text), port=options.port) as server:
            print(server.base_url, flush=True)
            threading.Event().wait()
    except OSError as error:
        sys.exit(
            f"port {options.port} cannot be opened ({error.strerror or error}); stop the program that uses it, give "
            "another with --port, or leave --port out for any free one"
        )


if __name__ == "__main__":
    main()
