"""Requests that schemathesis makes from ``/openapi.json``: the gateway answers none of them with a 5xx."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from agl_gateway.service import GatewayService
from agl_gateway.store_api import methods as store_api
from agl_store_sqlite._store import SQLiteStore

from .test_fuzz import ADMIN, MAX_WAIT_S, SOAK, attempt_token, backend, memory, probing

pytest.importorskip("schemathesis")

CONFIG = """
headers = {{ Authorization = "Bearer {admin}" }}
warnings = false

[[operations]]
include-path-regex = "^/v1/"
headers = {{ Authorization = "Bearer {token}" }}

[[operations]]
include-path = "/v1/traces"
enabled = false
"""
"""Calls that an attempt may make use its token; OTLP is left out, because schemathesis writes no protobuf."""


async def fuzzed(service: GatewayService, folder: Path, *, token: str, examples: int) -> int:
    """Run the fuzzing phase with ``examples`` examples per operation; returns the number of requests."""
    (folder / "schemathesis.toml").write_text(CONFIG.format(admin=ADMIN, token=token))
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json", "--phases=fuzzing"]
    command += [f"--max-examples={examples}", "--checks=not_a_server_error", "--seed=1", "--no-shrink"]
    command += ["--continue-on-failure", "--suppress-health-check=all", "--no-color"]
    running = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await running.communicate()
    finally:
        if running.returncode is None:
            running.kill()
    assert 0 == running.returncode, output.decode()
    found = re.search(r"(\d+) generated, (\d+) passed", output.decode())
    assert found is not None, output.decode()
    return int(found[2])


@pytest.mark.long
@pytest.mark.parametrize("examples", [3, pytest.param(200, marks=SOAK)])
async def test_no_request_from_the_schema_is_answered_with_5xx_or_holds_up_others(
    serving, tmp_path: Path, examples: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_api, "MAX_WAIT_S", 0.01)  # requests ask for waits of any length
    store = SQLiteStore(f"sqlite:///{tmp_path}/fuzzed.db")
    async with backend() as url, serving(backend=url, store=store, headers_s=1.0, body_s=1.0) as service:
        _, token = await attempt_token(service)

        async with probing(service) as waits:
            if is_long := examples > 100:
                await fuzzed(service, tmp_path, token=token, examples=examples // 5)
            before = memory()
            count = await fuzzed(service, tmp_path, token=token, examples=examples)
        after = memory()
        report = f"{count} requests from the schema: no answer of 5xx, {len(waits)} probes, the longest waited "
        print(f"{report}{max(waits):.3f} s, memory {before >> 20} MiB before and {after >> 20} MiB afterwards")
        assert count > 30 * examples  # small schemas run out of other requests
        assert max(waits) < MAX_WAIT_S
        assert not is_long or after < 1.1 * before
