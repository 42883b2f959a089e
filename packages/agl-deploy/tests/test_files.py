"""The files of ``agl deploy docker`` and ``agl deploy compose``: their contents, checked by tests and by linters."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from agl import PluginManager
from agl_deploy import files
from agl_deploy.needs import read_needs
from agl_deploy.pins import Pin

from .conftest import FILE, change, deploy

PLAIN = {"POSTGRES_USER", "POSTGRES_DB", "XDG_STATE_HOME"}
"""Variables of the compose file that are no secrets."""

WHEEL = Pin(name="agl-core", line="agl-core==0.1.0", version="0.1.0", source="/src")


def written(project: Path, *words: str) -> Path:
    done = deploy(*words, folder=project)
    assert 0 == done.returncode, done.stderr
    return project / "deploy"


def test_dockerfile_passes_its_linter_and_runs_no_image_as_root(project: Path) -> None:
    folder = written(project, "docker", "experiment.toml")
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None
    done = subprocess.run([hadolint, folder / "Dockerfile"], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stdout), done.stdout

    text = (folder / "Dockerfile").read_text()
    assert "USER 10001:10001" in text
    stages = {target: base for base, target in re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)}
    for target in ("gateway", "worker", "console", "trainer", "trainer-cpu", "trainer-cuda"):
        assert stages[target] == ("trainer" if target.startswith("trainer-") else "runtime")


def test_every_file_that_the_dockerfile_copies_is_there(project: Path) -> None:
    folder = written(project, "docker", "experiment.toml", "--output", "ops/images")
    assert not folder.exists()
    copied = re.findall(r"^COPY (ops/\S+) ", (project / "ops" / "images" / "Dockerfile").read_text(), re.MULTILINE)
    assert 7 == len(copied)
    assert [] == [path for path in copied if not (project / path).exists()]


def test_requirements_are_pinned_by_part(project: Path) -> None:
    folder = written(project, "docker", "experiment.toml")
    for part in ("gateway", "worker", "trainer", "console"):
        lines = [line for line in (folder / "requirements" / f"{part}.txt").read_text().splitlines() if line[0] != "#"]
        assert lines
        assert all(re.fullmatch(r"[\w.-]+==[\w.!]+(  # a wheel in the folder wheels)?", line) for line in lines), lines
    assert "openai==" in (folder / "requirements" / "worker.txt").read_text()


def test_compose_file_keeps_secrets_out_and_the_database_from_workers(project: Path) -> None:
    folder = written(project, "compose", "experiment.toml")
    services: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())["services"]

    assert {"postgres", "gateway", "trainer", "worker", "console"} == services.keys()
    for name, service in services.items():
        for variable, value in service["environment"].items():
            assert variable in PLAIN or re.fullmatch(r"\$\{\w+:\?[\w ./]+\}", value), name
        if name != "postgres":
            assert service["read_only"]
            assert ["ALL"] == service["cap_drop"]
    assert 2 == services["worker"]["deploy"]["replicas"]
    assert not set(services["worker"]["networks"]) & set(services["postgres"]["networks"])
    assert {"AGL_WORKER_TOKEN"} == services["worker"]["environment"].keys()
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one.get("ports", ()))
    names = {name for one in services.values() for name in one["environment"]} - PLAIN
    example = (folder / "env.example").read_text()
    assert names - {"POSTGRES_PASSWORD"} == set(re.findall(r"^(\w+)=$", example, re.MULTILINE))


def test_spool_of_the_composed_gateway_is_on_a_volume(project: Path) -> None:
    folder = written(project, "compose", "experiment.toml")
    gateway: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["gateway"]
    assert ["spool:/data"] == gateway["volumes"]
    assert "/data/state" == gateway["environment"]["XDG_STATE_HOME"]


@pytest.mark.parametrize("has_pip", [True, False])
def test_wheels_are_built_without_pip_in_the_environment(
    project: Path, manager: PluginManager, monkeypatch: pytest.MonkeyPatch, has_pip: bool
) -> None:
    needs = replace(read_needs(project / "experiment.toml", manager), pins={"gateway": [WHEEL]})
    monkeypatch.setattr(files, "find_spec", lambda name: object() if has_pip else None)
    pip = ["python", "-m", "pip"] if has_pip else ["uvx", "--python", f"3.{sys.version_info.minor}", "pip"]
    assert [*pip, "wheel", "--no-deps", "--wheel-dir", "deploy/wheels", "/src"] == files.wheel_command(needs, "deploy")


def test_compose_file_with_a_gpu_and_a_database_elsewhere(project: Path) -> None:
    change(project / "experiment.toml", "[runner]", 'store = "postgresql://agl@db.example/a$b"\n\n[runner]')
    folder = written(project, "compose", "experiment.toml", "--gpus", "2")
    compose: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())

    assert "postgres" not in compose["services"]
    assert {"spool", "trained"} == compose["volumes"].keys()
    assert "trainer-cuda" == compose["services"]["trainer"]["build"]["target"]
    devices = compose["services"]["trainer"]["deploy"]["resources"]["reservations"]["devices"]
    assert [{"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}] == devices
    assert "postgresql://agl@db.example/a$$b" in compose["services"]["gateway"]["command"]


def test_secret_that_the_experiment_names_too_is_given_once(project: Path) -> None:
    change(project / "experiment.toml", '"DEPLOY_MODEL_KEY"', '"AGL_SECRET"')
    compose = (written(project, "compose", "experiment.toml") / "compose.yaml").read_text()
    machine = (written(project, "skypilot", "experiment.toml") / "sky.yaml").read_text()
    assert 2 == compose.count("AGL_SECRET: ")  # of the gateway and of the trainer
    assert 1 == machine.count("AGL_SECRET: ")


def test_name_of_a_file_cannot_break_out_of_what_is_written(project: Path) -> None:
    hostile = 'a"\n    privileged: true #$HOME \x1b[31m.toml'
    (project / hostile).write_text(FILE)
    folder = written(project, "compose", hostile)
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]

    assert hostile.replace("$", "$$") == services["worker"]["command"][2]
    assert "privileged" not in services["worker"]
    worker = re.search(r"AS worker\n(?:.*\n)*?CMD (.*)\n", (folder / "Dockerfile").read_text())
    assert worker is not None
    assert hostile == json.loads(worker[1])[2]


def test_dry_run_prints_the_files_and_writes_nothing(project: Path) -> None:
    done = deploy("compose", "experiment.toml", "--dry-run", folder=project)

    assert 0 == done.returncode
    assert not (project / "deploy").exists()
    assert "Dockerfile (new) <==\n# syntax=docker/dockerfile:1\n" in done.stdout
    assert "docker compose --file deploy/compose.yaml up --build" in done.stderr


def test_second_run_changes_nothing_and_an_edited_file_is_kept(project: Path) -> None:
    folder = written(project, "compose", "experiment.toml")
    again = deploy("compose", "experiment.toml", folder=project)
    assert again.stdout.startswith("as it was: Dockerfile, ")
    (folder / "compose.yaml").write_text("mine")

    refused = deploy("compose", "experiment.toml", folder=project)
    assert 1 == refused.returncode
    assert "edited or come from elsewhere: compose.yaml; nothing was written" in refused.stderr
    assert "mine" == (folder / "compose.yaml").read_text()


@pytest.mark.parametrize("output", ["..", "a b"])
def test_output_outside_of_the_experiments_folder_is_refused(project: Path, output: str) -> None:
    done = deploy("docker", "experiment.toml", "--output", output, folder=project)
    assert 1 == done.returncode
    assert "is not a folder within" in done.stderr


def test_output_that_is_a_link_out_of_the_experiments_folder_is_refused(tmp_path: Path, project: Path) -> None:
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (project / "deploy").symlink_to(elsewhere)
    done = deploy("docker", "experiment.toml", folder=project)
    assert 1 == done.returncode
    assert "is not a folder within" in done.stderr
    assert [] == list(elsewhere.iterdir())


def test_skypilot_file_runs_the_experiment_in_the_home_of_the_machine(project: Path) -> None:
    folder = written(project, "skypilot", "experiment.toml", "--gpus", "2")
    task: dict[str, Any] = yaml.safe_load((folder / "sky.yaml").read_text())
    assert "H100:2" == task["resources"]["accelerators"]
    assert {"AGL_SECRET": None, "DEPLOY_MODEL_KEY": None} == task["secrets"]
    for path in (*task["file_mounts"].values(), "deploy/requirements/trainer.txt"):
        assert (project / path).exists()
    assert "--requirement deploy/requirements/trainer.txt" in task["setup"]

    program = project / "machine" / "agl" / "bin" / "agl"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    environment = {"HOME": str(project / "machine"), "PATH": os.environ["PATH"]}
    done = subprocess.run(["sh", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True)
    assert [
        *("run", "experiment.toml", "--resume", "--quiet", "--set"),
        f"experiment.store=sqlite:///{project}/machine/agl-data/agl.db",
        *("--set", f"experiment.workdir={project}/machine/agl-data/runs"),
    ] == json.loads(done.stdout)
    assert (project / "machine" / "agl-data").is_dir()


def test_wheels_and_secrets_stay_out_of_git_and_the_wheels_travel_with_their_folder(project: Path) -> None:
    folder = written(project, "docker", "experiment.toml")
    assert [".env", "wheels/*", "!wheels/.gitkeep"] == (folder / ".gitignore").read_text().split()
    assert [".gitkeep"] == [path.name for path in (folder / "wheels").iterdir()]


def test_health_check_says_what_does_not_answer(project: Path) -> None:
    folder = written(project, "docker", "experiment.toml")
    done = subprocess.run(
        [sys.executable, folder / "health.py", "http://127.0.0.1:1/healthz"], capture_output=True, text=True
    )
    assert 1 == done.returncode
    assert "http://127.0.0.1:1/healthz" in done.stderr
