"""Finds losses and estimators by name: those of this distribution, those of other plugins, and the user's functions.

Functions and classes are named by the decorators `agl_objectives.loss` and `agl_objectives.estimator`. A plugin's hook
`agl_objectives` names the modules that contain them. The core does not know this hook, so its implementations are
marked with `@agl.hookimpl(optionalhook=True)`. The hooks of all installed plugins are called, except for disabled
plugins and those that failed to load.
`module:name` names a class or a function that no plugin registers; it need not be decorated.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec
import torch

from agl import PluginManager
from agl.errors import AglError, ConfigError
from agl.hints import check_value, did_you_mean
from agl_objectives import plugin as own
from agl_objectives.contract import Estimates, LossTerms, Scores, TokenBatch, surveyed
from agl_objectives.entries import MARK, EstimatorEntry, LossEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from agl.contracts import Entry
    from agl_objectives.contract import Estimator, Loss

__all__ = [
    "FoundEstimator",
    "FoundLoss",
    "check_plugin",
    "checked_terms",
    "estimators",
    "find_estimator",
    "find_loss",
    "is_own_loss",
    "losses",
    "try_estimator",
    "try_loss",
]

E = TypeVar("E", bound="Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLoss:
    """A loss that is ready to use, with the entry that registered it."""

    entry: LossEntry
    call: Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEstimator:
    """An estimator that is ready to use, with the entry that registered it."""

    entry: EstimatorEntry
    call: Estimator


def find_loss(name: str, params: Mapping[str, Any] | None = None) -> FoundLoss:
    """Return the loss `name` with the parameters `params`.

    Raises ConfigError if the name is unknown (with the nearest name and all known ones), if the loss does not take the
    parameters, or if `try_loss` refuses it.
    """
    entry = _entry("loss", name, LossEntry)
    call: Loss = _built("loss", entry, params or {})
    try_loss(name, call)
    return FoundLoss(entry=entry, call=call)


def find_estimator(name: str, params: Mapping[str, Any] | None = None) -> FoundEstimator:
    """Return the estimator `name` with the parameters `params`; raises ConfigError as `find_loss` does."""
    entry = _entry("estimator", name, EstimatorEntry)
    call: Estimator = _built("estimator", entry, params or {})
    try_estimator(name, call)
    return FoundEstimator(entry=entry, call=call)


def is_own_loss(name: str) -> bool:
    """Return true for a loss of this distribution; these losses do not read entropies."""
    return name in {entry.name for entry in _named_by(own, LossEntry)}


def losses() -> list[LossEntry]:
    """Return the entries of all losses, those of this distribution first."""
    return list(_all(LossEntry).values())


def estimators() -> list[EstimatorEntry]:
    """Return the entries of all estimators, those of this distribution first."""
    return list(_all(EstimatorEntry).values())


def check_plugin(plugin: Any) -> dict[str, str]:
    """Try the losses and estimators of a plugin module with their default parameters, as `agl plugins check` does.

    Returns the error of each by `loss NAME` or `estimator NAME`, "" if it works. Raises ConfigError if a module of the
    plugin cannot be imported, or if another plugin has the same name.
    """
    found: dict[str, str] = {}
    for kind, record, attempt in ("loss", LossEntry, try_loss), ("estimator", EstimatorEntry, try_estimator):
        if plugin is not own:
            _all(record)
        for entry in _named_by(plugin, record):
            found[key := f"{kind} {entry.name}"] = ""
            factory: Any = entry.factory
            settings = inspect.signature(factory).parameters.values()  # also those that are not keyword-only
            params = {each.name: each.default for each in settings if isinstance(each.default, str | int | float)}
            try:
                attempt(entry.name, _built(kind, entry, params))
            except AglError as error:
                found[key] = str(error)
    return found


def _entry(kind: str, name: str, record: type[E]) -> E:
    if ":" in name:
        found = _imported(kind, name)
        entry = _mark(found, record) or record(name=name, factory=found)
        return msgspec.structs.replace(entry, name=name)
    known = _all(record)
    if name in known:
        return known[name]
    near = did_you_mean(name, known)
    raise ConfigError(
        f"No {kind} is named {name!r}{f'; {near}' if near else '.'} Use one of: {', '.join(known)}; or module:name for "
        "a function of your own."
    )


def _all(record: type[E]) -> dict[str, E]:
    """Return all entries by name, ours first; raises ConfigError for a name that two plugins give, and for a plugin
    whose modules cannot be imported.
    """
    found = {entry.name: entry for entry in _named_by(own, record)}
    for status in PluginManager.from_environment().status():
        module = sys.modules.get(status.module) if status.state == "loaded" else None
        if module is None or module is own or not hasattr(module, "agl_objectives"):
            continue
        for entry in _named_by(module, record):
            if found.setdefault(entry.name, entry) is not entry:
                raise ConfigError(
                    f"The plugin {status.name!r} names a {record.__name__.removesuffix('Entry').lower()} "
                    f"{entry.name!r}, and another one has this name. Rename it, or disable one of the plugins."
                )
    return found


def _named_by(plugin: Any, record: type[E]) -> list[E]:
    """Return the entries of what is decorated in the modules of a plugin, in the order of their definition."""
    try:
        modules = [importlib.import_module(name) for name in plugin.agl_objectives()]
    except Exception as error:
        message = f"Importing the modules that the hook agl_objectives of {plugin.__name__} names raised"
        raise ConfigError(f"{message} {type(error).__name__}: {error}; correct it, or disable the plugin.") from error
    values = [value for module in modules for value in vars(module).values()]
    return [entry for value in values if (entry := _mark(value, record))]


def _mark(found: Any, record: type[E]) -> E | None:
    """Return the entry with which `found` itself is decorated; a subclass or a wrapper also carries the original's."""
    entry = getattr(found, MARK, None)
    return entry if isinstance(entry, record) and entry.factory is found else None


def _built(kind: str, entry: Entry, params: Mapping[str, Any]) -> Any:
    factory: Any = entry.factory
    taken = _checked(f"the {kind} {entry.name!r}", factory, params)
    # An instance of a class is the loss or the estimator; a function is one itself, with its parameters as keywords.
    bound = partial(factory, **taken)
    return _called(kind, entry.name, bound) if inspect.isclass(factory) else bound


def _imported(kind: str, name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The {kind} {name!r} cannot be imported: {error}. Give module:name of a function or class that Python "
            "finds from where the experiment runs."
        ) from error


def _checked(component: str, factory: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return `params` converted to the annotated types; raises ConfigError if the factory does not take them."""
    keywords = [p for p in inspect.signature(factory).parameters.values() if p.kind is p.KEYWORD_ONLY]
    names = [parameter.name for parameter in keywords]
    unknown = [name for name in params if name not in names]
    if unknown:
        near = did_you_mean(unknown[0], names)
        hint = f"{near} Its" if near else "its"
        raise ConfigError(
            f"{component} takes no parameter {unknown[0]!r}; {hint} parameters are: {', '.join(names) or 'none'}"
        )
    absent = [p.name for p in keywords if p.default is p.empty and p.name not in params]
    if absent:
        raise ConfigError(f"{component} needs the parameter {absent[0]!r}; its parameters are: {', '.join(names)}")
    hints = _hints(factory)
    return {name: check_value(value, hints.get(name, Any), f"{component}: {name}") for name, value in params.items()}


def _hints(factory: Any) -> dict[str, Any]:
    target = factory.__init__ if inspect.isclass(factory) else factory
    try:
        return get_type_hints(target, include_extras=True)
    except (NameError, TypeError):  # names that are imported only for type checking, or an object without annotations
        return {}


T = TypeVar("T")

_LOSS = "return LossTerms(loss_M=...) with one number for each token, and let agl weigh them and add them up"
_ESTIMATOR = "return Estimates(found_S=..., unit_S=...) with one number each for every score"


def try_loss(name: str, loss: Loss) -> None:
    """Call a loss once; raises ConfigError if it fails, or lacks a finite number or gradient for a token."""
    logp_M = torch.tensor([-0.2, -1.0, -0.5, -2.0, -0.1, -0.7], requires_grad=True)
    old_M = logp_M.detach() + torch.tensor([0.0, 0.1, -0.1, 0.0, 0.2, -0.3])
    tokens = TokenBatch(
        logp_M=logp_M,
        old_M=old_M,
        behaviour_M=old_M,
        advantages_M=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        weight_M=torch.ones(6),
        row_M=torch.tensor([0, 0, 0, 1, 1, 1]),
        rollout_M=torch.tensor([0, 0, 0, 1, 1, 1]),
        entropy_M=torch.full((6,), 0.5),
    )
    terms = checked_terms(name, _called("loss", name, lambda: loss(surveyed(loss, tokens))), logp_M)
    if not bool(torch.isfinite(terms.loss_M).all()):
        raise ConfigError(f"The loss {name!r} returned {_shown(terms.loss_M)} for six tokens; {_LOSS}.")
    if not terms.loss_M.requires_grad:
        raise ConfigError(
            f"The loss {name!r} returned numbers without a gradient, from which nothing is learnt; compute them from "
            "tokens.logp_M by operations of torch, without detach() or item()."
        )
    (gradient_M,) = _called("loss", name, lambda: torch.autograd.grad(terms.loss_M.sum(), logp_M))
    if not bool(torch.isfinite(gradient_M).all()):
        raise ConfigError(
            f"The loss {name!r} has the gradient {_shown(gradient_M)} for six tokens, of which the first and the "
            "fourth have the ratio 1; one NaN would spread to all weights, so change what has no derivative there."
        )


def try_estimator(name: str, estimator: Estimator) -> None:
    """Call an estimator once; raises ConfigError if it fails, or lacks a finite advantage or unit for a score."""
    scores = Scores(
        scores_S=torch.tensor([1.0, 0.0, 0.5, 0.25]),
        group_S=torch.tensor([0, 0, 0, 1]),
        tokens_S=torch.tensor([3, 4, 5, 6]),
        baseline_S=torch.tensor([0.5, 0.5, 0.5, 0.5]),
        roles_S=("writer", "writer", "critic", "critic"),
    )
    found: Any = _called("estimator", name, lambda: estimator(scores))
    if not isinstance(found, Estimates):
        raise ConfigError(f"The estimator {name!r} returned {type(found).__name__} for four scores; {_ESTIMATOR}.")
    for part, values in (("found_S", found.found_S), ("unit_S", found.unit_S)):
        if not (_has_shape(values, scores.scores_S) and bool(torch.isfinite(values).all())):
            raise ConfigError(
                f"The estimator {name!r} returned {part} = {_shown(values)} for four scores, of which the last is "
                f"alone in its group; {_ESTIMATOR}."
            )


def checked_terms(name: str, found: Any, logp_M: Tensor) -> LossTerms:
    """Return the result `found` of a loss, if it has one number for each token; raises ConfigError otherwise."""
    if isinstance(found, LossTerms) and _has_shape(found.loss_M, logp_M):
        return found
    got = f"loss_M = {_shown(found.loss_M)}" if isinstance(found, LossTerms) else type(found).__name__
    raise ConfigError(f"The loss {name!r} returned {got} for {len(logp_M)} trained tokens; {_LOSS}.")


def _called(kind: str, name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except AglError:
        raise
    except Exception as error:  # the function is a user's or a plugin's
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        place = f" at {Path(frames[0].filename).name}:{frames[0].lineno}" if frames else ""
        raise ConfigError(
            f"The {kind} {name!r} raised {type(error).__name__}: {error}{place}, when it was called with a few numbers "
            "before the run; correct it, and test it with agl_objectives.testing."
        ) from error


def _has_shape(values: Any, like: Tensor) -> bool:
    return isinstance(values, torch.Tensor) and values.shape == like.shape


def _shown(values: Any) -> str:
    if not isinstance(values, torch.Tensor):
        return f"a {type(values).__name__}"
    return f"{values.tolist()}" if values.numel() <= 8 else f"a tensor of the shape {list(values.shape)}"  # pyright: ignore[reportUnknownMemberType]  # torch has no type for it
