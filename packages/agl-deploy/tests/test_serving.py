"""The files that serve a labelled version with vLLM: they fetch the version's weights, and run vLLM on them."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agl import PluginManager
from agl.errors import ConfigError
from agl.schemas import ResourceVersion, Weights
from agl_deploy.files import compose_files, parse_model, serving_files
from agl_deploy.needs import Needs, read_needs
from agl_inspect.records.labels import move
from agl_store_sqlite._store import SQLiteStore

from .conftest import change

OPTIONS = ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]


@pytest.fixture
def needs(project: Path, manager: PluginManager) -> Needs:
    change(
        project / "experiment.toml", "[policy.small]", '[policy.main_llm]\nuse = "vllm"\nmodel = "m"\n\n[policy.small]'
    )
    return read_needs(project / "experiment.toml", manager)


def served_with(project: Path, folder: Path, *words: str) -> list[str]:
    """Run the script with a fake vLLM that prints its arguments, and return these."""
    (project / "bin").mkdir()
    vllm = project / "bin" / "vllm"
    vllm.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    vllm.chmod(0o755)
    script = Path(__file__).parents[1] / "src" / "agl_deploy" / "templates" / "serve_model.py"
    environment = {**os.environ, "PATH": f"{vllm.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, script, folder, "main_llm", *words]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def test_full_weights_are_served_as_a_model_of_their_own(project: Path) -> None:
    (project / "weights").mkdir()
    found = served_with(project, project / "weights", "--max-model-len", "4096")
    weights = str(project / "weights")
    assert ["serve", weights, "--served-model-name", "main_llm", *OPTIONS, "--max-model-len", "4096"] == found


def test_adapter_is_served_on_its_base(project: Path) -> None:
    (project / "weights").mkdir()
    config = {"r": 12, "base_model_name_or_path": "org/base"}
    (project / "weights" / "adapter_config.json").write_text(json.dumps(config))
    found = served_with(project, project / "weights")

    assert ["serve", "org/base", "--served-model-name", "main_llm-base", "--enable-lora"] == found[:5]
    assert ["--max-lora-rank", "16", "--lora-modules", f"main_llm={project / 'weights'}"] == found[5:9]


def test_label_decides_which_weights_arrive_and_taking_it_back_brings_the_earlier_ones(
    project: Path, needs: Needs
) -> None:
    store = f"sqlite:///{project}/runs.db"
    files = serving_files(needs, "main_llm@production", "deploy", gpus=1)
    services: dict[str, Any] = yaml.safe_load(
        next(text for path, text in files.items() if path.endswith(".compose.yaml"))
    )["services"]
    weights = next(one for name, one in services.items() if name.endswith("-weights"))
    shell, flag, line = weights["command"]
    line = line.replace("http://gateway:4747", store).replace("/models/served", f"{project}/served")
    line = line.replace("agl data export", f"{shlex.quote(sys.executable)} -m agl data export")

    async def label(version: str) -> None:
        opened = SQLiteStore(store)
        try:
            folder = project / version
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(version)
            made = Weights(uri=str(folder), base_model="org/base", format="hf")
            await opened.publish([ResourceVersion(name="main_llm", version=version, resource=made)])
            await move(opened, "main_llm", "production", version)
        finally:
            await opened.close()

    for version in ("first", "second", "first"):
        asyncio.run(label(version))
        done = subprocess.run([shell, flag, line], capture_output=True, text=True)
        assert 0 == done.returncode, done.stderr
        assert version == (project / "served" / "config.json").read_text()


def test_name_of_a_policy_cannot_break_out_of_the_command(project: Path, manager: PluginManager) -> None:
    hostile = "a; touch owned #'\\n- b"
    change(
        project / "experiment.toml",
        "[policy.small]",
        f'[policy."{hostile}"]\nuse = "vllm"\nmodel = "m"\n\n[policy.small]',
    )
    files = serving_files(
        read_needs(project / "experiment.toml", manager), "a; touch owned #'\n- b@best", "deploy", gpus=1
    )
    for text in files.values():
        if not text.startswith('"""'):
            list(yaml.safe_load_all(text))
    compose = next(text for path, text in files.items() if path.endswith(".compose.yaml"))
    command = next(one["command"] for one in yaml.safe_load(compose)["services"].values() if "command" in one)
    line = command[2].replace("/models/served", str(project / "served")).replace("agl data export", "echo")
    done = subprocess.run(["sh", "-c", line], cwd=project, capture_output=True, text=True)
    assert "a; touch owned #'\n- b@best" in done.stdout
    assert not (project / "owned").exists()


@pytest.mark.parametrize("policy", ["worker", "gateway", "database", "spool"])
def test_policy_with_the_name_of_a_part_is_a_service_of_its_own(
    project: Path, manager: PluginManager, policy: str
) -> None:
    change(
        project / "experiment.toml",
        "[policy.small]",
        f'[policy.{policy}]\nuse = "vllm"\nmodel = "m"\n\n[policy.small]',
    )
    needs = read_needs(project / "experiment.toml", manager)
    deployment = yaml.safe_load(compose_files(needs, "deploy", gpus=0)["compose.yaml"])
    files = serving_files(needs, f"{policy}@best", "deploy", gpus=1)
    served = yaml.safe_load(files[f"model-{policy}-model.compose.yaml"])
    for part in ("services", "volumes"):
        assert not deployment[part].keys() & served[part].keys()
    names = {one["metadata"]["name"] for one in yaml.safe_load_all(files[f"model-{policy}-model.kubernetes.yaml"])}
    assert {f"answers-{policy}-model"} == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("main_llm", "is not NAME@LABEL, such as main_llm@production"),
        ("main_llm@", "is not NAME@LABEL"),
        ("main_llm@a b", "is not NAME@LABEL"),
        ("small@production", "no policy 'small' whose weights are trained; trained are main_llm"),
        ("main_lm@production", "no policy 'main_lm'"),
    ],
)
def test_what_is_no_label_of_a_trained_policy_is_refused(needs: Needs, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_model(text, needs)


def test_files_fit_the_deployment_that_they_stand_beside(needs: Needs) -> None:
    files = serving_files(needs, "main_llm@production", "deploy", gpus=2)
    kubernetes = next(text for path, text in files.items() if path.endswith(".kubernetes.yaml"))
    config, deployment, service = yaml.safe_load_all(kubernetes)

    assert files["serve_model.py"] == config["data"]["serve_model.py"]
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert 2 == pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert len(deployment["metadata"]["name"]) <= 63
