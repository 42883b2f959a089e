"""Lets algorithms check their needs before anything of the experiment runs, as far as the files say them.

An algorithm checks itself against its context. Here that holds what is known from the plan: tasks, resources, the
number of validations. The rest is absent until a run starts, so a check ends at the first use of that.
"""

import time
from typing import Any, NoReturn, cast

from agl.algorithms import AlgorithmConfig
from agl.contracts import AlgorithmContext, CheckedAlgorithm, Credit
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import ResourceVersion
from agl_run.plan import Plan


class _NotStartedError(Exception):
    """Ends a check that asks for a part of a running experiment."""


class _Absent:
    """A part of a running experiment; any use raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotStartedError(name)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise _NotStartedError("")

    def __truediv__(self, other: object) -> NoReturn:
        raise _NotStartedError(str(other))

    def __fspath__(self) -> NoReturn:
        raise _NotStartedError("")


async def check_without_starting(plan: Plan, algorithm: AlgorithmConfig) -> None:
    """Build and release an algorithm, which checks its parameters, its tasks and its budget.

    Raises:
        ConfigError: A run would refuse it, for a reason that is known without one.
    """
    manager = plan.manager
    built = manager.build(plan.entry(algorithm), **algorithm.params)
    try:
        if isinstance(built, CheckedAlgorithm):
            await built.check(_context(plan, algorithm))
    except _NotStartedError:
        return
    finally:
        await built.close()


def _context(plan: Plan, algorithm: AlgorithmConfig) -> AlgorithmContext:
    section, absent = plan.config.experiment, cast("Any", _Absent())
    credit = algorithm.credit or plan.config.credit
    made: Credit = plan.manager.build(plan.manager.credit(credit.use), **credit.params)
    return AlgorithmContext(
        experiment=plan.name,
        name=algorithm.name,
        tunes=algorithm.tunes,
        train=plan.train,
        val=plan.val,
        validation=len(plan.val[: section.validation_limit or None]),
        validated=lambda: (),
        seed=section.seed,
        workdir=absent,
        folder=plan.folder,
        store=absent,
        credit=made,
        collect=absent,
        sources=algorithm.source,
        recorded=absent,
        publish=absent,
        propose=absent,
        live=absent,
        endpoint=absent,
        current=lambda name: _first_version(plan, name),
        policy=absent,
        progress=lambda done, total, text: None,
        say=lambda text: None,
        clock=time.time,
        agents=algorithm.agents,
    )


def _first_version(plan: Plan, name: str) -> ResourceVersion:
    """Return a resource as the file has it; one with a label may have another version when the run starts."""
    if name in plan.config.policy or plan.label(name):
        raise _NotStartedError(name)
    if name not in plan.resources:
        hint = did_you_mean(name, plan.resources, otherwise=f"there are {sorted(plan.resources)}")
        raise ConfigError(f"there is no resource {name!r}; {hint}")
    return ResourceVersion(name=name, version="initial", resource=plan.resources[name], created_at=0.0)
