"""What plugins register: a name, a lazy factory, one line of help. Nothing here imports what it names.

A factory is ``"package.module:attribute"``, imported when the component is asked for, or a callable.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from agl.schemas import Record

Factory: TypeAlias = str | Callable[..., Any]
Kind = Literal["tracer", "reward", "store", "algorithm", "credit", "runner", "policy", "gateway", "logger", "command"]


class Entry(Record, frozen=True, kw_only=True):
    """One component.

    Attributes:
        name: Lower case, digits and hyphens, starting with a letter; unique within its kind.
        factory: Makes the component from its parameters, given as keyword arguments.
        summary: One line for ``agl plugins list``.
    """

    name: str
    factory: Factory
    summary: str = ""


class TracerEntry(Entry, frozen=True, kw_only=True):
    """Factory of a :class:`agl.contracts.Tracer`; ``frameworks`` are the modules that it observes."""

    frameworks: tuple[str, ...] = ()


class RewardEntry(Entry, frozen=True, kw_only=True):
    """Factory of a :class:`agl.contracts.RewardEmitter`.

    Attributes:
        takes_setup: Whether the factory also takes ``setup``, a :class:`agl.contracts.RewardSetup`.
    """

    takes_setup: bool = False


class StoreEntry(Entry, frozen=True, kw_only=True):
    """``factory(url: str)`` gives a :class:`agl.contracts.Store`; the name is the URL's scheme."""


class AlgorithmEntry(Entry, frozen=True, kw_only=True):
    """Factory of an :class:`agl.contracts.Algorithm`.

    Attributes:
        tunes: Kinds of resources it can tune: ``weights`` (a policy's) or ``prompt_template``, ``json``.
        needs_token_ids: Whether it trains on tokens; then a backend without ids is refused.
        shares: Whether it can learn from rollouts that another algorithm paid for (``source``).
    """

    tunes: tuple[Literal["weights", "prompt_template", "json"], ...] = ("weights",)
    needs_token_ids: bool = True
    shares: bool = False


class CreditEntry(Entry, frozen=True, kw_only=True):
    """Factory of an :class:`agl.contracts.Credit`."""


class RunnerEntry(Entry, frozen=True, kw_only=True):
    """``factory(setup: agl_run.RunSetup, **params)`` gives a :class:`agl.contracts.Runner`.

    Attributes:
        can_replay: Whether it answers the model calls of a replay (:func:`agl_run.replay.script.load_script`); without,
            a credit that replays rollouts is refused.
    """

    can_replay: bool = False


class PolicyEntry(Entry, frozen=True, kw_only=True):
    """``factory(name=..., **params)`` gives a :class:`agl.contracts.Policy`; ``trains`` if it takes weights."""

    trains: bool = False


class GatewayEntry(Entry, frozen=True, kw_only=True):
    """Factory of an :class:`agl.contracts.Gateway`."""


class LoggerEntry(Entry, frozen=True, kw_only=True):
    """``factory(experiment=..., workdir=..., **params)`` gives an :class:`agl.contracts.Logger`."""


class CommandEntry(Entry, frozen=True, kw_only=True):
    """Factory that is, or returns, a ``click.Command`` to hang below ``agl``; imported when it is called.

    Attributes:
        parent: The command of ``agl`` below which this one hangs, such as ``resources``; ``""`` for ``agl`` itself.
    """

    parent: str = ""
