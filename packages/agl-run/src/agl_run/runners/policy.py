"""The `openai` policy: any running OpenAI-compatible endpoint; its weights are not trained."""

import os

from agl.contracts import ServedModel
from agl.errors import ConfigError, PolicyError
from agl.schemas import LLM, Json, Resource, ResourceVersion


class OpenAIPolicy:
    """Attaches to an endpoint.

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
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"policy {name!r}: base_url {base_url!r} is no URL; write http://HOST:PORT/v1")
        self._name = name
        self._has_token_ids = has_token_ids
        self._served = ServedModel(
            base_urls=(base_url.rstrip("/"),),
            model=model,
            api_key_env=api_key_env,
            sampling_parameters=sampling_parameters or {},
        )

    async def start(self) -> ServedModel:
        """Check that the key is set."""
        variable = self._served.api_key_env
        if variable and not os.environ.get(variable) and "api.openai.com" in self._served.base_urls[0]:
            raise PolicyError(
                f"policy {self._name!r} needs the environment variable {variable}, which is not set; "
                "set it, or name another with api_key_env"
            )
        return self._served

    async def stop(self) -> None:
        """Do nothing."""

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Serve the endpoint's own model; raises for weights, which cannot be loaded into it."""
        if not isinstance(version.resource, LLM):
            raise PolicyError(
                f"policy {self._name!r} is an endpoint that runs elsewhere and cannot load {version.version!r}; "
                'train with a policy that takes weights, such as use = "torch"'
            )
        return self._served

    def resource(self) -> Resource:
        """Return the endpoint as a resource."""
        return self._served.llm

    @property
    def has_token_ids(self) -> bool:
        """Return true if the endpoint is configured to return token ids."""
        return self._has_token_ids
