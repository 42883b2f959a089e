"""Runs an agent class of Agent Lightning 1.0, unchanged, as the command of one attempt.

    python -m agl_lightning.job my_agent.ChatAgent QUESTION=question ANSWER=answer

The class has a method ``run``, sync or async, and reads environment variables: those that the arguments map to fields
of the task, ``AGL_OPENAI_BASE_URL`` and ``AGL_KEY`` for its model calls, and ``AGL_EVENT_URL``, to which it posts its
reward. The runner ``command`` gives the task, the address and the key, and reads the reward from the last line.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from pkgutil import resolve_name
from threading import Thread
from typing import Any

from agl.errors import ConfigError


def main(arguments: Sequence[str]) -> None:
    """Run the agent on the task of this attempt, and print its reward as JSON.

    Raises:
        ConfigError: The task lacks a field that the arguments name.
    """
    if "AGL_TASK_FILE" not in os.environ or not arguments:
        sys.exit('name this program as the agent: agent = ["python", "-m", "agl_lightning.job", "MODULE.CLASS", ...]')
    path, *pairs = arguments
    task = json.loads(Path(os.environ["AGL_TASK_FILE"]).read_text(encoding="utf-8"))
    os.environ |= _variables(task, dict(pair.split("=", 1) for pair in pairs))
    os.environ |= {"AGL_OPENAI_BASE_URL": os.environ["OPENAI_BASE_URL"], "AGL_KEY": os.environ["OPENAI_API_KEY"]}
    with _Events(("127.0.0.1", 0), _Handler) as events:
        os.environ["AGL_EVENT_URL"] = f"http://127.0.0.1:{events.server_port}/events"
        Thread(target=events.serve_forever, daemon=True).start()
        result: Any = resolve_name(path)().run()
        if inspect.isawaitable(result):
            asyncio.run(_wait_for(result))
        events.shutdown()
    if events.reward is not None:
        sys.stdout.write(json.dumps({"reward": events.reward}) + "\n")


def _variables(task: Any, fields: Mapping[str, str]) -> dict[str, str]:
    """Return the value of each environment variable; other values than texts as JSON."""
    found: dict[str, str] = {}
    for variable, name in fields.items():
        value: Any = task
        for part in name.removeprefix("input.").split("."):
            try:
                value = value[part]
            except (KeyError, TypeError):
                raise ConfigError(f"{variable}={name} names no field of the task {json.dumps(task)[:200]}") from None
        found[variable] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return found


async def _wait_for(result: Any) -> None:
    await result


class _Events(ThreadingHTTPServer):
    """Receives the events of an agent; keeps the value of the last reward."""

    reward: float | None = None


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:  # the name that the server calls
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if event.get("event_type") == "reward" and isinstance(self.server, _Events):
            self.server.reward = event["data"]["value"]
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
