"""The files by which others join the project say what the project does: hooks, workflow, templates, policies."""

import re
import subprocess

import pytest
import yaml

from tools.public import ROOT


def commands(text: str) -> list[str]:
    return re.findall(r"python3 -m pip install nox uv && python3 -m nox -s \w+", text)


def test_workflow_runs_the_two_commands_of_the_readme():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert sorted(set(commands((ROOT / "README.md").read_text()))) == sorted(steps)


def test_workflow_may_only_read_the_repository():
    assert {"contents": "read"} == yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["permissions"]


def test_pre_commit_checks_style_with_the_release_that_the_tests_use():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    used = {word for hook in hooks for word in hook.get("additional_dependencies", ())}
    assert used == set(re.findall(r'"(ruff==[^"]+)"', (ROOT / "noxfile.py").read_text()))


@pytest.mark.parametrize("form", sorted(path.name for path in ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml")))
def test_form_for_issues_has_fields_of_known_types_with_labels(form):
    data = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / form).read_text())
    ids = [field["id"] for field in data["body"]]
    assert data["name"]
    assert data["description"]
    assert len(set(ids)) == len(ids)
    assert {field["type"] for field in data["body"]} <= {"textarea", "dropdown", "input"}
    assert all(field["attributes"]["label"] for field in data["body"])


@pytest.mark.parametrize("page", ["SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_a_page_at_the_top_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s#]+)\)", (ROOT / page).read_text())
    assert [] == [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()]


def test_no_file_has_markers_of_a_merge_conflict():
    command = ["git", "grep", "-I", "-l", "-E", "^(<<<<<<<|>>>>>>>)"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (1, "") == (found.returncode, found.stdout + found.stderr)  # 1: no line matches
