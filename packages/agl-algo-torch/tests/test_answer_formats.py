"""Tool calls and reasoning in the notations of several families: chosen by rendering, read back, and not doubled."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agl.errors import ConfigError
from agl_algo_torch.learner.model import LoadedModel
from agl_algo_torch.serving.codec import TextCodec
from agl_algo_torch.serving.policy import TorchPolicy
from agl_algo_torch.serving.templates import PromptBuilder
from agl_algo_torch.serving.toolcalls import ParsedResponse, ParsedToolCall, ToolParser, find_parser, read_format

Serve = Callable[..., TorchPolicy]
Connect = Callable[[TorchPolicy], Any]

PROPERTIES = {"city": {"type": "string"}, "n": {"type": "integer"}, "zip": {"type": "string"}}
FUNCTION = {"name": "find", "description": "f", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ARGUMENTS = {"city": "Rome", "n": 3, "zip": "00100"}
CALL = ParsedToolCall("find", json.dumps(ARGUMENTS))
JSON = json.dumps(ARGUMENTS)
BAR, LOW = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"


def deepseek(name: str) -> str:
    return f"<{BAR}{name.replace(' ', LOW)}{BAR}>"


def pairs(form: str) -> str:
    return "".join(form.format(key, value) for key, value in ARGUMENTS.items())


XML = "<function=find>\n" + pairs("<parameter={}>\n{}\n</parameter>\n") + "</function>"
GLM = "find\n" + pairs("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")
V3 = f"function{deepseek('tool sep')}find\n```json\n{JSON}\n```"
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "find", "arguments": {JSON}}}\n</tool_call>',
    "qwen3_coder": f"<tool_call>\n{XML}\n</tool_call>",
    "glm45": f"<tool_call>{GLM}</tool_call>",
    "llama3_json": f'{{"name": "find", "parameters": {JSON}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "find", "arguments": {JSON}}}]',
    "mistral v11": f"[TOOL_CALLS]find[ARGS]{JSON}",
    "deepseek_v3": "".join(map(deepseek, ["tool calls begin", "tool call begin"]))
    + V3
    + "".join(map(deepseek, ["tool call end", "tool calls end"])),
    "deepseek_v3 1": deepseek("tool call begin") + f"find{deepseek('tool sep')}{JSON}" + deepseek("tool call end"),
    "openai": f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{JSON}",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_in_the_notation_of_its_family_is_read(name: str) -> None:
    parse = find_parser(name.partition(" ")[0]).parse
    text = WRITTEN[name]
    assert (CALL,) == parse(text, TOOLS).calls
    assert parse(text, TOOLS).content is None
    broken = text.replace("}", "").replace("</tool_call>", "")
    assert () == parse(broken, TOOLS).calls
    assert broken == parse(broken, TOOLS).content
    assert ParsedResponse("no call") == parse("no call", TOOLS)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "find"}',
        '{"name": "Bob", "parameters": {}}',
        '{"name": ["find"], "parameters": {}}',
        '{"name": "find", "parameters": {}}; {"name": "Bob", "age": 3}',
    ],
)
def test_answer_in_json_is_a_llama_call_only_if_it_names_a_tool_and_has_arguments(text: str) -> None:
    assert ParsedResponse(text) == find_parser("llama3_json").parse(text, TOOLS)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "openai"])
def test_call_with_too_deeply_nested_brackets_stays_content(name: str) -> None:
    parse = find_parser(name).parse
    for depth in (*range(900, 1000), 100_000):  # the stack ends somewhere in the range, while reading or writing
        text = WRITTEN[name].replace('"Rome"', "[" * depth + "]" * depth)
        found = parse(text, TOOLS)
        assert found.calls or found.content
    assert () == parse(text, TOOLS).calls


@pytest.mark.parametrize("schema", [True, {}, {"properties": None}, {"properties": {"n": True}}])
def test_schema_without_types_reads_an_argument_as_text_or_json(schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": schema}}]
    (call,) = (
        find_parser("qwen3_coder")
        .parse("<tool_call><function=find><parameter=n>12</parameter></function></tool_call>", tools)
        .calls
    )
    has_property = isinstance(schema, dict) and schema.get("properties")
    assert {"n": 12 if has_property else "12"} == json.loads(call.arguments)


@pytest.mark.parametrize(
    ("kinds", "expected"), [(["string", "null"], "12"), (["integer", "null"], 12), (["integer", "string"], "12")]
)
def test_text_stays_text_if_string_is_one_of_the_types(kinds: list[str], expected: object) -> None:
    schema = {"type": "object", "properties": {"n": {"type": kinds}}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": schema}}]
    (call,) = (
        find_parser("glm45")
        .parse("<tool_call>find<arg_key>n</arg_key><arg_value>12</arg_value></tool_call>", tools)
        .calls
    )
    assert {"n": expected} == json.loads(call.arguments)


def test_channels_of_gpt_oss_are_reasoning_and_content() -> None:
    thought = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
    parse = find_parser("openai").parse
    assert ParsedResponse("four", (), "I add.") == parse(f"{thought}<|channel|>final<|message|>four", [])
    assert ParsedResponse(None, (CALL,), "I add.") == parse(thought + WRITTEN["openai"], [])


HEAD = "{%- if tools %}{{ tools | tojson }}\n{% endif %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
TAIL = (
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
XML_CALLS = """\
{%- for c in m.tool_calls or [] %}<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>
{{ v }}
</parameter>
{% endfor %}</function>
</tool_call>{%- endfor %}"""
# As Qwen3.5: the prompt opens the reasoning, and every later prompt has a block of it.
THINKING = (
    HEAD
    + "{%- if m.role == 'assistant' %}"
    + "{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}"
    + "{{- m.content }}"
    + XML_CALLS
    + TAIL
)
SAID = f"I look.\n</think>\n\n<tool_call>\n{XML}\n</tool_call>"


@pytest.fixture
def thinking(make_loaded: Any) -> LoadedModel:
    loaded = make_loaded(context=4096)
    loaded.tokenizer.chat_template = THINKING
    return loaded


def test_the_format_is_found_by_rendering(thinking: LoadedModel, make_tokenizer: Any) -> None:
    found = read_format(thinking.tokenizer, stop_texts=["<|im_end|>"])
    assert ("qwen3_coder", ("<think>", "</think>"), "") == (found.name, found.thinking, found.refusal)
    assert ParsedResponse(None, (CALL,), "I look.") == found.read(SAID, tools=TOOLS, is_open=True)
    assert ParsedResponse(None, (), "I loo") == found.read("I loo", tools=TOOLS, is_open=True)
    assert ParsedResponse("plain") == found.read("plain", tools=TOOLS, is_open=False)
    assert ParsedResponse("b", (), "a") == found.read("<think>\na\n</think>\n\nb", tools=[], is_open=False)
    hermes = read_format(make_tokenizer(), stop_texts=["<|im_end|>"])
    assert ("hermes", None, "") == (hermes.name, hermes.thinking, hermes.refusal)


def test_reasoning_that_a_template_renders_without_a_tag_behind_it_stays_content(thinking: LoadedModel) -> None:
    body = "{{- (m.reasoning_content or '') + m.content }}" + XML_CALLS
    thinking.tokenizer.chat_template = HEAD + body + TAIL.replace("<think>\\n", "")
    found = read_format(thinking.tokenizer, stop_texts=["<|im_end|>"])
    assert ("qwen3_coder", None) == (found.name, found.thinking)
    assert ParsedResponse("plain") == found.read("plain", tools=TOOLS, is_open=False)


SHOUT = ToolParser(lambda text, _: ParsedResponse(text.upper()))


def test_a_parser_of_another_package_is_used_by_its_reference(make_tokenizer: Any) -> None:
    found = read_format(make_tokenizer(), tool_parser=f"{__name__}:SHOUT")
    assert ParsedResponse("YES") == found.read("yes", tools=TOOLS, is_open=False)
    with pytest.raises(ConfigError, match="cannot be imported"):
        read_format(make_tokenizer(), tool_parser="no_such_package:PARSER")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (HEAD.replace("tools | tojson", "''") + "{{- m.content }}" + TAIL, "does not show tools to the model"),
        (HEAD + "{{- m.content }}" + TAIL, "writes tool calls in a form that no parser reads back"),
    ],
)
def test_tools_that_a_template_cannot_carry_are_refused_with_the_reason(
    template: str, reason: str, make_loaded: Any, serve: Serve, connect: Connect
) -> None:
    loaded = make_loaded()
    loaded.tokenizer.chat_template = template.replace("{{ '' }}\n", "")
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    client = connect(serve(loaded))
    with pytest.raises(openai.BadRequestError, match=reason):
        client.chat.completions.create(**asked, tools=TOOLS)
    assert client.chat.completions.create(**asked).choices
    raw = connect(serve(loaded, tool_parser="none"))
    assert raw.chat.completions.create(**asked, tools=TOOLS).choices


def test_reasoning_that_a_prompt_has_opened_is_not_doubled_in_the_next_prompt(thinking: LoadedModel) -> None:
    codec = TextCodec(thinking.tokenizer, stop_ids=thinking.stop_ids)
    builder = PromptBuilder(codec, context_length=1024)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "where?"}]
    for turn in range(3):
        prompt = builder.build(messages, tools=TOOLS, options={})
        said = [*codec.encode(SAID), thinking.tokenizer.eos_token_id]
        function = {"name": "find", "arguments": JSON}
        answer = {"role": "assistant", "content": None, "tool_calls": [{"id": f"c{turn}", "function": function}]}
        builder.remember(prompt, said, message={**answer, "reasoning_content": "I look."})
        messages += [answer, {"role": "tool", "tool_call_id": f"c{turn}", "content": "there"}]
        later = builder.build(messages, tools=TOOLS, options={})
        assert (*prompt.ids, *said) == later.ids[: len(prompt.ids) + len(said)]
        assert (turn + 2, turn + 1) == (later.text.count("<think>"), later.text.count("</think>"))


def test_answer_whose_prompt_is_rendered_differently_later_is_rendered_by_the_template(thinking: LoadedModel) -> None:
    closed = "'<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n'"
    closed = f"{{{{ '<|im_start|>assistant\\n' + ({closed}) }}}}"
    thinking.tokenizer.chat_template = THINKING.replace("{{ '<|im_start|>assistant\\n<think>\\n' }}", closed).replace(
        "'<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n'", "''"
    )
    codec = TextCodec(thinking.tokenizer, stop_ids=thinking.stop_ids)
    builder = PromptBuilder(codec, context_length=1024)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "where?"}]
    off = {"enable_thinking": False}
    first = builder.build(messages, tools=TOOLS, options=off)
    call = f"<tool_call>\n{XML}\n</tool_call>"
    function = {"name": "find", "arguments": JSON}
    answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
    builder.remember(first, [*codec.encode(call), thinking.tokenizer.eos_token_id], message=answer)
    messages += [answer, {"role": "tool", "tool_call_id": "c", "content": "there"}]
    second = builder.build(messages, tools=TOOLS, options=off)
    assert 0 == second.spliced
    assert 1 == second.text.count("<think>")
    assert 1 == second.text.count(call)


def test_object_that_is_not_a_tool_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"The tool parser 'json:loads' is a function\. Name a ToolParser\."):
        find_parser("json:loads")
