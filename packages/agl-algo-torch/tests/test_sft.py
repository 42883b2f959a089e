"""Tokenising dialogues, and supervised fine-tuning as an algorithm."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.errors import ConfigError, DatasetError
from agl.schemas import LLM, Episode, Weights
from agl_algo_torch.data.dialogues import Dialogue, check_dialogues, read_dialogues, tokenize
from agl_algo_torch.sft import SFT
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench, RolloutOrder

from .token_world import made

if TYPE_CHECKING:
    from pathlib import Path

CALL = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": '{"x": "1+1"}'}}
MESSAGES = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
    {"role": "assistant", "content": "it is 2"},
)
FORGETFUL = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role != 'assistant' or loop.last %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def lines(count: int) -> str:
    rows = [
        {"messages": [{"role": "user", "content": f"q{i % 4}"}, {"role": "assistant", "content": f"a{i % 4}"}]}
        for i in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def model_dir(make_loaded: Any, tmp_path: Path) -> Path:
    made = make_loaded()
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def scenario_of(model_dir: Path, **params: Any) -> AlgorithmScenario:
    def make() -> SFT:
        settings = {"batch_size": 4, "updates_per_step": 2, "lr": 3e-3, "threads": 1, "device": "cpu", **params}
        return made(SFT, data="dialogues.jsonl", **settings)

    def play(_: RolloutOrder) -> Episode:
        raise AssertionError("supervised fine-tuning collects nothing")

    return AlgorithmScenario(
        make=make,
        play=play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        files={"dialogues.jsonl": lines(22)},
    )


class TestConformance(AlgorithmConformance):
    collects = False

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        longer = scenario_of(model_dir, updates=10, decay="constant")
        return replace(scenario_of(model_dir, decay="constant"), make_longer=longer.make)


@pytest.mark.long
class TestConformanceWithDropout(AlgorithmConformance):
    """Check that dropout removes the same units after a restart."""

    collects = False

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        path = model_dir / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.3}))
        return scenario_of(model_dir, decay="constant")


def text_of(tokenizer: Any, sample: Any) -> list[str]:
    """Return the trained parts of a row as texts."""
    stretches, current = [], []
    for token, is_trained in zip(sample.ids.tolist(), [*sample.mask.tolist()], strict=True):
        if is_trained:
            current.append(token)
        elif current:
            stretches.append(tokenizer.decode(current))
            current = []
    return [*stretches, tokenizer.decode(current)] if current else stretches


def test_only_the_assistants_turns_are_trained_up_to_their_end(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    (sample,) = tokenize(Dialogue(where="f:1", messages=MESSAGES), tokenizer=tokenizer, max_tokens=999)
    assert [
        '<tool_call>\n{"name": "calc", "arguments": {"x": "1+1"}}\n</tool_call><|im_end|>',
        "it is 2<|im_end|>",
    ] == text_of(tokenizer, sample)
    assert "f:1" == sample.rollout


def test_a_template_that_drops_earlier_turns_gives_a_row_per_turn(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = FORGETFUL
    messages = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    )
    rows = tokenize(Dialogue(where="f:1", messages=messages), tokenizer=tokenizer, max_tokens=999)
    assert [["d<|im_end|>"], ["b<|im_end|>"]] == [text_of(tokenizer, row) for row in rows]
    assert {"f:1"} == {row.rollout for row in rows}


GLM_LIKE = """\
{%- for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


def test_stop_token_that_begins_the_next_message_is_trained(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = GLM_LIKE
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|tool|>", "<|assistant|>"]})
    stops = tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>"])
    question, answer = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    dialogue = Dialogue(where="f:1", messages=(question, answer, question, answer))
    (sample,) = tokenize(dialogue, tokenizer=tokenizer, max_tokens=999, stop_ids=stops)
    assert ["4<|user|>", "4<|user|>"] == text_of(tokenizer, sample)
    check = partial(check_dialogues, [dialogue], tokenizer=tokenizer, max_tokens=999)
    assert [] == check(stop_ids=stops)
    assert [
        "assistant turns do not end in a stop token, so the model does not learn to stop: 2, first in f:1"
    ] == check(stop_ids=[])


def test_what_the_template_leaves_out_of_an_answer_is_said_before_the_first_step(
    model_dir: Path, make_tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = GLM_LIKE.replace("message.content", "message.content.split('</think>')[-1]").replace(
        "endfor", "if message.role == 'assistant' %}<|im_end|>{% endif %}{% endfor"
    )
    tokenizer.save_pretrained(model_dir)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}]}
    called = {"messages": list(MESSAGES)}
    scenario = scenario_of(model_dir)
    scenario = replace(scenario, files={"dialogues.jsonl": f"{json.dumps(row)}\n{json.dumps(called)}\n"})
    said = asyncio.run(AlgorithmBench(scenario, tmp_path / "work").said(steps=1))
    assert ["dialogues.jsonl:1", "dialogues.jsonl:2"] == [text.rpartition("/")[2] for text in said]
    assert ["have content that", "have tool calls"] == [" ".join(text.split()[2:5]) for text in said]


OPENED = """{% for m in messages %}[{{ m.role }}]
{% if m.role == 'assistant' %}<think>
{{ m.reasoning_content or '' }}</think>{{ m.content }}
{%- for call in m.tool_calls or [] %}{% if loop.first %}{{ call.function.name }}{% endif %}{% endfor %}<|im_end|>
{%- else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]
<think>
{% endif %}"""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"reasoning_content": "b", "content": "c"}, []),
        ({"content": "<think>\nb</think>c"}, ["have their reasoning in the content"]),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, []),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}] * 2}, ["have tool calls"]),
    ],
)
def test_doubled_reasoning_and_every_lost_call_are_said(
    make_tokenizer: Any, answer: dict[str, Any], said: list[str]
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = OPENED
    dialogue = Dialogue(where="f:1", messages=({"role": "user", "content": "a"}, {"role": "assistant", **answer}))
    found = check_dialogues([dialogue], tokenizer=tokenizer, max_tokens=999, stop_ids=[])
    assert len(said) == len(found)
    assert all(text in sentence for text, sentence in zip(said, found, strict=True))


def test_dialogue_that_the_template_refuses_is_named_before_the_first_step(model_dir: Path, tmp_path: Path) -> None:
    strange = {"messages": [{"role": "critic", "content": "a"}, {"role": "assistant", "content": "b"}]}
    scenario = scenario_of(model_dir, is_shuffled=False)
    scenario = replace(scenario, files={"dialogues.jsonl": lines(20) + json.dumps(strange) + "\n"})
    bench = AlgorithmBench(scenario, tmp_path / "work")
    with pytest.raises(DatasetError, match=r"dialogues.jsonl:21: .* refuses the messages: strange role\. Change"):
        asyncio.run(bench.said(steps=1))


def test_a_dialogue_beyond_the_context_is_named(make_tokenizer: Any) -> None:
    with pytest.raises(DatasetError, match=r"f:7.*tokens.*context is 10"):
        tokenize(Dialogue(where="f:7", messages=MESSAGES), tokenizer=make_tokenizer(), max_tokens=10)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "d.jsonl:2: the line is not JSON"),
        ("[]", "d.jsonl:2: expected"),
        ('{"messages": [{"content": "x"}]}', "d.jsonl:2: expected"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "d.jsonl:2: no message has the role assistant"),
    ],
)
def test_an_unreadable_row_is_named_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(lines(1) + line + "\n")
    with pytest.raises(DatasetError) as caught:
        read_dialogues(path)
    assert message in str(caught.value)


def test_absent_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        read_dialogues(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DatasetError, match="is empty"):
        read_dialogues(tmp_path / "empty.jsonl")


async def run(bench: AlgorithmBench) -> list[dict[str, float]]:
    async with bench:
        algorithm = bench.scenario.make()
        await algorithm.setup(bench.context())
        metrics: list[dict[str, float]] = []
        is_finished = False
        while not is_finished:
            report = await algorithm.step()
            metrics.append(report.metrics)
            is_finished = report.is_finished
        await algorithm.close()
        return metrics


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_loss_falls(model_dir: Path, tmp_path: Path, aggregation: str) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, updates=24, aggregation=aggregation, lr=1e-2), tmp_path / "work")
    losses = [metrics["loss"] for metrics in asyncio.run(run(bench))]
    assert losses[-1] < 0.3 * losses[0]


def test_micro_batches_add_up_to_the_same_update(model_dir: Path, tmp_path: Path) -> None:
    at_once = asyncio.run(run(AlgorithmBench(scenario_of(model_dir, updates=2), tmp_path / "a")))
    one_by_one = asyncio.run(run(AlgorithmBench(scenario_of(model_dir, updates=2, token_budget=1), tmp_path / "b")))
    assert at_once[0]["loss"] == pytest.approx(one_by_one[0]["loss"], rel=1e-5)
    assert at_once[0]["grad_norm"] == pytest.approx(one_by_one[0]["grad_norm"], rel=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_lora_publishes_an_adapter_of_the_model(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, updates=2, lora_rank=4), tmp_path / "work")
    asyncio.run(run(bench))
    weights = bench.published[-1].resource
    assert isinstance(weights, Weights)
    assert ("lora", str(model_dir)) == (weights.format, weights.base_model)


@pytest.mark.parametrize(("settings", "steps"), [({}, 2), ({"updates": 21}, 3), ({"updates_per_step": 4}, 3)])
def test_size_of_a_run_is_known_before_it(tmp_path: Path, settings: dict[str, int], steps: int) -> None:
    row = {"messages": [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 23)
    context: Any = SimpleNamespace(folder=tmp_path)
    assert (0, steps) == SFT(data="rows.jsonl", batch_size=2, **settings).run_size(context)


def test_an_endpoint_cannot_be_tuned(model_dir: Path, tmp_path: Path) -> None:
    scenario = scenario_of(model_dir)
    bench = AlgorithmBench(
        AlgorithmScenario(
            make=scenario.make,
            play=scenario.play,
            tunes=("llm",),
            resources={"llm": LLM(endpoint="http://x/v1", model="m")},
            files=scenario.files,
        ),
        tmp_path / "work",
    )

    async def body() -> None:
        async with bench:
            await scenario.make().setup(bench.context())

    with pytest.raises(ConfigError, match=r"'llm' is a LLM.*use = \"torch\""):
        asyncio.run(body())


def test_resuming_after_the_checkpoint_is_gone_says_so(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir), tmp_path / "work")

    async def body() -> None:
        async with bench:
            first = bench.scenario.make()
            await first.setup(bench.context())
            await first.step()
            shutil.rmtree(tmp_path / "work" / "state")
            second = bench.scenario.make()
            await second.setup(bench.context())
            await second.restore(first.state())

    with pytest.raises(ConfigError, match=r"No saved state of .* does not exist"):
        asyncio.run(body())


@pytest.mark.parametrize("broken", [{"batch_size": 0}, {"updates": -1}, {"keep": 0}, {"updates_per_step": 0}])
def test_counts_below_their_least_are_refused(broken: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(broken))):
        made(SFT, data="x", **broken)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_trains_on_a_gpu(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, updates=24, lr=1e-2, device="cuda"), tmp_path / "work")
    losses = [metrics["loss"] for metrics in asyncio.run(run(bench))]
    assert losses[-1] < losses[0]
