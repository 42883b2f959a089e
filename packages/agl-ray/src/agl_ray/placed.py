"""Stands for an algorithm whose steps run in an actor, on the share that was reserved for it.

The driver's calls go to the actor, and the actor's questions are answered from the context that the driver gave. If
the actor dies, the run ends; ``--resume`` repeats the step in flight.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from agl.algorithms import AlgorithmConfig
from agl.contracts import Algorithm, AlgorithmContext, ReversibleAlgorithm, StepReport
from agl.errors import AglError, ConfigError
from agl.schemas import LLM, Episode, Json
from agl_ray.cluster import Cluster, ProcessGoneError, answer_of, ray
from agl_ray.host import ASKED, AlgorithmHost, Facts, Message, Snapshot
from agl_ray.reservation import Place, options_of
from agl_run.fleets import WorkerOrder

T = TypeVar("T")

_LOG = logging.getLogger("agl_ray")

_THREADS = 8
"""Number of calls that the actor answers at once: a step, and questions and answers during the step."""

CLOSE_S = 30.0
"""Seconds that an algorithm may take to close before its process is killed."""


def placed_algorithm(config: AlgorithmConfig, *, cluster: Cluster, place: Place, order: WorkerOrder) -> Algorithm:
    """Return an algorithm that runs in an actor; it can go back to earlier states if the real algorithm can."""
    from agl import PluginManager

    manager = PluginManager.from_environment(environ=order.plugins)
    kind = manager.resolve(manager.algorithm(config.use))
    can_go_back = isinstance(kind, type) and issubclass(kind, ReversibleAlgorithm)
    return (_ReversiblePlaced if can_go_back else _Placed)(config, cluster=cluster, place=place, order=order)


class _Placed:
    """An algorithm whose steps run in an actor; see the module's docstring."""

    def __init__(self, config: AlgorithmConfig, *, cluster: Cluster, place: Place, order: WorkerOrder) -> None:
        self._config = config
        self._cluster = cluster
        self._place = place
        self._order = order
        self._actor: Any = None
        self._context: AlgorithmContext | None = None
        self._state: Mapping[str, Json] = {}
        self._validated = 0
        self._pump: asyncio.Task[None] | None = None
        self._broken: asyncio.Future[None] | None = None
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def setup(self, context: AlgorithmContext) -> None:
        """Start the actor, and set up the algorithm in it."""
        self._context = context
        self._actor = await self._cluster.run(self._start)
        self._broken = asyncio.get_running_loop().create_future()
        self._pump = asyncio.create_task(self._listen())
        facts = Facts(
            experiment=context.experiment,
            tunes=context.tunes,
            train=tuple(context.train),
            val=tuple(context.val),
            validation=context.validation,
            seed=context.seed,
            workdir=str(context.workdir.absolute()),
            sources=context.sources,
        )
        await self._call("setup", facts)

    async def step(self) -> StepReport:
        """Take a step in the actor; if this is cancelled, the step is cancelled too."""
        return await self._call("step")

    def state(self) -> Mapping[str, Json]:
        """Return the algorithm's state after the last call."""
        return self._state

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Let the algorithm continue from a state."""
        await self._call("restore", dict(state))

    async def close(self) -> None:
        """Close the algorithm and end its process; idempotent."""
        actor = self._actor
        if actor is not None:
            with contextlib.suppress(AglError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._call("close")
            self._actor = None
            with contextlib.suppress(Exception):  # the actor may be gone
                await self._cluster.run(lambda: ray().kill(actor))
        tasks = [*self._answering.values(), *([self._pump] if self._pump else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pump = None
        if self._broken is not None and not self._broken.cancel() and not self._broken.cancelled():
            self._broken.exception()  # retrieved, so that asyncio does not log it again

    def _start(self) -> Any:
        kind = ray().remote(AlgorithmHost)
        return kind.options(
            **options_of(self._place.amounts),
            max_restarts=0,
            max_concurrency=_THREADS,
            scheduling_strategy=self._place.strategy(),
        ).remote(self._order, self._config)

    async def _call(self, method: str, *args: Any, **named: Any) -> Any:
        if self._actor is None:
            raise AglError(f"algorithm {self._config.name!r} is not set up")
        reference = self._actor.call.remote(method, args, named, self._now())
        answer = self._cluster.unless_gone(answer_of(reference))
        try:
            result, self._state = await (answer if method == "close" else self._unless_broken(answer))
        except asyncio.CancelledError:
            self._actor.cancel.remote()
            raise
        except ProcessGoneError as error:
            raise AglError(
                f"the process of the algorithm {self._config.name!r} on the Ray cluster ended: {error} Every finished "
                "step is kept; mend the cause unless it was an accident, and continue with --resume (resume=True)"
            ) from error
        return result

    async def _unless_broken(self, answer: Coroutine[Any, Any, T]) -> T:
        """Return the answer to a call; if the algorithm's own questions can no longer be answered, raise that error."""
        assert self._broken is not None  # noqa: S101  # made with the actor
        answering = asyncio.ensure_future(answer)
        try:
            await asyncio.wait((answering, self._broken), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._actor.cancel.remote()
                self._broken.result()
            return answering.result()
        finally:
            answering.cancel()

    def _break(self, error: Exception) -> None:
        """Fail the running call and all later ones."""
        if self._broken is not None and not self._broken.done():
            name = self._config.name
            problem = AglError(f"algorithm {name!r} cannot be heard or answered on the Ray cluster: {error}")
            problem.__cause__ = error
            self._broken.set_exception(problem)

    def _now(self) -> Snapshot:
        context = self._given()
        live = dict(context.live())
        endpoints: dict[str, LLM] = {}
        for name in live:
            with contextlib.suppress(ConfigError):  # the resource is not a policy
                endpoints[name] = context.endpoint(name)
        episodes: tuple[Episode, ...] = tuple(context.validated())
        is_new, self._validated = len(episodes) != self._validated, len(episodes)
        return Snapshot(
            live=live,
            current={name: context.current(name) for name in live},
            endpoints=endpoints,
            kept=frozenset(context.kept()),
            validated=episodes if is_new else None,
        )

    def _given(self) -> AlgorithmContext:
        if self._context is None:
            raise AglError(f"algorithm {self._config.name!r} is not set up")
        return self._context

    async def _listen(self) -> None:
        """Answer the algorithm's questions and pass on its notices, until the actor's process is gone."""
        try:
            while True:
                for message in await answer_of(self._actor.receive.remote()):
                    self._take(message)
        except ProcessGoneError:
            return
        except Exception as error:  # noqa: BLE001  # raised by the running call
            self._break(error)

    def _take(self, message: Message) -> None:
        if message.name in ASKED:
            task = asyncio.create_task(self._answer(message))
            self._answering[message.number] = task
            task.add_done_callback(lambda _: self._answering.pop(message.number, None))
        elif message.name == "cancel":
            task = self._answering.get(message.args[0])
            if task is not None:
                task.cancel()
        else:
            getattr(self._given(), message.name)(*message.args)

    async def _answer(self, message: Message) -> None:
        value, problem = None, None
        try:
            value = await getattr(self._given(), message.name)(*message.args, **message.named)
        except Exception as error:  # noqa: BLE001  # raised where it was asked
            problem = error
        try:
            await self._send(message.number, value, problem)
        except ProcessGoneError:
            return
        except Exception as error:  # noqa: BLE001  # raised where it was asked, or by the running call
            _LOG.debug("the answer to %r cannot be sent as it is", message.name, exc_info=error)
            self._validated = -1  # the values sent along with it did not arrive
            await self._send_instead(message.number, AglError(str(problem or error)))

    async def _send_instead(self, number: int, problem: AglError) -> None:
        """Send an error in place of an answer that cannot be sent."""
        try:
            await self._send(number, None, problem)
        except ProcessGoneError:
            return
        except Exception as error:  # noqa: BLE001  # raised by the running call
            self._break(error)

    async def _send(self, number: int, value: Any, problem: Exception | None) -> None:
        await answer_of(self._actor.answer.remote(number, value, problem, self._now()))


class _ReversiblePlaced(_Placed):
    """A placed algorithm that can continue from an earlier state."""

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Let the algorithm continue from an earlier state with smaller steps."""
        await self._call("go_back", dict(state), rate=rate)
