"""Teachers that give the log-probability of every token of a text: a model in this process, or a server.

A teacher scores the token ids that the policy sampled, so it must have the policy's tokenizer. A server must answer
`/v1/completions` with the log-probabilities of the prompt's tokens (`prompt_logprobs`), as vLLM and the embedded server
of `torch` policies do.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import aiohttp
import torch

from agl.errors import AglError, ConfigError
from agl_algo_torch.learner.batch import recompute_logprobs
from agl_algo_torch.learner.model import load_model, no_bars
from agl_algo_torch.learner.packing import pack
from agl_algo_torch.learner.scoring import find_head
from agl_algo_torch.learner.typed_torch import integers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from agl.schemas import LLM
    from agl_algo_torch.learner.batch import RowSample
    from agl_algo_torch.learner.model import LoadedModel
    from agl_objectives.settings import Compute

PROBE = "Seven times eight is fifty-six: 7*8=56.\n\nA list in Python, [1, 2, 3], has three items. ¿Qué? 你好"
"""A text that shows whether two tokenizers are the same."""

_AT_ONCE = 8
"""Largest number of simultaneous requests to a server."""
_LEAST = -100.0
"""Lower bound, in nats, for log-probabilities from a server; one minus infinity would spread to every weight."""
_SAID_AFTER_S = 60.0
"""Seconds between two messages about a server that does not answer."""


class Teacher(Protocol):
    """A model whose log-probabilities a policy learns from."""

    async def start(self, tokenizer: Any) -> None:
        """Check that the teacher answers and uses the policy's `tokenizer`; raises ConfigError if not."""

    async def score(self, samples: Sequence[RowSample]) -> list[Tensor]:
        """Return the teacher's log-probabilities at temperature 1, [T] per sample; only trained tokens are defined."""
        ...

    async def close(self) -> None:
        """Release the teacher's model or connections; idempotent."""


class LocalTeacher:
    """A model in this process, loaded at the first `score`.

    Args:
        path: A folder in Hugging Face's format, or a hub name.
        compute: Device, precision and memory, the same as for the policy.
        say: Shows the user a message about an optimisation that the model does not allow.
    """

    def __init__(self, path: str, compute: Compute, *, say: Callable[[str], None]) -> None:
        self._path, self._compute, self._say = path, compute, say
        self._loaded: LoadedModel | None = None

    async def start(self, tokenizer: Any) -> None:
        """Check that the teacher's tokenizer is the policy's; does not load the model."""
        await asyncio.to_thread(self._check, tokenizer)

    def _check(self, tokenizer: Any) -> None:
        found = load_tokenizer(self._path)
        own, other = (cast("dict[str, int]", one.get_vocab()) for one in (tokenizer, found))
        odd = next((token for token, number in own.items() if other.get(token) != number), None)
        if odd is not None:
            raise another_tokenizer(self._path, f"{odd!r} is {own[odd]} for the policy and {other.get(odd)} for it")
        asked, answered = (list(one(PROBE, add_special_tokens=False)["input_ids"]) for one in (tokenizer, found))
        if asked != answered:
            raise another_tokenizer(self._path, "it splits a text into other tokens")

    async def score(self, samples: Sequence[RowSample]) -> list[Tensor]:
        """Return the log-probabilities at temperature 1, [T] per sample, from forward passes without gradient.

        Raises ConfigError if a sample has pictures that went through another processor than the teacher's.
        """
        if self._loaded is None:
            self._loaded, notices = await asyncio.to_thread(self._open)
            for notice in notices:
                self._say(f"the teacher {self._path!r}: {notice}")
        self._check_pictures(self._loaded, samples)
        return await asyncio.to_thread(self._score, self._loaded, samples)

    def _check_pictures(self, loaded: LoadedModel, samples: Sequence[RowSample]) -> None:
        own = "" if loaded.modality is None else loaded.modality.processor
        for sample in samples:
            if sample.pictures is not None and (needed := sample.pictures.modality.processor) != own:
                raise ConfigError(
                    f"The teacher {self._path!r} has another processor of pictures than the policy: {own or 'none'}, "
                    f"not {needed}. Take a larger model of the policy's family with the same preprocessor_config.json."
                )

    def _open(self) -> tuple[LoadedModel, list[str]]:
        loaded = load_model(self._path, device=self._compute.device, dtype=self._compute.dtype)
        return loaded, list(filter(None, [find_head(loaded.model), pack(loaded.model)]))

    def _score(self, loaded: LoadedModel, samples: Sequence[RowSample]) -> list[Tensor]:
        plain = [replace(sample, temperature=torch.ones(len(sample.ids))) for sample in samples]
        return recompute_logprobs(loaded.model, plain, token_budget=self._compute.token_budget, device=loaded.device)

    async def close(self) -> None:
        """Release the model."""
        self._loaded = None


class ServedTeacher:
    """A model behind an OpenAI-compatible server that returns the log-probabilities of prompts.

    Args:
        llm: Returns the server's address, the model's name and the environment variable with the key. Called for every
            request, because any of these may change while training runs.
        name: The teacher's name, for messages.
        wait_s: Seconds for which requests to a server that does not answer are repeated.
        say: Shows the user a message.
    """

    def __init__(self, llm: Callable[[], LLM], *, name: str, say: Callable[[str], None], wait_s: float = 600.0) -> None:
        self._llm, self._name, self._wait_s, self._say = llm, name, wait_s, say
        self._session: aiohttp.ClientSession | None = None

    async def start(self, tokenizer: Any) -> None:
        """Check that the server answers with log-probabilities, and that its tokenizer is the policy's."""
        choice = await self._complete(PROBE)
        found = cast("list[int] | None", choice.get("prompt_token_ids"))
        if not found or choice.get("prompt_logprobs") is None:
            lacks = "prompt_logprobs" if found else "return_token_ids"
            raise ConfigError(
                f"The teacher {self._name!r} answers without {lacks}, which distillation needs. Serve it with vLLM "
                'that has both, or with [policy.NAME] use = "torch", or give a model folder as the teacher.'
            )
        if found[-8:] != (own := list(tokenizer(PROBE)["input_ids"]))[-8:] or len(found) != len(own):
            raise another_tokenizer(self._name, "it splits a text into other tokens")

    async def score(self, samples: Sequence[RowSample]) -> list[Tensor]:
        """Return the server's log-probabilities, [T] per sample; repeats unanswered requests for `wait_s` seconds.

        Raises:
            ConfigError: A sample has pictures.
            AglError: The server refuses a request, its answer has other tokens than the request, or it stays away.
        """
        if seeing := next((sample.rollout for sample in samples if sample.pictures is not None), ""):
            raise ConfigError(
                f"The teacher {self._name!r} is a server, which gets no pictures, and the rollout {seeing!r} shows "
                "some. Give a model folder as the teacher."
            )
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def one(sample: RowSample) -> Tensor:
            async with at_once:
                ids = integers(sample.ids)
                return self._read(ids, (await self._complete(ids)).get("prompt_logprobs"))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(sample)) for sample in samples]
        except ExceptionGroup as found:
            raise found.exceptions[0] from None  # the others were about the same server
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _read(self, ids: Sequence[int], entries: Sequence[Mapping[str, Any] | None] | None) -> Tensor:
        """Return the log-probability of each token in `ids`, [T]; 0 for the first, which no earlier token predicts."""
        if entries is None or len(entries) != len(ids):
            raise AglError(
                f"The teacher {self._name!r} was asked for {len(ids)} tokens and answered "
                f"{'none' if entries is None else len(entries)}. Check that it is served without truncating prompts."
            )
        found = [0.0]
        for token, entry in zip(ids[1:], entries[1:], strict=True):
            value = (entry or {}).get(str(token))
            if value is None:
                raise AglError(
                    f"The teacher {self._name!r} answered without the token {token}, which it was asked for. Check "
                    "that its server returns prompt_logprobs as vLLM does."
                )
            found.append(max(_LEAST, float(value["logprob"])))
        return torch.tensor(found)

    async def _complete(self, prompt: str | Sequence[int]) -> dict[str, Any]:
        """Return the only choice of the completion for a prompt; repeats the request until the server answers."""
        start, shown = time.monotonic(), float("-inf")
        attempt = 0
        while True:
            problem = await self._try(prompt)
            if isinstance(problem, dict):
                return problem
            waited = time.monotonic() - start
            if waited > self._wait_s:
                raise AglError(
                    f"The teacher {self._name!r} has not answered for {waited:.0f} s: {problem}. No rollout was "
                    "trained without it. Start it, then continue with agl run --resume."
                )
            if time.monotonic() - shown > _SAID_AFTER_S:
                shown = time.monotonic()
                self._say(f"the teacher {self._name!r} is away ({problem}); asking again for {self._wait_s:g} s")
            await asyncio.sleep(min(0.1 * 2 ** min(attempt, 6), 5.0, self._wait_s))
            attempt += 1

    async def _try(self, prompt: str | Sequence[int]) -> dict[str, Any] | str:
        """Send one request; returns the choice, or a text that says why the server is unavailable.

        Raises AglError if the server refuses the request.
        """
        llm = self._llm()
        body = {"model": llm.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        body |= {"prompt_logprobs": 0, "return_token_ids": True}
        key = os.environ.get(llm.api_key_env, "") if llm.api_key_env else ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        try:
            async with self._session.post(f"{llm.endpoint}/completions", json=body, headers=headers) as answer:
                if answer.status in (408, 429) or answer.status >= 500:
                    return f"it answered {answer.status}"
                if answer.status != 200:
                    raise AglError(
                        f"The teacher {self._name!r} refused a request with {answer.status}: "
                        f"{(await answer.text())[:300].strip()}. Check its address, model and context length."
                    )
                return cast("dict[str, Any]", (await answer.json())["choices"][0])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return str(error) or type(error).__name__


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a model; raises ConfigError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        with no_bars():
            return cast("Any", AutoTokenizer).from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The tokenizer of {path!r} cannot be loaded: {error}. "
            "Give a directory in Hugging Face's format or a hub name."
        ) from error


def another_tokenizer(teacher: str, difference: str) -> ConfigError:
    """Return the error for a teacher whose tokenizer is not the policy's; `difference` says how the two differ."""
    return ConfigError(
        f"The teacher {teacher!r} has another tokenizer than the policy: {difference}. It cannot say how likely the "
        "policy's tokens are. Take a larger model of the policy's family, or write the teacher's runs to a file "
        "(agl data export) and use sft."
    )
