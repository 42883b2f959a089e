"""A request body is parsed only once in the client's process, and only once in the gateway."""

import json
import subprocess
import sys

import pytest

from agl_testing.model_server import ScriptedModelServer

COUNT = """
import asyncio, json, sys, time
import msgspec

BODY = json.dumps({
    "model": "scripted",
    "temperature": 0.5,
    "messages": [{"role": "user", "content": "the marker"}],
    "metadata": {"conversation_id": "c1"},
}).encode()
seen = []

def note(data):
    if b"the marker" in bytes(data):
        seen.append(bytes(data))

class Decoder:
    def __class_getitem__(cls, item):
        return cls

    def __init__(self, *args, **options):
        self._inner = INNER(*args, **options)

    def decode(self, data):
        note(data)
        return self._inner.decode(data)

INNER, decode = msgspec.json.Decoder, msgspec.json.decode
msgspec.json.Decoder = Decoder
msgspec.json.decode = lambda data, **options: (note(data), decode(data, **options))[1]

import httpx
from agl.contracts import Upstream
from agl.schemas import Rollout, new_rollout_id
from agl.stores import MemoryStore
from agl.tracing import ActiveAttempt, SpanRecorder, activate
from agl_run.access.tokens import AttemptTokens
from agl_gateway.embedded import EmbeddedGateway

SECRET = b"a secret of these tests alone"
case, base_url = sys.argv[1:]
upstream = Upstream(name="main_llm", base_url=base_url, model="served", is_trained=True, agents="nobody")

async def main():
    store, gateway = MemoryStore(), EmbeddedGateway()
    url = await gateway.start(store=store, upstreams=[upstream], secret=SECRET)
    await store.enqueue([Rollout(rollout_id=new_rollout_id(), task={})])
    (claim,) = await store.claim(worker="test")
    attempt, recorder = claim.attempt, SpanRecorder()
    ids = {"rollout_id": attempt.rollout_id, "attempt_id": attempt.attempt_id}
    token = AttemptTokens(SECRET).issue(*ids.values(), expires_at=time.time() + 600)
    active = ActiveAttempt(
        **ids,
        trace_id="1" * 32,
        root_span_id="1" * 16,
        record=recorder.record,
        token=token,
        upstreams=(upstream,),
        gateway_url="" if case == "process" else url,
    )
    async with httpx.AsyncClient(timeout=60) as client:
        if case == "gateway":
            headers = {"authorization": f"Bearer {token}"}
            answer = await client.post(f"{url}/v1/chat/completions", content=BODY, headers=headers)
        else:
            with activate(active):
                answer = await client.post(f"{base_url}/chat/completions", content=BODY)
        answer.raise_for_status()
    await gateway.settle(attempt.attempt_id)
    parsed = list(seen)  # before this test reads the store
    spans = recorder.drain() + await store.spans(attempt.rollout_id)
    await gateway.stop()
    await store.close()
    calls = [span.call for span in spans if span.call is not None]
    print(json.dumps({
        "whole": parsed.count(BODY),
        "messages": len(parsed) - parsed.count(BODY),
        "recorded": [call.request["messages"][0]["content"] for call in calls],
        "policies": [call.policy for call in calls],
    }))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("case", "processes"), [("process", 1), ("gateway", 1), ("hook and gateway", 2)], ids=["process", "gateway", "both"]
)
def test_a_body_is_parsed_once_between_the_client_and_the_record(
    server: ScriptedModelServer, case: str, processes: int
):
    done = subprocess.run(
        [sys.executable, "-c", COUNT, case, server.base_url], capture_output=True, text=True, timeout=120, check=False
    )
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert (["the marker"], ["main_llm"]) == (found["recorded"], found["policies"])
    # Each process that reads it splits it at its top level once; its messages are read for the record alone.
    assert (processes, 1) == (found["whole"], found["messages"])
