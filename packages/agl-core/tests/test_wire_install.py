"""The wire hook is in place for modules imported before, during and after a rollout, each in a new process."""

import importlib.util
import subprocess
import sys

import pytest

MODULES = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]

ATTEMPT = """
import sys
from agl.tracing import ActiveAttempt, SpanRecorder, activate
recorder = SpanRecorder()
attempt = ActiveAttempt(
    rollout_id="ro-1", attempt_id="ro-1.1", trace_id="a" * 32, root_span_id="1" * 16, record=recorder.record
)
def call(module):
    def respond(request):
        return module.Response(200, json={"id": "c", "choices": []})
    with module.Client(transport=module.MockTransport(respond)) as client:
        client.post("http://x/v1/chat/completions", json={"model": "m", "messages": []})
    return len(recorder.drain())
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", ATTEMPT + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imported_before_the_rollout_is_hooked(name: str):
    run(f"""
import {name} as module
with activate(attempt):
    assert call(module) == 1
assert call(module) == 0
""")


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imported_inside_the_rollout_is_hooked(name: str):
    run(f"""
path = list(sys.meta_path)
with activate(attempt):
    import {name} as module
    assert call(module) == 1
    assert "exec_module" not in vars(module.__spec__.loader)
send = module.Client.send
assert call(module) == 0
assert sys.meta_path == path
with activate(attempt):
    assert module.Client.send is not send
    assert call(module) == 1
assert module.Client.send is send
""")


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imported_after_the_rollout_is_hooked_in_the_next(name: str):
    run(f"""
with activate(attempt):
    pass
import {name} as module
assert call(module) == 0
with activate(attempt):
    assert call(module) == 1
""")


def test_a_rollout_imports_no_client():
    run("""
with activate(attempt):
    pass
assert not {"httpx", "httpx2", "openai", "aiohttp"} & set(sys.modules)
""")
