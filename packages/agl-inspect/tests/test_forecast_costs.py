"""Memory and time of a model on a device: known sizes, laws that must hold, and input that is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from agl.errors import ConfigError
from agl_inspect.forecast.costs import (
    DEVICES,
    DeviceForecast,
    Recorded,
    StepShape,
    Training,
    device_of,
    forecast_on,
    memory_of,
)
from agl_inspect.forecast.models import ModelShape, shape_of_model
from agl_inspect.forecast.observed import Observed
from agl_inspect.forecast.queueing import forecast
from agl_run.forecast.text import on_device

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN_MOE = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
FULL, LORA, EIGHT = Training(), Training(lora_rank=32), Training(moments="8bit")
SMALL = Training(lora_rank=32, gradient_checkpointing=True)


def llama() -> ModelShape:
    return shape_of_model(",".join(f"{name}={value}" for name, value in LLAMA_8B.items()), folder=Path())


def recorded(count: int = 64, *, response: int = 100, at_once: int = 16) -> Recorded:
    rollouts = [
        Observed(
            rollout_id=f"r{number}",
            group_id=f"g{number // 4}",
            seconds=3.0,
            deciding_s=3.0,
            model_s=2.0,
            calls=1,
            prompt_tokens=300,
            response_tokens=response,
            rows=1,
            row_tokens=300 + response,
            trained_tokens=response,
            context=300 + response,
        )
        for number in range(count)
    ]
    step = forecast(rollouts, tasks=8, samples=8, concurrency=at_once)
    return Recorded(rollouts=rollouts, shape=StepShape(tasks=8, samples=8), step=step, concurrency=at_once)


def on(device: str, model: ModelShape, training: Training = FULL, material: Recorded | None = None) -> DeviceForecast:
    return forecast_on(device_of(device), model, training, material or recorded())


def test_time_of_the_model_in_earlier_attempts_is_not_the_agents() -> None:
    once = recorded()
    twice = [replace(one, attempts=2, seconds=6.0) for one in once.rollouts]
    alone, again = (
        on("h100", llama(), material=each).collect_s for each in (once, dataclasses.replace(once, rollouts=twice))
    )
    assert again == pytest.approx(2 * alone, rel=0.05)


def test_shape_is_read_from_a_folder_a_file_and_a_nested_configuration(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "seeing.json").write_text(json.dumps({"text_config": LLAMA_8B, "hidden_size": 7}))
    (tmp_path / "own.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in LLAMA_8B.items()))

    found = [
        shape_of_model(name, folder=tmp_path) for name in ("llama", "llama/config.json", "seeing.json", "own.toml")
    ]

    assert {8_030_257_152} == {shape.weights for shape in found}  # as its card says, but for the last norm
    assert ["llama", "llama", "seeing", "own"] == [shape.name for shape in found]


def test_experts_count_in_memory_and_those_in_use_in_arithmetic(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_MOE))
    shape = shape_of_model(".", folder=tmp_path)

    assert 30.5e9 == pytest.approx(shape.weights, rel=0.01)
    assert 3.3e9 == pytest.approx(shape.used + shape.vocabulary * shape.hidden, rel=0.02)


@pytest.mark.parametrize("given", ["8B", "0.5b", "500M", "70B", "32B", "3B", "1.5B"])
def test_number_of_weights_makes_a_usual_shape(given: str) -> None:
    wanted = float(given[:-1]) * {"b": 1e9, "m": 1e6}[given[-1].lower()]
    shape = shape_of_model(given, folder=Path())

    assert wanted == pytest.approx(shape.weights, rel=0.05)
    assert shape.is_supposed
    if given == "8B":
        assert shape.weights == llama().weights


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere", "neither a file or folder here nor a size"),
        ("1M", "no usual model has 1M weights.*give its sizes"),
        ("layers=2,hidden=64", "does not say heads or num_attention_heads, vocabulary or vocab"),
        ("layers=two,hidden=64,heads=2,vocabulary=9", "gives layers as 'two', which is not a whole number"),
        ("layers=2,hidden=64,heads=2,vocabulary=9,kvheads=1", "no size 'kvheads'.*did you mean 'kv_heads'"),
        ("1.2.3B", "neither a file or folder here nor a size"),
        (".B", "neither a file or folder here nor a size"),
        ("infinite.json", "gives layers as inf, which is not a whole number"),
        ("nested.json", "does not say layers"),
        ("broken.json", "cannot be read as a model's configuration"),
        ("list.json", "holds no object"),
    ],
)
def test_what_is_no_model_is_named(given: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "infinite.json").write_text('{"num_hidden_layers": Infinity}')
    (tmp_path / "nested.json").write_text('{"text_config": "elsewhere"}')
    with pytest.raises(ConfigError, match=message):
        shape_of_model(given, folder=tmp_path)


def test_devices_are_found_by_name_and_a_wrong_one_suggests_another() -> None:
    assert [one.name for one in DEVICES] == [device_of(one.name.upper()).name for one in DEVICES]
    assert all(one.source and one.memory > 1e10 and one.flops > 1e13 < 1e16 for one in DEVICES)
    assert device_of("cpu").memory > 1e8
    with pytest.raises(ConfigError, match=r"'a100' is not in the table of devices; there are a100-80, a100-40$"):
        device_of("a100")
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        device_of("h20O")


def test_training_all_weights_takes_sixteen_bytes_each() -> None:
    memory = memory_of(llama(), FULL, tokens=1, trained=1)
    weights = llama().weights

    assert 16 * weights == memory.weights + memory.gradients + memory.optimizer
    assert 2 * weights == memory.served


def test_keys_and_values_of_a_token_take_what_grouped_attention_leaves() -> None:
    memory = memory_of(llama(), FULL, tokens=1, trained=1, contexts=[1000, 24])

    assert 1024 * 131_072 == memory.kv_cache  # 2 * 32 layers * 8 heads * 128 * 2 bytes


def test_moments_in_8_bits_take_a_quarter() -> None:
    eight = memory_of(llama(), EIGHT, tokens=1, trained=1)

    assert 0.25 * 8 * llama().weights == pytest.approx(eight.optimizer, rel=0.02)


def test_critic_under_adapters_has_adapters_on_the_same_base() -> None:
    alone, both = (
        memory_of(llama(), replace(LORA, has_critic=has_critic), tokens=1, trained=1) for has_critic in (False, True)
    )

    assert both.weights - alone.weights == 4 * llama().adapters(32)
    assert both.optimizer == 2 * alone.optimizer
    assert both.gradients == alone.gradients  # those of the policy are gone when the critic trains


def test_changes_of_settings_fit_and_cheaper_ones_do_not() -> None:
    tight = replace(device_of("h100"), memory=60e9)
    found = forecast_on(tight, llama(), LORA, recorded())
    fewer = forecast_on(tight, llama(), replace(LORA, token_budget=8192), recorded())
    again = forecast_on(tight, llama(), replace(LORA, gradient_checkpointing=True), recorded())

    assert found.memory.training + found.memory.serving > 0.9 * 60e9
    assert found.changes
    assert not again.changes
    assert fewer.memory.training < found.memory.training


def test_proposed_token_budget_keeps_the_checkpointing_that_auto_had_chosen() -> None:
    device, model = replace(device_of("h100"), memory=67e9), shape_of_model("3B", folder=Path())
    training = Training(gradient_checkpointing="auto", token_budget=16_384)
    settable = ["compute.token_budget", "compute.gradient_checkpointing"]

    assert training.on(device, model).gradient_checkpointing
    assert not replace(training, token_budget=1024).on(device, model).gradient_checkpointing
    assert forecast_on(device, model, training, recorded(256), settable=settable).changes == [
        "compute.gradient_checkpointing = true",
        "compute.token_budget = 1024",
    ]


def test_proposals_name_only_what_the_algorithm_has() -> None:
    tight = replace(device_of("h100"), memory=50e9)
    quantized = forecast_on(tight, llama(), SMALL, recorded(), settable=["lora.is_quantized"])

    assert quantized.changes == ["lora.is_quantized = true"]
    assert not forecast_on(tight, llama(), SMALL, recorded(), settable=["compute.dtype"]).changes


def test_adapters_leave_the_base_without_gradient_and_moments() -> None:
    full, lora = (memory_of(llama(), training, tokens=1024, trained=256) for training in (FULL, LORA))

    assert 83_886_080 == llama().adapters(32)  # as peft counts them for all linear layers
    assert lora.gradients + lora.optimizer < 0.02 * (full.gradients + full.optimizer)
    assert lora.weights < 0.6 * full.weights


def test_checkpointing_keeps_a_fraction_of_a_pass() -> None:
    plain, again = (
        memory_of(llama(), Training(dtype="float32", gradient_checkpointing=is_on), tokens=8192, trained=800)
        for is_on in (False, True)
    )

    assert again.activations < 0.2 * plain.activations
    assert again.weights == plain.weights


def test_token_of_one_conversation_takes_the_reading_of_all_weights() -> None:
    found = on("h100", llama(), material=recorded(at_once=1))
    model, cache = llama(), 400 * 131_072

    expected = (2 * (model.weights - model.vocabulary * model.hidden) + cache) / (3.35e12 * 0.6)

    assert expected == pytest.approx(found.token_s, rel=1e-3)


def test_conversations_side_by_side_share_that_reading() -> None:
    one, many = (on("h100", llama(), material=recorded(at_once=count)) for count in (1, 64))

    assert many.token_s < 2 * one.token_s
    assert many.decode_s < 0.1 * one.decode_s


def test_update_takes_six_operations_a_weight_and_token() -> None:
    found = on("a100-80", llama())
    tokens = 64 * 400
    attention = 3 * 4 * 32 * 4096 * 200 * tokens

    passes = (6 * llama().used * tokens + attention) / (312e12 * 0.4)
    assert passes + 28 * llama().weights / (2.039e12 * 0.6) == pytest.approx(found.update_s, rel=1e-3)


@pytest.mark.parametrize(
    ("training", "factor"),
    [
        (Training(gradient_checkpointing=True), 4 / 3),
        (LORA, 2 / 3),
        (Training(passes=2), 2.0),
        (Training(other_passes=3), 2.0),
        (Training(has_critic=True), 2.0),
        (Training(dtype="float32"), 16.0),
    ],
    ids=lambda value: None if isinstance(value, Training) else f"{value:.2g}",
)
def test_settings_change_the_time_of_updates_as_they_should(training: Training, factor: float) -> None:
    plain, changed = (on("h100", llama(), one, recorded(4096)) for one in (FULL, training))
    weights = 28 * llama().weights / (3.35e12 * 0.6)

    updates = 0.0 if training.lora_rank else weights * training.models
    assert factor == pytest.approx((changed.update_s - updates) / (plain.update_s - weights), rel=0.06)


def test_what_tools_take_stays_and_the_models_time_goes() -> None:
    quick = on("b200", shape_of_model("0.5B", folder=Path()))

    assert 4.0 < quick.collect_s < 5.0  # four rollouts behind each other that wait a second each


def test_rollouts_without_tokens_are_planned_too() -> None:
    material = recorded()
    none = [
        replace(one, rows=0, row_tokens=0, trained_tokens=0, prompt_tokens=0, response_tokens=0, context=0)
        for one in material.rollouts
    ]
    step = forecast(none, tasks=8, samples=8, concurrency=16)
    found = on("h100", llama(), material=Recorded(rollouts=none, shape=material.shape, step=step, concurrency=16))

    assert found.collect_s >= 4.0
    assert 0.0 == found.memory.kv_cache


@pytest.mark.parametrize(
    ("device", "model", "training", "verdict"),
    [
        ("h200", "0.5B", FULL, "trainer and server fit side by side"),
        ("h100", "8B", FULL, "do not fit; the cheapest change with which they fit: compute.gradient"),
        ("h100", "8B", SMALL, "trainer and server fit side by side"),
        ("h100", "3B", Training(gradient_checkpointing="auto"), "trainer and server fit side by side"),
        ("h200", "70B", SMALL, 'use = "verl", engine = "ray", trainer.nnodes = 1, trainer.n_gpus_per_node = 2,'),
        ("h100", "70B", FULL, "trainer.nnodes = 4, trainer.n_gpus_per_node = 8,"),
        ("l4", "300B", FULL, "no known change is enough: take a smaller model"),
        (
            "h100",
            "20B",
            SMALL,
            "fit on a device each, not on one; the cheapest change with which they fit: lora.is_quantized = true",
        ),
        ("a100-80", "3.8B", Training(gradient_checkpointing=True), 'they fit: optim.moments = "8bit"'),
        (
            "a100-40",
            "1.5B",
            Training(dtype="float32", gradient_checkpointing="auto"),
            'they fit: compute.dtype = "bfloat16"',
        ),
    ],
)
def test_report_says_if_it_fits_and_that_nothing_was_measured(
    device: str, model: str, training: Training, verdict: str
) -> None:
    lines = on_device(on(device, shape_of_model(model, folder=Path()), training))
    text = " ".join(line.strip() for line in lines)

    assert verdict in text
    assert "not measured" in text
    assert "its shape is that of a usual one" in text
    assert max(map(len, lines)) <= 80


def test_a_base_in_four_bits_takes_a_quarter_without_its_embedding_and_head() -> None:
    model = llama()
    whole, stored = (
        memory_of(model, Training(lora_rank=32, is_quantized=is_quantized), tokens=1024, trained=256).weights
        for is_quantized in (False, True)
    )
    tables = 2 * 2 * model.vocabulary * model.hidden
    adapters = 4 * model.adapters(32)
    assert stored - tables - adapters == pytest.approx(0.28125 * (whole - tables - adapters))
