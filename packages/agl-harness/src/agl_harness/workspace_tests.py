"""The reward ``tests``: runs tests in a copy of the workspace after the harness has ended.

Hidden tests are copied in only then, and replace files of the harness at the same paths. The workspace itself stays as
the harness left it, so that a kept workspace can be scored again.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

from agl.contracts import RewardSetup
from agl.errors import ConfigError
from agl.schemas import Record, Reward, Rollout, Span
from agl_harness.runner import base_environment
from agl_harness.sandboxes.backends import attach
from agl_harness.sandboxes.contract import WORKSPACE, CopyableSandbox, Finished, Limits, PathError, Sandbox, bytes_of
from agl_harness.workspace import checked_file, files_of, filled

_CLEAR = (
    'while IFS= read -r line; do path=${line#?}; [ -e "$path" ] || [ -L "$path" ] || continue; case $line in '
    'd*) if [ -L "$path" ] || [ ! -d "$path" ]; then rm -rf -- "$path" || exit; else chmod u+rwx "$path"; fi ;; '
    'f*) [ -L "$path" ] || chmod -R u+rwX "$path"; rm -rf -- "$path" || exit ;; esac; done'
)
"""Makes room for files at the paths on standard input, one per line with the prefix d or f.

At the path of a folder (d) it removes links and files; at the path of a file (f) it removes anything."""

MAX_REPORT = 16 << 20
"""Largest size of a report in bytes."""

_CHECK = f'[ -f "$1" ] && [ ! -L "$1" ] && [ "$(wc -c < "$1")" -le {MAX_REPORT} ]'
"""A shell test that succeeds if a path is a plain file of at most ``MAX_REPORT`` bytes."""

_FEEDBACK = 2_000
"""Number of characters from the end of the tests' output that become the reward's feedback."""


class Tally(Record, frozen=True, kw_only=True):
    """The counts of a test run.

    Attributes:
        passed: Number of tests that passed.
        total: Number of tests that ran, or could not run because of an error; skipped tests do not count.
    """

    passed: int
    total: int


class WorkspaceTests:
    """Rewards the work in a workspace by running tests on it.

    Args:
        setup: Provides the experiment's folder.
        command: The command that runs the tests, as a shell-quoted text or as a list of words; its ``python`` is the
            Python that runs agl.
        hidden: File or folder, relative to the experiment file, that is copied into the workspace before the tests run;
            a part such as ``{name}`` is replaced by that field of the task.
        into: Folder of the workspace into which hidden files are copied; by default the workspace itself.
        hidden_files: Key of a task's field with further hidden files, as texts by path. Name the key in ``hidden`` of
            ``[experiment]`` too, so that the harness does not get the field.
        score: ``share`` for the share of the tests that passed, ``all`` for 1.0 if every test passed and else 0.0, or
            ``exit`` for 1.0 if the command's exit status is 0 and else 0.0.
        report: File in the workspace to which the tests write a JUnit XML report; by default the tests are counted in
            the command's output.
        expected: Smallest number of tests; missing tests count as failed.
        timeout_s: Time limit of the tests in seconds; beyond it the reward is 0.0.
        memory: Memory limit of the tests.
        processes: Largest number of processes of the tests.

    Raises:
        ConfigError: A parameter is wrong.
    """

    def __init__(  # keyword-only; each is a key of the reward's params
        self,
        *,
        setup: RewardSetup,
        command: str | Sequence[str],
        hidden: str = "",
        into: str = "",
        hidden_files: str = "",
        score: str = "share",
        report: str = "",
        expected: int = 0,
        timeout_s: float = 120.0,
        memory: str = "8GB",
        processes: int = 512,
    ) -> None:
        self._words = shlex.split(command) if isinstance(command, str) else list(command)
        if not self._words:
            raise ConfigError('the reward "tests" needs a command, such as command = "python -m unittest"')
        if score not in ("share", "all", "exit"):
            raise ConfigError(f'the reward "tests" has no score {score!r}; write "share", "all" or "exit"')
        self._folder = setup.folder.absolute()
        self._hidden = hidden
        self._into = checked_file(into) if into else ""
        self._hidden_files = hidden_files
        self._score = score
        self._report = checked_file(report) if report else ""
        self._expected = expected
        self._limits = Limits(seconds=timeout_s, memory=bytes_of(memory), processes=processes)

    async def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Reward:
        """Run the tests.

        Raises:
            SandboxError: The sandbox went away.
            ConfigError: The hidden tests, or the program that runs the tests, do not exist.
        """
        sandbox = (await attach(spans, reward="tests", folder=self._folder)).sandbox
        if not isinstance(sandbox, CopyableSandbox):
            return await self._test(sandbox, rollout)
        copy = await sandbox.snapshot()
        try:
            return await self._test(copy, rollout)
        finally:
            await copy.close()

    async def _test(self, sandbox: Sandbox, rollout: Rollout) -> Reward:
        if not await self._bring(sandbox, rollout):
            stuck = "what the harness left in the place of the hidden tests or of the report could not be removed"
            return Reward(value=0.0, name="tests", feedback=stuck)
        try:
            done = await sandbox.exec(self._words, environment=base_environment(sandbox), limits=self._limits)
        except FileNotFoundError as error:
            raise ConfigError(f'the reward "tests" cannot run: {error}; correct its command') from None
        tally = await self._tally(sandbox, done)
        value = self._value(done, tally)
        shown = f"{done.output}\n{done.errors}".strip()[-_FEEDBACK:]
        if done.exceeded:
            shown = f"the tests were stopped at {done.detail}\n{shown}"
        return Reward(value=value, name="tests", feedback=shown)

    async def _bring(self, sandbox: Sandbox, rollout: Rollout) -> bool:
        """Copy the hidden tests into a workspace, replacing files of the harness, and remove an old report.

        Returns false if files of the harness that are in the way could not be removed.
        """
        with tempfile.TemporaryDirectory(prefix="agl-tests-") as folder:
            files = self._tests_of(rollout, Path(folder))
            in_the_way = [*files, *([PurePosixPath(WORKSPACE, self._report)] if self._report else [])]
            if not await self._clear(sandbox, in_the_way):
                return False
            for path, source in files.items():
                await sandbox.upload(source, str(path))
        return True

    async def _clear(self, sandbox: Sandbox, files: Sequence[PurePosixPath]) -> bool:
        if not files:
            return True
        above = {parent for path in files for parent in path.parents if len(parent.parts) > 0}
        lines = [f"d{sandbox.root / path}" for path in sorted(above)] + [f"f{sandbox.root / path}" for path in files]
        done = await sandbox.exec(
            ["/bin/sh", "-c", _CLEAR],
            environment={"PATH": os.defpath},
            stdin="".join(f"{line}\n" for line in lines).encode(),
            limits=self._limits,
        )
        return done.code == 0

    def _tests_of(self, rollout: Rollout, folder: Path) -> dict[PurePosixPath, Path]:
        """Return the hidden files by path in the sandbox; those in the task's field are first written to ``folder``."""
        found: dict[str, Path] = {}
        if self._hidden:
            source = self._folder / filled(self._hidden, rollout.task)
            if not source.exists():
                raise ConfigError(
                    f'the hidden tests {str(source)!r} do not exist; correct hidden of the reward "tests"'
                )
            found = _files(source)
        texts = files_of(rollout.task, key=self._hidden_files) if self._hidden_files else {}
        for number, (name, text) in enumerate(texts.items()):
            found[checked_file(name)] = folder / str(number)
            found[name].write_text(text, encoding="utf-8", newline="")
        for name in found:
            if "\n" in name:
                raise ConfigError(f"the hidden test {name!r} has a line break in its name; name it without")
        return {PurePosixPath(WORKSPACE, self._into, name): path for name, path in found.items()}

    async def _tally(self, sandbox: Sandbox, done: Finished) -> Tally | None:
        if not self._report:
            return tally_of_output(f"{done.output}\n{done.errors}")
        checked = await sandbox.exec(
            ["/bin/sh", "-c", _CHECK, "sh", self._report], environment={"PATH": os.defpath}, limits=self._limits
        )
        if checked.code != 0:
            return None
        try:
            return tally_of_report(await sandbox.read(f"{WORKSPACE}/{self._report}"))
        except (OSError, PathError):
            return None

    def _value(self, done: Finished, tally: Tally | None) -> float:
        if done.exceeded:
            return 0.0
        if self._score == "exit":
            return float(done.code == 0)
        if tally is None:
            return 0.0
        total = max(tally.total, self._expected)
        share = tally.passed / total if total else 0.0
        if self._score == "all":
            return float(share == 1.0 and done.code == 0)
        return min(share, 1.0)


def _files(source: Path) -> dict[str, Path]:
    """Return the files in a folder by path relative to it, or a single file by its name; links are followed."""
    if source.is_file():
        return {source.name: source.resolve()}
    return {str(path.relative_to(source)): path.resolve() for path in sorted(source.rglob("*")) if path.is_file()}


def tally_of_report(data: bytes) -> Tally | None:
    """Count the test cases of a JUnit report; ``None`` if it is too large or not XML, or has a document type."""
    if len(data) > MAX_REPORT or b"<!DOCTYPE" in data:
        return None
    try:
        cases = list(ElementTree.fromstring(data).iter("testcase"))
    except ElementTree.ParseError:
        return None
    results = [{child.tag for child in case} for case in cases]
    ran = [tags for tags in results if "skipped" not in tags]
    return Tally(passed=sum(not tags & {"failure", "error"} for tags in ran), total=len(ran))


def tally_of_output(text: str) -> Tally | None:
    """Count the tests in the output of unittest, pytest, node, cargo or ``go test -v``; ``None`` for other output."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return next((found for count in _COUNTS if (found := count(plain)) is not None), None)


def _unittest(text: str) -> Tally | None:
    ran = re.findall(r"^Ran (\d{1,9}) tests? in ", text, flags=re.MULTILINE)
    if not ran:
        return None
    last = text[text.rindex(f"Ran {ran[-1]} test") :]
    counts = {word: int(number) for word, number in re.findall(r"\b([a-z]+(?: [a-z]+)?)=(\d{1,9})", last)}
    bad = sum(counts.get(word, 0) for word in ("failures", "errors", "unexpected successes"))
    headings = re.findall(r"^(?:FAIL|ERROR|UNEXPECTED SUCCESS): (\S+ \(\S+\))", text, flags=re.MULTILINE)
    if len(headings) == bad:  # one test may fail in several subtests
        bad = len(set(headings))
    total = int(ran[-1]) - counts.get("skipped", 0)
    return Tally(passed=max(0, total - bad), total=max(total, bad))


def _pytest(text: str) -> Tally | None:
    lines = re.findall(r"^=* ?((?:\d{1,9} [a-z]+(?: [a-z]+)?(?:, )?)+) in [\d.]+s.*$", text, flags=re.MULTILINE)
    if not lines:
        return None
    counts = {word: int(number) for number, word in re.findall(r"(\d{1,9}) ([a-z]+(?: [a-z]+)?)", lines[-1])}
    passed = counts.get("passed", 0) + counts.get("xpassed", 0)
    bad = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    return Tally(passed=passed, total=passed + bad)


def _node(text: str) -> Tally | None:
    lines = re.findall(r"^[#\u2139] (pass|fail|cancelled) (\d{1,9})$", text, flags=re.MULTILINE)
    found = {word: int(number) for word, number in lines}
    if not {"pass", "fail"} <= set(found):
        return None
    return Tally(passed=found["pass"], total=sum(found.values()))


def _cargo(text: str) -> Tally | None:
    found = re.findall(r"^test result: \w+\. (\d{1,9}) passed; (\d{1,9}) failed", text, flags=re.MULTILINE)
    passed, failed = (sum(int(pair[place]) for pair in found) for place in (0, 1))
    return Tally(passed=passed, total=passed + failed) if found else None


def _go(text: str) -> Tally | None:
    found = re.findall(r"^ *--- (PASS|FAIL): ", text, flags=re.MULTILINE)
    return Tally(passed=found.count("PASS"), total=len(found)) if found else None


_COUNTS: tuple[Callable[[str], Tally | None], ...] = (_unittest, _pytest, _node, _cargo, _go)
