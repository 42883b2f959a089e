"""Writes ``mlflow.json``: a trace that MLflow's tracing wrote to SQLite, with two assessments."""

import tempfile
from pathlib import Path

import mlflow
from openai import OpenAI
from server import QUESTION, Server, ask

server = Server()
folder = Path(tempfile.mkdtemp())
mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
mlflow.create_experiment("demo", artifact_location=str(folder))
mlflow.set_experiment("demo")
mlflow.openai.autolog()
client = OpenAI(base_url=f"{server.url}/v1", api_key="none")


@mlflow.trace(span_type="TOOL")
def weather(city: str) -> str:
    return "yes"


@mlflow.trace(span_type="AGENT")
def guide(question: str) -> str:
    return ask(client, weather, question)


guide(QUESTION)
mlflow.flush_trace_async_logging()
found = mlflow.get_last_active_trace_id()
person = mlflow.entities.AssessmentSource("HUMAN", "reader")
mlflow.log_feedback(trace_id=found, name="helpful", value=0.75, rationale="good", source=person)
mlflow.log_expectation(trace_id=found, name="expected", value="rain", source=person)
trace = mlflow.get_trace(found)
for place in ("mlflow.artifactLocation", "mlflow.user"):
    trace.info.tags.pop(place, None)
    trace.info.trace_metadata.pop(place, None)
Path("mlflow.json").write_text(trace.to_json(pretty=True) + "\n")
