"""Builds every component of a plan once, so that wrong parameters and missing packages are found before a run."""

import os
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

from agl.algorithms import AlgorithmConfig
from agl.contracts import (
    AlgorithmContext,
    CheckedAlgorithm,
    Credit,
    Exporter,
    RewardEmitter,
    RewardSetup,
    Sink,
    Upstream,
)
from agl.errors import ConfigError, UnknownComponentError
from agl.hints import did_you_mean
from agl.schemas import LLM, PromptTemplate, Resource, ResourceVersion
from agl_inspect.stores import located
from agl_run.config.sections import PAST
from agl_run.parts.counterfactual import check_replays
from agl_run.parts.gateway import check_place
from agl_run.parts.models import policy_params
from agl_run.parts.rewards import build_own, is_own
from agl_run.parts.waiting import loading, waiting_for
from agl_run.plan import Plan


async def check_components(plan: Plan, *, say: Callable[[str], None] | None = None) -> None:
    """Build and close every component that can be built without being started; raises the first error.

    Algorithms also check that the plan meets their needs, such as a budget for its tasks, and call the functions that
    their parameters name. ``say`` is called with a line for each check that takes longer than a second.
    """
    config, manager = plan.config, plan.manager
    for credit in (config.credit, *(a.credit for a in config.algorithm if a.credit is not None)):
        check_replays(plan, manager.build(manager.credit(credit.use), **credit.params))
    for name, resource in plan.resources.items():
        if isinstance(resource, PromptTemplate):
            check_template(name, resource)
    # Keys before components: a missing key is the commonest mistake, and building may take seconds.
    check_keys(plan)
    check_place(plan, store_url="" if plan.store else located(config.experiment.store, plan.folder))
    with waiting_for("importing the rewards, tracers and exporters", say=say):
        build_rewards(plan)
        for name in config.tracers:
            manager.build(manager.tracer(name))
        for _, exporter in build_exporters(plan):
            await exporter.close()
        build_sinks(plan)
    for algorithm in config.algorithm:
        with waiting_for(f"algorithm {algorithm.name!r}: checking {algorithm.use}", say=say):
            await check_without_starting(plan, algorithm)
    # Last, because a policy may read a model.
    trained = plan.trained_policies() if plan.needs_token_ids() else set[str]()
    for name, policy in config.policy.items():
        with waiting_for(loading(name, policy.use, policy.params, folder=plan.folder), say=say):
            built = manager.build(manager.policy(policy.use), name=name, **policy_params(plan, name))
        if name in trained and not built.has_token_ids:
            raise ConfigError(no_token_ids(name, policy.use))
        if policy.use != PAST:  # it has the first weights of another policy
            check_policy_key(plan, name, built.resource())


async def check_algorithms(plan: Plan) -> None:
    """Build and close every algorithm, so that each checks its parameters."""
    for algorithm in plan.config.algorithm:
        await plan.manager.build(plan.entry(algorithm), **algorithm.params).close()


class _Policies(dict[str, LLM]):
    """Policies by name; reading a policy that this machine cannot reach raises :class:`ConfigError`."""

    def __init__(self, policies: Mapping[str, LLM], unreachable: Mapping[str, str]) -> None:
        super().__init__(policies)
        self._unreachable = unreachable

    def __getitem__(self, name: str) -> LLM:
        if name in self._unreachable:
            raise ConfigError(self._unreachable[name])
        return super().__getitem__(name)


def build_rewards(
    plan: Plan, upstreams: Iterable[Upstream] = (), *, unreachable: Mapping[str, str] | None = None
) -> list[tuple[str, RewardEmitter]]:
    """Build the reward emitters; return them as ``(name, emitter)``.

    Args:
        plan: The experiment.
        upstreams: The running policies.
        unreachable: For each policy that this machine cannot reach, the reason; a reward that uses it is refused.
    """
    manager = plan.manager
    # Rewards call policies directly and not by the gateway: their calls are not the agent's.
    running = {up.name: LLM(endpoint=up.base_url, model=up.model, api_key_env=up.api_key_env) for up in upstreams}
    policies = _Policies({name: LLM() for name in plan.config.policy} | running, unreachable or {})

    def build(use: str, params: Mapping[str, Any]) -> RewardEmitter:
        if is_own(plan, use):
            return build_own(plan, use, params)
        entry = manager.reward(use)
        return manager.build(entry, **({**params, "setup": setup} if entry.takes_setup else params))

    # Defined after ``build``, which refers to it: a reward may build others, such as a judge within
    # a sum.
    setup = RewardSetup(folder=plan.folder, policies=policies, build=build)
    return [(item.use, build(item.use, item.params)) for item in plan.config.reward]


def build_exporters(plan: Plan) -> list[tuple[str, Exporter]]:
    """Build the exporters of finished rollouts; return them as ``(name, exporter)``."""
    return [(name, built) for name, built in _destinations(plan) if not isinstance(built, Sink)]


def build_sinks(plan: Plan) -> list[tuple[str, Sink]]:
    """Build the sinks of the run's metrics; return them as ``(name, sink)``."""
    return [(name, built) for name, built in _destinations(plan) if isinstance(built, Sink)]


def _destinations(plan: Plan) -> Iterator[tuple[str, Exporter | Sink]]:
    manager = plan.manager
    for item in plan.config.exporter:
        yield item.use, manager.build(manager.exporter(item.use), **item.params)


def no_token_ids(name: str, use: str) -> str:
    """Return the error text for training on the tokens of a policy whose backend returns no token ids."""
    return (
        f"an algorithm trains on the tokens of {name!r}, and its backend (use = {use!r}) returns no token ids; "
        "serve it with torch, vLLM or SGLang, or set has_token_ids = true if it does return them"
    )


_KEY = "api_key_env"

_VARIABLE = re.compile(r"[A-Za-z_]\w*")

_NAME = re.compile(r"[^\W\d][\w -]*([.\[].*)?")
"""A regular expression for a placeholder's name, with an attribute or an index."""

_FORMAT = re.compile(r"(.?[<>=^])?[+\- ]?z?#?0?\d*[,_]?(\.\d+)?[bcdeEfFgGnosxX%]?|%.*")
"""A regular expression for a placeholder's format, as Python defines it."""


def check_keys(plan: Plan) -> None:
    """Raise :class:`ConfigError` if ``api_key_env`` anywhere names an environment variable that is not set."""
    for place, params in _all_params(plan):
        for name in _variables(params):
            require_key(place, name)


def check_policy_key(plan: Plan, name: str, resource: Resource) -> None:
    """Raise :class:`ConfigError` if the environment variable for a policy's API key is not set."""
    # A local server seldom needs a key, unless a gateway is set up to send one.
    if isinstance(resource, LLM) and ("api.openai.com" in resource.endpoint or _has_gateway(plan)):
        require_key(f"policy.{name}", resource.api_key_env)


def require_key(place: str, variable: str) -> None:
    """Raise :class:`ConfigError` if ``variable`` is not set in the environment; ``""`` means that no key is needed."""
    # A key that was pasted in place of its variable would end up in the store and in logs.
    if variable and not _VARIABLE.fullmatch(variable):
        raise ConfigError(
            f"[{place}] {_KEY} is not the name of an environment variable, and may be a key itself; export the key, "
            f'such as in OPENAI_API_KEY, and write {_KEY} = "OPENAI_API_KEY"'
        )
    if variable and not os.environ.get(variable):
        raise ConfigError(
            f"[{place}] takes its key from the environment variable {variable}, which is not set; set it, name another "
            f'with {_KEY}, or write {_KEY} = "" if the server needs no key'
        )


def check_template(name: str, template: PromptTemplate) -> None:
    """Raise :class:`ConfigError` if braces in an f-string template form no placeholder, such as ``{json: 1}``."""
    if template.engine != "f-string":
        return
    remedy = 'write literal braces as {{ and }}, or set engine = "plain" or "jinja"'
    try:
        # Python's own parser decides what a placeholder is, as it will when the prompt is filled.
        fields = [item for item in string.Formatter().parse(template.template) if item[1] is not None]
    except ValueError as error:
        raise ConfigError(f"[resource.{name}] template: {error}; {remedy}") from None
    for _, field, form, conversion in fields:
        if not (_NAME.fullmatch(field or "") and _is_format(form or "")):
            shown = f"{field}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
            raise ConfigError(
                f"[resource.{name}] template: {'{' + shown[:60] + '}'!r} is read as a placeholder and is not one; "
                f"{remedy}"
            )


def _is_format(form: str) -> bool:
    return not form.startswith((" ", "\n")) and bool(_FORMAT.fullmatch(re.sub(r"\{[^{}]*\}", "", form)))


def _has_gateway(plan: Plan) -> bool:
    use = plan.config.gateway.use
    try:
        return use != "none" and bool(plan.manager.gateway("gateway" if use == "auto" else use))
    except UnknownComponentError:
        return False


def _all_params(plan: Plan) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the section and the parameters of every component that may call models."""
    config = plan.config
    yield from ((f"policy.{name}", policy.params) for name, policy in config.policy.items())
    yield from (("[algorithm]", algorithm.params) for algorithm in config.algorithm)
    yield from (("[reward]", reward.params) for reward in config.reward)


def _variables(value: Any) -> Iterator[str]:
    """Yield the value of every ``api_key_env``, at any depth of ``value``."""
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            if key == _KEY and isinstance(item, str):
                yield item
            else:
                yield from _variables(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _variables(item)


class NotStartedError(Exception):
    """Raised when a check uses a part of a running experiment; the check then ends without an error."""


class _Absent:
    """A placeholder for a part of a running experiment; using it raises :class:`NotStartedError`."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotStartedError(name)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotStartedError("")

    def __truediv__(self, other: object) -> NoReturn:
        raise NotStartedError(str(other))

    def __fspath__(self) -> NoReturn:
        raise NotStartedError("")


async def check_without_starting(plan: Plan, algorithm: AlgorithmConfig) -> None:
    """Build an algorithm, let it check its parameters, its tasks and its budget, and close it.

    Raises:
        ConfigError: A run would refuse the algorithm, for a reason that can be found without a run.
    """
    manager = plan.manager
    built = manager.build(plan.entry(algorithm), **algorithm.params)
    try:
        if isinstance(built, CheckedAlgorithm):
            await built.check(unstarted_context(plan, algorithm))
    except NotStartedError:
        return
    finally:
        await built.close()


def unstarted_context(plan: Plan, algorithm: AlgorithmConfig) -> AlgorithmContext:
    """Return an algorithm's context before a run; parts of a running experiment raise an error when they are used."""
    section, absent = plan.config.experiment, cast("Any", _Absent())
    credit = algorithm.credit or plan.config.credit
    made: Credit = plan.manager.build(plan.manager.credit(credit.use), **credit.params)
    return AlgorithmContext(
        experiment=plan.name,
        name=algorithm.name,
        tunes=algorithm.tunes,
        train=plan.train,
        val=plan.val,
        validation=len(plan.val[: section.validation_limit or None]),
        validated=lambda: (),
        seed=section.seed,
        workdir=absent,
        folder=plan.folder,
        store=absent,
        credit=made,
        collect=absent,
        sources=algorithm.source,
        recorded=absent,
        publish=absent,
        propose=absent,
        live=absent,
        endpoint=absent,
        current=lambda name: _first_version(plan, name),
        policy=absent,
        progress=lambda done, total, text: None,
        say=lambda text: None,
        clock=time.time,
        agents=algorithm.agents,
    )


def _first_version(plan: Plan, name: str) -> ResourceVersion:
    """Return a resource's version as the file defines it; raises :class:`NotStartedError` for a policy.

    A run may start from another version, to which the resource's label points; the file's text may then be empty, and
    raises the same error.
    """
    if name in plan.config.policy:
        raise NotStartedError(name)
    if name not in plan.resources:
        hint = did_you_mean(name, plan.resources, otherwise=f"there are {sorted(plan.resources)}")
        raise ConfigError(f"there is no resource {name!r}; {hint}")
    resource = plan.resources[name]
    if plan.label(name) and isinstance(resource, PromptTemplate) and not resource.template.strip():
        raise NotStartedError(name)
    return ResourceVersion(name=name, version="initial", resource=resource, created_at=0.0)
