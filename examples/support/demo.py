"""An agent that learns from its users while it serves them: `python demo.py`.

Starts scripted models, a gateway, a learner and customers as processes, and prints what each of them says. It fails if
the learner misses the customers' new wish, or lets a poisoned prompt through.
"""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from customers import GATEWAY, TOKEN

from agl_inspect.records.learning import LearningCandidate, LearningRecords
from agl_store_sqlite import SQLiteStore

HERE = Path(__file__).parent
STORE = "sqlite:///out/support.db"
FIRST = 100
PATIENCE_S = 150.0


class Program:
    """A program that runs beside the demo, whose lines are printed under its name and kept."""

    def __init__(self, name: str, *words: str) -> None:
        self.lines: list[str] = []
        self._name = name
        environment = {**os.environ, "AGL_TOKEN": f"admin-{TOKEN}", "AGL_CLIENT_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *words],
            cwd=HERE,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            print(f"{self._name:9} | {line.rstrip()}", flush=True)

    def wait(self) -> None:
        """Wait for its end; raises RuntimeError if it failed."""
        status = self._process.wait()
        self._reader.join()
        if status:
            raise RuntimeError(f"{self._name} ended with status {status}")

    def stop(self) -> None:
        """Stop it as Ctrl-C would, and wait for its end."""
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None


@contextmanager
def running(name: str, *words: str) -> Generator[Program]:
    """Run a program until the end of the block."""
    program = Program(name, *words)
    try:
        yield program
    finally:
        program.stop()


def until(what: str, is_so: Callable[[], bool], *programs: Program) -> None:
    """Wait until something happens; raises RuntimeError if it takes too long, or if a program ends."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end or not all(program.is_running for program in programs):
            raise RuntimeError(f"this did not happen: {what}")
        time.sleep(0.5)
    print(f"{'demo':9} | {what}", flush=True)


def candidates() -> list[LearningCandidate]:
    """Read the learner's candidates, the newest last."""

    async def read() -> list[LearningCandidate]:
        store = SQLiteStore(STORE)
        try:
            found = await LearningRecords("support").candidates.read(store)
        finally:
            await store.close()
        return sorted(found.values(), key=lambda each: each.number)

    return asyncio.run(read())


def content(customers: Program) -> float:
    """Return the newest share of content customers, from 0 to 1; -1 before the first one."""
    found = re.findall(r"(\d+)% of the newest content", "\n".join(customers.lines))
    return int(found[-1]) / 100 if found else -1.0


def is_promoted() -> bool:
    """Return whether the learner promoted a candidate."""
    return any(each.stage in ("watch", "accepted") for each in candidates())


def is_poison_refused() -> bool:
    """Return whether the prompt that a person proposed was refused."""
    return any(each.stage == "refused" and each.origin == "a person" for each in candidates())


def propose_poison() -> None:
    """Publish the poisoned prompt, and propose it to the learner with a label."""
    person = ("-m", "agl", "resources")
    published = Program("a person", *person, "publish", "answer_prompt", "poison.txt", "--store", STORE)
    published.wait()
    version = published.lines[0].split()[-1]
    Program("a person", *person, "promote", "answer_prompt", version, "--label", "candidate", "--store", STORE).wait()


def play() -> None:
    """Run all of it."""
    with ExitStack() as stack:
        models = stack.enter_context(running("models", "scripted.py"))
        until("the models answer", lambda: bool(models.lines), models)
        upstream = ("--upstream", "support_llm=http://127.0.0.1:8790/v1")
        learner = stack.enter_context(running("learner", "-m", "agl", "learn", "support.toml"))
        serve = ("-m", "agl", "serve", "--store", STORE, "--port", GATEWAY.rpartition(":")[2], *upstream)
        gateway = stack.enter_context(running("gateway", *serve))
        until("the gateway serves", lambda: any("serving" in line for line in gateway.lines), gateway)
        until("the learner learns", lambda: any("learning" in line for line in learner.lines), learner)
        first = Program("customers", "customers.py", "--wish", "short", "--count", str(FIRST), "--seed", "1")
        first.wait()
        print(f"{'demo':9} | the customers change their wish: a link, and the next step", flush=True)
        wishes = ("customers.py", "--wish", "link", "--saboteurs", "0.1", "--seed", "2")
        customers = stack.enter_context(running("customers", *wishes))
        until("the customers are not content any more", lambda: 0 <= content(customers) < 0.5, customers)
        until("a better prompt is promoted", is_promoted, customers, learner, gateway)
        until("the customers are content again", lambda: content(customers) >= 0.85, customers, learner, gateway)
        propose_poison()
        until("the poisoned prompt is refused", is_poison_refused, customers, learner, gateway)
        assert content(customers) >= 0.85


def main() -> None:
    """Run the demo, and say where to look."""
    os.chdir(HERE)
    shutil.rmtree("out", ignore_errors=True)
    started = time.monotonic()
    try:
        play()
    except RuntimeError as error:
        sys.exit(f"the demo failed: {error}")
    print(f"\nall of it took {time.monotonic() - started:.0f} s")
    print(f"in the folder {HERE}:")
    print("  agl console out/support.db --open          every candidate's story, at Learners")
    print("  agl learn log --store out/support.db       what happened, in order")


if __name__ == "__main__":
    main()
