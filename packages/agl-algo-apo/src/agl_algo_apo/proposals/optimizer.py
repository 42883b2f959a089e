"""The optimiser's model: any endpoint with OpenAI's chat completions; metered, retried and remembered.

Answers are stored on disk, keyed by the content of their requests. So a step that is repeated after a crash makes the
same requests, gets the same answers, and pays for nothing twice.

An outage of the endpoint is waited for. Each request waits separately, for a time that grows from try to try, or as
long as the endpoint asks for in ``Retry-After`` (RFC 9110, section 10.2.3: seconds, or a date).
"""

import asyncio
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, cast

import httpx
import msgspec
from msgspec import Meta

from agl.contracts import AlgorithmContext
from agl.errors import ConfigError
from agl.schemas import Json, Record, to_json
from agl.urls import base_url_of
from agl_algo_apo.search.budget import Budget, BudgetExhaustedError, Settings, Spent

TRIES = 4
"""The maximum number of times that a request is sent if the answers are not valid in the API."""

LONGEST_PAUSE_S = 30.0
"""The maximum pause between two tries, in seconds, unless the endpoint requests a longer one."""

_OPTIONAL = ("seed", "temperature", "max_tokens")
_RETRIED = frozenset({408, 409, 425, 429})
_SPENT = "insufficient_quota"
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class OptimizerSettings(Settings, frozen=True, kw_only=True):
    """The address of the optimiser's model, and the parameters of requests to it.

    Attributes:
        base_url: Base URL of the endpoint, including ``/v1``.
        model: The model's name at the endpoint.
        api_key_env: Environment variable that holds the key; ``""`` if none is needed.
        temperature: Sampling temperature; ``None`` leaves it to the endpoint.
        max_tokens: The most tokens of an answer.
        timeout_s: Seconds that one answer may take.
        retry_s: Seconds before the second try, doubled for each further one, up to half a minute; a ``Retry-After`` of
            the endpoint has precedence.
        wait_s: The most seconds to wait for the end of an outage, refusals of too many requests included.
        extra: Further fields of the request's body.
    """

    base_url: str
    model: str
    api_key_env: str = ""
    temperature: Annotated[float, Meta(ge=0)] | None = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] = 4096
    timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    retry_s: Annotated[float, Meta(ge=0)] = 0.5
    wait_s: Annotated[float, Meta(ge=0)] = 600.0
    extra: dict[str, Json] = {}


class OptimizerDownError(Exception):
    """Raised if the optimiser's model does not answer; it is caught within this package and ends the search."""


class OptimizerAnswer(Record, frozen=True, kw_only=True):
    """An answer of the optimiser's model.

    Attributes:
        text: The answer's text, with all parts joined.
        tokens: Tokens read and written; ``(-1, -1)`` if the endpoint does not report them.
        is_cut: True if the answer was cut at its maximum length.
    """

    text: str
    tokens: tuple[int, int] = (-1, -1)
    is_cut: bool = False


class PaidAnswer(NamedTuple):
    """The text of an answer, and its cost; if the endpoint reports no tokens, the highest possible cost."""

    text: str
    spent: Spent


class NoAnswer(NamedTuple):
    """A try that brought no answer.

    Attributes:
        why: The reason as text.
        kind: ``passing`` for an outage, ``spoilt`` for an answer that is not valid in the API, ``refused`` if waiting
            is useless.
        pause_s: Seconds that the endpoint asks the client to wait; ``None`` if it does not say.
        may_cost: True if the model may have answered nevertheless, so that an answer may be charged.
    """

    why: str
    kind: Literal["passing", "spoilt", "refused"]
    pause_s: float | None = None
    may_cost: bool = False


def settings_of(optimizer: str | OptimizerSettings, context: AlgorithmContext) -> OptimizerSettings:
    """Return the given settings, or settings for the policy of that name; raises :class:`ConfigError`."""
    if isinstance(optimizer, OptimizerSettings):
        return optimizer
    llm = context.endpoint(optimizer)
    return OptimizerSettings(base_url=llm.endpoint, model=llm.model, api_key_env=llm.api_key_env)


class Optimizer:
    """Asks the optimiser's model.

    Attributes:
        hint: Advice to the user about answers that were cut off; ``""`` if there were none.

    Args:
        settings: The model's address and parameters.
        budget: Pays for every request before it is sent.
        memory: File of the answers so far; created if missing.
        say: Shows the user one line.

    Raises:
        ConfigError: The base URL is not a URL, or the key's environment variable is not set.
    """

    def __init__(
        self, settings: OptimizerSettings, *, budget: Budget, memory: Path, say: Callable[[str], None]
    ) -> None:
        base_url = base_url_of(settings.base_url, who="the optimiser's base_url")
        self._settings = settings
        self._budget = budget
        self._memory = memory
        self._answers = _read_answers(memory)
        self._dropped: set[str] = set()
        self._say = say
        self.hint = ""
        self._waiting = 0  # questions that wait for the end of an outage
        self._client = httpx.AsyncClient(
            base_url=f"{base_url}/", timeout=settings.timeout_s, headers=_headers(settings)
        )

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of an answer."""
        return self._settings.max_tokens

    async def check(self) -> None:
        """Raise :class:`ConfigError` unless the endpoint answers and accepts the key."""
        try:
            response = await self._client.get("models")
        except httpx.HTTPError as error:
            raise ConfigError(
                f"the optimiser's endpoint {self._settings.base_url} does not answer "
                f"({type(error).__name__}: {error}); start it, or correct optimizer.base_url"
            ) from error
        if response.status_code in (401, 403):
            raise ConfigError(
                f"the optimiser's endpoint {self._settings.base_url} refuses the key "
                f"(HTTP {response.status_code}); set optimizer.api_key_env to the variable that holds it"
            )

    async def ask(self, text: str, *, seed: str) -> PaidAnswer:
        """Return the model's answer; the same text and seed get the same answer, even after a restart.

        Raises:
            BudgetExhaustedError: There is no room for another request; nothing was sent.
            OptimizerDownError: The model did not answer.
        """
        text = _well_formed(text)
        return await self._answer(self._body(text, seed), self._reserve(text))

    async def ask_all(self, questions: Sequence[tuple[str, str]]) -> list[PaidAnswer | None]:
        """Return the answers to (text, seed) pairs; ``None`` for a pair that failed or had no room in the budget.

        All requests are paid for in order before they are sent at once, so which of them are sent does not depend on
        timing.

        Raises:
            BudgetExhaustedError: There is no room for any request.
            OptimizerDownError: The model answered none of them.
        """
        questions = [(_well_formed(text), seed) for text, seed in questions]
        reserved: list[Spent] = []
        for text, _ in questions:
            try:
                reserved.append(self._reserve(text))
            except BudgetExhaustedError:
                if not reserved:
                    raise
                break
        asked = [self._answer(self._body(*pair), paid) for pair, paid in zip(questions, reserved, strict=False)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if failed and (len(failed) == len(answers) or not isinstance(failed[0], OptimizerDownError)):
            raise failed[0]
        found = [answer if isinstance(answer, PaidAnswer) else None for answer in answers]
        return found + [None] * (len(questions) - len(found))

    def _reserve(self, text: str) -> Spent:
        return self._budget.take_call(max_input=most_tokens(text), max_output=self._settings.max_tokens)

    async def _answer(self, body: Mapping[str, Json], reserved: Spent) -> PaidAnswer:
        key = hashlib.blake2b(to_json(body), digest_size=16).hexdigest()
        answer = self._answers.get(key)
        if answer is None:
            answer = await self._post(body, reserved)
            self._remember(key, answer)
        # A remembered answer costs as much as before: a repeated step pays for it from a restored budget.
        read, written = answer.tokens
        spent = reserved  # stays spent where no tokens are named: it is the most that the answer can have cost
        if read >= 0:
            spent = self._budget.settle_call(reserved, input_tokens=read, output_tokens=written)
        if answer.is_cut and not self.hint:
            self.hint = (
                f"answers of the optimiser's model end at {self.max_tokens} tokens (finish_reason length), before they "
                f"are complete; raise max_tokens in optimizer = {{ ..., max_tokens = {4 * self.max_tokens} }}"
            )
            self._say(self.hint)
        return PaidAnswer(answer.text, spent)

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._client.aclose()

    def _body(self, text: str, seed: str) -> dict[str, Json]:
        settings = self._settings
        number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "big") >> 1  # 31 bits
        body: dict[str, Json] = {
            "model": settings.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": settings.max_tokens,
            "seed": number,
        }
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        return {**body, **settings.extra}

    async def _post(self, body: Mapping[str, Json], reserved: Spent) -> OptimizerAnswer:
        """Send a request until it is answered; if no answer was made, refund the reservation."""
        settings, clock = self._settings, asyncio.get_running_loop().time
        spoilt, may_cost, pause_s, ends, is_waiting = 0, False, settings.retry_s, 0.0, False
        try:
            while isinstance(found := await self._try(body), NoAnswer):
                ends = ends or clock() + settings.wait_s  # from the first failure on
                spoilt += found.kind == "spoilt"
                may_cost = may_cost or found.may_cost
                asked_s = pause_s if found.pause_s is None else found.pause_s
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                if found.kind == "refused" or spoilt == TRIES or clock() + asked_s > ends:
                    if not may_cost:
                        self._budget.cancel_call(reserved)
                    raise OptimizerDownError(
                        f"the optimiser's model at {settings.base_url} did not answer: {found.why}"
                    )
                if not self._waiting:  # the user hears once of all questions that wait at the same time
                    self._say(
                        f"the optimiser's model at {settings.base_url} does not answer ({found.why}); the search waits "
                        f"for it, for {settings.wait_s:g} s at most"
                    )
                self._waiting += not is_waiting
                is_waiting = True
                await asyncio.sleep(asked_s)
            return found
        finally:
            self._waiting -= is_waiting

    async def _try(self, body: Mapping[str, Json]) -> OptimizerAnswer | NoAnswer:
        try:
            response = await self._send(body)
        except httpx.HTTPError as error:
            # Only a request that was never sent certainly costs nothing.
            may_cost = not isinstance(error, _UNSENT)
            return NoAnswer(f"{type(error).__name__}: {error}", "passing", may_cost=may_cost)
        if response.status_code == 200:
            answer = _read_answer(response)
            return answer or NoAnswer("HTTP 200 with a body that is no chat completion", "spoilt", may_cost=True)
        why = f"HTTP {response.status_code}: {' '.join(response.text.split())[:300]}"
        is_passing = response.status_code >= 500 or response.status_code in _RETRIED
        if not is_passing or _SPENT in response.text:  # a spent account answers 429, and waiting does not fill it
            return NoAnswer(why, "refused")
        # A gateway that gives up on a model does not stop it: only a refusal certainly costs nothing.
        may_cost = response.status_code >= 500 or response.status_code == 408
        return NoAnswer(why, "passing", requested_pause(response.headers), may_cost)

    async def _send(self, body: Mapping[str, Json]) -> httpx.Response:
        """Send a request; a field that the endpoint refuses by name is left out from then on."""
        while True:
            sent = self._fitted(body)
            response = await self._client.post("chat/completions", json=sent)
            # Compared with the body that was sent: another request may have dropped the field since.
            # An error about `max_tokens` names the field that newer models use instead.
            refused = [
                name
                for name in _OPTIONAL
                if name in sent and ("max_completion_tokens" if name == "max_tokens" else name) in response.text
            ]
            if response.status_code != 400 or not refused:
                return response
            self._dropped.update(refused)

    def _fitted(self, body: Mapping[str, Json]) -> dict[str, Json]:
        fitted = {name: value for name, value in body.items() if name not in self._dropped}
        if "max_tokens" in self._dropped:
            fitted["max_completion_tokens"] = self._settings.max_tokens
        return fitted

    def _remember(self, key: str, answer: OptimizerAnswer) -> None:
        self._answers[key] = answer
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        with self._memory.open("ab+") as file:
            if not _ends_a_line(file):  # a crash cut off the last answer, and must not take this one with it
                file.write(b"\n")
            file.write(to_json([key, msgspec.to_builtins(answer)]) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _headers(settings: OptimizerSettings) -> dict[str, str]:
    if not settings.api_key_env:
        return {}
    key = os.environ.get(settings.api_key_env, "")
    if not key:
        raise ConfigError(
            f"the optimiser's model needs the environment variable {settings.api_key_env}, which is not set; "
            "set it, or name another with optimizer.api_key_env"
        )
    return {"Authorization": f"Bearer {key}"}


def most_tokens(text: str) -> int:
    """Return an upper bound of a text's tokens: its bytes, which no tokenizer exceeds, plus the chat format."""
    return len(text.encode()) + 64


def _read_answer(response: httpx.Response) -> OptimizerAnswer | None:
    try:
        body = response.json()
        choice = body["choices"][0]
        text = _text_of(choice["message"]["content"])
        is_cut = choice.get("finish_reason") == "length"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    found: Any = cast("dict[str, Any]", body).get("usage")
    usage = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    read, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
    tokens = (read, written) if isinstance(read, int) and isinstance(written, int) else (-1, -1)
    return OptimizerAnswer(text=_well_formed(text), tokens=tokens, is_cut=is_cut)


def _text_of(content: Any) -> str:
    """Return the text in an answer's content, which is a string or a list of parts; parts without text are left out."""
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        return "".join(part if isinstance(part, str) else _text_of(part.get("text")) for part in parts)
    return content if isinstance(content, str) else ""


def _well_formed(text: str) -> str:
    """Return the text without lone surrogates, which neither files nor requests can hold."""
    # Two surrogates that form a pair become one character; lone ones are removed.
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return re.sub("[\ud800-\udfff]", "", joined)


def _ends_a_line(file: BinaryIO) -> bool:
    """Return true if a file that was opened at its end is empty or ends with a newline."""
    if file.tell() == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _read_answers(memory: Path) -> dict[str, OptimizerAnswer]:
    """Return the answers in the file ``memory``; a last line that a crash cut off is skipped."""
    if not memory.exists():
        return {}
    answers: dict[str, OptimizerAnswer] = {}
    for line in memory.read_bytes().splitlines():
        try:
            key, answer = msgspec.json.decode(line, type=tuple[str, OptimizerAnswer])
        except msgspec.DecodeError:
            continue
        answers[key] = answer
    return answers


def requested_pause(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for; ``None`` if it is absent or unreadable."""
    value = headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:  # "-0000": a date in UTC that names no zone
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
