"""Sandboxes in Harbor's environments, tested with Harbor's own factory, base class and templates.

``AGL_HARBOR_PYTHON`` names a Python 3.12 that has the package ``harbor``.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError
from agl_harness import PathError, SandboxError
from agl_harness.conformance import SandboxConformance, sh
from agl_harness.sandboxes.harbor import HarborSandboxes
from agl_harness.sandboxes.isolation import bubblewrap, find_isolation
from agl_testing.model_server import ScriptedModelServer

from .conftest import asks, dev
from .test_harbor import FILE, only, write

PYTHON = os.environ.get("AGL_HARBOR_PYTHON", "") or (sys.executable if find_spec("harbor") is not None else "")
WORKS = bool(find_isolation("auto").program)

needs_harbor = pytest.mark.skipif(
    not (PYTHON and WORKS), reason="AGL_HARBOR_PYTHON names no Python with harbor, or bubblewrap does not work"
)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the environment of these tests importable for Harbor."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def params(folder: Path) -> dict[str, Any]:
    """Return the parameters of a backend whose environments are folders."""
    return {
        "environment": "harbor_environment:FolderEnvironment",
        "python": PYTHON,
        "image": "scratch",
        "kwargs": {"folder": str(folder), "bubblewrap": bubblewrap()},
    }


@needs_harbor
class TestHarbor(SandboxConformance):
    @pytest.fixture
    def sandboxes(self, tmp_path: Path) -> Any:
        return HarborSandboxes(base=tmp_path, **params(tmp_path / "environments"))


@needs_harbor
def test_environment_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    script = f"""
import asyncio, os
from pathlib import Path
from agl_harness.sandboxes.harbor import HarborSandboxes

async def main():
    boxes = HarborSandboxes(base=Path({str(tmp_path)!r}), **{params(tmp_path / "environments")!r})
    box = await boxes.create("one")
    print(box.address, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert -9 == done.returncode, done.stderr

    async def gone() -> None:
        async with asyncio.timeout(60):
            while list((tmp_path / "environments").iterdir()):
                await asyncio.sleep(0.05)
        with pytest.raises(SandboxError, match="is gone"):
            await HarborSandboxes(base=tmp_path).attach(done.stdout.strip())

    asyncio.run(gone())


@needs_harbor
def test_program_that_dies_is_a_dead_sandbox_and_the_next_one_is_new(tmp_path: Path) -> None:
    async def main() -> str:
        boxes = HarborSandboxes(base=tmp_path, **params(tmp_path / "environments"))
        await boxes.start()
        first = await boxes.create("one")
        endless = asyncio.create_task(sh(first, "sleep 600"))
        await asyncio.sleep(0.2)
        (program,) = _programs(str(tmp_path))
        os.kill(program, signal.SIGKILL)
        with pytest.raises(SandboxError, match=r"is gone|it ended"):
            await endless
        async with asyncio.timeout(60):
            while _programs(str(tmp_path)):
                await asyncio.sleep(0.05)
        second = await boxes.create("two")
        done = await sh(second, "echo again")
        await boxes.close()
        return done.output

    assert "again\n" == asyncio.run(main())


def _programs(text: str) -> list[int]:
    """Return the ids of processes whose command line contains ``text``."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace")
            if "harbor_server.py" in words and text in words:
                found.append(int(path.parent.name))
    return found


@needs_harbor
def test_output_is_cut_and_no_link_leads_out(tmp_path: Path) -> None:
    async def main() -> None:
        boxes = HarborSandboxes(base=tmp_path, **params(tmp_path / "environments"))
        box = await boxes.create("one")
        done = await sh(box, "head -c 67200000 /dev/zero | tr '\\0' x; seq 100000 >&2")
        assert 0 == done.code
        assert 80_000 < len(done.output) < 81_000
        assert "characters left out" in done.output
        assert done.errors.startswith("1\n2\n")
        assert done.errors.endswith("100000\n")
        await sh(box, "mkdir -p '/agl/a\nb'; echo x > '/agl/a\nb/file'; ln -s '/agl/a\nb' out")
        with pytest.raises(PathError, match="leads out of the sandbox"):
            await box.read("workspace/out/file")
        await boxes.close()

    asyncio.run(main())


@needs_harbor
def test_task_that_harbor_makes_is_graded(tmp_path: Path) -> None:
    harbor = str(Path(PYTHON).parent / "harbor")
    words = ["init", "--task", "acme/made", "--no-pytest", "--output-dir", str(tmp_path)]
    subprocess.run([harbor, *words], check=True, capture_output=True)
    config = tmp_path / "made" / "task.toml"
    config.write_text(config.read_text().replace("artifacts = []", 'artifacts = ["/app/hi.txt"]'))
    for name, text in {
        "instruction.md": "Write hi into hi.txt.\n",
        "solution/solve.sh": "\necho hi > /app/hi.txt\n",
        "tests/test.sh": "\ngrep -c hi /app/hi.txt > /logs/verifier/reward.txt\n",
    }.items():
        with (tmp_path / "made" / name).open("a") as file:
            file.write(text)
    command = [sys.executable, "-m", "agl_run", "harness", "oracle", "made"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "made: 1\n" == done.stdout, done.stderr


@needs_harbor
@pytest.mark.parametrize("mode", ["shared", "separate"])
def test_experiment_runs_and_is_graded_in_harbor_s_environment(
    project: Path, model: ScriptedModelServer, mode: str
) -> None:
    write(
        project / "tasks" / "hi",
        {
            "instruction.md": "Write hi into hi.txt.\n",
            "task.toml": f'artifacts = ["/app/hi.txt"]\n[verifier]\nenvironment_mode = "{mode}"\n',
            "environment/Dockerfile": "FROM scratch\nRUN make everything\nWORKDIR /app\n",
            "tests/Dockerfile": "FROM scratch\nWORKDIR /check\n",
            "tests/test.sh": "pwd; grep -c hi /app/hi.txt > /logs/verifier/reward.txt\n",
        },
    )
    (project / "shell.toml").write_text('[shell]\ncommand = ["sh", "-c", "$prompt"]\n')
    (project / "tasks" / "hi" / "instruction.md").write_text("echo hi > hi.txt; ls /tests; pwd")
    given = ", ".join(f'{key} = "{value}"' for key, value in params(project / "made").items() if isinstance(value, str))
    kwargs = ", ".join(f'{key} = "{value}"' for key, value in params(project / "made")["kwargs"].items())
    text = f'{{ sandbox = "harbor", sandbox_params = {{ {given}, kwargs = {{ {kwargs} }} }} }}'
    model.enqueue(*asks())
    episode = only(dev(project, model, file=f"{FILE}\n", params=text))
    assert [1.0] == [reward.value for reward in episode.rewards], episode.rewards
    assert ("/check" if mode == "separate" else "/app") in episode.rewards[0].feedback
    assert [] == list((project / "made").iterdir())


def test_python_without_harbor_is_named(tmp_path: Path) -> None:
    boxes = HarborSandboxes(base=tmp_path, python=sys.executable + "-none")
    with pytest.raises(ConfigError, match="cannot be started"):
        asyncio.run(boxes.start())
    if find_spec("harbor") is None:
        with pytest.raises(ConfigError, match=r"needs the package harbor.*sandbox_params = \{ python"):
            asyncio.run(HarborSandboxes(base=tmp_path).start())
    with pytest.raises(ConfigError, match="has no image for a workspace"):
        asyncio.run(HarborSandboxes(base=tmp_path).create("one"))
