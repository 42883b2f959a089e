"""Names the modules with the losses and estimators of this distribution, without importing torch.

`agl_objectives` is marked optional, because the core does not know it; only `agl_objectives.registry` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl import AlgorithmEntry, CommandEntry, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl(optionalhook=True)
def agl_objectives() -> Iterable[str]:
    """Yield the modules whose functions and classes are decorated with `loss` or `estimator`."""
    yield "agl_objectives.losses"
    yield "agl_objectives.estimators"


@hookimpl
def agl_algorithms() -> Iterable[AlgorithmEntry]:
    """Register the algorithm whose tasks an agent writes."""
    yield AlgorithmEntry(
        name="mint",
        factory="agl_objectives.minting:Mint",
        summary="tasks that an agent writes during the run, for other algorithms to learn from",
        tunes=("json",),
        needs_token_ids=False,
    )


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Yield the check by which `agl plugins check` tries losses and estimators."""
    yield CommandEntry(
        name="objectives",
        parent="plugins check",
        factory="agl_objectives.registry:check_plugin",
        summary="call every loss and estimator once",
    )
