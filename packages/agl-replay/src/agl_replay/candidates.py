"""Finds the candidates of ``agl resources try``: versions of the store, and texts that a person gives or edits."""

import asyncio
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import click

from agl.contracts import Store
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Json, Resource, ResourceVersion
from agl_inspect.records.labels import labelled
from agl_inspect.records.names import ORIGIN, PROMPT_TRIAL
from agl_inspect.versions import shown
from agl_run.engine import Plan, TextResource, open_store, reached, text_of, unknown_placeholders, with_text

MOST = 26
"""Largest number of candidates, because each has a letter."""

_STANDARD_INPUT = "-"


@dataclass(frozen=True, kw_only=True)
class Given:
    """A candidate that the command line gives: the option's name without dashes, and the option's value."""

    option: str
    value: str = ""

    @property
    def words(self) -> str:
        """The option with its value; the value is left out if it is the text itself."""
        return f"--{self.option} {self.value}" if self.option in ("version", "text-file") else f"--{self.option}"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A candidate that can run.

    Attributes:
        version: The candidate's version, which need not be stored yet; ``None`` for the value in the experiment's file.
        resource: The candidate's prompt or value.
        words: A description of the candidate's origin.
    """

    version: ResourceVersion | None
    resource: TextResource
    words: str


def resource_of(plan: Plan, name: str | None, given: Sequence[Given]) -> str:
    """Return the resource to try: ``name``, or the one in ``--version NAME@V``, or else the experiment's only one.

    Raises:
        ConfigError: The resource does not exist, or there are several and the command names no resource.
    """
    named = [each.value.rpartition("@")[0] for each in given if each.option == "version" and "@" in each.value]
    names = list(dict.fromkeys([name, *named] if name else named))
    if len(names) > 1:
        raise ConfigError(f"the candidates are of different resources, {' and '.join(names)}; try one at a time")
    if not plan.resources:
        raise ConfigError(
            "the experiment has no text to try: it has no [resource.NAME] with a template or a value; agl resources "
            "compare compares models and weights"
        )
    there = sorted(plan.resources)
    if names and names[0] in plan.resources:
        return names[0]
    if names:
        kind = "is a policy, whose weights are not a text" if names[0] in plan.config.policy else "is not a resource"
        raise ConfigError(f"{names[0]!r} {kind}; {did_you_mean(names[0], there, otherwise=f'there are {there}')}")
    if len(there) > 1:
        raise ConfigError(f"which resource? the experiment has {', '.join(there)}; name one behind the file")
    return there[0]


def contenders(plan: Plan, name: str, given: Sequence[Given]) -> tuple[Contender, list[Contender]]:
    """Return the live version, and the list of candidates to compare, the baseline first.

    The baseline is the first of the given candidates, or the live version if only one candidate is given.

    Raises:
        ConfigError: A text cannot be used, there are too many candidates, or two have the same text.
        NotFoundError: The store has no such version.
    """
    if not given:
        raise ConfigError(
            "there is nothing to try: name a candidate with --version, --text, --text-file or --edit; several are "
            "compared with the first, a single one with the live version"
        )
    present, versions, named = _read_known(plan, name, given)
    found: list[Contender] = []
    for each in given:
        if each.option == "version":
            found.append(named[each.value])
        else:
            base = found[-1] if found and each.option == "edit" else present
            found.append(_of_text(plan, name, each, base, versions))
    found = [present, *found] if len(found) == 1 else found
    if len(found) > MOST:
        raise ConfigError(f"there are {len(found)} candidates, and {MOST} can be compared at once; leave some out")
    for place, one in enumerate(found):
        same = next((other for other in found[:place] if other.resource == one.resource), None)
        if same is not None:
            raise ConfigError(
                f"two candidates have the same text, {_named(same)} and {_named(one)}, so that any difference would be "
                "chance; give each a text of its own"
            )
    return present, found


def new_placeholders(plan: Plan, present: Contender, found: Sequence[Contender]) -> list[str]:
    """Return a warning for each candidate whose text has placeholders that neither the live text nor the tasks have."""
    objects = [cast("dict[str, Json]", task) for task in (*plan.train, *plan.val) if isinstance(task, dict)]
    known = {key for task in objects for key in task}
    lines: list[str] = []
    for each in found:
        if unknown := unknown_placeholders(each.resource, present.resource, keys=known):
            lines.append(
                f"{each.words} has the placeholder {', '.join(unknown)}, which the present text lacks: its rollouts "
                "fail unless the agent fills it in"
            )
    return lines


_Known = tuple[Contender, Sequence[ResourceVersion], dict[str, Contender]]


def _read_known(plan: Plan, name: str, given: Sequence[Given]) -> _Known:
    """Return the live version, all versions of the resource, and the versions that the command line names."""

    async def use() -> _Known:
        store = open_store(plan)
        try:
            versions = await store.resources(name)
            named: dict[str, Contender] = {}
            for each in given:
                if each.option == "version":
                    which = each.value.rpartition("@")[2]
                    if not versions:
                        raise ConfigError(
                            f"there is no version {which!r} of {name!r} yet, nor any other; give a text with --text, "
                            "--text-file or --edit"
                        )
                    named[each.value] = _of_version((await shown(store, name, which)).version, each.words)
            return await _present(store, plan, name, versions), versions, named
        finally:
            await store.close()

    return asyncio.run(use())


async def _present(store: Store, plan: Plan, name: str, versions: Sequence[ResourceVersion]) -> Contender:
    """Return the version from which a run would now continue or start."""
    record, label = await reached(store, plan), plan.label(name)
    if record is not None and name in record.live:
        return _of_version(await store.resource(name, record.live[name]), f"live in {plan.name}")
    if label and (version := await labelled(store, name, label)) is not None:
        return _of_version(version, f"the label {label}")
    resource = _text_resource(name, plan.resources[name])
    same = next((version for version in reversed(versions) if version.resource == resource), None)
    return Contender(version=same, resource=resource, words="the experiment's file")


def _of_version(version: ResourceVersion, words: str) -> Contender:
    return Contender(version=version, resource=_text_resource(version.name, version.resource), words=words)


def _text_resource(name: str, resource: Resource) -> TextResource:
    if not isinstance(resource, TextResource):
        raise ConfigError(f"{name!r} has no text, because it is a model or weights; name a prompt or a value")
    return resource


def _of_text(plan: Plan, name: str, given: Given, base: Contender, versions: Sequence[ResourceVersion]) -> Contender:
    """Make the candidate of a text; if a version already has the text, the candidate is that version."""
    text = _text_of(given, text_of(base.resource))
    try:
        resource = with_text(base.resource, text)
    except ConfigError as error:
        raise ConfigError(f"the text of {given.words} cannot be tried: {error}") from None
    same = next((version for version in reversed(versions) if version.resource == resource), None)
    if same is not None:
        return Contender(version=same, resource=resource, words=given.words)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    version = ResourceVersion(
        name=name,
        version=f"{plan.name}{PROMPT_TRIAL}-{digest}",
        resource=resource,
        parent=base.version.version if base.version else "",
        created_at=time.time(),
        metadata={"experiment": plan.name, "origin": ORIGIN, "candidate": True},
    )
    return Contender(version=version, resource=resource, words=given.words)


def _text_of(given: Given, present: str) -> str:
    """Return the given text; a final line break, which editors add, is removed unless ``present`` ends with one."""
    if given.option == "text":
        return given.value
    text = _edited(present) if given.option == "edit" else _read(given.value)
    return text if present.endswith("\n") else text.removesuffix("\n").removesuffix("\r")


def _edited(present: str) -> str:
    text = click.edit(present, extension=".txt", require_save=False)
    if text is None or text.removesuffix("\n") == present.removesuffix("\n"):
        raise ConfigError("the editor left the text as it was, so there is nothing to try; change it and save")
    return text


def _read(path: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == _STANDARD_INPUT else Path(path).read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read the text {path!r}: {error.strerror or error}; correct --text-file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the text {path!r} is not UTF-8: {error.reason} at byte {error.start}; convert it") from None


def _named(one: Contender) -> str:
    return f"{one.words} ({one.version.version})" if one.version else one.words
