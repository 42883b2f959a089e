"""Resources, which algorithms change and agents read, as immutable versions with their lineage."""

import string
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from agl.errors import ConfigError
from agl.schemas._base import SCHEMA_VERSION, Int64, Json, Record


class LLM(Record, frozen=True, kw_only=True, tag="llm"):
    """A model that the agent may call.

    Attributes:
        endpoint: Base URL of an OpenAI-compatible API, with its ``/v1``; in training the gateway's.
        model: Name to send as ``model``.
        sampling_parameters: Defaults for the request, such as ``{"temperature": 0.7}``.
        api_key_env: Name of the environment variable that holds the provider's key.
        api_key: The attempt's token, set only on the copy that an agent gets; stores refuse an ``LLM`` with a key.
    """

    endpoint: str = ""
    model: str = ""
    sampling_parameters: dict[str, Json] = {}
    api_key_env: str = ""
    api_key: str = ""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """The base URL with the attempt's ids and token in its path, for clients that cannot send a key.

        Returns the endpoint unchanged if an id is ``None``, if no token is set (the endpoint is then not a gateway), or
        if the endpoint already has the attempt's path.
        """
        is_routed = f"/rollout/{rollout_id}/attempt/{attempt_id}/" in self.endpoint
        # Only a gateway understands such a path, and only an agent's own copy has a token.
        if rollout_id is None or attempt_id is None or not self.api_key or is_routed:
            return self.endpoint
        root = self.endpoint.removesuffix("/").removesuffix("/v1")
        return f"{root}/rollout/{rollout_id}/attempt/{attempt_id}/key/{self.api_key}/v1"

    @property
    def base_url(self) -> str:
        """The endpoint, under the name that clients use."""
        return self.endpoint


class PromptTemplate(Record, frozen=True, kw_only=True, tag="prompt_template"):
    """A prompt with placeholders.

    Attributes:
        template: The text.
        engine: The syntax of placeholders: ``f-string`` for ``{name}``, ``jinja`` for ``{{ name }}`` (sandboxed; needs
            the jinja2 package), or ``plain`` for a text without placeholders.
    """

    template: str
    engine: Literal["f-string", "jinja", "plain"] = "f-string"

    def format(self, /, **values: object) -> str:
        """Fill the placeholders; raises :class:`ConfigError`, which names the placeholders without a value."""
        if self.engine == "plain":
            return self.template
        if self.engine == "jinja":
            return _render_jinja(self.template, values)
        missing = sorted(self.fields - values.keys())
        if missing:
            raise ConfigError(
                f"the prompt template needs {missing} and got only {sorted(values)}; "
                "pass the missing values or escape literal braces as {{ and }}"
            )
        return self.template.format(**values)

    @property
    def fields(self) -> frozenset[str]:
        """Names of the f-string placeholders, including those in format specifications such as ``{x:{width}}``.

        Empty for the other engines.
        """
        if self.engine != "f-string":
            return frozenset()
        # A placeholder may look into its value: {task.name}, {rows[0]}.
        return frozenset(name.split(".")[0].split("[")[0] for name in _placeholders(self.template))


class Weights(Record, frozen=True, kw_only=True, tag="weights"):
    """Model weights or an adapter on disk.

    Attributes:
        uri: Directory, relative to the experiment's work directory or absolute.
        base_model: The model that an adapter belongs to; ``""`` for full weights.
        format: ``hf`` for a Hugging Face directory, ``lora`` for a peft adapter.
    """

    uri: str
    base_model: str = ""
    format: Literal["hf", "lora"] = "hf"


PROBE_FILE = "probe.json"
"""Name of the file with the :class:`WeightsProbe` in a directory of weights."""


class WeightsProbe(Record, frozen=True, kw_only=True):
    """The log-probabilities that weights give to a fixed text; they show whether a server has loaded these weights.

    Whoever writes weights writes the probe into the same directory. After a server has loaded the weights, its own
    log-probabilities are compared with the probe, because some servers report a successful reload and go on serving
    other weights.

    Attributes:
        token_ids: The text, [N], N at least 2.
        logprobs: Natural log-probability of every token but the first, given the tokens before it, [N - 1].
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class JsonResource(Record, frozen=True, kw_only=True, tag="json"):
    """Any JSON value, such as a list of tool descriptions."""

    value: Json


Resource: TypeAlias = LLM | PromptTemplate | Weights | JsonResource
"""A value that algorithms change and agents read."""

NamedResources: TypeAlias = dict[str, Any]
"""Resources by name, in the form in which an agent's ``rollout`` gets them."""


class ResourceVersion(Record, frozen=True, kw_only=True):
    """One immutable version of a resource, and its origin.

    Attributes:
        name: The resource's name, such as ``main_llm``.
        version: Unique within the name; chosen by the publisher, so that publishing twice is harmless.
        parent: The version from which this one was made; ``""`` for the first version.
        algorithm: Name of the algorithm that made the version; ``""`` if a person did.
        step: The step of that algorithm.
        metadata: Anything else, such as scores.
    """

    name: str
    version: str
    resource: Resource
    parent: str = ""
    algorithm: str = ""
    step: Int64 = 0
    created_at: float = 0.0
    metadata: dict[str, Json] = {}
    schema_version: int = SCHEMA_VERSION


def write_probe(folder: Path, probe: WeightsProbe) -> None:
    """Write the probe of weights into their folder."""
    (folder / PROBE_FILE).write_bytes(msgspec.json.encode(probe))


def read_probe(folder: Path) -> WeightsProbe | None:
    """Read the probe in a folder of weights; ``None`` if there is no probe.

    Raises:
        ConfigError: The file is not a probe.
    """
    path = folder / PROBE_FILE
    if not path.is_file():
        return None
    try:
        probe = msgspec.json.decode(path.read_bytes(), type=WeightsProbe)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a probe of weights ({error}); export them again, or remove it") from error
    # Of one token nothing can be predicted.
    if len(probe.token_ids) < 2 or len(probe.logprobs) != len(probe.token_ids) - 1:
        raise ConfigError(
            f"{path} has {len(probe.token_ids)} tokens and {len(probe.logprobs)} log-probabilities, which must be one "
            "fewer; export the weights again, or remove it"
        )
    return probe


def _placeholders(template: str) -> Iterator[str]:
    parse = string.Formatter().parse
    for _, name, style, _ in parse(template):
        if name is not None:
            yield name
            # Format specifications may contain placeholders, nested one level deep at most.
            yield from (inner for _, inner, _, _ in parse(style or "") if inner is not None)


def _render_jinja(template: str, values: dict[str, object]) -> str:
    try:
        jinja2 = import_module("jinja2")
        sandbox = import_module("jinja2.sandbox")
    except ImportError as error:
        raise ConfigError("a jinja prompt template needs jinja2; run: pip install jinja2") from error
    # Sandboxed, because prompts come from optimisers, that is from models. Strict, because an empty
    # value would pass unseen.
    environment = sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)
    return str(environment.from_string(template).render(values))
