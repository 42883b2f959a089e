"""The reference is complete and exact: experiment files, the command line, and the public names of Python."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
import msgspec
import pytest

from agl.algorithms import AlgorithmConfig, ComponentConfig
from agl.contracts import Store
from agl.schemas import Record
from agl_inspect.terminal.program import Modes, cli
from agl_run.config import sections as config
from agl_run.config.file import ONE_OR_SEVERAL
from agl_run.config.learning import GateSettings, LearnSettings

REFERENCE = Path(__file__).parents[1] / "reference"
RECORDS: dict[str, Any] = {
    "Top level": config.ExperimentConfig,
    "`[experiment]`": config.ExperimentSection,
    "`[runner]`": config.RunnerConfig,
    "`[policy.NAME]`": config.PolicyConfig,
    "`[resource.NAME]`": config.ResourceConfig,
    "`[[algorithm]]`": AlgorithmConfig,
    "`[schedule]`": config.ScheduleConfig,
    "`[credit]`": ComponentConfig,
    "`[[reward]]`": ComponentConfig,
    "`[gateway]`": config.GatewayConfig,
    "`[[exporter]]`": ComponentConfig,
    "`[retention]`": config.RetentionConfig,
}
LEARNER = "`[learn.NAME]`"
"""The section of a learner, whose tables are nested."""

NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def sections(name: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    text = (REFERENCE / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in ``text``, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def type_of(kind: Any) -> str:
    """A type as the reference writes it, in TOML's words."""
    if kind is Any:
        return "any"
    if kind in NAMES:
        return NAMES[kind]
    if get_origin(kind) is Literal:
        words = [f'`"{word}"`' for word in get_args(kind)]
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if get_origin(kind) is tuple:
        (item, _) = get_args(kind)
        return "array of " + ("tables" if isinstance(item, type) and issubclass(item, Record) else "strings")
    if get_origin(kind) is dict:
        return {float: "table of numbers"}.get(get_args(kind)[1], "table")
    if isinstance(kind, type):
        return "table"
    if get_origin(kind) is Annotated:
        return type_of(get_args(kind)[0])
    return " or ".join(type_of(option) for option in get_args(kind) if option is not type(None))


def type_in_file(field: Any) -> str:
    """A field's type in TOML, where one name may stand for an array of one."""
    return f"{'string or ' if field.name in ONE_OR_SEVERAL else ''}{type_of(field.type)}"


def default_of(field: Any) -> str:
    """A default as the reference writes it, in TOML."""
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or value is msgspec.UNSET:
        return "none"
    if isinstance(value, Record):
        return "see below"
    text = msgspec.json.encode(value).decode()
    return f"`{text}`"


@pytest.mark.parametrize("heading", RECORDS)
def test_experiment_file_has_every_key_with_type_and_default(heading):
    fields = msgspec.structs.fields(RECORDS[heading])
    expected = [(f"`{field.name}`", type_in_file(field), default_of(field)) for field in fields]
    table = {"table of tables": "table"} if heading == "Top level" else {}
    found = [
        (key, table.get(kind, kind), default) for key, kind, default, _ in rows(sections("experiment-file.md")[heading])
    ]
    assert expected == found


@pytest.mark.parametrize("heading", RECORDS)
def test_experiment_file_says_what_every_key_means(heading):
    assert all(meaning for *_, meaning in rows(sections("experiment-file.md")[heading]))


def test_experiment_file_has_every_section():
    assert [*RECORDS, LEARNER] == list(sections("experiment-file.md"))


def test_experiment_file_has_every_key_of_a_learner():
    gate = GateSettings()
    parts = {key: getattr(gate, key) for key in gate.__struct_fields__}
    nested = [f"{key}.{name}" for key in ("replay", "canary") for name in parts[key].__struct_fields__]
    expected = [*LearnSettings.__struct_fields__, *nested, *(key for key in parts if key not in ("replay", "canary"))]

    assert expected == [key.strip("`") for key, *_ in rows(sections("experiment-file.md")[LEARNER])]


def commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command with its path, subcommands and modes included."""
    waiting: list[tuple[str, click.Command, click.Context]] = [("agl", cli, click.Context(cli, info_name="agl"))]
    while waiting:
        path, command, context = waiting.pop()
        yield path, command, context
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                waiting.append((f"{path} {name}", child, click.Context(child, info_name=name, parent=context)))
        if isinstance(command, Modes):
            for flag, mode in command.modes.items():
                waiting.append((f"{path} {flag}", mode, click.Context(mode, info_name=flag, parent=context)))


COMMANDS = {path: (command, context) for path, command, context in commands()}


def test_command_line_has_every_command_with_its_arguments():
    expected = {
        " ".join(["agl", *usage])
        for path, (command, context) in COMMANDS.items()
        for usage in [[*path.split()[1:], *arguments_of(command, context)]]
    }
    assert expected == {heading.strip("`") for heading in sections("cli.md")}


def arguments_of(command: click.Command, context: click.Context) -> list[str]:
    return [item.make_metavar(context) for item in command.params if isinstance(item, click.Argument)]


def test_lists_of_commands_show_whole_sentences():
    cut: list[str] = []
    for path, (command, context) in COMMANDS.items():
        names = command.list_commands(context) if isinstance(command, click.Group) and command is not cli else []
        for name in names:
            room = 80 - 8 - max(map(len, names))  # click's margins in a terminal of 80 columns
            text = COMMANDS[f"{path} {name}"][0].get_short_help_str(room)
            cut += [text] if text.endswith("...") else []
    assert cut == []


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_command_line_has_every_option_with_its_default(path):
    command, context = COMMANDS[path]
    heading = " ".join([path, *arguments_of(command, context)])
    table = rows(sections("cli.md")[f"`{heading}`"])
    options = [item for item in command.params if isinstance(item, click.Option) and item.name != "help"]
    assert [option_of(item, context) for item in options] == [cells[0] for cells in table]
    shown = {option_of(item, context): f"`{item.default}`" for item in options if item.show_default is True}
    assert shown == {cells[0]: cells[1] for cells in table if cells[0] in shown}
    assert all(cells[2] for cells in table)


def option_of(option: click.Option, context: click.Context) -> str:
    value = "" if option.is_flag else f" {option.make_metavar(context)}".replace("|", r"\|")
    names = " / ".join([", ".join(option.opts), *option.secondary_opts])
    return f"`{names}{value}`"


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_store_contract_has_every_method():
    members = [name for name, member in vars(Store).items() if inspect.iscoroutinefunction(member)]
    found = [name for cells in rows(sections("store-contract.md")["Methods"]) for name in names(cells[0])]
    assert sorted(members) == sorted(found)
