"""The actor in which an algorithm takes its steps, and the algorithm's context there.

The actor opens the store itself. For functions that belong to the experiment's own process, such as collecting rollouts
and publishing versions, it asks that process and waits for the answer. Values that an algorithm may read at any time
are sent along with every call and answer.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from agl.algorithms import AlgorithmConfig
from agl.contracts import Algorithm, AlgorithmContext
from agl.errors import AglError, ConfigError
from agl.schemas import LLM, Episode, Json, ResourceVersion
from agl_run.fleets import WorkerOrder

RECEIVE_S = 5.0
"""Longest time in seconds that one call of ``receive`` waits for messages."""

ASKED = ("collect", "recorded", "publish", "propose")
"""Names of the context's functions that run in the experiment's own process."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The fields of an algorithm's context that never change; they are sent to the actor once."""

    experiment: str
    tunes: tuple[str, ...]
    train: tuple[Json, ...]
    val: tuple[Json, ...]
    validation: int
    seed: int
    workdir: str
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The changing fields of an algorithm's context at one moment; ``validated`` is ``None`` if unchanged."""

    live: Mapping[str, str]
    current: Mapping[str, ResourceVersion]
    endpoints: Mapping[str, LLM]
    kept: frozenset[int]
    validated: tuple[Episode, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Message:
    """A question or a notice from an algorithm; ``number`` identifies a question, and is 0 for a notice."""

    number: int
    name: str
    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict[str, Any])


class ElsewhereError(ConfigError, AttributeError):
    """An algorithm used an object that only the experiment's process has; an ``AttributeError`` for ``getattr``."""


class _NoPolicy:
    """Stands for a policy that runs in another process; any use raises :class:`ElsewhereError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise ElsewhereError(
            f"the algorithm uses {attribute!r} of the policy {self._name!r}, which runs in the experiment's own "
            "process; remove [algorithm.resources], so that the algorithm runs there too"
        )


class _Link:
    """Sends an algorithm's questions to the experiment's process, and receives the answers, in one event loop."""

    def __init__(self) -> None:
        self.out: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._count = 0

    async def ask(self, name: str, *args: Any, **named: Any) -> Any:
        self._count += 1
        number = self._count
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.out.put(Message(number=number, name=name, args=args, named=named))
        try:
            return await answer
        except asyncio.CancelledError:
            self._asked.pop(number, None)
            self.tell("cancel", number)
            raise

    def tell(self, name: str, *args: Any) -> None:
        self.out.put(Message(number=0, name=name, args=args))

    def settle(self, number: int, value: Any, error: Exception | None) -> None:
        asked = self._asked.pop(number, None)
        if asked is None or asked.done():
            return
        if error is None:
            asked.set_result(value)
        else:
            asked.set_exception(error)


class AlgorithmHost:
    """Builds an algorithm, and runs its methods on a separate event loop.

    The methods are not coroutines, because Ray would then run all of them on one event loop.

    Args:
        order: The experiment.
        config: The algorithm.
    """

    def __init__(self, order: WorkerOrder, config: AlgorithmConfig) -> None:
        self._order = order
        self._config = config
        self._manager, self._store = order.open_store()
        self._algorithm: Algorithm = self._manager.build(self._manager.algorithm(config.use), **config.params)
        self._link = _Link()
        self._snapshot = Snapshot(live={}, current={}, endpoints={}, kept=frozenset())
        self._validated: tuple[Episode, ...] = ()
        self._cancel: Callable[[], object] = _nothing
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def call(self, method: str, args: tuple[Any, ...], named: Mapping[str, Any], now: Snapshot) -> tuple[Any, Any]:
        """Run a method of the algorithm to its end; return its result and the algorithm's state afterwards."""
        self._note(now)
        if method == "setup":
            args = (self._context(args[0]),)
        result = self._wait(getattr(self._algorithm, method)(*args, **named))
        if method == "close":
            self._wait(self._store.close())
        return result, {} if method in ("setup", "close") else dict(self._algorithm.state())

    def cancel(self) -> None:
        """Cancel the running method."""
        self._cancel()

    def receive(self) -> list[Message]:
        """Return the algorithm's new questions and notices; an empty list after five seconds without any."""
        out = self._link.out
        try:
            found = [out.get(timeout=RECEIVE_S)]
        except queue.Empty:
            return []
        while not out.empty():
            found.append(out.get())
        return found

    def answer(self, number: int, value: Any, error: Exception | None, now: Snapshot) -> None:
        """Deliver the answer to one of the algorithm's questions."""
        self._note(now)
        self._loop.call_soon_threadsafe(self._link.settle, number, value, error)

    def _note(self, now: Snapshot) -> None:
        self._snapshot = now
        if now.validated is not None:
            self._validated = now.validated

    def _wait(self, work: Any) -> Any:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._cancel = running.cancel
        try:
            return running.result()
        finally:
            self._cancel = _nothing

    def _context(self, facts: Facts) -> AlgorithmContext:
        config, experiment = self._config, self._order.config
        credit = config.credit or experiment.credit
        return AlgorithmContext(
            experiment=facts.experiment,
            name=config.name,
            tunes=facts.tunes,
            train=facts.train,
            val=facts.val,
            validation=facts.validation,
            validated=lambda: self._validated,
            seed=facts.seed,
            workdir=Path(facts.workdir),
            folder=Path(self._order.folder),
            store=self._store,
            credit=self._manager.build(self._manager.credit(credit.use), **credit.params),
            sources=facts.sources,
            live=lambda: self._snapshot.live,
            endpoint=lambda name: _known(name, self._snapshot.endpoints, "policy"),
            current=lambda name: _known(name, self._snapshot.current, "resource"),
            policy=lambda name: _policy(_known(name, self._snapshot.endpoints, "policy"), name),
            progress=partial(self._link.tell, "progress"),
            say=partial(self._link.tell, "say"),
            clock=time.time,
            kept=lambda: self._snapshot.kept,
            collect=partial(self._link.ask, "collect"),
            recorded=partial(self._link.ask, "recorded"),
            publish=partial(self._link.ask, "publish"),
            propose=partial(self._link.ask, "propose"),
            reads=partial(self._link.tell, "reads"),
            agents=config.agents,
        )


def _nothing() -> None:
    """Do nothing; used while no method runs."""


def _policy(served: LLM, name: str) -> Any:
    del served  # only its existence matters
    return _NoPolicy(name)


def _known(name: str, found: Mapping[str, Any], kind: str) -> Any:
    if name not in found:
        raise AglError(f"there is no {kind} {name!r}; there are {sorted(found)}")
    return found[name]
