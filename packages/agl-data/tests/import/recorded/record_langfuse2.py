"""Writes a request of Langfuse 2 to ``langfuse-batch.json``, and the trace that it reads to ``langfuse-trace.json``."""

import json
import os
from pathlib import Path
from typing import Any

from server import QUESTION, Server, ask

WHEN = "2026-05-01T10:00:00.000Z"


def trace_of(path: str, body: bytes) -> Any:
    """Answer a request for the trace as Langfuse's service does, from the events that it received."""
    if "/traces/" not in path:
        return {"successes": [], "errors": []}
    made: dict[str, dict[str, Any]] = {}
    for event in events():
        kind = event["type"].split("-")[0]
        known = {name: value for name, value in event["body"].items() if value is not None}
        made.setdefault(event["body"]["id"], {"kind": kind}).update(known)
    trace = next(each for each in made.values() if each["kind"] == "trace")
    observations = [
        {
            **each,
            "type": each["kind"].upper(),
            "level": "DEFAULT",
            "unit": "TOKENS",
            "modelParameters": each.get("modelParameters", {}),
            "usage": {"unit": "TOKENS"},
        }
        for each in made.values()
        if each["kind"] in ("span", "generation")
    ]
    scores = [
        {"timestamp": WHEN, "createdAt": WHEN, "updatedAt": WHEN, "source": "API", "dataType": "NUMERIC", **each}
        for each in made.values()
        if each["kind"] == "score"
    ]
    return {**trace, "htmlPath": "", "latency": 1, "totalCost": 0, "observations": observations, "scores": scores}


def events() -> list[dict[str, Any]]:
    """Return the events of all batches."""
    return [event for path, body in server.bodies if path.endswith("/ingestion") for event in json.loads(body)["batch"]]


server = Server(trace_of)
os.environ |= {"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk", "LANGFUSE_HOST": server.url}

from langfuse.decorators import langfuse_context, observe  # noqa: E402
from langfuse.openai import OpenAI  # noqa: E402

client = OpenAI(base_url=f"{server.url}/v1", api_key="none")


@observe()
def weather(city: str) -> str:
    return "yes"


@observe()
def guide(question: str) -> str:
    langfuse_context.score_current_trace(name="helpful", value=0.75, comment="good")
    return ask(client, weather, question)


guide(QUESTION)
langfuse_context.flush()
Path("langfuse-batch.json").write_text(json.dumps({"batch": events()}, indent=1) + "\n")
found = next(event["body"]["id"] for event in events() if event["type"] == "trace-create")
trace = langfuse_context.client_instance.fetch_trace(found).data
Path("langfuse-trace.json").write_text(json.dumps(json.loads(trace.json()), indent=1) + "\n")
