"""Shellcheck finds nothing in the shell scripts of the repository and of generated files."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from agl import PluginManager
from agl_deploy.files import rayjob_files, serving_files, skypilot_files
from agl_deploy.needs import OnRay, read_needs

from .conftest import change

ROOT = Path(__file__).parents[3]
SHELLS = re.compile(rb"#!\s*/\S*[/ ](ba|da)?sh\b")
FENCED = re.compile(r"^```(sh|bash)\b.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
ON_RAY = OnRay(version="2.60.0", runs_agents=True, shares_files=False, takes_jobs=True)


def shellcheck(text: str, *, shell: str = "sh") -> None:
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert program is not None
    command = [program, "--shell", shell, "--exclude", "SC2016", "-"]  # a name with $ is quoted on purpose
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stdout), f"{text}\n{done.stdout}"


def values_in(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value within plain data, with its key; items of a list have an empty key."""
    yield key, value
    if isinstance(value, dict):
        for name, one in value.items():
            yield from values_in(one, name)
    elif isinstance(value, list):
        for one in value:
            yield from values_in(one)


def lines_in(text: str) -> Iterator[str]:
    """Yield the shell commands in a YAML file: lines of jobs and tasks, and ``sh -c`` commands."""
    for document in yaml.safe_load_all(text):
        for key, value in values_in(document):
            if key in ("entrypoint", "setup", "run") and isinstance(value, str):
                yield value
            if isinstance(value, list) and value[:2] == ["sh", "-c"]:
                yield value[2].replace("$$", "$")


def test_shell_texts_of_generated_files_pass(project: Path, manager: PluginManager) -> None:
    policy = '[policy."own; a\' $b"]\nuse = "vllm"\nmodel = "m"\n\n[policy.small]'
    change(project / "experiment.toml", "[policy.small]", policy)
    hostile = project / "a b';$HOME.toml"
    hostile.write_text((project / "experiment.toml").read_text())
    found = list[str]()
    for file in (project / "experiment.toml", hostile):
        needs = msgspec.structs.replace(read_needs(file, manager), ray=ON_RAY)
        for store in ("", "postgresql://agl@db.example/a$b"):
            stored = msgspec.structs.replace(needs, store=store)
            for files in (
                skypilot_files(stored, "deploy", gpus=1),
                rayjob_files(stored, "deploy", gpus=1),
                serving_files(stored, "own; a' $b@production", "deploy", gpus=1),
            ):
                for path, text in files.items():
                    found += lines_in(text) if path.endswith(".yaml") else []
    assert len(found) == 2 * 2 * 5
    for text in found:
        shellcheck(text)


def test_shell_texts_of_the_repository_pass() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git, so that nobody knows which files belong to the repository")
    checked = 0
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if not path.is_file() or path.suffix in (".png", ".svg", ".lock"):
            continue
        content = path.read_bytes()
        texts = list[tuple[str, str]]()
        if SHELLS.match(content):
            texts.append((content.decode(), "bash" if b"bash" in content.partition(b"\n")[0] else "sh"))
        elif path.suffix == ".md":
            texts += [(block[2], block[1]) for block in FENCED.finditer(content.decode())]
        elif path.parent.name == "workflows":
            texts += [(line, "bash") for line in lines_in(content.decode())]
        for text, shell in texts:
            checked += 1
            shellcheck(text, shell=shell)
    assert checked >= 3


def test_a_text_with_a_mistake_is_found() -> None:
    with pytest.raises(AssertionError, match="SC2086"):
        shellcheck("rm -r $1/x\n")
