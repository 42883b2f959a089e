"""Prometheus' rules and Grafana's dashboard: they have one source, and valid expressions that fit the metrics."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest
import yaml

from agl import PluginManager
from agl_deploy.files import chart_files
from agl_deploy.needs import read_needs

from .conftest import change

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "alerts.md"
RULES = ("agl-rules.yaml", "agl-run-rules.yaml")


@pytest.fixture
def files(project: Path, manager: PluginManager) -> dict[str, str]:
    return chart_files(read_needs(project / "experiment.toml", manager), gpus=0)


def expressions(files: dict[str, str]) -> Iterator[str]:
    """Yield all expressions of the rules and the dashboard."""
    for name in RULES:
        for group in yaml.safe_load(files[f"chart/files/{name}"])["groups"]:
            yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads(files["chart/files/agl-dashboard.json"])["panels"]:
        yield from (target["expr"].replace("$job", "agl") for target in panel["targets"])


@pytest.mark.parametrize("name", RULES)
def test_rules_are_those_of_the_page_about_alerts(files: dict[str, str], name: str) -> None:
    rules = re.search(rf'```yaml title="{name}"\n(.*?)```', PAGE.read_text("utf-8"), re.DOTALL)
    assert rules is not None
    assert rules[1] == files[f"chart/files/{name}"]


def test_every_expression_is_one_of_prometheus(files: dict[str, str]) -> None:
    found = list(expressions(files))
    assert len(found) > 12
    for text in found:
        promql_parser.parse(text)


def test_panels_of_the_dashboard_do_not_overlap(files: dict[str, str]) -> None:
    panels = json.loads(files["chart/files/agl-dashboard.json"])["panels"]
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert 24 == 1 + max(x for x, _ in cells)
    assert len(panels) == len({panel["id"] for panel in panels})


def test_values_of_any_experiment_fit_their_schema(project: Path, manager: PluginManager) -> None:
    file = project / "experiment.toml"
    change(file, 'name = "answers"', 'name = "Null_%"\nstore = "postgresql://agl@db.example/runs"'.replace("%", "x"))
    change(file, "[policy.small]", '[[exporter]]\nuse = "webhook"\nparams = { url_env = "HOOK" }\n\n[policy.small]')
    found = chart_files(read_needs(file, manager), gpus=3)
    values: dict[str, Any] = yaml.safe_load(found["chart/values.yaml"])

    jsonschema.validate(values, json.loads(found["chart/values.schema.json"]))
    assert ["DEPLOY_MODEL_KEY", "HOOK"] == values["trainer"]["secrets"]
    assert (3, False) == (values["trainer"]["gpus"], values["postgresql"]["bundled"])
    assert values["images"]["name"] == yaml.safe_load(found["chart/Chart.yaml"])["name"]
