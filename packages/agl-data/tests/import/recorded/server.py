"""A model server that also collects requests, for the scripts that record the files of other tools.

Each script runs in this folder, in its own environment with the tool and ``openai``.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

QUESTION = "Will it rain in Oslo?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells if it will rain",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


class Server:
    """Answers chat completions, and stores all other requests, which ``reply`` answers."""

    def __init__(self, reply: Callable[[str, bytes], Any] | None = None) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        self._reply = reply or (lambda path, body: {})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(outer._take(self.path, b""))

            def do_POST(self) -> None:
                self._answer(outer._take(self.path, self.rfile.read(int(self.headers.get("content-length") or 0))))

            def do_PATCH(self) -> None:
                self.do_POST()

            def _answer(self, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _take(self, path: str, body: bytes) -> Any:
        if path.endswith("/chat/completions"):
            return _answer(json.loads(body))
        self.bodies.append((path, body))
        return self._reply(path, body)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    is_first = request["messages"][-1]["role"] == "user"
    message = call if is_first else {"role": "assistant", "content": "It will rain."}
    return {
        "id": "chatcmpl-1" if is_first else "chatcmpl-2",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "gpt-6-2026",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if is_first else "stop"}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16},
    }


def ask(client: Any, weather: Callable[[str], str], question: str) -> str:
    """Run an agent that calls the model, a tool, and the model again."""
    messages: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": question}]
    given = {"model": "gpt-6", "tools": TOOLS, "temperature": 0.5}
    first = client.chat.completions.create(messages=messages, **given).choices[0].message
    (call,) = first.tool_calls
    messages.append({"role": "assistant", "content": None, "tool_calls": [call.model_dump()]})
    content = weather(json.loads(call.function.arguments)["city"])
    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return client.chat.completions.create(messages=messages, **given).choices[0].message.content
