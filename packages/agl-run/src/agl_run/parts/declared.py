"""Checks declarations that fail in the first rollouts only: keys of providers, and placeholders of prompts."""

import os
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any, cast

from agl.errors import ConfigError, UnknownComponentError
from agl.schemas import LLM, PromptTemplate, Resource
from agl_run.plan import Plan

_KEY = "api_key_env"

_VARIABLE = re.compile(r"[A-Za-z_]\w*")

_NAME = re.compile(r"[^\W\d][\w -]*([.\[].*)?")
"""A placeholder's name, with an attribute or an index."""

_FORMAT = re.compile(r"(.?[<>=^])?[+\- ]?z?#?0?\d*[,_]?(\.\d+)?[bcdeEfFgGnosxX%]?|%.*")
"""A placeholder's format, as Python defines it."""


def check_keys(plan: Plan) -> None:
    """Raise :class:`ConfigError` for a variable that is named as ``api_key_env`` and not set."""
    for place, params in _all_params(plan):
        for name in _variables(params):
            require_key(place, name)


def check_policy_key(plan: Plan, name: str, resource: Resource) -> None:
    """Check the key of a policy, which may come from its default; raises :class:`ConfigError`."""
    if isinstance(resource, LLM) and ("api.openai.com" in resource.endpoint or _has_gateway(plan)):
        require_key(f"policy.{name}", resource.api_key_env)


def require_key(place: str, variable: str) -> None:
    """Raise :class:`ConfigError` if the environment lacks the variable; ``""`` is none."""
    if variable and not _VARIABLE.fullmatch(variable):
        raise ConfigError(
            f"[{place}] {_KEY} is no name of an environment variable, and may be a key itself; export the key, such as "
            f'in OPENAI_API_KEY, and write {_KEY} = "OPENAI_API_KEY"'
        )
    if variable and not os.environ.get(variable):
        raise ConfigError(
            f"[{place}] takes its key from the environment variable {variable}, which is not set; set it, name another "
            f'with {_KEY}, or write {_KEY} = "" if the server needs no key'
        )


def check_template(name: str, template: PromptTemplate) -> None:
    """Raise :class:`ConfigError` for braces of an f-string template that are no placeholder, such as ``{json: 1}``."""
    if template.engine != "f-string":
        return
    remedy = 'write literal braces as {{ and }}, or set engine = "plain" or "jinja"'
    try:
        fields = [item for item in string.Formatter().parse(template.template) if item[1] is not None]
    except ValueError as error:
        raise ConfigError(f"[resource.{name}] template: {error}; {remedy}") from None
    for _, field, form, conversion in fields:
        if not (_NAME.fullmatch(field or "") and _is_format(form or "")):
            shown = f"{field}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
            raise ConfigError(
                f"[resource.{name}] template: {'{' + shown[:60] + '}'!r} is read as a placeholder and is none; {remedy}"
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
    """Yield the parameters of the components that call models, with their place in the file."""
    config = plan.config
    yield from ((f"policy.{name}", policy.params) for name, policy in config.policy.items())
    yield from (("[algorithm]", algorithm.params) for algorithm in config.algorithm)
    yield from (("[reward]", reward.params) for reward in config.reward)


def _variables(value: Any) -> Iterator[str]:
    """Yield every ``api_key_env`` within a value."""
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            if key == _KEY and isinstance(item, str):
                yield item
            else:
                yield from _variables(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _variables(item)
