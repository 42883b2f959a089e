"""Names the modules with the losses and estimators of this distribution, without importing torch.

The hook is marked optional, because the core does not know it; only `agl_objectives.registry` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl(optionalhook=True)
def agl_objectives() -> Iterable[str]:
    """Yield the modules whose functions and classes are decorated with `loss` or `estimator`."""
    yield "agl_objectives.losses"
    yield "agl_objectives.estimators"
