"""The reward and the policy that every installation has: ``exact-match`` and ``openai``."""

import os
from collections.abc import Sequence
from typing import Any, cast

from agl import semconv
from agl.contracts import ServedModel
from agl.episodes import final_text, is_answered
from agl.errors import ConfigError, PolicyError
from agl.schemas import LLM, Json, Resource, ResourceVersion, Reward, Rollout, Span
from agl.urls import base_url_of


class ExactMatch:
    """Gives 1.0 if the final text equals the task's answer, else 0.0.

    The final text is the last answer of a model. If no model answer was recorded, it is the text that the agent
    returned, or everything that a command printed.
    White space is normalised to single spaces before the comparison, and case is ignored unless ``case`` is true.
    A task without an answer is an error, because its reward would silently be 0; an attempt that ends without any
    text gets 0.0.

    Args:
        answer: The task's key that holds the answer, or a list of accepted answers; usually a hidden key.
        case: Whether upper and lower case differ.
        name: The reward's name.
    """

    def __init__(self, *, answer: str = "answer", case: bool = False, name: str = "") -> None:
        self._answer = answer
        self._case = case
        self._name = name

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Reward:
        """Return the reward of one attempt; raises :class:`ConfigError` if the task has no answer."""
        accepted = self._accepted(rollout)
        text = final_text(spans) if any(map(_is_answer, spans)) else _returned(spans)
        is_right = self._normal(text) in {self._normal(answer) for answer in accepted}
        feedback = "" if is_right else f"expected {accepted[0]!r}, got {text!r}"
        return Reward(value=float(is_right), name=self._name, source="evaluator", feedback=feedback)

    def _accepted(self, rollout: Rollout) -> list[str]:
        task: Any = rollout.task
        found: Any = cast("dict[str, Any]", task).get(self._answer) if isinstance(task, dict) else None
        answers: list[Any] = cast("list[Any]", found) if isinstance(found, list) else [found]
        if not answers or None in answers:
            raise ConfigError(
                f"the reward exact-match compares with the task's {self._answer!r}, which rollout "
                f"{rollout.rollout_id} does not have; add it to the dataset, or name another key with answer = ..."
            )
        return [str(answer) for answer in answers]

    def _normal(self, text: str) -> str:
        joined = " ".join(text.split())
        return joined if self._case else joined.casefold()


def _is_answer(span: Span) -> bool:
    call = span.call
    return call is not None and call.dialect != "embeddings" and not span.is_late and is_answered(call)


def _returned(spans: Sequence[Span]) -> str:
    texts = (span.attributes.get(semconv.OUTPUT) for span in spans)
    return next((text for text in texts if isinstance(text, str)), "")


class OpenAIPolicy:
    """A policy that uses a running OpenAI-compatible endpoint, whose weights are not trained.

    Args:
        name: The policy's name.
        model: Model name at the endpoint.
        base_url: Base URL with its ``/v1``.
        api_key_env: Environment variable that holds the key; ``""`` if none is needed.
        has_token_ids: Whether the endpoint gives token ids and log-probabilities when asked (vLLM and SGLang do).
        sampling_parameters: Default sampling parameters of the resource.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        base_url: str = "https://api.openai.com/v1",
        api_key_env: str = "OPENAI_API_KEY",
        has_token_ids: bool = False,
        sampling_parameters: dict[str, Json] | None = None,
    ) -> None:
        self._name = name
        self.has_token_ids = has_token_ids
        self._served = ServedModel(
            base_urls=(base_url_of(base_url, who=f"policy {name!r}: base_url"),),
            model=model,
            api_key_env=api_key_env,
            sampling_parameters=sampling_parameters or {},
        )

    async def start(self) -> ServedModel:
        """Check that the environment holds the API key, and return the endpoint."""
        variable = self._served.api_key_env
        # Other servers mostly accept calls without a key.
        if variable and not os.environ.get(variable) and "api.openai.com" in self._served.base_urls[0]:
            raise PolicyError(
                f"policy {self._name!r} needs the environment variable {variable}, which is not set; "
                "set it, or name another with api_key_env"
            )
        return self._served

    async def stop(self) -> None:
        """Do nothing: the endpoint runs elsewhere."""

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Return the endpoint's own model; raises :class:`PolicyError` for weights, which an endpoint cannot load."""
        if not isinstance(version.resource, LLM):
            raise PolicyError(
                f"policy {self._name!r} is an endpoint that runs elsewhere and cannot load {version.version!r}; "
                'train with a policy that takes weights, such as use = "torch"'
            )
        return self._served

    def resource(self) -> Resource:
        """Return the endpoint's ``LLM`` resource."""
        return self._served.llm
