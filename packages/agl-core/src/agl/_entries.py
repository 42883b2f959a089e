"""The records of plugins: the components that they register, and the status of each plugin.

A component is a name, a lazy factory and one line of help. This module imports no component.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from agl.schemas import Record

Factory: TypeAlias = str | Callable[..., Any]

Kind = Literal[
    "tracer",
    "reward",
    "store",
    "algorithm",
    "credit",
    "runner",
    "policy",
    "modality",
    "gateway",
    "redactor",
    "exporter",
    "command",
]
"""The kinds of components that plugins register."""

PluginState = Literal["loaded", "broken", "disabled"]


class Entry(Record, frozen=True, kw_only=True):
    """One component of a plugin.

    Attributes:
        name: Lower case, digits and hyphens, starting with a letter; unique within its kind.
        factory: ``"package.module:attribute"``, imported when the component is asked for, or a callable. It gets the
            component's parameters as keyword arguments.
        summary: One line for ``agl plugins list``.
    """

    name: str
    factory: Factory
    summary: str = ""


class TracerEntry(Entry, frozen=True, kw_only=True):
    """Registers a tracer; the factory builds an :class:`agl.contracts.Tracer`.

    Attributes:
        frameworks: The modules that the tracer observes.
    """

    frameworks: tuple[str, ...] = ()


class RewardEntry(Entry, frozen=True, kw_only=True):
    """Registers a reward emitter; the factory builds an :class:`agl.contracts.RewardEmitter`.

    Attributes:
        takes_setup: Whether the factory also takes ``setup``, an :class:`agl.contracts.RewardSetup`.
    """

    # An option, because most rewards are plain functions of the spans and should not have to accept
    # a parameter that they ignore.
    takes_setup: bool = False


class StoreEntry(Entry, frozen=True, kw_only=True):
    """Registers a store by its URL's scheme; ``factory(url=...)`` builds an :class:`agl.contracts.Store`."""


class AlgorithmEntry(Entry, frozen=True, kw_only=True):
    """Registers an algorithm; the factory builds an :class:`agl.contracts.Algorithm` from its parameters alone.

    Attributes:
        tunes: Kinds of resources that the algorithm can tune: ``weights`` (of a policy), ``prompt_template`` or
            ``json``.
        needs_token_ids: Whether the algorithm trains on tokens. If so, a backend that returns no token ids is refused.
        shares: Whether the algorithm can learn from rollouts that another algorithm collected (setting ``source``).
    """

    tunes: tuple[Literal["weights", "prompt_template", "json"], ...] = ("weights",)
    # True by default: an algorithm that trains on tokens without declaring it would fail only after
    # its rollouts were paid for.
    needs_token_ids: bool = True
    shares: bool = False


class CreditEntry(Entry, frozen=True, kw_only=True):
    """Registers a credit assignment; the factory builds an :class:`agl.contracts.Credit`."""


class RunnerEntry(Entry, frozen=True, kw_only=True):
    """Registers a runner; ``factory(setup=..., **params)`` builds an :class:`agl.contracts.Runner`.

    ``setup`` is a ``RunContext`` of ``agl-run``.

    Attributes:
        can_replay: Whether the runner answers the model calls of a replayed rollout from the recording. A runner that
            does not is refused together with a credit that replays rollouts.
    """

    can_replay: bool = False


class PolicyEntry(Entry, frozen=True, kw_only=True):
    """Registers a model server; ``factory(name=..., **params)`` builds an :class:`agl.contracts.Policy`.

    Attributes:
        trains: Whether the server can load new weights.
    """

    trains: bool = False


class ModalityEntry(Entry, frozen=True, kw_only=True):
    """Registers a way to read pictures; ``factory(model=...)`` builds an :class:`agl.contracts.Modality`.

    ``model`` is the directory or hub name of a model. A model whose type is ``qwen2_vl`` is read by the modality of the
    name ``qwen2-vl`` if there is one, and otherwise by ``transformers``.
    """


class GatewayEntry(Entry, frozen=True, kw_only=True):
    """Registers a capture proxy; the factory builds an :class:`agl.contracts.Gateway`."""


class RedactorEntry(Entry, frozen=True, kw_only=True):
    """Registers a redactor; the factory builds an :class:`agl.contracts.Redactor` without parameters."""


class ExporterEntry(Entry, frozen=True, kw_only=True):
    """Registers a destination of finished rollouts; the factory builds an :class:`agl.contracts.Exporter`.

    The factory may build an ``agl.contracts._sink.Sink`` instead, which shows the numbers of a run.
    """


class CommandEntry(Entry, frozen=True, kw_only=True):
    """Registers a command; the factory is, or returns, a ``click.Command``, and is imported when the command is called.

    Attributes:
        parent: The ``agl`` command that this one is a subcommand of, such as ``resources``; ``""`` for ``agl`` itself.
            A subcommand of ``export`` is a format, and its factory builds an ``agl_inspect.exports.ExportWriter``.
            One of ``plugins check`` named ``x`` is a function that gets each plugin module with a hook ``agl_x``, and
            returns an error by component, ``""`` for none.
    """

    parent: str = ""


class PluginStatus(Record, frozen=True, kw_only=True):
    """The status of one plugin, as :meth:`agl.PluginManager.status` returns it.

    Attributes:
        name: The entry point's name.
        distribution: The installed distribution; ``""`` for a plugin that was registered as an object.
        version: The distribution's version.
        module: The module that the entry point names.
        state: ``loaded``, ``broken`` (quarantined; see ``error``) or ``disabled``.
        components: ``"<kind> <name>"`` of every component that the plugin registered, or would have registered if it
            had not failed.
        error: The reason why the plugin is broken and the remedy, in one paragraph.
        failures: Number of calls of the plugin's observers that have raised so far.
    """

    name: str
    distribution: str
    version: str
    module: str
    state: PluginState
    components: tuple[str, ...] = ()
    error: str = ""
    # Observers are isolated, so this number is the only trace of an observer that fails repeatedly.
    failures: int = 0
