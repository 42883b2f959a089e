"""The names of Agent Lightning 0.3 that this module does not offer, and the replacement of each name."""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn

from agl.errors import ConfigError
from agl.hints import did_you_mean

_PAGE = "docs/how-to/agent-lightning.md"


@cache
def remedies() -> Mapping[str, tuple[str, str]]:
    """Return what to do instead of using each name, and the page that describes it, as ``replaced.toml`` says."""
    groups = tomllib.loads(files("agl_lightning").joinpath("replaced.toml").read_text(encoding="utf-8"))["group"]
    return {name: (group["instead"], group.get("page", _PAGE)) for group in groups for name in group["names"]}


class Replaced:
    """Stands for a name without a counterpart: it can be imported, and each use of it raises the error.

    A script imports more names than it uses, so only a call, a subclass, an attribute or an index is refused.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **settings: Any) -> NoReturn:
        """Refuse to make one or to decorate with it."""
        self._refuse()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        """Refuse to be a base class."""
        self._refuse()

    def __getitem__(self, key: Any) -> NoReturn:
        """Refuse a type argument."""
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        """Refuse to be iterated, as the members of an enumeration are."""
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions, such as those of a copy or of a test for a type
            raise AttributeError(name)
        self._refuse()

    def __or__(self, other: Any) -> Any:
        """Return the other type: annotations may name what no call passes."""
        return other

    __ror__ = __or__

    def _refuse(self) -> NoReturn:
        remedy, page = remedies()[self.__name__]
        raise ConfigError(
            f"Agent Lightning's {self.__name__} has no counterpart of its form here; {remedy} (see {page})"
        )


def replaced(name: str) -> Replaced:
    """Return what stands for a name that this module does not offer.

    Raises:
        AttributeError: Agent Lightning does not have the name.
    """
    if name not in remedies():
        import agl_lightning as lightning

        near = did_you_mean(name, [*dir(lightning), *remedies()])
        raise AttributeError(f"module 'agl_lightning' has no attribute {name!r}{f'; {near}' if near else ''}")
    return Replaced(name)
