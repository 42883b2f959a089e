"""The processes under measurement: the gateway over a durable store, and a proxy that only passes on.

``python -m benchmarks._served gateway|proxy BACKEND_URL [STORE_URL TOKENS_FILE ATTEMPTS [SPOOL [SECONDS]]]``. Prints
its URL, then for every line on standard input its CPU seconds so far. The parent kills it. SPOOL is a folder or
``off``; SECONDS is the time that the store gets before a call goes there.
"""

import asyncio
import sys
import time
from pathlib import Path

import aiohttp
from aiohttp import web

from agl.contracts import Gateway, Store, Upstream
from agl.schemas import Rollout, new_rollout_id
from agl_run.access import AttemptTokens
from benchmarks._harness import component

SECRET = b"a secret of the benchmarks alone"


async def gateway(
    backend: str, store_url: str, tokens_file: str, attempts: int, spool: str = "off", spool_after_s: str = "0.05"
) -> tuple[Gateway, str]:
    """The gateway and its URL, with running attempts, their tokens and an admin's in a file."""
    store: Store = component("store", store_url.partition(":")[0], url=store_url)
    tokens = AttemptTokens(SECRET)
    await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=n) for n in range(attempts)])
    claims = await store.claim(worker="bench", limit=attempts, lease_s=3600)
    until = time.time() + 3600
    issued = [tokens.issue(c.attempt.rollout_id, c.attempt.attempt_id, expires_at=until) for c in claims]
    Path(tokens_file).write_text("\n".join(issued), encoding="utf-8")
    Path(f"{tokens_file}.admin").write_text(tokens.issue("", "", scope="admin", expires_at=until), encoding="utf-8")
    Path(f"{tokens_file}.ids").write_text("\n".join(c.attempt.attempt_id for c in claims), encoding="utf-8")
    one = Upstream(name="canned", base_url=backend, is_trained=True)
    served: Gateway = component("gateway", "gateway", spool=spool, spool_after_s=float(spool_after_s))
    return served, await served.start(store=store, upstreams=[one], secret=SECRET)


async def proxy(backend: str) -> str:
    """The least that an aiohttp proxy can do: read, pass on, pass back."""
    session = aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0))

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        headers = {"content-type": "application/json"}
        async with session.post(f"{backend}{request.path[3:]}", data=body, headers=headers) as response:
            kind = {"content-type": response.headers["content-type"]}
            if response.content_type != "text/event-stream":
                return web.Response(body=await response.read(), status=response.status, headers=kind)
            reply = web.StreamResponse(status=response.status, headers=kind)
            await reply.prepare(request)
            async for chunk in response.content.iter_any():
                await reply.write(chunk)
            await reply.write_eof()
            return reply

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def main(kind: str, backend: str, *rest: str) -> None:
    if kind == "gateway":
        store_url, tokens_file, attempts, *spooling = rest
        served, url = await gateway(backend, store_url, tokens_file, int(attempts), *spooling)
        ids = Path(f"{tokens_file}.ids").read_text(encoding="utf-8").split()
        print(url, flush=True)
    else:
        print(await proxy(backend), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        if kind == "gateway":
            for attempt_id in ids:
                await served.settle(attempt_id)
        print(time.process_time(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
