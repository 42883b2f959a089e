"""The needs of experiments on other machines, and the errors and warnings for some experiments."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from agl import PluginManager, PolicyEntry, hookimpl
from agl.contracts import RunnerEntry
from agl.errors import ConfigError, UnknownComponentError
from agl_deploy.needs import Needs, read_needs

from .conftest import change


@pytest.fixture
def read(project: Path, manager: PluginManager):
    def read(old: str = "", new: str = "") -> Needs:
        if old:
            change(project / "experiment.toml", old, new)
        return read_needs(project / "experiment.toml", manager)

    return read


def names(needs: Needs, part: str) -> set[str]:
    return {pin.name for pin in needs.pins[part]}


def test_agents_imports_are_followed_through_the_folder_and_pinned_for_those_who_run_it(project: Path, read) -> None:
    change(project / "deploy_helpers" / "asking.py", "def", "from . import grading\n\n\ndef")
    (project / "deploy_helpers" / "grading.py").write_text("def of(text):\n    import yaml\n")
    needs = read()

    assert {"openai", "pyyaml"} <= names(needs, "worker") & names(needs, "trainer")
    assert not {"openai", "pyyaml"} & (names(needs, "gateway") | names(needs, "console"))
    assert "agl-console" in names(needs, "console") - names(needs, "trainer")
    assert not needs.warnings


def test_components_come_with_their_distributions(read) -> None:
    needs = read("[policy.small]", '[[exporter]]\nuse = "webhook"\nparams = { url_env = "HOOK" }\n\n[policy.small]')

    assert {"agl-core", "agl-run", "agl-gateway", "agl-store-postgres"} <= names(needs, "trainer")
    assert {"worker": [], "trainer": ["DEPLOY_MODEL_KEY", "HOOK"]} == needs.variables


def test_key_of_an_openai_policy_has_a_default(read) -> None:
    assert ["OPENAI_API_KEY"] == read('api_key_env = "DEPLOY_MODEL_KEY"\n', "").variables["trainer"]


def test_requirements_beside_the_file_are_pinned_and_named_where_they_are_absent(project: Path, read) -> None:
    (project / "requirements.txt").write_text(
        "# ours\nPyYAML>=5  # for data\n-r other.txt\nno-such-thing==1\nfor-mars; sys_platform == 'mars'\n"
    )
    needs = read()

    assert "pyyaml" in names(needs, "worker")
    assert ["no-such-thing"] == [text.split()[0] for text in needs.warnings]


def test_packages_of_a_checkout_have_a_source_for_their_wheel(read) -> None:
    pins = {pin.name: pin for pin in read().pins["gateway"]}

    assert "packages/agl-core" in pins["agl-core"].source.replace("\\", "/")
    assert "" == pins["msgspec"].source
    assert pins["agl-core"].source in read().sources


def test_program_of_a_command_is_read_too(project: Path, read) -> None:
    (project / "deploy_program.py").write_text("import yaml\nimport deploy_absent_module\n")
    change(project / "experiment.toml", '"deploy_agent:solve"', '["python", "deploy_program.py"]')
    needs = read("concurrency = 1", 'concurrency = 1\nuse = "command"')

    assert "pyyaml" in names(needs, "worker")
    assert ["deploy_program.py imports 'deploy_absent_module'"] == [text.split(",")[0] for text in needs.warnings]


def test_module_that_python_runs_is_read_too(project: Path, read) -> None:
    (project / "deploy_program.py").write_text("import yaml\n")
    change(project / "experiment.toml", '"deploy_agent:solve"', '["python3", "-u", "-m", "deploy_program"]')
    assert "pyyaml" in names(read("concurrency = 1", 'concurrency = 1\nuse = "command"'), "worker")


class Elsewhere:
    """A plugin with components of packages that are not installed here."""

    @hookimpl
    def agl_policies(self) -> Iterable[PolicyEntry]:
        yield PolicyEntry(name="tinker", factory="nowhere:Policy", summary="x", trains=True)

    @hookimpl
    def agl_runners(self) -> Iterable[RunnerEntry]:
        yield RunnerEntry(name="harness", factory="nowhere:Runner", summary="x")


def test_key_of_a_tinker_policy_has_a_default(project: Path) -> None:
    manager = PluginManager.from_environment()
    manager.register(Elsewhere(), name="elsewhere")
    change(project / "experiment.toml", 'use = "openai"', 'use = "tinker"')
    change(project / "experiment.toml", 'api_key_env = "DEPLOY_MODEL_KEY"\n', "")
    assert ["TINKER_API_KEY"] == read_needs(project / "experiment.toml", manager).variables["trainer"]


def test_harness_needs_its_runner_and_is_not_in_the_image(project: Path, read) -> None:
    with pytest.raises(UnknownComponentError, match="no runner is named 'harness'"):
        read('agent = "deploy_agent:solve"', 'harness = "pi"\nworkspace = "git:repo@main"')
    manager = PluginManager.from_environment()
    manager.register(Elsewhere(), name="elsewhere")
    harness, workspace = read_needs(project / "experiment.toml", manager).warnings
    assert "harness is 'pi', whose program the image of the workers does not have" in harness
    assert "the images have no .git folders" in workspace


def test_database_in_the_file_is_used_in_place_of_a_bundled_one(read) -> None:
    assert "" == read().store
    url = "postgresql://agl@db.example/runs?sslmode=verify-full"
    assert url == read('name = "answers"', f'name = "answers"\nstore = "{url}"').store


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "answers"', 'name = "answers"\nstore = "memory://"', r"store is memory://.*postgresql://"),
        ('name = "answers"', 'name = "answers"\nstore = "http://h:1"', r"store is http://h:1, which"),
        ('name = "answers"', 'name = "answers"\nstore = "postgresql://u:geheim@h/d"', r"experiment.store.*PGPASSWORD"),
        (
            'name = "answers"',
            'name = "answers"\nstore = "postgresql://u@h/d?sslmode=require&password=geheim"',
            r"experiment.store.*PGPASSWORD",
        ),
        (
            'name = "answers"',
            'name = "answers"\nstore = "postgresql://me@x:geheim@h/d"',
            r"experiment.store.*PGPASSWORD",
        ),
        ('"deploy_agent:solve"', '["python", "../agent.py"]', r"agent runs '../agent.py'"),
        ('"tasks.jsonl"', '"harbor:/srv/tasks"', r"val is 'harbor:/srv/tasks', a path outside"),
        (
            'agent = "deploy_agent:solve"',
            'harness = "pi"\nworkspace = "../repo"',
            r"workspace is '../repo', a path outside",
        ),
        ('agent = "deploy_agent:solve"', 'harness = "/etc/mine.toml"', r"harness is '/etc/mine.toml', a path outside"),
        ('"DEPLOY_MODEL_KEY"', '""\nx-api-key = "geheim"', r"policy.small.x-api-key .*looks like a credential"),
        ("[policy.small]", '[gateway]\nuse = "none"\n[policy.small]', r"\[gateway\] use"),
        (
            "[policy.small]",
            '[gateway]\nparams.tls_cert = "a.pem"\n[policy.small]',
            r"params has 'tls_cert'",
        ),
        ('"deploy_agent:solve"', '["/opt/me/agent", "x"]', r"agent runs '/opt/me/agent'"),
        ('"tasks.jsonl"', '"../tasks.jsonl"', r"val is '../tasks.jsonl', a path outside"),
        ('"tasks.jsonl"', '"/data/tasks.jsonl"', r"val is '/data/tasks.jsonl', a path outside"),
        ('"DEPLOY_MODEL_KEY"', '""\napi_key = "geheim"', r"policy.small.api_key .*looks like a credential"),
        ('"DEPLOY_MODEL_KEY"', '"sk-geheim-0123456789abcdef"', r"policy.small.api_key_env .*looks like a credential"),
        ('"DEPLOY_MODEL_KEY"', '"A: b"', r"the api_key_env in the experiment's file is not the name"),
        ('"http://models.example/v1"', '"http://me:geheim@models/v1"', r"policy.small.base_url .*password"),
    ],
)
def test_experiment_that_cannot_be_deployed_is_refused_without_showing_a_secret(read, old, new, said) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read(old, new)
    assert "geheim" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("http://models.example/v1", "http://localhost:8000/v1", "in a container localhost is the container itself"),
        ('model = "small"', 'model = "/srv/model"', "a path of this machine"),
        ('name = "answers"', 'name = "answers"\nstore = "postgresql:///agl"', "a database of this machine"),
    ],
)
def test_what_may_not_work_elsewhere_is_a_warning(read, old, new, said) -> None:
    assert [True] == [said in text for text in read(old, new).warnings]


def test_key_in_the_agents_code_is_a_warning_without_the_key(project: Path, read) -> None:
    change(project / "deploy_helpers" / "asking.py", "def", 'KEY = "sk-geheim-0123456789abcdef"\n\n\ndef')
    assert 1 == len(read().warnings)
    assert "deploy_helpers/asking.py" in read().warnings[0]
    assert "geheim" not in read().warnings[0]


def test_component_that_is_not_installed_is_named_with_the_line_that_installs_it(read) -> None:
    with pytest.raises(UnknownComponentError, match="pip install"):
        read("[policy.small]", '[[reward]]\nuse = "numeric-match"\n\n[policy.small]')


def test_program_that_cannot_be_read_is_named(project: Path, read) -> None:
    (project / "deploy_agent.py").write_text("def solve(:\n")
    with pytest.raises(ConfigError, match=r"deploy_agent.py of the agent is not valid Python"):
        read()


def test_local_version_of_torch_is_no_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agl_deploy.pins import missing, pins

    for name, version, needs in (
        ("torch", "9.1+cpu", ["nvidia-cudnn", "plain"]),
        ("nvidia-cudnn", "1", []),
        ("plain", "2", ['only-on-mars; sys_platform == "mars"', 'more; extra == "all"']),
        ("more", "3", []),
    ):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {n}" for n in needs)]
        (folder / "METADATA").write_text("\n".join(lines))
    origin = {"url": "https://git.example/plain", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}}
    (tmp_path / "plain-2.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    assert ["plain==2", "torch==9.1"] == [pin.line for pin in pins(["torch"])]
    assert ["more==3", "plain==2"] == [pin.line for pin in pins(["plain[all]"])]
    assert "git+https://git.example/plain@0a1b" == pins(["plain"])[0].source
    (tmp_path / "plain-2.dist-info" / "direct_url.json").write_text(json.dumps(origin | {"subdirectory": "packages/p"}))
    assert "git+https://git.example/plain@0a1b#subdirectory=packages/p" == pins(["plain"])[0].source
    assert ["absent"] == missing(["absent", "torch"])
