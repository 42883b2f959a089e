"""The scripted server as the anthropic client sees it."""

from collections.abc import Iterator

import anthropic
import pytest

from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Status, Step, ToolCall

USER = [{"role": "user", "content": "hi"}]
CALLS = (ToolCall("add", {"a": 1}), ToolCall("mul", {"b": 2}))


@pytest.fixture
def client(model_server: ScriptedModelServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=model_server.url, api_key="k", max_retries=0) as opened:
        yield opened


def test_messages_plain_gives_text_and_tool_use(model_server: ScriptedModelServer, client: anthropic.Anthropic) -> None:
    model_server.enqueue(Reply(text="so", tool_calls=CALLS), Reply(text="x", finish_reason="length"))
    answer = client.messages.create(model="m", max_tokens=9, messages=USER, system="be brief")
    assert ["text", "tool_use", "tool_use"] == [block.type for block in answer.content]
    assert [("add", {"a": 1}), ("mul", {"b": 2})] == [(b.name, b.input) for b in answer.content[1:]]
    assert "tool_use" == answer.stop_reason
    assert "max_tokens" == client.messages.create(model="m", max_tokens=9, messages=USER).stop_reason
    assert "Bearer k" == model_server.calls[0].headers["authorization"]


def test_messages_stream_assembles_to_the_plain_answer(
    model_server: ScriptedModelServer, client: anthropic.Anthropic
) -> None:
    reply = Reply(text="hello there", tool_calls=CALLS)
    model_server.enqueue(reply, reply)
    plain = client.messages.create(model="m", max_tokens=9, messages=USER)
    with client.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "hello there" == text
    assert [(b.type, getattr(b, "input", None)) for b in plain.content] == [
        (b.type, getattr(b, "input", None)) for b in final.content
    ]
    assert (plain.stop_reason, plain.usage.output_tokens) == (final.stop_reason, final.usage.output_tokens)


def test_messages_stream_has_anthropics_events_in_order(
    model_server: ScriptedModelServer, client: anthropic.Anthropic
) -> None:
    model_server.enqueue(Reply(text="ab", chunks=2))
    events = client.messages.create(model="m", max_tokens=9, messages=USER, stream=True)
    kinds = [event.type for event in events if event.type != "ping"]
    assert [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ] == kinds


def test_messages_become_turns_with_tool_results(
    model_server: ScriptedModelServer, client: anthropic.Anthropic
) -> None:
    roles: list[list[str]] = []

    def respond(request: ModelRequest) -> Step:
        roles.append([turn.role for turn in request.turns])
        return Reply(text="done")

    model_server.respond_with(respond)
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}]}
    history = [*USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    client.messages.create(model="m", max_tokens=9, messages=history, system="s")
    assert [["system", "user", "assistant", "tool"]] == roles


def test_messages_errors_have_anthropics_shape(model_server: ScriptedModelServer, client: anthropic.Anthropic) -> None:
    model_server.enqueue(Status(code=429, retry_after=1))
    with pytest.raises(anthropic.RateLimitError, match="injected") as caught:
        client.messages.create(model="m", max_tokens=9, messages=USER)
    assert "1" == caught.value.response.headers["retry-after"]
