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
    """The installed tracers as one object: each attribute comes from the first tracer that has it."""

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


# A descriptor without __set__, so that an agent may have its own attribute of the same name.
class _CurrentTracers:
    """A descriptor that returns the tracers of the running attempt; an agent may override it by assignment."""

    def __get__(self, agent: object, owner: type) -> Tracers:
        capture = current()
        return Tracers(capture.tracers if capture else ())


class LitAgent(Generic[T]):
    """An agent as a class: override :meth:`rollout`, as a function or a coroutine function.

    A class may also define ``training_rollout`` for rollouts that train, and ``validation_rollout`` for rollouts that
    validate or test. Both take the same arguments as ``rollout``, which runs the remaining rollouts. Each name may end
    in ``_async``. One instance serves many rollouts at once, so keep per-rollout state in local variables.

    Attributes:
        tracer: The tracers of the running attempt. Use it for features beyond the tracer contract, such as a handler
            that an agent passes to its framework.
    """

    tracer = _CurrentTracers()

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> Any:
        """Run the agent on one task.

        Args:
            task: One row of the dataset, without its hidden fields.
            resources: The resources that the experiment tunes or provides, by name: ``LLM``, ``PromptTemplate`` ...
            rollout: The record of this run, hidden fields removed.

        Returns:
            A number is taken as the reward, and a dict of numbers as the reward's dimensions. ``None`` records
            nothing. A string or any other JSON value is the agent's output, which reward emitters see.
        """
        raise NotImplementedError(f"{type(self).__name__} must override rollout(task, resources, rollout)")


def agent(function: F) -> F:
    """Mark a plain function, sync or async, as an agent for people who read the code; returns it unchanged.

    The function may have the parameters ``task``, ``resources``, ``rollout``, ``llm`` (the only LLM among the
    resources), ``prompt_template`` (the only prompt template) and the name of any resource. The first parameter with
    another name gets the task. A resource replaces the default of the parameter with its name; where the default is a
    string, the parameter gets the text of a prompt template.
    """
    return function
