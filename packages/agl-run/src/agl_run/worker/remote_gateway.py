"""A worker's client for the gateway of an experiment on another machine.

The client checks that the gateway can be reached and has not been replaced, and waits until the gateway has stored an
attempt's calls. It uses HTTP from the standard library, with one request at a time and without a proxy.
"""

import asyncio
import http.client
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from agl.contracts import Runner
from agl.errors import CaptureError, GatewayLostError
from agl.schemas import Claim, Outcome
from agl_run.access.trust import client_context, refusal_of
from agl_run.access.worker_token import WORKER_TOKEN_ENV, WorkerKey
from agl_run.runners.setup import LastingRunner

TIMEOUT_S = 10.0
"""Seconds that one request may take."""

PATIENCE_S = 30.0
"""Seconds without an answer after which a gateway counts as gone; as long as a worker's lease."""

RETRY_S = 1.0
FRESH_S = 2.0
"""Seconds for which an answer is proof that the gateway runs."""


class RemoteGateway:
    """A client for one gateway, given by its base URL without ``/v1``; must be used in one event loop.

    Args:
        url: The gateway's URL from this machine.
        key: Returns the token to send: an :class:`~agl_run.access.tokens.AdminKey`, or a worker's key.
        ca: File with the certificate authorities to trust; see :func:`~agl_run.access.trust.client_context`.
        patience_s: Seconds without an answer after which the gateway counts as gone.

    Attributes:
        is_refused: True if the gateway's last answer was that it does not accept this machine's tokens.
        lost: Set once the gateway is gone, or another gateway answers at its URL.
    """

    def __init__(
        self, url: str, *, key: Callable[[], str], ca: Path | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self.url = url
        self._ca = ca
        # Made once, because loading the system's authorities is slow compared with a request.
        self._context = client_context(ca) if url.startswith("https:") else None
        self.lost = asyncio.Event()
        self.is_refused = False
        self._patience_s = patience_s
        self._key = key
        self._id = ""
        self._start = ""
        # Times of the monotonic clock; minus infinity stands for never.
        self._answered_at = float("-inf")
        self._failed_at = float("-inf")

    async def look(self) -> str:
        """Ask the gateway for its id; return ``""`` or a problem, whose text continues "the gateway URL ...".

        Raises:
            GatewayLostError: Another gateway answers at this URL.
        """
        status, answer = await self._ask("GET", "/identity")
        if status == 200:
            self._recognise(answer)
            return ""
        self._failed_at = time.monotonic()
        # Kept apart from other failures, because waiting does not help against a wrong secret.
        self.is_refused = status == 401
        if self.is_refused and isinstance(self._key, WorkerKey):
            return f"refuses the token in {WORKER_TOKEN_ENV} or in its file: {answer}"
        if self.is_refused:
            return (
                "refuses this machine's tokens: it signs with another secret. Set AGL_SECRET to the same value where "
                "`agl run` runs and here"
            )
        return f"does not answer as a gateway of this release does ({answer})"

    def silence_s(self) -> float:
        """Return the seconds since the gateway's last answer."""
        return time.monotonic() - self._answered_at

    def failed_since(self, moment: float) -> bool:
        """Return true if a request to the gateway has failed since ``moment`` (:func:`time.monotonic`)."""
        return self._failed_at >= moment

    async def ready(self) -> None:
        """Return once the gateway answers; raises :class:`GatewayLostError` if it is gone or does not answer."""
        if self.lost.is_set():
            raise self._gone("is gone")
        # One request serves all attempts that start within two seconds.
        if self.silence_s() < FRESH_S:
            return
        deadline = time.monotonic() + self._patience_s
        while problem := await self.look():
            if time.monotonic() > deadline:
                raise self._gone(problem)
            await asyncio.sleep(RETRY_S)

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store.

        If the gateway reports that it waits for its store, this method waits too.

        Raises:
            GatewayLostError: The gateway does not answer for ``patience_s`` seconds, or another gateway answers.
            CaptureError: The store refused some of the calls.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            status, answer = await self._ask("POST", "/settle", {"attempt_id": attempt_id})
            if status == 200:
                return self._recognise(answer)
            if status == 409:
                raise CaptureError(answer)
            # The gateway is alive and waits for its store, so the patience starts again.
            if status == 202:
                self._recognise(answer)
                deadline = time.monotonic() + self._patience_s
                continue
            self._failed_at = time.monotonic()
            if self._failed_at > deadline:
                raise self._gone(f"went away while attempt {attempt_id!r} ran ({answer})")
            await asyncio.sleep(RETRY_S)

    def _recognise(self, answer: str) -> None:
        """Compare the gateway's id and start in an answer with those of the first answer.

        Another id means that calls may be lost, so :class:`GatewayLostError` is raised. Another start means that the
        gateway was restarted and kept all calls.
        """
        gateway_id, _, start = answer.partition(" ")
        self._id, self._start = self._id or gateway_id, self._start or start
        # A new id means that the spool of the earlier gateway is gone, and with it calls that were
        # answered and not stored.
        if gateway_id != self._id:
            raise self._gone("was started again; calls of running attempts may be lost")
        if start != self._start:
            self._start = start
            self._failed_at = time.monotonic()  # it has cut off the calls in flight, whose agents may have failed
        self._answered_at = time.monotonic()

    def _gone(self, what: str) -> GatewayLostError:
        self.lost.set()
        return GatewayLostError(f"the gateway {self.url} {what}")

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Send a request; return the status with the gateway's id and start, or with a problem.

        Status 0 means that no gateway answered.
        """
        try:
            status, answer = await asyncio.to_thread(self._request, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            return 0, refusal_of(error, self._ca) or f"{type(error).__name__}: {error}"
        try:
            # A proxy or another program may answer on that port with anything.
            data: Any = msgspec.json.decode(answer)
            is_fine = status in (200, 202)
            text = f"{data['gateway']} {data.get('start', '')}" if is_fine else data["error"]["message"]
        except (msgspec.DecodeError, KeyError, TypeError):
            return -1, f"HTTP {status} with {answer[:80]!r}"
        return status, str(text)

    def _request(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        host, port, context = parts.hostname or "", parts.port, self._context
        # The standard library, without a proxy: settings for agents' traffic must not redirect
        # control messages.
        connection = (
            http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
            if context
            else http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        )
        headers = {"authorization": f"Bearer {self._key()}", "content-type": "application/json"}
        try:
            connection.request(
                method,
                parts.path.rstrip("/") + path,
                body=None if body is None else msgspec.json.encode(body),
                headers=headers,
            )
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()


class GuardedRunner:
    """Wraps a runner so that each attempt first waits for the gateway.

    If an attempt fails and the gateway did not answer during it, the attempt is given back, because the agent may not
    be the cause.
    """

    def __init__(self, runner: Runner, gateway: RemoteGateway) -> None:
        self._runner = runner
        self._gateway = gateway

    async def start(self) -> None:
        """Start the runner."""
        await self._runner.start()

    async def execute(self, claim: Claim) -> Outcome:
        """Run one attempt; raises :class:`GatewayLostError` if it must be repeated.

        If the gateway is gone before the attempt starts, this waits until it is cancelled: the worker is about to stop,
        and would otherwise claim the rollout again.
        """
        try:
            await self._gateway.ready()
        except GatewayLostError:
            # Waits until it is cancelled; returning would fail an attempt that another worker can
            # run.
            await asyncio.Event().wait()
        started = time.monotonic()
        outcome = await self._runner.execute(claim)
        # A success needs no excuse, so only failures are doubted.
        if outcome.status == "failed":
            await self._gateway.settle(claim.attempt.attempt_id)
            if self._gateway.failed_since(started):
                raise GatewayLostError(f"the gateway {self._gateway.url} did not answer while the attempt ran")
        return outcome

    async def release(self, claim: Claim, outcome: Outcome | None) -> None:
        """Let the wrapped runner remove what it kept of an attempt."""
        if isinstance(self._runner, LastingRunner):
            await self._runner.release(claim, outcome)

    async def stop(self) -> None:
        """Stop the runner."""
        await self._runner.stop()
