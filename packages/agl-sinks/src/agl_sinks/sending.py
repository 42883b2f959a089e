"""Sends POST requests to web addresses; the error for a refused request tells whether repeating it may succeed.

Redirects are errors, because following one would send the body and the keys to another address.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import httpx

import agl
from agl.errors import ExportError

T = TypeVar("T")

AGENT = f"agl-sinks/{agl.__version__}"
_SHOWN = 200
"""Largest number of characters of a refusal's text that an error shows."""


def post(
    url: str,
    body: bytes,
    *,
    shown: str,
    headers: Mapping[str, str],
    timeout_s: float,
    passing: frozenset[int],
    advice: Mapping[int, str],
    is_secret: bool = False,
) -> httpx.Response:
    """Post a body, and return the response after reading it completely.

    Args:
        url: The address, which may be a secret.
        body: The body of the request.
        shown: The address to show in messages.
        headers: The headers of the request.
        timeout_s: Timeout in seconds, for each network operation of the exchange.
        passing: Statuses after which the request may be repeated.
        advice: The next step for the user, by status.
        is_secret: Leave the text of the response out of messages, because it may repeat the secret address.

    Raises:
        ExportError: The address does not answer, or refuses the body.
    """
    try:
        with httpx.stream(
            "POST", url, content=body, headers={"User-Agent": AGENT, **headers}, timeout=timeout_s
        ) as response:
            if response.is_success:
                response.read()
                return response
            text = ""
            with suppress(httpx.HTTPError):  # the text of the refusal broke off, and the status suffices
                text = response.read().decode("utf-8", "replace")
            advised = _elsewhere(response, is_secret=is_secret) or advice.get(response.status_code, "")
            raise _refusal(response, shown, "" if is_secret else text, advised, passing=passing)
    except (httpx.HTTPError, OSError) as error:
        why = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ExportError(
            f"{shown} does not answer ({why}); start it, or correct the address", is_passing=True
        ) from None


def _elsewhere(response: httpx.Response, *, is_secret: bool) -> str:
    if not 300 <= response.status_code < 400:
        return ""
    target = "" if is_secret else response.headers.get("Location", "")
    return f"it sends elsewhere; name that address{f': {target}' if target else ''}"


def _refusal(response: httpx.Response, shown: str, text: str, advice: str, *, passing: frozenset[int]) -> ExportError:
    said = " ".join(text.split())[:_SHOWN]
    answer = f"{shown} answered {response.status_code} {response.reason_phrase}{f': {said}' if said else ''}"
    wait = response.headers.get("Retry-After", "")
    return ExportError(
        f"{answer}; {advice}" if advice else answer,
        is_passing=response.status_code in passing,
        retry_after_s=float(wait) if wait.isdecimal() else 0.0,
    )


async def in_background(work: Callable[[], T]) -> T:
    """Run blocking work in a daemon thread, and return its result.

    A stuck backend therefore does not keep a program from exiting. If the caller is cancelled, the thread runs on, and
    its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]  # T may be None itself

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # raised again where the future is awaited
            failure = error
        with suppress(RuntimeError):  # the loop is closed, so nobody waits for the result
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="agl-sinks", daemon=True).start()
    return await future
