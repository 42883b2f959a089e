"""The policy that is trained, found and checked in the same way for both engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl.errors import ConfigError
from agl.schemas import Weights

if TYPE_CHECKING:
    from agl.contracts import AlgorithmContext


def tuned_policy(context: AlgorithmContext) -> tuple[str, Weights]:
    """Return the name of the one policy that is tuned, and its weights.

    Raises ConfigError for several policies, for weights that cannot be trained from here, and where there are no tasks.
    """
    if len(context.tunes) != 1:
        raise ConfigError(
            f"verl trains the weights of one policy, but tunes {list(context.tunes)}. "
            'Give one name, such as tunes = "main_llm", and one [[algorithm]] per policy.'
        )
    if not context.train:
        raise ConfigError("verl needs training tasks, but the experiment has none. Set `train` to a dataset.")
    name = context.tunes[0]
    return name, own_weights(context.current(name).resource, name=name)


def own_weights(resource: Any, *, name: str) -> Weights:
    """Return a policy's weights; raises ConfigError where they cannot be trained from here."""
    if not isinstance(resource, Weights):
        raise ConfigError(
            f"The policy {name!r} is a {type(resource).__name__}, whose weights cannot be trained from here. "
            f'Serve weights: [policy.{name}] use = "torch".'
        )
    return resource
