"""Reads an experiment, and determines the needs of its parts: distributions, environment variables, a database."""

import hashlib
import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from itertools import pairwise
from pathlib import Path, PurePosixPath

from agl import PluginManager
from agl.contracts import Kind
from agl.errors import ConfigError
from agl.hints import pip_install
from agl.schemas import Json, Record
from agl_deploy.findings import refuse, variables, warnings
from agl_deploy.imports import Imported, read_imports
from agl_deploy.pins import Pin, has_extra, missing, pins
from agl_run import ExperimentConfig, PolicyConfig, load_config

LONGEST = 30
"""Largest length of a name, which leaves room for the chart's suffixes within Kubernetes' limit of 63 characters."""

_VALID = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")

PARTS = ("gateway", "worker", "trainer", "console")

_EVERYWHERE = ("agl-core", "agl-run", "agl-gateway", "agl-data", "agl-store-postgres")
_OF_A_CODER = ("pip", "setuptools", "wheel", "agl-deploy", "agl-testing")
"""Distributions that may be in an agent's ``requirements.txt`` for development, and that no image needs."""

_RAY_WITH_JOBS = "ray[default]"
_HARNESS = "harness"
"""Name of the runner of coding harnesses."""

_KEYS = {"openai": "OPENAI_API_KEY", "tinker": "TINKER_API_KEY"}
"""The environment variable with the API key, by kind of policy, used if the policy's settings name no variable."""


class OnRay(Record, frozen=True, kw_only=True):
    """An experiment's use of a Ray cluster.

    Attributes:
        version: The installed release of Ray.
        runs_agents: True if the agents run on the cluster.
        shares_files: True if several processes of the cluster write to the run's folder.
        takes_jobs: True if Ray's job server is installed here, and so in images with the same pins.
    """

    version: str
    runs_agents: bool
    shares_files: bool
    takes_jobs: bool


class Needs(Record, frozen=True, kw_only=True):
    """Everything that an experiment needs on another machine.

    Attributes:
        file: Absolute path of the experiment's file.
        name: The name for images, releases and services, derived from the experiment's name.
        experiment: The experiment's name.
        store: URL of the database; ``""`` for the PostgreSQL that the deployment includes.
        pins: The distributions to install, by part.
        trained: Names of the policies whose weights can be trained.
        variables: The environment variables with keys that the experiment names, by part.
        ray: The use of a Ray cluster; ``None`` if the experiment does not need Ray.
        warnings: Warnings for people about settings that may not work on other machines.
    """

    file: Path
    name: str
    experiment: str
    store: str
    pins: dict[str, list[Pin]]
    trained: list[str]
    variables: dict[str, list[str]]
    ray: OnRay | None
    warnings: list[str]

    @property
    def sources(self) -> list[str]:
        """The sources from which wheels must be built, for distributions without a release in an index."""
        return sorted({pin.source for each in self.pins.values() for pin in each if pin.source})


def read_needs(file: Path, manager: PluginManager) -> Needs:
    """Read an experiment, and determine its needs.

    Raises:
        ConfigError: The experiment cannot be deployed (see :func:`agl_deploy.findings.refuse`), or a distribution that
            every deployment needs is not installed here.
        UnknownComponentError: A component is not installed here, so that its distribution is unknown.
    """
    config = load_config(file)
    folder, agent = file.absolute().parent, config.experiment.agent
    refuse(config, tomllib.loads(file.read_text(encoding="utf-8")), folder)
    found = read_imports(folder, _modules(config), agent if isinstance(agent, tuple) else ())
    parts = _distributions(config, manager, found)
    absent = missing(name for names in parts.values() for name in names)
    needed = [name for name in absent if name in (*_EVERYWHERE, "agl-console")]
    if needed:
        raise ConfigError(
            f"a deployment needs {', '.join(needed)}, and versions are pinned as they are installed here; run: "
            f"{' && '.join(pip_install(name) for name in needed)}"
        )
    store = config.experiment.store
    pinned = {part: _with_jobs_of_ray(names) for part, names in parts.items()}
    return Needs(
        file=file.absolute(),
        name=deployed_name(config.experiment.name),
        experiment=config.experiment.name,
        store="" if store.startswith("sqlite") else store,
        pins=pinned,
        trained=[name for name, policy in config.policy.items() if manager.policy(policy.use).trains],
        variables=_variables(config),
        ray=_on_ray(config, pinned["trainer"]),
        warnings=[*warnings(config, folder, found.files), *_not_here(found, absent)],
    )


def deployed_name(text: str) -> str:
    """Return a DNS label of at most 30 characters for a text: the text itself, if it is such a label.

    Any other text is simplified, and eight hexadecimal digits of its hash are added. The same text therefore always
    gives the same name, and texts that are equal after the simplification give different names.
    """
    if _VALID.fullmatch(text) and len(text) <= LONGEST:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"agl-{plain}"
    return f"{plain[: LONGEST - 9].strip('-')}-{digest}"


def _modules(config: ExperimentConfig) -> list[str]:
    """Return the modules in the experiment's file: in ``module:attribute``, and in a command ``python -m module``."""
    agent = config.experiment.agent
    uses = [agent if isinstance(agent, str) else "", *(reward.use for reward in config.reward)]
    words = agent if not isinstance(agent, str) else ()
    is_python = bool(words) and PurePosixPath(words[0]).name.startswith("python")
    run = [module for flag, module in pairwise(words) if is_python and flag == "-m"][:1]
    return [*(use.partition(":")[0] for use in uses if ":" in use), *run]


def _runners(config: ExperimentConfig, manager: PluginManager) -> list[str]:
    """Return the names of the configured runner, and of the runner that a harness or ``verifiers:NAME`` implies."""
    agent = config.experiment.agent
    brought = agent.partition(":")[0] if isinstance(agent, str) and ":" in agent else ""
    is_brought = any(entry.name == brought for entry in manager.entries("runner"))
    return [config.runner.use, *([_HARNESS] if config.experiment.harness else []), *([brought] if is_brought else [])]


def _with_extra(distribution: str, component: str) -> str:
    """Return a component's distribution; if it has an extra with the component's name, with that extra."""
    extras = metadata.metadata(distribution).get_all("Provides-Extra") if distribution else None
    return f"{distribution}[{component}]" if component in (extras or ()) else distribution


def _distributions(config: ExperimentConfig, manager: PluginManager, found: Imported) -> dict[str, list[str]]:
    owners = {component: one.distribution for one in manager.status() for component in one.components}

    def of(kind: Kind, names: Iterable[str]) -> list[str]:
        wanted = [manager.entry(kind, name).name for name in names if ":" not in name]
        return [_with_extra(owners[f"{kind} {name}"], name) for name in wanted]

    agents = [name for name in found.distributions if name not in _OF_A_CODER]
    rewards = of("reward", (reward.use for reward in config.reward))
    worker = [*_EVERYWHERE, *agents, *rewards, *of("tracer", config.tracers), *of("runner", _runners(config, manager))]
    credits = [config.credit, *(each.credit for each in config.algorithm if each.credit)]
    trainer = [
        *worker,
        *of("algorithm", (algorithm.use for algorithm in config.algorithm)),
        *of("policy", (policy.use for policy in config.policy.values())),
        *of("credit", (credit.use for credit in credits)),
        *of("exporter", (exporter.use for exporter in config.exporter)),
    ]
    own = (_EVERYWHERE, worker, trainer, (*_EVERYWHERE, "agl-console"))
    return {part: sorted({name for name in names if name}) for part, names in zip(PARTS, own, strict=True)}


def _with_jobs_of_ray(names: list[str]) -> list[Pin]:
    """Pin distributions; if one of them needs Ray, pin Ray's job server too."""
    found = pins(names)
    return pins([*names, _RAY_WITH_JOBS]) if any(pin.name == "ray" for pin in found) else found


def _on_ray(config: ExperimentConfig, trainer: list[Pin]) -> OnRay | None:
    """Return the experiment's use of Ray; ``None`` if Ray is not among the trainer's pins."""
    version = next((pin.version for pin in trainer if pin.name == "ray"), "")
    if not version:
        return None
    return OnRay(
        version=version,
        runs_agents=config.runner.use == "ray",
        shares_files=any(each.resources or each.params.get("engine") == "ray" for each in config.algorithm),
        takes_jobs=has_extra(_RAY_WITH_JOBS),
    )


def _variables(config: ExperimentConfig) -> dict[str, list[str]]:
    """Return the environment variables with keys, by part; workers need those of the rewards, which they compute."""
    rewards = {*variables([reward.params for reward in config.reward])}
    policies = {name for policy in config.policy.values() for name in variables(_with_key(policy))}
    rest = variables([*(each.params for each in config.algorithm), *(each.params for each in config.exporter)])
    return {"worker": sorted(rewards), "trainer": sorted({*rewards, *policies, *rest})}


def _with_key(policy: PolicyConfig) -> dict[str, Json]:
    """Return a policy's parameters, with ``api_key_env`` set to its default if the kind of policy has one."""
    default = _KEYS.get(policy.use)
    return {"api_key_env": default, **policy.params} if default else policy.params


def _not_here(found: Imported, absent: list[str]) -> list[str]:
    """Return warnings about imports and requirements of the agent that are not installed here."""
    return [
        *(
            f"{file} imports {module!r}, which is neither in the folder nor installed here: add its distribution to "
            "requirements.txt in the experiment's folder"
            for module, file in found.unknown
        ),
        *(f"{name} of requirements.txt is not installed here, so it is not pinned: install it" for name in absent),
    ]
