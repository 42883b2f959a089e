"""Writes ``langsmith.jsonl``: the runs and the feedback that LangSmith's client lists, one per line."""

import json
import os
from pathlib import Path
from typing import Any

from server import QUESTION, Server, ask

WHEN = "2026-05-01T10:00:00+00:00"
runs: dict[str, dict[str, Any]] = {}
feedback: list[dict[str, Any]] = []


def service(path: str, body: bytes) -> Any:
    """Store runs and feedback, and list them, as LangSmith's service does."""
    given = json.loads(body or b"{}")
    if path.endswith("/runs/query"):
        done = ({**run, "status": "success", "session_id": run["trace_id"]} for run in runs.values())
        return {"runs": list(done), "cursors": {"next": None}}
    if "/feedback" in path:
        if body:
            feedback.append({"trace_id": given["run_id"], **given, "created_at": WHEN, "modified_at": WHEN})
        return feedback if not body else given
    if "/runs" in path:
        own = given.get("id") or path.rpartition("/")[2]
        known = {name: value for name, value in given.items() if value is not None and name != "attachments"}
        runs.setdefault(own, {"id": own}).update(known)
    return {}


server = Server(service)
os.environ |= {"LANGSMITH_TRACING": "true", "LANGSMITH_ENDPOINT": server.url, "LANGSMITH_API_KEY": "none"}

from langsmith import Client, traceable  # noqa: E402
from langsmith.wrappers import wrap_openai  # noqa: E402
from openai import OpenAI  # noqa: E402

client = Client(auto_batch_tracing=False)
model = wrap_openai(OpenAI(base_url=f"{server.url}/v1", api_key="none"), tracing_extra={"client": client})


@traceable(run_type="tool", client=client)
def weather(city: str) -> str:
    return "yes"


@traceable(client=client)
def guide(question: str) -> str:
    return ask(model, weather, question)


guide(QUESTION)
client.flush()
root = next(run["id"] for run in runs.values() if not run.get("parent_run_id"))
client.create_feedback(root, key="helpful", score=0.75, comment="good")
client.flush()
for run in runs.values():
    run["extra"] = {"metadata": {name: value for name, value in run["extra"]["metadata"].items() if name[:3] == "ls_"}}
lines = [run.model_dump_json() for run in client.list_runs(project_id=root)]
lines += [each.model_dump_json() for each in client.list_feedback(run_ids=[root])]
Path("langsmith.jsonl").write_text("".join(line + "\n" for line in lines))
