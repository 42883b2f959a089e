"""The RayJob of ``agl deploy ray``: its structure, its entry point, and each pod's network access and secrets."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from agl import PluginManager
from agl.errors import ConfigError
from agl_deploy.files import AGENTS, rayjob_files
from agl_deploy.needs import Needs, OnRay, read_needs

from .conftest import FILE, change, deploy

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
TEMPLATE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["metadata", "spec"],
    "properties": {
        "metadata": {"type": "object", "additionalProperties": False, "properties": {"labels": TEXTS}},
        "spec": {
            "type": "object",
            "required": ["containers"],
            "properties": {"containers": {"type": "array", "minItems": 1}},
        },
    },
}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
RAYJOB: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {
            "type": "object",
            "additionalProperties": False,
            # KubeRay uses six of the 53 characters of a cluster's name for its own suffix.
            "properties": {"name": {"pattern": "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"}, "labels": TEXTS},
        },
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["entrypoint", "rayClusterSpec"],
            "properties": {
                "entrypoint": {"type": "string", "minLength": 1},
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
                "backoffLimit": COUNT,
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "ttlSecondsAfterFinished": COUNT,
                "rayClusterSpec": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["headGroupSpec"],
                    "properties": {
                        "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
                        "authOptions": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {"mode": {"enum": ["disabled", "token"]}},
                        },
                        "headGroupSpec": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["template"],
                            "properties": {"rayStartParams": TEXTS, "template": TEMPLATE},
                        },
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "additionalProperties": False,
                                # Without an autoscaler KubeRay asks for both bounds.
                                "required": ["groupName", "template", "minReplicas", "maxReplicas"],
                                "properties": {
                                    "groupName": {"type": "string"},
                                    "replicas": COUNT,
                                    "minReplicas": COUNT,
                                    "maxReplicas": COUNT,
                                    "rayStartParams": TEXTS,
                                    "template": TEMPLATE,
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}
"""A schema of the generated parts of KubeRay's RayJob, as strict as KubeRay's operator."""

ON_RAY = OnRay(version="2.60.0", runs_agents=True, shares_files=False, takes_jobs=True)


@pytest.fixture
def needs(project: Path, manager: PluginManager) -> Needs:
    """The needs of the experiment if Ray ran its agents; Ray itself is not installed for these tests."""
    return msgspec.structs.replace(read_needs(project / "experiment.toml", manager), ray=ON_RAY)


def written(needs: Needs, *, gpus: int = 0) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(rayjob_files(needs, "deploy", gpus=gpus)["rayjob.yaml"]))


def of(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(one["spec"] for one in found if (one["kind"], one["metadata"]["name"]) == (kind, name))


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    cluster = found[0]["spec"]["rayClusterSpec"]
    return {"head": cluster["headGroupSpec"]["template"], "agents": cluster["workerGroupSpecs"][0]["template"]}


@pytest.mark.parametrize("runs_agents", [True, False])
@pytest.mark.parametrize("store", ["", "postgresql://agl@db.example:6543/agl"])
@pytest.mark.parametrize("gpus", [0, 2])
def test_manifest_is_a_rayjob_with_what_it_needs(needs: Needs, runs_agents: bool, store: str, gpus: int) -> None:
    ray = msgspec.structs.replace(ON_RAY, runs_agents=runs_agents, shares_files=not runs_agents)
    found = written(msgspec.structs.replace(needs, ray=ray, store=store), gpus=gpus)
    jsonschema.validate(found[0], RAYJOB)
    assert ["RayJob", "Service", "PersistentVolumeClaim", "NetworkPolicy", "NetworkPolicy"] == [
        one["kind"] for one in found
    ]
    container = pods(found)["head"]["spec"]["containers"][0]
    assert f"answers-trainer-{'cuda' if gpus else 'cpu'}:local" == container["image"]
    assert gpus == container["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert (store or "postgresql://agl@answers-postgres/agl") in found[0]["spec"]["entrypoint"]
    assert ("--ray auto" in found[0]["spec"]["entrypoint"]) == runs_agents


def test_entry_point_is_one_command_for_the_shell_on_the_head(needs: Needs, tmp_path: Path) -> None:
    hostile = "a b';$HOME\"`id`.toml"
    found = written(msgspec.structs.replace(needs, file=needs.file.with_name(hostile)))
    for name in ("app", "bin"):
        (tmp_path / name).mkdir()
    program = tmp_path / "bin" / "agl"
    program.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getcwd(), *sys.argv[1:]]))\n")
    program.chmod(0o755)
    line = found[0]["spec"]["entrypoint"].replace("/app ", f"{tmp_path}/app ").replace("/opt/agl/venv", str(tmp_path))

    done = subprocess.run(["sh", "-c", line], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    folder, *words = json.loads(done.stdout)
    assert str(tmp_path / "app") == folder
    assert ["run", hostile, "--resume", "--quiet", "--ray", "auto"] == words[:6]
    assert "gateway.advertise=answers-ray" in words
    assert f"runner.resources.custom.{AGENTS}=0.001" in words


def test_agents_run_on_other_nodes_than_the_keys_of_providers(needs: Needs) -> None:
    found = written(needs)
    group = found[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert [{AGENTS: 1}] == [json.loads(word) for word in shlex.split(group["rayStartParams"]["resources"])]
    assert "resources" not in found[0]["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]

    given = {part: {each["name"] for each in pod["spec"]["containers"][0]["env"]} for part, pod in pods(found).items()}
    assert {"RAY_USAGE_STATS_ENABLED", "AGL_SECRET", "PGPASSWORD", "DEPLOY_MODEL_KEY"} == given["head"]
    assert {"RAY_USAGE_STATS_ENABLED", "PGPASSWORD"} == given["agents"]


def test_pods_have_no_rights_and_write_to_their_own_volumes(needs: Needs) -> None:
    for part, pod in pods(written(needs)).items():
        assert not pod["spec"]["automountServiceAccountToken"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert ["ALL"] == container["securityContext"]["capabilities"]["drop"]
        assert all("wget" not in json.dumps(container[probe]) for probe in ("readinessProbe", "livenessProbe"))
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm"} | ({"/data"} if part == "head" else set()) == mounted.keys()
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        assert "Memory" == volumes[mounted["/dev/shm"]]["emptyDir"]["medium"]
        assert set(mounted.values()) == volumes.keys()


def test_files_are_shared_where_several_processes_write_them(needs: Needs) -> None:
    alone = written(needs)
    assert ["ReadWriteOnce"] == of(alone, "PersistentVolumeClaim", "answers-ray")["accessModes"]

    ray = msgspec.structs.replace(ON_RAY, shares_files=True)
    shared = written(msgspec.structs.replace(needs, ray=ray))
    assert ["ReadWriteMany"] == of(shared, "PersistentVolumeClaim", "answers-ray")["accessModes"]
    for pod in pods(shared).values():
        assert "/data" in {each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]}


def selects(selector: dict[str, str], pod: dict[str, Any]) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def test_policies_and_the_service_select_the_pods_that_they_are_for(needs: Needs) -> None:
    found = written(needs)
    both = pods(found)
    everything = of(found, "NetworkPolicy", "answers-ray")
    agents = of(found, "NetworkPolicy", "answers-ray-agents")
    assert all(selects(everything["podSelector"]["matchLabels"], pod) for pod in both.values())
    chosen = [part for part, pod in both.items() if selects(agents["podSelector"]["matchLabels"], pod)]
    assert ["agents"] == chosen
    reached = [peer["podSelector"]["matchLabels"] for rule in agents["egress"] for peer in rule.get("to", ())]
    assert ["ray", "postgres"] == [labels["app.kubernetes.io/component"] for labels in reached]
    service = of(found, "Service", "answers-ray")
    assert ["head"] == [part for part, pod in both.items() if selects(service["selector"], pod)]
    for component in ("worker", "trainer", "gateway"):  # the chart's policies for these would cut Ray's own ports
        assert component not in {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in both.values()}


def test_agents_reach_a_database_elsewhere_at_its_port(needs: Needs) -> None:
    found = written(msgspec.structs.replace(needs, store="postgresql://agl@db.example:6543/agl"))
    rules = of(found, "NetworkPolicy", "answers-ray-agents")["egress"]
    assert {"ports": [{"port": 6543}]} in rules
    assert not any("postgres" in json.dumps(rule) for rule in rules)


def test_agents_reach_every_host_of_a_database(needs: Needs) -> None:
    found = written(msgspec.structs.replace(needs, store="postgresql://agl@one:6543,[::1],three:5555/agl"))
    rules = of(found, "NetworkPolicy", "answers-ray-agents")["egress"]
    assert {"ports": [{"port": 5432}, {"port": 5555}, {"port": 6543}]} in rules


def test_experiment_without_ray_is_refused(project: Path) -> None:
    done = deploy("ray", "experiment.toml", folder=project)
    assert 1 == done.returncode
    assert 'nothing in experiment.toml uses Ray; write [runner] use = "ray"' in done.stderr
    assert not (project / "deploy").exists()


def test_ray_without_its_server_for_jobs_is_refused(needs: Needs) -> None:
    ray = msgspec.structs.replace(ON_RAY, takes_jobs=False)
    with pytest.raises(ConfigError, match=r"Ray's server for jobs is not; run: pip install 'ray\[default\]'"):
        rayjob_files(msgspec.structs.replace(needs, ray=ray), "deploy", gpus=0)


@pytest.fixture
def with_ray(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment on Ray, with plugins and a fake distribution of Ray, whose extra needs pyyaml."""
    site = project / "site"
    packages = {
        "ray": ("2.60.0", 'Provides-Extra: default\nRequires-Dist: pyyaml; extra == "default"\n', ""),
        "agl_ray": ("0.1.0", "Requires-Dist: ray>=2.60\n", "[agl]\nray = agl_ray.plugin\n"),
        "agl_algo_apo": ("0.1.0", "", "[agl]\napo = agl_algo_apo.plugin\n"),
    }
    for name, (version, needed, entries) in packages.items():
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        head = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (folder / "METADATA").write_text(head + needed)
        (folder / "entry_points.txt").write_text(entries)
    sources = [str(Path(__file__).parents[2] / name / "src") for name in ("agl-ray", "agl-algo-apo")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *sources, os.environ.get("PYTHONPATH", "")]))
    (project / "experiment.toml").write_text(FILE.replace("[runner]", '[runner]\nuse = "ray"'))
    return project


def test_command_writes_the_job_beside_its_images(with_ray: Path) -> None:
    done = deploy("ray", "experiment.toml", "--gpus", "1", folder=with_ray)
    assert 0 == done.returncode, done.stderr
    folder = with_ray / "deploy"
    assert "kubectl apply --filename deploy/rayjob.yaml" in done.stdout
    job = next(yaml.safe_load_all((folder / "rayjob.yaml").read_text()))
    assert "2.60.0" == job["spec"]["rayClusterSpec"]["rayVersion"]
    assert "--ray auto" in job["spec"]["entrypoint"]
    pinned = (folder / "requirements" / "trainer.txt").read_text().lower()
    assert "ray==2.60.0" in pinned
    assert "pyyaml==" in pinned
    assert "agl-ray==" in pinned
    assert re.search(r'echo "PATH=/opt/agl/venv/bin:', (folder / "Dockerfile").read_text())


def test_compose_file_for_agents_on_ray_is_refused(with_ray: Path) -> None:
    done = deploy("compose", "experiment.toml", folder=with_ray)
    assert 1 == done.returncode
    assert "take agl deploy ray, or another runner" in done.stderr
    assert not (with_ray / "deploy").exists()


def test_algorithm_with_resources_shares_its_files(with_ray: Path) -> None:
    change(
        with_ray / "experiment.toml",
        "[policy.small]",
        '[[algorithm]]\nuse = "apo"\n[algorithm.resources]\nnum_cpus = 1\n\n[policy.small]',
    )
    done = deploy("ray", "experiment.toml", folder=with_ray)
    assert 0 == done.returncode, done.stderr
    assert "ReadWriteMany" in (with_ray / "deploy" / "rayjob.yaml").read_text()
