"""Writes ``langfuse.pb.gz``, a request of Langfuse 5's SDK: OTLP in Protobuf."""

import os
from pathlib import Path

from server import QUESTION, Server, ask

server = Server()
os.environ |= {"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk", "LANGFUSE_BASE_URL": server.url}

from langfuse import get_client, observe  # noqa: E402
from langfuse.openai import OpenAI  # noqa: E402

client = OpenAI(base_url=f"{server.url}/v1", api_key="none")


@observe(as_type="tool")
def weather(city: str) -> str:
    return "yes"


@observe(as_type="agent")
def guide(question: str) -> str:
    return ask(client, weather, question)


guide(QUESTION)
get_client().shutdown()
(body,) = (body for path, body in server.bodies if path.endswith("/otel/v1/traces"))
Path("langfuse.pb.gz").write_bytes(body)
