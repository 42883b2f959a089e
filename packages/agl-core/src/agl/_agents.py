"""Two ways to write an agent for this project: a class or a decorated function.

Neither is needed: a plain function of the task is an agent too.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from agl.contracts import Tracer
from agl.schemas import NamedResources, Rollout
from agl.tracing._context import current

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Tracers:
    """The installed tracers as one object: an attribute is that of the first one that has it."""

    def __init__(self, tracers: tuple[Tracer, ...]) -> None:
        self._tracers = tracers

    def __getattr__(self, name: str) -> Any:
        for tracer in self._tracers:
            if hasattr(tracer, name):
                return getattr(tracer, name)
        found = [type(tracer).__name__ for tracer in self._tracers]
        raise AttributeError(
            f"no tracer of this run has {name!r}; it has {found}. Use it inside a rollout, and name the tracer that "
            "has it in the experiment's tracers"
        )


# A descriptor without __set__, so that an agent may keep an attribute of this name of its own.
class _CurrentTracers:
    """The tracers of the running attempt, as an attribute that an agent's own of this name replaces."""

    def __get__(self, agent: object, owner: type) -> Tracers:
        capture = current()
        return Tracers(capture.tracers if capture else ())


class LitAgent(Generic[T]):
    """An agent as a class: override :meth:`rollout`, as a function or a coroutine function.

    A class may also define ``training_rollout`` or ``validation_rollout``, with the same arguments, for rollouts that
    train, and for those that validate or test; ``rollout`` runs the others. Names that end in ``_async`` are accepted.
    One instance serves many rollouts at once, so keep per-rollout state in local variables.

    Attributes:
        tracer: The tracers of the running attempt, for what a tracer offers besides its contract, such as a handler
            that an agent passes to its framework by hand.
    """

    tracer = _CurrentTracers()

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> Any:
        """Run the agent on one task.

        Args:
            task: One row of the dataset, without its hidden fields.
            resources: The resources that the experiment tunes or provides, by name: ``LLM``, ``PromptTemplate`` ...
            rollout: The record of this run, hidden fields removed.

        Returns:
            A number is the reward, a dict of numbers its dimensions, ``None`` nothing; a string or any other
            JSON value is the agent's output, which reward emitters see.
        """
        raise NotImplementedError(f"{type(self).__name__} must override rollout(task, resources, rollout)")


def agent(function: F) -> F:
    """Mark a plain function, sync or async, as an agent for whoever reads it; it is returned as it is.

    It may take any of the parameters ``task``, ``resources``, ``rollout``, ``llm`` (the only LLM among the
    resources), ``prompt_template`` (likewise), or a resource's name; the first parameter of another name is the task.
    """
    return function
