"""Runs agents against a model that calls every tool it is offered, for tests of adapters whose agents have tools."""

import json
import re
import threading
from collections.abc import Collection, Sequence
from typing import Any

from agl.contracts import Tracer
from agl.tracing import OtelTracer, WireTracer
from agl_gateway.embedded import EmbeddedGateway
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Status, ToolCall
from tests import adapters
from tests.adapters import Played, check_rollouts

MARK = re.compile(r"#\d+#")


class Script:
    """Scripts the model: it calls each offered tool once, then answers; a prompt can ask for failures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: dict[str, list[int]] = {}

    def __call__(self, request: ModelRequest) -> Reply | Status:
        text = json.dumps(request.body)
        found = MARK.search(text)
        assert found, text
        mark = found[0]
        if "fail twice" in text:
            with self._lock:
                left = self._faults.setdefault(mark, [500, 429])
                if left:
                    return Status(code=left.pop(), retry_after=0.01)
        if "refuse" in text:
            return Status(code=400)
        tools = [tool.get("function", tool)["name"] for tool in request.body.get("tools", ())]
        answered = any(turn.role == "tool" for turn in request.turns)
        if tools and not answered:
            calls = tuple(ToolCall(name, _arguments(name, mark)) for name in tools)
            return Reply(tool_calls=calls, chunk_delay=0.001)
        return Reply(text=f"answer to {mark}", chunk_delay=0.001)


def _arguments(tool: str, mark: str) -> dict[str, str]:
    return {} if tool.startswith("transfer") else {"input" if tool == "consult" else "question": f"{tool} {mark}"}


def play(
    agent: Any, server: ScriptedModelServer, *tracers: Tracer, count: int = 1, gateway: bool = False, task: str = ""
) -> list[Played]:
    """Run ``count`` rollouts at once; the question of each contains a different mark."""
    tasks = [{"question": f"#{number}# {task}", "mark": f"#{number}#"} for number in range(count)]
    return adapters.play(
        agent,
        tasks,
        server=server,
        tracers=[*tracers, OtelTracer(), WireTracer()],
        gateway=EmbeddedGateway() if gateway else None,
    )


def check(
    played: Sequence[Played], server: ScriptedModelServer, *, errors: int = 0, callers: Collection[str] = ("chat",)
) -> None:
    """Check the rollouts, each with ``errors`` failed calls, and that a span of the framework encloses every call.

    ``callers`` are the operations of these spans.
    """
    check_rollouts(played, server, marker="mark")
    assert [errors] * len(played) == [len(run.failed_calls) for run in played]
    for run in played:
        ids = {span.span_id: span for span in run.spans}
        parents = [ids[str(span.attributes["agl.framework_span_id"])] for span in run.spans if span.call is not None]
        assert set(callers) >= {str(parent.attributes.get("gen_ai.operation.name")) for parent in parents}
