"""Bad input: each mistake gives an error of one paragraph with the next step, before anything runs."""

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from agl import AlgorithmEntry, PluginManager, PolicyEntry, TracerEntry, hookimpl
from agl.errors import AglError, ConfigError, DatasetError, UnknownComponentError
from agl.hints import pip_install
from agl.tracing import WireTracer
from agl_run import ExperimentConfig, Quiet, Trainer, load_config, parse_config
from agl_run.checks.planning import make_plan
from agl_run.plan import Plan
from agl_run.terminal import make_trainer, read_experiment


class ToyPlugin:
    @hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        return [
            AlgorithmEntry(name="weights-toy", factory=dict),
            AlgorithmEntry(name="prompt-toy", factory=dict, tunes=("prompt_template",), needs_token_ids=False),
        ]

    @hookimpl
    def agl_policies(self) -> list[PolicyEntry]:
        return [PolicyEntry(name="trainable", factory=dict, trains=True)]


def agent(task: Any) -> None: ...


def needs_judge(task: Any, judge_llm: Any) -> None: ...


BASE: dict[str, Any] = {
    "experiment": {"agent": "unused:unused", "store": "memory://"},
    "policy": {"main": {"use": "trainable"}},
    "resource": {"prompt": {"template": "Hello {name}"}},
    "algorithm": [{"use": "weights-toy", "tunes": "main"}],
}


def plan(
    changes: dict[str, Any] | None = None, *, who: Any = agent, train: Any = ({"q": 1},), folder: Path = Path()
) -> Plan:
    manager = PluginManager()
    manager.register(ToyPlugin(), name="toy")
    data = {**BASE, **(changes or {})}
    return make_plan(parse_config(data), folder=folder, manager=manager, agent=who, train=train)


def section(**values: Any) -> dict[str, Any]:
    return {"experiment": {**BASE["experiment"], **values}}


def test_good_plan_is_accepted() -> None:
    assert {"main"} == plan().trained_policies()
    assert plan().needs_token_ids()


def written(folder: Path, *, val: int) -> dict[str, Any]:
    """Write the task files of an experiment, and return the settings that name them."""
    (folder / "train.jsonl").write_text('{"q": 1}')
    (folder / "val.jsonl").write_text("\n".join(f'{{"q": {n}}}' for n in range(val)))
    return {"train": "train.jsonl"} | ({"val": "val.jsonl"} if val else {})


@pytest.mark.parametrize(
    ("val", "settings", "message"),
    [
        (0, {"validation_limit": 3}, "validation_limit is 3, and there are no validation tasks; set [experiment] val"),
        (0, {"final": "last"}, "final is 'last', and there are no validation tasks; set [experiment] val"),
        (10, {"on_collapse": "stop", "validate_every": 1}, "from 11 validation tasks on, and there are 10; give"),
        (
            20,
            {"on_collapse": "continue", "validate_every": 1, "validation_limit": 3},
            "a collapse shows from 11 validation tasks on, and there are 3; give more of them",
        ),
    ],
)
def test_setting_that_needs_other_validations_is_refused(
    val: int, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = section(**written(tmp_path, val=val), **settings)
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(given, train=None, folder=tmp_path)


@pytest.mark.parametrize(
    ("val", "settings"),
    [
        (1, {"validation_limit": 3, "final": "last"}),
        (11, {"on_collapse": "stop", "validate_every": 1}),
        (4, {"on_collapse": "rollback", "validate_every": 1}),
    ],
)
def test_setting_that_has_the_validations_it_needs_is_accepted(
    val: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    plan(section(**written(tmp_path, val=val), **settings), train=None, folder=tmp_path)


def test_settings_of_validations_are_accepted_where_only_training_tasks_are_passed() -> None:
    plan(section(validation_limit=3, final="last"))


def test_experiment_without_algorithms_may_say_what_a_collapse_would_do() -> None:
    plan({**section(on_collapse="stop"), "algorithm": []})


def test_group_key_is_looked_for_in_every_task(tmp_path: Path) -> None:
    given = section(**written(tmp_path, val=2), group_key="q")
    plan(given, train=None, folder=tmp_path)
    (tmp_path / "val.jsonl").write_text('{"q": 1}\n{"q": null, "a": 2}')
    lacks = "group_key is 'q', which task 2 of val lacks: {'q': None, 'a': 2}; give it to every task, or remove"
    with pytest.raises(ConfigError, match=re.escape(lacks)):
        plan(given, train=None, folder=tmp_path)
    with pytest.raises(ConfigError, match="which task 1 of train lacks: a text; give it to every task"):
        plan(section(group_key="q"), train=["a text"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experimnt": {}}, "unknown key 'experimnt'; did you mean 'experiment'"),
        (section(seeds=3), "unknown key 'experiment.seeds'; did you mean 'seed'"),
        ({"runner": {"concurency": 3}}, "unknown key 'runner.concurency'; did you mean 'concurrency'"),
        ({"algorithm": [{"use": "weights-toy", "tune": "main"}]}, "unknown key 'algorithm.tune'; did you mean 'tunes'"),
        (section(seed="three"), 'experiment.seed is "three"; write a whole number'),
        ({"policy": {"main": {"model": "x"}}}, r'\[policy.main\] lacks use; write use = "openai", "torch"'),
        ({"resource": {"prompt": {"templat": "x"}}}, "unknown key 'resource.prompt.templat'; did you mean 'template'"),
        ({"resource": {"prompt": {"template": "x", "value": 1}}}, r'\[resource.prompt\]: write template = "..."'),
        ({"resource": {"prompt": {"value": 1, "engine": "jinja"}}}, r'\[resource.prompt\]: write template = "..."'),
        ({"resource": {"prompt": {}}}, r'\[resource.prompt\]: write template = "..."'),
        (
            {"resource": {"prompt": {"template": "x", "label": 3}}},
            r'resource.prompt.label is 3; write one text in quotes: label = "..."',
        ),
        ({"resource": {"main": {"template": "x"}}}, "both policies and resources"),
        (section(name="my experiment"), "may hold letters, digits"),
        (section(name="x" * 81), "the name 'x{30}'... has 81 characters, and 80 are allowed"),
        (section(validate_every=2), "no validation tasks"),
        (section(validate_every=-1), "experiment.validate_every is -1; write the number of steps between validations"),
        (section(validation_limit=-1), "experiment.validation_limit is -1; write the most validation tasks, 0 for all"),
        (section(group_key="qq"), "group_key is 'qq', which task 1 of train lacks: {'q': 1}; did you mean 'q'"),
        (section(on_collapse="stop"), "on_collapse is 'stop', and only validations between the steps show a collapse"),
        (section(penalty=-1.0, failed="drop"), "penalty is ignored if failed and missing_reward are"),
        ({"schedule": {"every": 4}}, "schedule.every is ignored in mode 'sequential'"),
        ({"runner": {"concurrency": -1}}, "must be at least 1, or 0 to leave"),
        ({"runner": {"timeout_s": 0.0}}, "above 0 seconds"),
        (
            {"gateway": {"use": "none", "params": {"port": 1}}},
            "gateway.params, gateway.advertise, gateway.ca and gateway.process are ignored",
        ),
        ({"algorithm": [{"use": "weights-toy", "tunes": "mian"}]}, "tunes 'mian'.*did you mean 'main'"),
        (
            {"algorithm": [{"use": "weights-toy"}], "policy": {"main": {"use": "trainable"}, "b": {"use": "openai"}}},
            r"tunes nothing; set tunes to one of \['b', 'main', 'prompt'\]",
        ),
        (
            {"algorithm": [{"use": "weights-toy", "tunes": "main", "name": "validate"}]},
            "a name reserved for validation",
        ),
        (
            {"algorithm": [{"use": "weights-toy", "tunes": "prompt"}]},
            "tunes weights, and 'prompt' is a prompt_template",
        ),
        ({"algorithm": [{"use": "prompt-toy", "tunes": "main"}]}, "tunes prompt_template, and 'main' is a policy"),
        ({"algorithm": [{"use": "weights-toy", "tunes": "main", "agents": "a("}]}, "is not a regular expression"),
        (
            {"algorithm": [{"use": "weights-toy", "tunes": "main"}, {"use": "weights-toy", "tunes": "main"}]},
            "two algorithms are called 'weights-toy'",
        ),
        (
            {
                "algorithm": [
                    {"use": "weights-toy", "tunes": "main"},
                    {"use": "weights-toy", "tunes": "main", "name": "second"},
                ],
                "schedule": {"mode": "concurrent"},
            },
            "'weights-toy' and 'second' would tune 'main' at the same time",
        ),
        ({"schedule": {"first": "weights-toy"}}, 'schedule.first is ignored in mode "sequential"'),
        (
            {"schedule": {"mode": "alternate", "first": ["weight-toy"]}},
            "schedule.first names 'weight-toy', which is not an algorithm; did you mean 'weights-toy'",
        ),
        (
            {"policy": {"main": {"use": "openai", "model": "m"}}},
            "a policy of use = 'openai' takes none; use a policy that trains",
        ),
    ],
)
def test_wrong_setting_is_named_with_its_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        plan(changes)
    assert "\n" not in str(raised.value)


def test_sequential_algorithms_may_tune_one_resource() -> None:
    algorithms = [{"use": "weights-toy", "tunes": "main"}, {"use": "weights-toy", "tunes": "main", "name": "second"}]

    assert 2 == len(plan({"algorithm": algorithms}).config.algorithm)


@pytest.mark.parametrize("mode", ["alternate", "concurrent"])
def test_a_first_algorithm_may_tune_what_another_takes_over(mode: str) -> None:
    algorithms = [{"use": "weights-toy", "tunes": "main", "name": name} for name in ("warm-up", "second", "third")]

    assert plan({"algorithm": algorithms[:2], "schedule": {"mode": mode, "first": "warm-up"}})
    with pytest.raises(ConfigError, match="'second' and 'third' would tune 'main' at the same time"):
        plan({"algorithm": algorithms, "schedule": {"mode": mode, "first": "warm-up"}})


def test_unknown_plugin_gives_the_close_match_or_the_install_line() -> None:
    with pytest.raises(UnknownComponentError, match="weights-toy"):
        plan({"algorithm": [{"use": "weight-toy", "tunes": "main"}]})
    with pytest.raises(UnknownComponentError, match=re.escape(pip_install("agl-algo-torch"))):
        plan({"algorithm": [{"use": "grpo", "tunes": "main"}]})
    with pytest.raises(AglError, match=re.escape(pip_install("agl-store-postgres"))):
        plan(section(store="postgresql://localhost"))


@pytest.mark.parametrize(("use", "expected"), [("weights-toy", ("main",)), ("prompt-toy", ("prompt",))])
def test_algorithm_that_names_nothing_tunes_the_only_resource_that_it_can(use: str, expected: tuple[str, ...]) -> None:
    assert expected == plan({"algorithm": [{"use": use}]}).config.algorithm[0].tunes


def test_agent_that_needs_a_missing_resource_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs the resource 'judge_llm'.*\[policy.judge_llm\]"):
        plan(who=needs_judge)


def test_algorithm_without_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs training tasks"):
        plan(train=())


def test_hidden_key_that_no_task_has_is_refused() -> None:
    with pytest.raises(DatasetError, match="hidden key 'anwser' is in no task"):
        plan(section(hidden=("anwser",)), train=[{"answer": 1}])


def test_dataset_row_that_is_not_json_is_named_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"q": 1}\n\n{"q": oops}\n')
    with pytest.raises(DatasetError, match=r"train\.jsonl:3: not JSON"):
        plan(train="train.jsonl", folder=tmp_path)


@pytest.mark.parametrize(("content", "message"), [(None, "no dataset"), ("\n\n", "is empty")])
def test_missing_or_empty_dataset_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(DatasetError, match=message):
        plan(train="train.jsonl", folder=tmp_path)


@pytest.mark.parametrize("content", ['[{"q": 1}, {"q": 2}]', '\n[\n  {"q": 1},\n  {"q": 2}\n]\n', '{"q": 1}\n{"q": 2}'])
def test_dataset_is_json_lines_or_one_array_of_tasks(tmp_path: Path, content: str) -> None:
    (tmp_path / "train.json").write_text(content)
    assert [{"q": 1}, {"q": 2}] == list(plan(train="train.json", folder=tmp_path).train)


def test_lines_that_are_arrays_are_tasks(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("[1, 2]\n[3]\n")
    assert [[1, 2], [3]] == list(plan(train="train.jsonl", folder=tmp_path).train)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"q": 1}\n\n"q"\n', r"train\.jsonl, line 3: 'q' is not an object, and other tasks are; write every task as"),
        ('[{"q": 1}, 7]', r"train\.jsonl, task 2: '7' is not an object, and other tasks are"),
        ('[\n{"q": 1},\n]', r"train\.jsonl:1: not JSON: .*; every line must be one JSON value, or the whole file one"),
        ("[]", "is empty"),
    ],
)
def test_dataset_with_a_slip_is_refused_with_its_place(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(DatasetError, match=message):
        plan(train="train.jsonl", folder=tmp_path)


def test_task_that_is_not_json_is_named() -> None:
    with pytest.raises(DatasetError, match=r"train\[1\] is not JSON"):
        plan(train=[{"q": 1}, {"q": object()}])


def test_missing_file_lists_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text("")
    with pytest.raises(ConfigError, match=r"no experiment file .*did you mean 'experiment\.toml'"):
        load_config(tmp_path / "experimet.toml")
    with pytest.raises(ConfigError, match=r"no experiment file .*there is experiment\.toml"):
        load_config(tmp_path / "other.toml")


def test_invalid_toml_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("[experiment\n")
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 1"):
        load_config(tmp_path / "e.toml")


def test_agent_module_that_raises_is_a_readable_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising_agent.py").write_text("raise ValueError('no database')\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match="'raising_agent' raised ValueError when it was imported: no database"):
        plan(who="raising_agent:solve", folder=tmp_path)


def test_missing_module_is_named_with_the_file_that_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking_agent.py").write_text("import lacking_helper\ndef solve(task): ...\n")
    (tmp_path / "lacking_helper.py").write_text("import os\nimport langgraph_of_tomorrow.graph\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "lacking_helper.py"
    message = (
        f"the agent's module 'lacking_agent' needs the missing module 'langgraph_of_tomorrow', which {file}:2 imports; "
        "install it into this environment"
    )
    with pytest.raises(ConfigError) as raised:
        plan(who="lacking_agent:solve", folder=tmp_path)
    assert message == str(raised.value)


class LackingTracer(WireTracer):
    """A tracer whose framework is not installed."""

    def install(self) -> None:
        import_module("framework_of_tomorrow")


class LackingPlugin:
    @hookimpl
    def agl_tracers(self) -> list[TracerEntry]:
        return [TracerEntry(name="lacking", factory=LackingTracer)]


def test_tracer_without_its_framework_is_named_with_the_missing_module(tmp_path: Path) -> None:
    manager = PluginManager()
    manager.register(LackingPlugin(), name="lacking")
    trainer = Trainer(tracers="lacking", store="memory://", folder=tmp_path, plugins=manager, progress=Quiet())
    with pytest.raises(ConfigError, match="the tracer 'lacking' needs the missing module 'framework_of_tomorrow', wh"):
        trainer.dev(agent, [{"q": 1}])


class RaisingTracer(WireTracer):
    def install(self) -> None:
        raise RuntimeError("the framework is too old")


class RaisingPlugin:
    @hookimpl
    def agl_tracers(self) -> list[TracerEntry]:
        return [TracerEntry(name="raising", factory=RaisingTracer)]


def test_tracer_whose_installation_raises_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    manager = PluginManager()
    manager.register(RaisingPlugin(), name="raising")
    trainer = Trainer(tracers="raising", store="memory://", folder=tmp_path, plugins=manager, progress=Quiet())
    says = (
        r"'raising' could not be installed: RuntimeError: the framework is too old, at .*test_experiment_errors.py:\d+"
    )
    with pytest.raises(ConfigError, match=says):
        trainer.dev(agent, [{"q": 1}])


LISTS = """
[experiment]
agent = "agent:solve"
name = "lists"
hidden = ["answer"]
[[algorithm]]
use = "apo"
[[algorithm]]
use = "grpo"
"""
REWARD = '[[reward]]\nuse = "exact-match"\n'


def set_in(folder: Path, text: str, *settings: str) -> ExperimentConfig:
    """Return the configuration of a file after ``--set``."""
    (folder / "lists.toml").write_text(text)
    return read_experiment(folder / "lists.toml", settings, manager=PluginManager())[0]


@pytest.mark.parametrize(
    ("text", "setting", "expected"),
    [
        (LISTS, "reward.use=numeric", [("numeric", {})]),
        (LISTS + REWARD, "reward.use=numeric", [("numeric", {})]),
        (LISTS + REWARD, "reward.params.a=1", [("exact-match", {"a": 1})]),
        (LISTS + REWARD + REWARD, "reward.1.use=numeric", [("exact-match", {}), ("numeric", {})]),
    ],
)
def test_setting_a_key_of_the_only_table_of_a_list_needs_no_position(
    tmp_path: Path, text: str, setting: str, expected: list[Any]
) -> None:
    assert expected == [(item.use, item.params) for item in set_in(tmp_path, text, setting).reward]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.use=sft", "there are 2 entries in 'algorithm'; say which: algorithm.0.use or algorithm.1.use"),
        ("algorithm.params.lr=1", "say which: algorithm.0.params or algorithm.1.params"),
        ("algorithm.1=sft", "'algorithm' is a list of tables, and '1' is not a key of one, as in algorithm.0.use=NAME"),
        ("algorithm.sft.use=dpo", "there is no 'sft' in that list"),
        ("experiment.name.first=a", "'experiment.name' is 'lists', which has no keys; write --set experiment.name=VAL"),
        ("experiment.hidden.0=a", r"'experiment.hidden' is a list of values; set it as a whole: --set 'experiment.hid"),
        ("experiment.hidden.0.a=a", r"'experiment.hidden' is a list of values; set it as a whole"),
        ("experiment.name", "is not of the form KEY=VALUE"),
    ],
)
def test_setting_that_leads_nowhere_says_what_to_write(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        set_in(tmp_path, LISTS, setting)


def test_agent_that_makes_its_client_at_import_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import os\nKEY = os.environ['OPENAI_API_KEY']\ndef solve(task): ...\n"
    (tmp_path / "keyed_agent.py").write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    assert "keyed_agent:solve" == plan(who="keyed_agent:solve", folder=tmp_path).agent.path
    assert "OPENAI_API_KEY" not in os.environ


def test_plan_without_any_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are no tasks"):
        plan({"algorithm": []}, train=())


ALGORITHMS = """
[experiment]
agent = "a:b"

[[algorithm]]
use = "sft"
name = "grpo"

[[algorithm]]
use = "sft"

[[algorithm]]
use = "ppo"
name = "first"

[[algorithm]]
use = "ppo"
name = "second"
"""


@pytest.mark.parametrize(("name", "changed"), [("sft", "sft"), ("grpo", "grpo"), ("second", "second"), ("2", "first")])
def test_override_prefers_the_name_of_an_entry(name: str, changed: str, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(ALGORITHMS)
    trainer = make_trainer(tmp_path / "e.toml", (f"algorithm.{name}.params.lr=1",), manager=PluginManager())
    assert [changed] == [algorithm.name for algorithm in trainer.config.algorithm if algorithm.params == {"lr": 1}]


@pytest.mark.parametrize(
    ("name", "message"),
    [("ppo", "there are 2 entries called 'ppo' in that list; use a name"), ("9", "there is no '9' in that list")],
)
def test_override_of_no_single_entry_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(ALGORITHMS)
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path / "e.toml", (f"algorithm.{name}.params.lr=1",), manager=PluginManager())
