"""TRL's own trainer takes a step on recorded rollouts, and on rollouts that agl runs; needs torch (``nox -s trl``)."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.errors import ConfigError
from agl.schemas import LLM, ModelCall, Reward, pack_floats, pack_ids
from agl.tracing import make_reward_span
from agl_data.export.trl import LiveRollouts, RecordedRollouts, prompt_of, reward
from agl_run import Quiet
from agl_store_sqlite._store import SQLiteStore

from .worlds import START_NS, call_span, recording_of, replaced

WORDS = ["<eos>", "<unk>", "add", "2", "3", "4", "5", "6"]


def filled(folder: Path, tasks: int, runs: int, *, branches: int = 1) -> str:
    """Return the URL of a new store with ``runs`` rollouts of each task, every second of which is right."""
    recordings = []
    for number in range(tasks * runs):
        task, run = divmod(number, runs)
        own, spans = f"ro-{number:03d}", []
        for branch in range(branches):
            call = ModelCall(
                request_id=f"r{branch}",
                dialect="chat",
                model="tiny",
                prompt_ids=pack_ids([2, 3 + task, 7 - branch]),
                response_ids=pack_ids([4 + run % 2, 5, 0]),
                logprobs=pack_floats([-2.0, -1.5, -2.5]),
                request={"messages": [{"role": "user", "content": "add"}]},
                response={"choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}}]},
            )
            at_ns = START_NS + branch
            span = call_span(f"{branch + 1:016x}", call, parent="", at_ns=at_ns, attempt=f"{own}.1")
            spans.append(replaced(span, rollout_id=own))
        scored = make_reward_span(own, f"{own}.1", Reward(value=float(run % 2), source="evaluator"))
        found = recording_of([*spans, replaced(scored, start_ns=START_NS + 9)], own)
        rollout = replaced(found.rollout, task={"prompt": f"add {3 + task}"}, group_id=f"task-{task}")
        recordings.append(replaced(found, rollout=rollout))
    path = folder / "runs.db"

    async def write() -> None:
        store = SQLiteStore(f"sqlite:///{path}")
        try:
            await store.restore(recordings)
        finally:
            await store.close()

    asyncio.run(write())
    return str(path)


def test_recorded_rows_come_once_each_before_any_comes_twice(tmp_path: Path) -> None:
    rollouts = RecordedRollouts(filled(tmp_path, tasks=2, runs=2))
    assert [{"prompt": "add 3"}, {"prompt": "add 4"}] == rollouts.dataset

    found = rollouts(["add 3", "add 4", "add 3", "add 3"], None)
    assert ["ro-000", "ro-002", "ro-001", "ro-000"] == found["agl_rollout_id"]
    assert [0.0, 0.0, 1.0, 0.0] == found["agl_reward"] == reward([], [], **found)
    assert ([2, 3, 7], [4, 5, 0], [1, 1, 1], [-2.0, -1.5, -2.5]) == tuple(
        found[name][0] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs")
    )


def test_prompt_that_no_task_has_is_refused(tmp_path: Path) -> None:
    rollouts = RecordedRollouts(filled(tmp_path, tasks=1, runs=1))
    with pytest.raises(ConfigError, match="no rollout is recorded for the prompt 'other'; train on the attribute"):
        rollouts(["other"], None)
    with pytest.raises(ConfigError, match="has no rollout with token ids in 'none' to train on"):
        RecordedRollouts(str(tmp_path / "runs.db"), experiment="none")


def test_rollout_with_several_rows_is_refused_or_the_others_counted(tmp_path: Path) -> None:
    url = filled(tmp_path, tasks=1, runs=1, branches=2)
    with pytest.raises(ConfigError, match=r'rollout ro-000 has 2 rows, .* pass rows="longest"'):
        RecordedRollouts(url)
    rollouts = RecordedRollouts(url, rows="longest")
    assert [7] == rollouts(["add 3"], None)["prompt_ids"][0][2:]
    assert [1] == [count for what, count, _ in rollouts.losses.listed() if what.startswith("rows of rollouts")]


def test_prompt_of_a_task_is_its_text_or_its_json() -> None:
    assert ["a", "b", '{"x":1}'] == [prompt_of(task) for task in ({"prompt": "a"}, "b", {"x": 1})]


def trained(folder: Path, rollout_func: Any, dataset: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Train a tiny random model for one step; return its weights before and after, and TRL's trainer."""
    pytest.importorskip("trl", reason="TRL is not installed; nox -s trl installs it")
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), eos_token_id=0, pad_token_id=0, **shape))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(dataset),
        processing_class=tokenizer,
        rollout_func=rollout_func,
    )
    trainer.train()
    after = trainer.model.state_dict()
    return any(not torch.equal(value, after[name]) for name, value in before.items()), trainer


@pytest.mark.filterwarnings("default")
def test_trainer_of_trl_takes_a_step_on_recorded_rollouts(tmp_path: Path) -> None:
    rollouts = RecordedRollouts(filled(tmp_path, tasks=1, runs=4))
    has_changed, trainer = trained(tmp_path, rollouts, rollouts.dataset)
    assert has_changed
    assert 0.5 == trainer.state.log_history[0]["reward"]


class _Model(BaseHTTPRequestHandler):
    """Answers chat completions with token ids, as vLLM does on request; fails the third request."""

    requests = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        _Model.requests += 1
        number = _Model.requests
        ids = [4 + number % 2, 5, 0]
        content = [{"token": WORDS[each], "logprob": -1.5, "bytes": None, "top_logprobs": []} for each in ids]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": WORDS[ids[0]]},
            "finish_reason": "stop",
            "logprobs": {"content": content},
            "token_ids": ids,
        }
        body = {"id": f"c{number}", "object": "chat.completion", "created": 0, "model": "tiny", "choices": [choice]}
        data = json.dumps({**body, "prompt_token_ids": [2, 3, 6]}).encode()
        self.send_response(200 if number != 3 else 400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def model_url() -> Iterator[str]:
    _Model.requests = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), _Model) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def ask(task: dict[str, Any], llm: Any) -> float:
    import openai

    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": task["prompt"]}]
        answer = client.chat.completions.create(model=llm.model, messages=messages)
    return float(answer.choices[0].message.content == "4")


@pytest.mark.filterwarnings("default")
def test_trainer_of_trl_takes_a_step_on_rollouts_that_agl_runs(
    tmp_path: Path, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed; nox -s trl installs it")
    monkeypatch.chdir(tmp_path)
    llm = LLM(endpoint=model_url, model="tiny")
    runs = agl.Trainer(initial_resources={"main": llm}, store=f"sqlite:///{tmp_path}/live.db", progress=Quiet())
    rollouts = LiveRollouts(runs, ask)
    has_changed, _ = trained(tmp_path, rollouts, [{"prompt": "add 3"}])
    assert has_changed
    assert 4 == _Model.requests
    assert [1] == [count for what, count, _ in rollouts.losses.listed() if what.startswith("rollouts without a row")]
