"""The table of chat templates in the documentation is what rendering the templates gives."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agl.errors import DatasetError
from agl_algo_torch.data.dialogues import Dialogue, tokenize
from agl_algo_torch.serving.toolcalls import read_format

PAGE = Path(__file__).parents[3] / "docs/reference/chat-templates.md"
TRL = find_spec("trl")
"""A package with the chat templates of many models; it is not imported."""

CHATML, GEMMA, LLAMA = ["<|im_end|>"], ["<end_of_turn>"], ["<|eot_id|>"]
NEW_GEMMA = ["<turn|>", "<|tool_response>"]
BAR, LOW = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
DEEPSEEK = [f"<{BAR}end{LOW}of{LOW}sentence{BAR}>"]
FAMILIES = {
    "Cohere Command R": ("cohere", ["<|END_OF_TURN_TOKEN|>"]),
    "Cohere Command A": ("cohere2", ["<|END_OF_TURN_TOKEN|>"]),
    "DeepSeek R1 distilled": ("deepseek_r1_distill", DEEPSEEK),
    "DeepSeek V3": ("deepseekv3", DEEPSEEK),
    "Gemma": ("gemma", GEMMA),
    "Gemma 3": ("gemma3", GEMMA),
    "Gemma 4": ("gemma4_v5", NEW_GEMMA),
    "GLM 4.5": ("glm4moe", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "gpt-oss": ("gptoss", ["<|return|>", "<|call|>"]),
    "LFM 2": ("lfm2_v2", CHATML),
    "LFM 2.5": ("lfm2_2_5_v2", CHATML),
    "Llama 3": ("llama3", LLAMA),
    "Llama 3.1": ("llama3_1", LLAMA),
    "Llama 3.2": ("llama3_2", LLAMA),
    "Nemotron 3 Nano": ("nemotron_3_nano", CHATML),
    "Nemotron 3 Super": ("nemotron_3_super", CHATML),
    "Phi 3": ("phi3", ["<|end|>"]),
    "Phi 3.5": ("phi3_5", ["<|end|>"]),
    "Qwen 2.5": ("qwen2_5", CHATML),
    "Qwen 3": ("qwen3", CHATML),
    "Qwen 3 Instruct 2507": ("qwen3_instruct_2507", CHATML),
    "Qwen 3 VL": ("qwen3_vl", CHATML),
    "Qwen 3.5": ("qwen3_5_think", CHATML),
    "Qwen 3.6": ("qwen3_6", CHATML),
    "Qwen 3.8": ("qwen3_8", CHATML),
}
HEAD = (
    "| Family | Tools seen | Calls parsed | Reasoning in its own field | Stop token trained |\n|---|---|---|---|---|\n"
)
MESSAGES = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})


def row(family: str, template: str, stops: list[str], tokenizer: Any) -> str:
    tokenizer.add_special_tokens({"additional_special_tokens": stops, "eos_token": stops[0], "bos_token": "<s>"})
    tokenizer.chat_template = template
    form = read_format(tokenizer, stop_texts=stops)
    ids = tokenizer.convert_tokens_to_ids(stops)
    dialogue = Dialogue(where="f:1", messages=MESSAGES)
    try:
        (sample,) = tokenize(dialogue, tokenizer=tokenizer, max_tokens=9999, stop_ids=ids)
        is_stopped = int(sample.ids[sample.mask][-1]) in ids
        trained = "yes" if is_stopped else "no: `sft` says so before its first step"
    except DatasetError:
        trained = "no: `sft` refuses the answers, which do not continue their prompts"
    cells = [
        "no: requests with tools are refused" if "show" in form.refusal else "yes",
        "no: requests with tools are refused" if form.refusal else f"yes, `{form.name}`",
        "yes" if form.thinking or form.parser.is_whole else "the template has none",
        trained,
    ]
    return f"| {family} | {' | '.join(cells)} |\n"


@pytest.mark.skipif(TRL is None, reason="the chat templates are in the package trl")
def test_documented_table_of_chat_templates_is_what_rendering_gives(make_tokenizer: Any) -> None:
    assert TRL is not None
    assert TRL.origin is not None
    folder = Path(TRL.origin).parent / "chat_templates"
    rows = [
        row(family, (folder / f"{name}.jinja").read_text(encoding="utf-8"), stops, make_tokenizer())
        for family, (name, stops) in FAMILIES.items()
    ]
    table = HEAD + "".join(rows)
    page = PAGE.read_text(encoding="utf-8")
    assert table in page, f"write this table into {PAGE}:\n{table}"
