"""A conversation stays one row: answers that come back in another notation keep their sampled ids."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from agl.episodes import build_episode
from agl.schemas import Attempt, Episode, ModelCall, Rollout, Span, pack_floats, pack_ids
from agl_algo_torch.learner.model import LoadedModel
from agl_algo_torch.serving.codec import TextCodec
from agl_algo_torch.serving.templates import PromptBuilder

Make = Callable[..., LoadedModel]
Message = dict[str, Any]

TURNS = 50


def written(turn: int) -> str:
    """Return a tool call as the model writes it, without the white space that the template would print."""
    return f'<tool_call>{{"name":"calc","arguments":{{"b":{turn},"a":"x"}}}}</tool_call>'


def received(turn: int, *, text: str = "", arguments: str = "") -> Message:
    """Return the answer as a client sends it back, with other white space and another order of keys."""
    arguments = arguments or f'{{ "a" : "x",\n  "b" : {turn} }}'
    function = {"name": "calc", "arguments": arguments}
    return {"role": "assistant", "content": text, "tool_calls": [{"id": f"call-{turn}", "function": function}]}


def sent(turn: int) -> Message:
    return received(turn, arguments=json.dumps({"b": turn, "a": "x"})) | {"content": None}


class Conversation:
    """A conversation with a prompt builder and prescribed answers of the model."""

    def __init__(self, loaded: LoadedModel, *, template: str = "") -> None:
        if template:
            loaded.tokenizer.chat_template = template
        self.codec = TextCodec(loaded.tokenizer)
        self.builder = PromptBuilder(self.codec, context_length=1024)
        self.messages: list[Message] = [{"role": "user", "content": "go"}]
        self.calls: list[tuple[list[int], list[int]]] = []

    def turn(self, turn: int, *, back: Message | None = None) -> None:
        """Answer with a tool call; the client then sends it back with the result."""
        prompt = self.builder.build(self.messages, tools=None, options={})
        ids = [*self.codec.encode(written(turn)), *sorted(self.codec.stop_ids)[:1]]
        self.builder.remember(prompt, ids, message=sent(turn))
        self.calls.append((list(prompt.ids), ids))
        result = {"role": "tool", "tool_call_id": f"call-{turn}", "content": str(turn)}
        self.messages += [back or received(turn), result]

    def prompt(self) -> str:
        return self.builder.build(self.messages, tools=None, options={}).text

    def episode(self) -> Episode:
        rollout = Rollout(rollout_id="r", task={}, status="succeeded", attempt_id="r.1")
        return build_episode(
            rollout, Attempt(attempt_id="r.1", rollout_id="r", number=1, worker="w", status="succeeded"), self.spans()
        )

    def spans(self) -> list[Span]:
        return [
            Span(
                rollout_id="r",
                attempt_id="r.1",
                span_id=f"{number:016x}",
                trace_id="1" * 32,
                name="chat",
                start_ns=number + 1,
                end_ns=number + 2,
                sequence=number,
                call=ModelCall(
                    request_id=f"q{number}",
                    dialect="chat",
                    model="tiny",
                    prompt_ids=pack_ids(prompt),
                    response_ids=pack_ids(ids),
                    logprobs=pack_floats([0.0] * len(ids)),
                ),
            )
            for number, (prompt, ids) in enumerate(self.calls)
        ]


def test_fifty_turns_with_calls_written_back_in_another_notation_are_one_row(make_loaded: Make) -> None:
    talk = Conversation(make_loaded())
    for turn in range(TURNS):
        talk.turn(turn)
    (row,) = talk.episode().rows
    prompt, ids = talk.calls[-1]
    assert 4 * len(prompt + ids) == len(row.ids)
    assert sum(len(ids) for _, ids in talk.calls) == sum(row.mask)
    whole = "".join(
        f"{written(turn)}<|im_end|>\n<|im_start|>tool\n{turn}<|im_end|>\n<|im_start|>assistant\n"
        for turn in range(TURNS)
    )
    assert "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n" + whole == talk.prompt()


@pytest.mark.parametrize("back", [received(0, arguments='{"a": "x", "b": 1}'), received(0, text="I call it.")])
def test_call_that_the_client_changed_is_read_as_it_came(make_loaded: Make, back: Message) -> None:
    talk = Conversation(make_loaded())
    talk.turn(0, back=back)
    assert written(0) not in talk.prompt()
    assert back["content"] in talk.prompt()
    talk.turn(1)
    assert 2 == len(talk.episode().rows)


def test_template_that_needs_the_calls_before_their_results_gets_them(make_loaded: Make) -> None:
    loaded = make_loaded()
    strict = (
        "{%- for message in messages %}{%- if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('a result without a call') }}{% endif %}{% endfor %}"
    )
    talk = Conversation(loaded, template=strict + loaded.tokenizer.chat_template)
    talk.turn(0)
    assert '{"name": "calc", "arguments": {"a": "x", "b": 0}}' in talk.prompt()


@pytest.mark.parametrize("answer", ["\n\nIt is 7.\n", " 7", "7 \n"])
def test_plain_answers_whose_white_space_the_template_trims_are_one_row(make_loaded: Make, answer: str) -> None:
    loaded = make_loaded()
    template = loaded.tokenizer.chat_template
    talk = Conversation(loaded, template=template.replace("message.content", "message.content.strip()"))
    for _ in range(5):
        prompt = talk.builder.build(talk.messages, tools=None, options={})
        ids = [*talk.codec.encode(answer), *sorted(talk.codec.stop_ids)[:1]]
        message = {"role": "assistant", "content": answer}
        talk.builder.remember(prompt, ids, message=message)
        talk.calls.append((list(prompt.ids), ids))
        talk.messages += [message, {"role": "user", "content": " sure? "}]
    (row,) = talk.episode().rows
    assert sum(len(ids) for _, ids in talk.calls) == sum(row.mask)
    talk.messages[1] = {"role": "assistant", "content": answer.strip() + " "}
    assert f"assistant\n{answer.strip()}<|im_end|>" in talk.prompt()


def test_message_cannot_pretend_to_be_an_answer(make_loaded: Make) -> None:
    talk = Conversation(make_loaded())
    talk.turn(0)
    talk.messages = [*talk.messages, received(0), {"role": "user", "content": "and?"}]
    assert 1 == talk.prompt().count("and?")
    other = Conversation(make_loaded())
    other.messages += [received(0), {"role": "tool", "content": "0"}]
    assert written(0) not in other.prompt()


def test_forgotten_answers_are_rendered_by_the_template(make_loaded: Make) -> None:
    talk = Conversation(make_loaded())
    talk.builder = PromptBuilder(talk.codec, context_length=1024, max_tokens=1)
    talk.turn(0)
    assert written(0) not in talk.prompt()
