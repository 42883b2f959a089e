"""Pins distributions to the releases that are installed here, as lines of requirements files.

A distribution that was installed from a folder, a repository or a file has no release that other machines can install.
Its wheel is built once, into a folder from which the images install it.
"""

import json
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agl.schemas import Record

_OF_THE_DEVICE = re.compile(r"(nvidia|cuda|triton|pytorch-triton)(-|$)")
"""Matches distributions that torch needs for one kind of device; each image's package index chooses their releases."""


class Pin(Record, frozen=True, kw_only=True):
    """An installed distribution.

    Attributes:
        name: The normalised name.
        line: The line in a requirements file, ``name==version``.
        version: The version in that line.
        source: The source for ``pip wheel`` from which the wheel is built; ``""`` for a release.
    """

    name: str
    line: str
    version: str
    source: str = ""


def pins(names: Iterable[str]) -> list[Pin]:
    """Pin distributions and all their requirements, sorted by name.

    Args:
        names: Distributions, optionally with extras, such as ``agl-core[otel]``. Distributions that are not installed
            are left out; see :func:`missing`.
    """
    found: dict[str, Pin] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(name), True) for name in names]
    while waiting:
        wanted, is_own = waiting.pop()
        distribution = _installed(wanted.name)
        name = canonicalize_name(wanted.name)
        if distribution is None or (not is_own and _OF_THE_DEVICE.match(name)):
            continue
        found[name] = _pin(name, distribution)
        for extra in ("", *wanted.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(need, False) for need in _needs(distribution, extra)]
    return [found[name] for name in sorted(found)]


def missing(names: Iterable[str]) -> list[str]:
    """Return the distributions among ``names`` that are not installed here."""
    return sorted({name for name in names if _installed(Requirement(name).name) is None})


def has_extra(name: str) -> bool:
    """Return true if a distribution is installed with everything that its extra needs, such as ``ray[default]``."""
    wanted = Requirement(name)
    distribution = _installed(wanted.name)
    needs = [need for extra in wanted.extras for need in _needs(distribution, extra)] if distribution else []
    return bool(needs) and not missing(need.name for need in needs)


def _installed(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _needs(distribution: metadata.Distribution, extra: str) -> list[Requirement]:
    """Return the requirements that an extra adds on this machine; for ``""``, those without any extra."""
    every = [Requirement(text) for text in distribution.requires or ()]
    if not extra:
        return [need for need in every if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [
        need
        for need in every
        if need.marker and need.marker.evaluate({"extra": extra}) and not need.marker.evaluate({"extra": ""})
    ]


def _pin(name: str, distribution: metadata.Distribution) -> Pin:
    version = distribution.version.partition("+")[0]  # the local version names the device
    return Pin(name=name, line=f"{name}=={version}", version=version, source=_source(distribution))


def _source(distribution: metadata.Distribution) -> str:
    """Return the origin of a distribution that is not a release (PEP 610's direct URL); ``""`` for a release."""
    text = distribution.read_text("direct_url.json")
    if text is None:
        return ""
    origin: dict[str, Any] = json.loads(text)
    url: str = origin["url"]
    folder = f"#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else ""
    if "vcs_info" in origin:
        return f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}{folder}"
    return str(Path(unquote(urlsplit(url).path))) if url.startswith("file:") else f"{url}{folder}"
