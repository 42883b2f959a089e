"""Algorithms with the arguments of Agent Lightning, as configurations of this project's algorithms.

:class:`APO` calls its models at the address of the given client, with the key from an environment variable.
:class:`VERL` serves the model that its configuration names, as the policy ``main_llm``.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

import msgspec

import agl
from agl.algorithms import AlgorithmConfig, algorithm
from agl.errors import ConfigError
from agl.schemas import PromptTemplate
from agl_run import PolicyConfig, policy

T = TypeVar("T")

MAIN_LLM = "main_llm"
"""The name of the policy that VERL trains."""

_LOG = logging.getLogger("agl_lightning")
_SERVED_BY_VERL = ("vllm", "sglang")


class Baseline:
    """Runs the agent on every task and trains nothing.

    Args:
        n_epochs: How often each task runs.
        settings: Settings of Agent Lightning's polling and logging, which nothing needs here.
    """

    def __init__(self, *, n_epochs: int = 1, **settings: Any) -> None:
        self.n_epochs = n_epochs
        self.settings = settings


class APO(Generic[T]):
    """Tunes the prompt among the initial resources; ``APO[Task]`` is the same.

    Args:
        async_openai_client: The ``openai`` client whose address and key are used for the algorithm's models. The key
            must be the value of an environment variable.
        gradient_model: The model that criticises failing runs.
        apply_edit_model: The model that writes new prompts.
        diversity_temperature: The temperature of both models.
        gradient_batch_size: Training tasks per step.
        val_batch_size: Validation tasks in the first slice of a race.
        beam_width: Number of candidates that take turns as parents.
        branch_factor: Children of each parent.
        beam_rounds: Number of rounds; in each round ``beam_width`` parents get children.
        settings: Parameters of this project's algorithm ``apo``, such as ``budget``.

    Raises:
        ConfigError: The client has no address or no known key.
    """

    def __init__(
        self,
        async_openai_client: Any,
        /,
        *,
        gradient_model: str = "gpt-5-mini",
        apply_edit_model: str = "gpt-4.1-mini",
        diversity_temperature: float = 1.0,
        gradient_batch_size: int = 4,
        val_batch_size: int = 16,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        _poml_trace: bool = False,
        **settings: Any,
    ) -> None:
        _refuse_waiting(settings)
        served = {**_address(async_openai_client), "temperature": diversity_temperature}
        params: dict[str, Any] = {
            "optimizer": {**served, "model": apply_edit_model},
            "critic": {**served, "model": gradient_model},
            "gradient_batch_size": gradient_batch_size,
            "val_batch_size": val_batch_size,
            "branch_factor": branch_factor,
            "beam_rounds": beam_rounds * beam_width,
            "parents": {"selector": "beam", "beam_width": beam_width},
            "budget": _preset(beam_rounds * beam_width * branch_factor),
        }
        self.config: AlgorithmConfig = agl.APO({**params, **settings})
        self.best: PromptTemplate | None = None

    def config_for(self, resources: Mapping[str, Any]) -> AlgorithmConfig:
        """Return the configuration for ``resources``; it declares the placeholders of all prompts as filled."""
        prompts = [given for given in resources.values() if isinstance(given, PromptTemplate)]
        filled: Any = sorted({name for prompt in prompts for name in prompt.fields})
        return msgspec.structs.replace(self.config, params={"texts": {"filled": filled}, **self.config.params})

    def get_best_prompt(self) -> PromptTemplate:
        """Return the prompt that is live after training.

        Raises:
            ConfigError: No trainer has run this algorithm to its end.
        """
        if self.best is None:
            raise ConfigError(
                "this APO has no best prompt yet; call trainer.fit(...) first, which returns when it is found"
            )
        return self.best


class VERL:
    """Trains the model of a configuration of VERL as the policy ``main_llm``.

    Args:
        config: VERL's own keys.
        settings: Further arguments of ``agl.VERL``, such as ``engine``. By default the engine follows from
            ``actor_rollout_ref.rollout.name``: ``ray`` for vLLM and SGLang, otherwise ``inproc``.
    """

    def __init__(self, config: Mapping[str, Any], /, **settings: Any) -> None:
        replaced = sorted({"trainer_cls", "daemon_cls"} & settings.keys())
        if replaced:
            raise ConfigError(
                f"VERL got {replaced}, and no class of VERL is replaced here; write an algorithm of your own, see "
                "docs/tutorial/algorithm.md"
            )
        own = {key: value for key, value in config.items() if key != "agentlightning"}
        if len(own) < len(config):
            _LOG.info("VERL's key 'agentlightning' is left out: calls become rows by their tokens, without a setting")
        rollout = _at(own, "actor_rollout_ref", "rollout")
        engine = "ray" if rollout.get("name") in _SERVED_BY_VERL else "inproc"
        self.config: AlgorithmConfig = algorithm("verl", {"engine": settings.pop("engine", engine), **own}, **settings)
        self.model: str = _at(own, "actor_rollout_ref", "model").get("path", "")
        self.trainer: Mapping[str, Any] = _at(own, "trainer")

    def policy(self) -> PolicyConfig:
        """Return the configuration of the policy that serves the model.

        Raises:
            ConfigError: The configuration names no model.
        """
        if not self.model:
            raise ConfigError(
                "VERL's configuration names no model; set actor_rollout_ref.model.path to a folder or a name on the "
                "hub, or give the trainer policies={'main_llm': agl_run.policy('torch', model=...)}"
            )
        return policy("verl" if self.config.params["engine"] == "ray" else "torch", model=self.model)


def _address(client: Any) -> dict[str, Any]:
    url, key = str(getattr(client, "base_url", "")).rstrip("/"), getattr(client, "api_key", None)
    if not url or "Azure" in type(client).__name__:
        raise ConfigError(
            f"APO got {type(client).__name__}, and needs a client of openai with a base_url, whose address and key "
            "its models have; write APO(AsyncOpenAI(base_url=...)), or agl.APO(optimizer={...}) as in "
            "docs/how-to/prompts.md"
        )
    variable = next((name for name, value in os.environ.items() if key and value == key), "")
    if key and not variable and "api.openai.com" in url:
        raise ConfigError(
            "APO got a client with a key that no environment variable holds, and keys are never written into an "
            "experiment; put it into OPENAI_API_KEY and write AsyncOpenAI()"
        )
    return {"base_url": url, "api_key_env": variable}


def _refuse_waiting(settings: dict[str, Any]) -> None:
    replaced = {
        "rollout_batch_timeout": "set the time of one attempt: Trainer(runner=agl_run.runner('async', timeout_s=600))",
        "run_initial_validation": "leave it out: the first prompt is always measured, since all others race against it",
    }
    for name, remedy in replaced.items():
        given = settings.pop(name, True)
        if given is not True:
            raise ConfigError(f"APO got {name}={given!r}, which it does not have here; {remedy}")


def _preset(proposals: int) -> str:
    return "light" if proposals <= 10 else "medium" if proposals <= 25 else "heavy"


def _at(config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the mapping at ``path`` in a nested configuration; empty if there is no mapping."""
    found: Any = config
    for name in path:
        found = cast("Mapping[str, Any]", found).get(name) if isinstance(found, Mapping) else None
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
