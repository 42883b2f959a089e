"""The chart is linted and rendered with many values, and every manifest is checked by Kubernetes' own schemas.

Helm's library takes 244 MB and Kubernetes' schemas 150 MB, so these tests run in a separate session, ``nox -s deploy``.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from agl import PluginManager
from agl_deploy.files import chart_files, compose_files, rayjob_files, serving_files
from agl_deploy.needs import Needs, OnRay, read_needs
from agl_deploy.parts import parts_of
from agl_deploy.writing import write

from .conftest import change

helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk; run nox -s deploy")
kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate; run nox -s deploy")

KUBERNETES = ["1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"]
OPERATORS = ("keda.sh/", "monitoring.coreos.com/")
"""APIs of operators, for which Kubernetes itself has no schemas."""

Values = dict[str, Any]
ELSEWHERE = {"bundled": False, "url": "postgresql://agl@db.example:5432/agl?sslmode=verify-full"}
GPU = {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
PEER = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
INTERNET = [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}], "ports": [{"port": 443}]}]
MANY = {"min": 1, "max": 50, "queuedPerWorker": 4, "cooldownSeconds": 60}


def workers(kind: str, **rest: Any) -> Values:
    return {"workers": {"autoscaling": {"kind": kind, **rest}}}


SETS: dict[str, Values] = {
    "as written": {},
    "database elsewhere": {"postgresql": ELSEWHERE},
    "database without a user": {"postgresql": {"bundled": False, "url": "postgres://db.example/agl"}},
    "registry": {"images": {"prefix": "registry.example:5000/team/", "tag": "1.2.3", "pullSecrets": ["registry"]}},
    "tag that is a number": {"images": {"tag": 20261123}},
    "always pull": {"images": {"pullPolicy": "Always"}},
    "one gateway": {"gateway": {"replicas": 1}},
    "gateways by keda": {"gateway": {"autoscaling": {"kind": "keda", "prometheus": "http://prometheus.example:9090"}}},
    "gateways by hpa": {"gateway": {"autoscaling": {"kind": "hpa", "spanQueueLength": 100}}},
    "workers by keda": workers("keda"),
    "workers by keda from none": workers("keda", **(MANY | {"min": 0})),
    "workers by hpa": workers("hpa", **MANY),
    "both by keda": workers("keda")
    | {"gateway": {"autoscaling": {"kind": "keda", "prometheus": "https://prometheus.example"}}},
    "both by hpa": workers("hpa") | {"gateway": {"autoscaling": {"kind": "hpa"}}},
    "no workers": {"workers": {"replicas": 0}},
    "busy workers": {"workers": {"replicas": 50, "concurrency": 64}},
    "workers with keys": {"workers": {"secrets": ["JUDGE_KEY", "OTHER"]}},
    "a gpu": {"trainer": {"gpus": 1, **GPU}},
    "eight gpus": {"trainer": {"gpus": 8, "resources": {"requests": {"memory": "64Gi"}, "limits": {}}}},
    "more steps": {"trainer": {"set": ["algorithm.grpo.params.steps=100", 'experiment.name="a b"']}},
    "trainer with keys": {"trainer": {"secrets": ["OPENAI_API_KEY"]}},
    "claim that exists": {"trainer": {"storage": {"claim": "models"}}},
    "shared storage": {"trainer": {"storage": {"class": "efs", "accessMode": "ReadWriteMany", "size": "1Ti"}}},
    "evictable trainer": {"trainer": {"evictable": True, "retries": 0, "graceSeconds": 30}},
    "trainer as a rayjob": {"trainer": {"enabled": False}, "workers": {"replicas": 0}},
    "no console": {"console": {"enabled": False}},
    "console behind a name": {
        "console": {"hosts": ["agl.example", "agl"]},
        "networkPolicy": {"consoleFrom": PEER},
    },
    "no network policy": {"networkPolicy": {"enabled": False}},
    "tools on the internet": {"networkPolicy": {"workersTo": INTERNET}},
    "metrics from elsewhere": {"networkPolicy": {"metricsFrom": PEER, "gatewayFrom": PEER}},
    "monitored": {"monitoring": {"podMonitor": True, "rules": True, "dashboard": True}},
    "rules alone": {"monitoring": {"rules": True}},
    "dashboard alone": {"monitoring": {"dashboard": True}},
    "role of a cloud": {"serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/agl"}},
    "storage classes": {"postgresql": {"storageClass": "gp3", "storage": "500Gi"}},
    "name of a file with spaces": {"experiment": 'my "first" $run.toml'},
    "everything": {
        "postgresql": ELSEWHERE,
        "gateway": {"autoscaling": {"kind": "keda", "prometheus": "http://p:9090"}, **GPU},
        "workers": {"autoscaling": {"kind": "keda", **MANY}, "secrets": ["A"], "concurrency": 8, **GPU},
        "trainer": {"gpus": 2, "secrets": ["B"], "set": ["experiment.seed=1"], **GPU},
        "networkPolicy": {"workersTo": INTERNET, "metricsFrom": PEER, "consoleFrom": PEER, "gatewayFrom": PEER},
        "monitoring": {"podMonitor": True, "rules": True, "dashboard": True},
    },
}
assert len(SETS) >= 30

REFUSED: dict[str, Values] = {
    "unknown key": {"worker": {"replicas": 3}},
    "unknown key below": {"workers": {"replica": 3}},
    "password in the url": {"postgresql": {"bundled": False, "url": "postgresql://agl:geheim@db.example/agl"}},
    "password among the url's options": {
        "postgresql": {"bundled": False, "url": "postgresql://agl@db.example/agl?password=geheim"}
    },
    "no url": {"postgresql": {"bundled": False}},
    "url that is not used": {"postgresql": {"url": "postgresql://db.example/agl"}},
    "keda without prometheus": {"gateway": {"autoscaling": {"kind": "keda"}}},
    "hpa to none": workers("hpa", min=0),
    "negative": {"workers": {"replicas": -1}},
    "text for a number": {"trainer": {"gpus": "two"}},
    "variable with a space": {"trainer": {"secrets": ["A B"]}},
    "secret with capitals": {"secret": "Answers"},
    "folder": {"experiment": "../experiment.toml"},
    "unknown autoscaler": workers("vpa"),
    "setting without a value": {"trainer": {"set": ["experiment.seed"]}},
}

RELEASES = ["answers", "a" * 53, "7b-run", "a-b"]


@pytest.fixture
def needs(project: Path, manager: PluginManager) -> Needs:
    return read_needs(project / "experiment.toml", manager)


@pytest.fixture
def chart(needs: Needs, tmp_path: Path) -> Iterator[Any]:
    write(tmp_path / "deploy", chart_files(needs, gpus=0), force=False)
    with helm.Chart.load(str(tmp_path / "deploy" / "chart")) as chart:
        yield chart


def manifests(chart: Any, values: Values, *, release: str = "answers") -> list[dict[str, Any]]:
    chart.validate_schema(values)
    texts = chart.render(values, name=release, namespace="agents")
    return [one for name, text in texts.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text) if one]


def of(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(one for one in found if (one["kind"], one["metadata"]["name"]) == (kind, name))


def commands(found: list[dict[str, Any]]) -> dict[str, list[str]]:
    pods = [one["spec"]["template"]["spec"] for one in found if one["kind"] in ("Deployment", "Job")]
    return {each["name"]: each["command"] for pod in pods for each in pod["containers"]}


def check(manifest: dict[str, Any], seen: set[str]) -> None:
    text = json.dumps(manifest, sort_keys=True)
    if text in seen or manifest["apiVersion"].startswith(OPERATORS):
        return
    seen.add(text)
    for version in KUBERNETES:
        kubernetes.validate(manifest, version, strict=True)


def test_chart_has_nothing_that_helms_linter_finds(chart: Any, tmp_path: Path) -> None:
    found = helm.lint(str(tmp_path / "deploy" / "chart"))
    assert [] == [each for each in found["messages"] if "icon is recommended" not in str(each)]


def test_every_manifest_of_every_set_of_values_is_what_kubernetes_takes(chart: Any) -> None:
    seen = set[str]()
    for values in SETS.values():
        found = manifests(chart, values)
        names = [(one["kind"], one["metadata"]["name"]) for one in found]
        assert len(names) == len(set(names))
        for one in found:
            check(one, seen)
    assert len(seen) > 50


@pytest.mark.parametrize("cloud", ["aws", "azure"])
def test_values_of_the_pages_about_clouds_fit_the_chart(chart: Any, cloud: str) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / f"deploy-{cloud}.md"
    values = re.search(r'```yaml title="values-\w+.yaml"\n(.*?)```', page.read_text("utf-8"), re.DOTALL)
    assert values is not None
    seen = set[str]()
    for one in manifests(chart, yaml.safe_load(values[1])):
        check(one, seen)
    assert len(seen) > 10


@pytest.mark.parametrize("release", RELEASES)
def test_names_of_any_release_are_short_enough(chart: Any, release: str) -> None:
    seen = set[str]()
    for one in manifests(chart, SETS["everything"] | {"postgresql": {"bundled": True, "url": ""}}, release=release):
        check(one, seen)
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", one["metadata"]["name"])
        assert all(len(str(value)) <= 63 for value in one["metadata"]["labels"].values())


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_work_are_refused_by_the_schema(chart: Any, name: str) -> None:
    with pytest.raises(helm.HelmError):
        chart.validate_schema(REFUSED[name])


def test_pods_run_the_commands_of_the_compose_file(chart: Any, needs: Needs) -> None:
    hosts = {"answers-gateway": "gateway", "answers-trainer": "trainer", "answers-postgres": "postgres"}
    parts = parts_of(needs)
    for name, words in commands(manifests(chart, {})).items():
        found = [re.sub("|".join(hosts), lambda match: hosts[match[0]], word) for word in words]
        for extra in (["--allow-host", "gateway.agents.svc"], ["--stay"]):
            if extra[-1] in found:
                del found[found.index(extra[-1]) - len(extra) + 1 : found.index(extra[-1]) + 1]
        assert list(parts[name].command) == found


def test_pods_have_the_secrets_of_their_part_and_no_rights(chart: Any, needs: Needs) -> None:
    found = manifests(chart, {})
    for one in found:
        if one["kind"] not in ("Deployment", "Job", "StatefulSet"):
            continue
        pod = one["spec"]["template"]["spec"]
        assert not pod["automountServiceAccountToken"]
        assert pod["securityContext"]["runAsNonRoot"]
        container = pod["containers"][0]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert ["ALL"] == container["securityContext"]["capabilities"]["drop"]
        named = [each["name"] for each in container["env"]]
        if one["kind"] != "StatefulSet":
            assert list(parts_of(needs)[container["name"]].secrets) == named
        for each in container["env"]:
            assert "valueFrom" in each or each["name"] in ("POSTGRES_USER", "POSTGRES_DB", "PGDATA")
    assert "Secret" not in {one["kind"] for one in found}


def test_workers_reach_no_database(chart: Any) -> None:
    rules = of(manifests(chart, {}), "NetworkPolicy", "answers-worker")["spec"]
    reached = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in rules["egress"]
        for peer in rule.get("to", ())
    ]
    assert ["gateway", "trainer"] == reached
    assert "ingress" not in rules
    database = of(manifests(chart, {}), "NetworkPolicy", "answers-postgres")["spec"]["ingress"][0]["from"]
    assert "worker" not in json.dumps(database)


def test_trainer_with_other_values_is_another_job(chart: Any) -> None:
    def job(values: Values) -> str:
        return next(one["metadata"]["name"] for one in manifests(chart, values) if one["kind"] == "Job")

    assert job({}) == job(SETS["busy workers"])
    for values in (SETS["more steps"], {"podLabels": {"azure.workload.identity/use": "true"}}):
        assert job({}) != job(values)


def test_secret_that_the_experiment_names_too_is_given_once(chart: Any) -> None:
    values: Values = {"trainer": {"secrets": ["PGPASSWORD", "A"]}, "workers": {"secrets": ["AGL_WORKER_TOKEN"]}}
    pods = [one["spec"]["template"]["spec"] for one in manifests(chart, values) if one["kind"] in ("Deployment", "Job")]
    names = {each["name"]: [one["name"] for one in each["env"]] for pod in pods for each in pod["containers"]}
    assert ["AGL_SECRET", "PGPASSWORD", "A"] == names["trainer"]
    assert ["AGL_WORKER_TOKEN"] == names["worker"]


def test_gpus_choose_the_image_and_are_asked_for(chart: Any) -> None:
    job = next(one for one in manifests(chart, SETS["a gpu"]) if one["kind"] == "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert "answers-trainer-cuda:local" == container["image"]
    assert 1 == container["resources"]["limits"]["nvidia.com/gpu"]


def test_autoscaled_deployments_have_no_replicas_of_their_own(chart: Any) -> None:
    for name in ("both by keda", "both by hpa"):
        found = manifests(chart, SETS[name])
        for part in ("worker", "gateway"):
            assert "replicas" not in of(found, "Deployment", f"answers-{part}")["spec"]
    policy = of(manifests(chart, SETS["workers by keda"]), "NetworkPolicy", "answers-gateway")
    assert "keda" in json.dumps(policy["spec"]["ingress"])
    keda = of(manifests(chart, SETS["workers by keda"]), "ScaledObject", "answers-worker")["spec"]["triggers"][0]
    host = re.search(r"//([^:]+):", keda["metadata"]["url"])
    assert host is not None
    assert host[1] in commands(manifests(chart, {}))["gateway"]


def test_trainer_is_evicted_where_the_values_allow_it(chart: Any) -> None:
    budgets = [
        {one["metadata"]["name"]: one["spec"] for one in manifests(chart, SETS[name]) if "Budget" in one["kind"]}
        for name in ("as written", "evictable trainer")
    ]
    assert 1 == budgets[0]["answers-trainer"]["minAvailable"]  # Kubernetes has no maxUnavailable for pods of a job
    assert {"answers-gateway", "answers-worker"} == budgets[1].keys()


def test_manifests_of_a_served_model_are_what_kubernetes_takes(project: Path, manager: PluginManager) -> None:
    change(project / "experiment.toml", "[policy.small]", '[policy.own]\nuse = "vllm"\nmodel = "m"\n\n[policy.small]')
    files = serving_files(read_needs(project / "experiment.toml", manager), "own@production", "deploy", gpus=1)
    seen = set[str]()
    for one in yaml.safe_load_all(files["model-own.kubernetes.yaml"]):
        check(one, seen)
    assert 3 == len(seen)


def test_manifests_of_a_rayjob_are_what_kubernetes_takes(needs: Needs) -> None:
    ray = OnRay(version="2.60.0", runs_agents=True, shares_files=True, takes_jobs=True)
    seen = set[str]()
    for store in ("", "postgresql://agl@db.example/agl"):
        text = rayjob_files(msgspec.structs.replace(needs, ray=ray, store=store), "deploy", gpus=1)["rayjob.yaml"]
        job, *others = yaml.safe_load_all(text)
        cluster = job["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "of-a-group"}}
            check(named | {"template": group["template"]}, seen)
        for one in others:
            check(one, seen)
    assert 7 == len(seen)


def test_database_of_the_chart_lets_a_rayjob_in(chart: Any) -> None:
    found = manifests(chart, SETS["trainer as a rayjob"])
    rules = of(found, "NetworkPolicy", "answers-postgres")["spec"]["ingress"][0]["from"]
    assert "ray" in [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rules]
    assert "Job" not in {one["kind"] for one in found}


def test_compose_file_has_no_error_for_its_linter(project: Path, needs: Needs) -> None:
    if (npx := shutil.which("npx")) is None:
        pytest.skip("needs npx, which runs dclint")
    files = compose_files(needs, "deploy", gpus=1)
    rules = ("no-build-and-image", "service-keys-order", "services-alphabetical-order", "require-quotes-in-ports")
    (project / "compose.yaml").write_text(files["compose.yaml"])
    (project / ".dclintrc.yaml").write_text(json.dumps({"rules": dict.fromkeys(rules, 0)}))
    command = [npx, "--yes", "dclint@3.1.0", "--config", ".dclintrc.yaml", "--max-warnings", "0", "compose.yaml"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_rules_and_dashboard_arrive_as_they_are(chart: Any, needs: Needs) -> None:
    files, found = chart_files(needs, gpus=0), manifests(chart, SETS["monitored"])
    for file, name in (("agl-rules.yaml", "answers"), ("agl-run-rules.yaml", "answers-runs")):
        assert yaml.safe_load(files[f"chart/files/{file}"]) == of(found, "PrometheusRule", name)["spec"]
    (endpoint,) = of(found, "PodMonitor", "answers-console")["spec"]["podMetricsEndpoints"]
    assert {"name": "answers", "key": "AGL_CONSOLE_PASSWORD"} == endpoint["basicAuth"]["password"]
    dashboard = of(found, "ConfigMap", "answers-dashboard")["data"]["agl.json"]
    assert json.loads(files["chart/files/agl-dashboard.json"]) == json.loads(dashboard)
