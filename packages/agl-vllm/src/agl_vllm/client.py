"""A client of one vLLM server: lists models, reads log-probabilities of a text, and changes the server's weights.

The routes below ``/v1`` are always there, except ``/v1/load_lora_adapter``, which needs
``VLLM_ALLOW_RUNTIME_LORA_UPDATING``. The other routes need ``VLLM_SERVER_DEV_MODE``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import aiohttp

from agl.errors import PolicyError

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_HOTTEST = 2.0
_SAME_NATS = 0.02
"""Log-probabilities that differ by less, in nats, count as equal up to rounding; a top-p of 0.95 causes 0.05."""


class RouteMissingError(PolicyError):
    """Raised if the server lacks a route, because the mode with that route is off."""


class ServerClient:
    """Calls one server, over a new connection each time, because calls are few. Methods raise :class:`PolicyError`.

    Args:
        base_url: The server's base URL, including ``/v1``.
        key: API key, ``""`` for none.
        timeout_s: Seconds for a call that changes weights or waits for answers in flight.
    """

    def __init__(self, base_url: str, *, key: str = "", timeout_s: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout_s = timeout_s

    @property
    def _root(self) -> str:
        return self.base_url.removesuffix("/v1")

    async def is_healthy(self, *, within_s: float = 10.0) -> bool:
        """Return true if the server answers within the time that its engine is running."""
        timeout = aiohttp.ClientTimeout(total=within_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{self._root}/health", headers=self._headers) as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def models(self) -> list[str]:
        """Return the model names that requests may use, adapters included."""
        url = f"{self.base_url}/models"
        listed = await self._call("GET", url)
        try:
            names = [str(entry["id"]) for entry in listed["data"]]
        except (TypeError, KeyError):
            names = []
        if not names:
            raise PolicyError(f"the answer to {url} lists no models; is base_url that of a vLLM server?")
        return names

    async def score(self, token_ids: Sequence[int], *, model: str) -> list[float]:
        """Return the natural log-probability of every token but the first, given the tokens before it; [N - 1].

        Raises:
            PolicyError: The server returns no token ids or no log-probabilities of the prompt.
        """
        body = {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "prompt_logprobs": 0,  # only for the prompt's tokens, not for other likely tokens
            "return_token_ids": True,
        }
        answer = await self._call("POST", f"{self.base_url}/completions", body)
        choice = answer["choices"][0]
        if choice.get("prompt_token_ids") != list(token_ids) or not choice.get("token_ids"):
            raise PolicyError(
                f"the server at {self.base_url} returned no token ids although they were asked for; use vLLM 0.10.2 "
                'or later, or attach to it with use = "openai", which needs none'
            )
        scores = choice.get("prompt_logprobs")
        if not scores or len(scores) != len(token_ids):
            raise PolicyError(
                f"the server at {self.base_url} returned no log-probabilities of the prompt, which the check after a "
                "weight update needs; is it a vLLM server?"
            )
        return [float(scores[at][str(token)]["logprob"]) for at, token in enumerate(token_ids) if at]

    async def check_logprobs_mode(self, token_ids: Sequence[int], *, model: str) -> None:
        """Check that the reported log-probabilities are those of the distribution that tokens are drawn from.

        With logits z and temperature T, the log-probabilities are z / T up to a constant, so at twice the temperature
        the likeliest token's lead over the next must be half as large. A server that always reports them at temperature
        1 shows the same lead both times. Raises :class:`PolicyError` for such a server.
        """
        plain, halved = [await self._lead(token_ids, model=model, temperature=t) for t in (1.0, 2.0)]
        # Closer to the same lead than to half of it. Rounding cannot confuse the two, unless the lead is nearly 0.
        if abs(halved - plain) < abs(halved - plain / 2):
            raise PolicyError(
                f"the server at {self.base_url} reports log-probabilities at temperature 1 whatever a request's "
                "temperature is, and training compares them with those at that temperature; start it with "
                "--logprobs-mode processed_logprobs"
            )

    async def check_own_sampling(self, token_ids: Sequence[int], *, model: str) -> None:
        """Check that requests without sampling parameters are answered from the full distribution.

        A server that was started without ``--generation-config vllm`` applies the model's own temperature, top-p, top-k
        and penalty to such requests, and training would not know. So requests without these parameters are compared
        with requests that set neutral values: at the default temperature, which reveals a temperature, and a penalty on
        the likely token that the prompt holds; and at the highest temperature that servers allow, where top-p and top-k
        cut off most. Raises :class:`PolicyError` for such a server.
        """
        prompt = await self._with_likeliest(token_ids, model=model)
        for heat in ({}, {"temperature": _HOTTEST}):
            neutral = {**_NEUTRAL, **heat}
            asked = neutral, heat, neutral
            first, untold, last = [await self._likely(prompt, model=model, **sampling) for sampling in asked]
            if _distance(untold, last) > _SAME_NATS + _distance(first, last):
                raise PolicyError(
                    f"the server at {self.base_url} samples by the model's generation_config.json where a request does "
                    "not say how, and training would take that for the policy's whole distribution; start it with "
                    "--generation-config vllm"
                )

    async def _with_likeliest(self, token_ids: Sequence[int], *, model: str) -> list[int]:
        """Prepend the likeliest next token to a prompt, up to three times, until the prompt already holds it."""
        prompt = list(token_ids)
        for _ in range(3):
            likeliest = next(iter(await self._likely(prompt, model=model, **_NEUTRAL)))
            if likeliest in prompt:
                break
            prompt.insert(0, likeliest)
        return prompt

    async def _lead(self, token_ids: Sequence[int], *, model: str, temperature: float) -> float:
        """Return the lead of the likeliest next token over the second likeliest, in nats."""
        first, second = (await self._likely(token_ids, model=model, temperature=temperature)).values()
        return first - second

    async def _likely(self, token_ids: Sequence[int], *, model: str, **sampling: float) -> dict[int, float]:
        """Return the two likeliest next tokens with their log-probabilities in nats, the likeliest first."""
        body = {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,  # else two tokens with the same text would be one entry
            **sampling,
        }
        answer = await self._call("POST", f"{self.base_url}/completions", body)
        found: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        ranked = sorted(found.items(), key=lambda item: -float(item[1]))[:2]
        return {int(token.removeprefix("token_id:")): float(logprob) for token, logprob in ranked}

    async def takes_tokens(self, *, model: str) -> bool:
        """Return true if the server takes prompts as token ids and renders them (vLLM's ``--enable-scale-out``)."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        try:
            await self._call("POST", f"{self.base_url}/chat/completions/render", body)
        except RouteMissingError:
            return False
        return True

    async def pause(self) -> None:
        """Hold new requests; returns once the requests in flight have ended."""
        await self._call("POST", f"{self._root}/pause?mode=wait")

    async def resume(self) -> None:
        """Serve held and new requests again."""
        await self._call("POST", f"{self._root}/resume")

    async def reset_prefix_cache(self) -> None:
        """Drop cached prompt prefixes, which were computed with the old weights."""
        await self._call("POST", f"{self._root}/reset_prefix_cache")

    async def reload_weights(self, path: str) -> None:
        """Load full weights from ``path``, a directory that the server can read, into the running engine."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._call("POST", f"{self._root}/collective_rpc", body)

    async def sleep(self) -> None:
        """Free the memory of weights and cache; the server answers nothing until `wake_up` and new weights."""
        await self._call("POST", f"{self._root}/sleep?level=2")

    async def wake_up(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate the memory of one part again; its former content is lost."""
        await self._call("POST", f"{self._root}/wake_up?tags={part}")

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter at ``path`` as the model ``name``; replaces an earlier adapter of that name."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        await self._call("POST", f"{self.base_url}/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        """Stop serving the adapter that was loaded as the model ``name``."""
        await self._call("POST", f"{self.base_url}/unload_lora_adapter", {"lora_name": name})

    async def _call(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=10)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, url, json=body, headers=self._headers) as answer,
            ):
                return await _content(answer, url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise PolicyError(
                f"the vLLM server did not answer {url} ({error or type(error).__name__}); is it running, and is "
                "base_url right?"
            ) from error


async def _content(answer: aiohttp.ClientResponse, url: str) -> Any:
    if answer.status != 200:
        text = (await answer.text())[:2000]
        if answer.status in (403, 404, 405):  # 403: vLLM 0.32 has the route, and it is switched off
            raise RouteMissingError(f"the vLLM server has no {url} (HTTP {answer.status}: {text})")
        raise PolicyError(f"the vLLM server answered {url} with HTTP {answer.status}: {text or 'no message'}")
    try:
        return await answer.json() if answer.content_type == "application/json" else await answer.text()
    except ValueError as error:
        raise PolicyError(
            f"the answer to {url} cannot be read ({error}); is base_url that of a vLLM server?"
        ) from error


def _distance(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the largest difference between two answers' log-probabilities, compared rank by rank."""
    return max(abs(mine - theirs) for mine, theirs in zip(one.values(), other.values(), strict=True))
