"""Distinguishes failures of infrastructure from failures of the agent, so that no candidate is scored for an outage.

Three sources are checked, the most reliable first: the HTTP statuses of the attempt's recorded model calls, a status
code in the text of the error or its causes, and the types of these errors. A text that breaks the agent is a failure of
the agent, and so is a request that the model's server refuses because of its content.

An error arrives here as text, so types are recognised by name: those of the standard library, httpx, requests, urllib3,
aiohttp, botocore, Google's clients, the OpenAI and Anthropic clients, and LiteLLM.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from agl.schemas import Episode, ErrorInfo, Span

Status = Literal["ok", "failed", "timeout", "unrewarded", "infrastructure"]

_PASSING = frozenset({408, 425, 429})
"""Status codes below 500 that do not mean that the request itself is wrong: too slow, too early, too many."""

_UNPAID = frozenset({401, 402, 404, 407, 421})
"""Further status codes with which a server refuses every request, because of a key, a bill or an address."""

_NAMES = re.compile(
    # the standard library
    r"Connection(?:Error|ResetError|RefusedError|AbortedError)|BrokenPipeError|MemoryError|gaierror|herror"
    r"|SSL(?:Error|EOFError|ZeroReturnError)|RemoteDisconnected|IncompleteRead|BadStatusLine"
    # httpx, requests, urllib3
    r"|Connect(?:Error|Timeout)|(?:Read|Write|Close|Network|Proxy)Error|(?:Read|Write|Pool)Timeout|TimeoutException"
    r"|(?:Remote)?ProtocolError|NewConnectionError|MaxRetryError|NameResolutionError|ChunkedEncodingError"
    # aiohttp
    r"|Server(?:Disconnected|Timeout|Connection)Error|Client(?:OS|Payload|Connection|ConnectionReset)Error"
    r"|ClientConnector\w*Error|ClientProxyConnectionError|(?:Connection|Socket)TimeoutError"
    # botocore
    r"|EndpointConnectionError|(?:Connect|Read)TimeoutError|ConnectionClosedError|HTTPClientError|ThrottlingException"
    r"|(?:Service|Model)(?:Unavailable|Timeout|NotReady)Exception|InternalServerException|TooManyRequestsException"
    # the OpenAI, Anthropic and Google clients, LiteLLM
    r"|API(?:Connection|Timeout)Error|RateLimitError|InternalServerError|ServiceUnavailable(?:Error)?|OverloadedError"
    r"|BadGateway(?:Error)?|GatewayTimeout|DeadlineExceeded(?:Error)?|ResourceExhausted|TooManyRequests"
    r"|AuthenticationError"
)
_FULL_NAMES = frozenset({"requests.exceptions.Timeout", "litellm.exceptions.Timeout", "litellm.exceptions.APIError",
                         "google.genai.errors.ServerError"})  # fmt: skip

_CODE = re.compile(
    r"Error code: (\d{3})\b"  # the clients of OpenAI and Anthropic
    r"|'(\d{3}) [^']*' for url"  # httpx
    r"|^(\d{3}) (?:Client|Server) Error"  # requests
    r"|^(\d{3}), message="  # aiohttp
    r"|^(\d{3}) (?:UNAVAILABLE|INTERNAL|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED)\b"  # google.genai
    r"|\b(?i:HTTP(?: Error| status|/[\d.]+)?:? )(\d{3})\b"  # urllib, and messages of an agent's own
    r"|\b(?i:status(?:[ _]code)?[ :=]+)(\d{3})\b"
    r"|\banswered (\d{3}): "  # the judge of agl-rewards
)
_AWS_CODE = re.compile(r"An error occurred \((\w+)\)")
_MESSAGE = re.compile(
    r"^timed out$|The (?:read|write|handshake) operation timed out"  # sockets
    r"|\[Errno (?:12|23|24|28|101|103|104|110|111|113)\]"  # memory, files, disk, network
    r"|<urlopen error (?:timed out|\[Errno -?\d+\] (?:Name|Temporary failure|nodename))"
    r"|StatusCode\.(?:UNAVAILABLE|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED|INTERNAL)"  # grpc
)

_RAISED = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")
_HEADER = "Traceback (most recent call last):"
_LINKS = ("The above exception was the direct cause", "During handling of the above exception")


def needs_calls(episode: Episode) -> bool:
    """Return true if the attempt's recorded calls are needed to decide how a rollout ended."""
    if episode.attempt is None or episode.rollout.status == "cancelled":
        return False
    is_whole = episode.rollout.status == "succeeded"
    return not is_whole or any(call.reject in ("error", "incomplete") for call in episode.transitions)


def status_of(episode: Episode, spans: Sequence[Span] = ()) -> Status:
    """Return how a rollout ended: well, by a failure of the agent, or by a failure of infrastructure.

    Args:
        episode: The rollout.
        spans: Spans of the rollout's deciding attempt; needed only if :func:`needs_calls` is true.
    """
    attempt = episode.attempt
    if attempt is None or episode.rollout.status == "cancelled" or attempt.status in ("lost", "cancelled"):
        return "infrastructure"
    is_whole = episode.rollout.status == "succeeded"
    # An agent that ignores the error of its last call still gets a reward, for an answer that it never received.
    if _is_cut_off(spans, refusals=frozenset() if is_whole else _UNPAID):
        return "infrastructure"
    if is_whole:
        return "unrewarded" if episode.reward is None else "ok"
    if attempt.status == "timeout":
        return "timeout"
    return "infrastructure" if attempt.error is not None and is_foreign(attempt.error) else "failed"


def is_foreign(error: ErrorInfo) -> bool:
    """Return true if infrastructure caused an error: the error itself, one of its causes, or one of a group."""
    raised = [(error.type, error.message), *_raised(error.traceback)]
    return any(_is_foreign(name, message) for name, message in raised)


def _is_cut_off(spans: Sequence[Span], *, refusals: frozenset[int]) -> bool:
    """Return true if a model call failed through no fault of its request, and no call came after it.

    A call that starts after the failed one has ended shows that the agent or its client continued.
    """
    calls = [span for span in spans if span.call is not None]
    failed = [span for span in calls if span.call is not None and _is_passing(span.call.status_code, refusals)]
    return any(all(span is call or span.start_ns < call.end_ns for span in calls) for call in failed)


def _is_passing(code: int, more: frozenset[int] = frozenset()) -> bool:
    return code in _PASSING or code in more or 500 <= code < 600


def _is_foreign(name: str, message: str) -> bool:
    if name in _FULL_NAMES or _NAMES.fullmatch(name.rpartition(".")[2]) or _MESSAGE.search(message):
        return True
    aws = _AWS_CODE.search(message)
    if aws is not None and (_NAMES.fullmatch(aws[1]) or (aws[1].isdigit() and _is_passing(int(aws[1])))):
        return True
    found = _CODE.search(message)
    return found is not None and _is_passing(int(next(code for code in found.groups() if code)))


def _raised(traceback: str) -> Iterator[tuple[str, str]]:
    """Yield the type and the first message line of every error in a formatted traceback."""
    is_expected = True  # the front may have been cut off, in the middle of the first stack
    for line in traceback.splitlines():
        bare = re.sub(r"^ *[|+] ", "", line)  # the frame around a group of errors
        if bare.endswith(_HEADER) or bare.startswith(_LINKS):
            is_expected = True
        elif is_expected and (found := _RAISED.fullmatch(bare)):
            yield found[1], found[2] or ""
            is_expected = False
