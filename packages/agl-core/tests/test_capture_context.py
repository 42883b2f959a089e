"""The context variable of a rollout: where it is carried, and that nothing of it is left afterwards."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from agl import operation
from agl.contracts import Tracer
from agl.tracing import ActiveAttempt, SpanRecorder, activate, around_attempts, current, current_span_id


def attempt(number: int = 1, **fields: object) -> ActiveAttempt:
    settings = {"record": SpanRecorder().record, "trace_id": f"{number:032x}", "root_span_id": f"{number:016x}"}
    return ActiveAttempt(rollout_id=f"ro-{number}", attempt_id=f"ro-{number}.1", **{**settings, **fields})  # type: ignore[arg-type]


class Named(Tracer):
    """A tracer that always names the same current span."""

    def __init__(self, span_id: str | None = None) -> None:
        self.span_id = span_id

    def install(self) -> None: ...

    def uninstall(self) -> None: ...

    def current_span_id(self) -> str | None:
        return self.span_id


def test_current_is_none_outside_a_rollout():
    assert current() is None
    assert current_span_id() is None


def test_activate_makes_the_capture_current_for_its_body_only():
    mine = attempt()
    with activate(mine) as entered:
        assert entered is mine
        assert current() is mine
        assert current_span_id() == mine.root_span_id
    assert current() is None


def test_activate_restores_the_outer_rollout_and_its_operation():
    with activate(attempt(1)), operation("outer") as outer:
        with activate(attempt(2)) as inner:
            assert current_span_id() == inner.root_span_id
        assert current_span_id() == outer.span_id


def test_activate_is_undone_when_the_body_raises():
    start = threading.Thread.start
    with pytest.raises(KeyError), activate(attempt()):
        raise KeyError("agent")
    assert current() is None
    assert threading.Thread.start is start


def test_tasks_of_concurrent_rollouts_see_their_own_capture():
    async def rollout(number: int) -> tuple[str, str]:
        with activate(attempt(number)):
            await asyncio.sleep(0.01 * (number % 3))
            mine = current()
            seen = await asyncio.create_task(asyncio.to_thread(current))
            assert mine is not None
            assert seen is not None
            return mine.rollout_id, seen.rollout_id

    async def run() -> list[tuple[str, str]]:
        return await asyncio.gather(*(rollout(number) for number in range(8)))

    assert [(f"ro-{number}", f"ro-{number}") for number in range(8)] == asyncio.run(run())


def test_threads_carry_the_capture():
    seen: list[ActiveAttempt | None] = []
    with activate(attempt()) as mine:
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert [mine] == seen


def test_threads_that_override_run_carry_the_capture():
    class Worker(threading.Thread):
        seen: ActiveAttempt | None = None

        def run(self) -> None:
            self.seen = current()

    with activate(attempt()) as mine:
        worker = Worker()
        worker.start()
        worker.join()
    assert worker.seen is mine
    assert "run" not in vars(worker)


def test_timers_carry_the_capture():
    seen: list[ActiveAttempt | None] = []
    with activate(attempt()) as mine:
        timer = threading.Timer(0.01, lambda: seen.append(current()))
        timer.start()
        timer.join()
    assert [mine] == seen


def test_a_thread_that_cannot_start_twice_says_so_and_is_left_as_it_was():
    with activate(attempt()):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="once"):
            thread.start()
    assert "run" not in vars(thread)


@pytest.mark.parametrize("workers", [1, 4])
def test_executors_carry_each_submitters_capture(workers: int):
    with ThreadPoolExecutor(workers) as pool:
        for number in range(6):
            with activate(attempt(number)) as mine:
                assert mine is pool.submit(current).result()
                assert [mine, mine] == list(pool.map(lambda _: current(), range(2)))


def test_run_in_executor_carries_the_capture():
    async def run() -> tuple[ActiveAttempt | None, ActiveAttempt | None, ActiveAttempt]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as pool, activate(attempt()) as mine:
            return await loop.run_in_executor(pool, current), await loop.run_in_executor(None, current), mine

    given, default, mine = asyncio.run(run())
    assert mine is given
    assert mine is default


def test_an_executors_worker_does_not_keep_the_rollout_that_started_it():
    with ThreadPoolExecutor(1) as pool:
        with activate(attempt()) as mine:
            assert mine is pool.submit(current).result()
        assert pool.submit(current).result() is None
        # Another rollout is active, so the patches are, too; this submitter is outside of it.
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with activate(attempt(2)):
                inside.set()
                leave.wait(5)

        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(5)
        assert pool.submit(current).result() is None
        leave.set()
        thread.join()


def test_patches_are_counted_and_undone_by_identity():
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit
    first, second = activate(attempt(1)), activate(attempt(2))
    first.__enter__()
    patched = threading.Thread.start
    assert patched is not start
    second.__enter__()
    assert threading.Thread.start is patched
    second.__exit__(None, None, None)
    assert threading.Thread.start is patched
    first.__exit__(None, None, None)
    assert threading.Thread.start is start
    assert ThreadPoolExecutor.submit is submit


def test_an_activation_that_is_never_left_stays():
    code = """
import gc
from agl.tracing import ActiveAttempt, SpanRecorder, activate, current
attempt = ActiveAttempt(
    rollout_id="ro-1", attempt_id="ro-1.1", trace_id="a" * 32, root_span_id="1" * 16, record=SpanRecorder().record
)
activate(attempt).__enter__()
gc.collect()
assert current() is attempt
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_activation_that_cannot_be_entered_leaves_nothing_behind():
    def broken(attempt: ActiveAttempt) -> AbstractContextManager[None]:
        raise ZeroDivisionError

    start = threading.Thread.start
    undo = around_attempts(broken)
    try:
        with pytest.raises(ZeroDivisionError), activate(attempt()):
            pass
    finally:
        undo()
    assert current() is None
    assert threading.Thread.start is start


def test_a_foreign_patch_on_top_of_ours_is_left_in_place(monkeypatch: pytest.MonkeyPatch):
    original = threading.Thread.start
    with activate(attempt()):
        ours = threading.Thread.start

        def foreign(self: threading.Thread) -> None:
            ours(self)

        threading.Thread.start = foreign  # type: ignore[method-assign]
    try:
        assert threading.Thread.start is foreign
        seen: list[ActiveAttempt | None] = []
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert seen == [None]
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]


def test_a_tracer_that_fails_names_no_span(caplog: pytest.LogCaptureFixture):
    class Broken(Named):
        def current_span_id(self) -> str | None:
            raise ZeroDivisionError

    with activate(attempt(tracers=(Broken(), Named("f" * 16)))):
        assert current_span_id() == "f" * 16
    assert "ZeroDivisionError" in caplog.text


def test_the_innermost_of_framework_span_and_operation_is_current():
    framework = Named()
    with activate(attempt(tracers=(framework,))) as mine:
        framework.span_id = "f" * 16
        assert current_span_id() == "f" * 16
        with operation("within the framework's span") as inner:
            assert current_span_id() == inner.span_id
            framework.span_id = "e" * 16
            assert current_span_id() == "e" * 16
            framework.span_id = "f" * 16
            assert current_span_id() == inner.span_id
        framework.span_id = None
        assert current_span_id() == mine.root_span_id


def test_the_token_is_not_in_the_representation():
    assert "agl_secret" not in repr(attempt(token="agl_secret"))
