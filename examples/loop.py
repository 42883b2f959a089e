"""The whole idea in one file: record an agent, turn its calls into rows, give credit, and train with GRPO.

    pip install torch httpx -e packages/agl-core
    python examples/loop.py

No server, no configuration and no download; half a minute on a laptop. Read it from top to bottom, then change it:
another task, another reward, another credit, another loss. `agl run` does the same with real models, many workers, a
durable store and resuming; the mathematics below is that of `agl_algo_torch/grpo.py`.

Papers, whose symbols the comments use:
    GRPO             Shao et al. 2024, arXiv 2402.03300, section 4.1
    Agent Lightning  Luo et al. 2025, arXiv 2508.03680, section 3: transitions (input_t, output_t, reward_t)

Notation: q is a task, G the size of its group, o_i the tokens that rollout i sampled, R_i its reward, A_i its
advantage, pi_theta the policy in training, pi_old the policy that sampled. In names, B counts rows and T tokens.
"""

import argparse
import json
import random
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from torch.nn.utils.rnn import pad_sequence

import agl
from agl import schemas
from agl.episodes import EpisodeCredit, build_episode
from agl.schemas import Attempt, Episode, Rollout
from agl.tracing import ActiveAttempt, SpanRecorder, activate

# --------------------------------------------------------------------------------------------------------------------
# 1. The task and the agent. Four boxes hold four numbers; each colour belongs to one box. Asked for a colour, the agent
#    asks the model which box to open, shows it the number in there, and returns its answer. The model has to find out
#    which box each colour means, and to repeat what it read.
# --------------------------------------------------------------------------------------------------------------------

COLOURS, BOXES, NUMBERS = ["red", "green", "blue", "grey"], ["A", "B", "C", "D"], ["1", "2", "3", "4"]


def make_task(chance: random.Random) -> dict[str, Any]:
    """A colour, and the numbers in the boxes."""
    return {"colour": chance.choice(COLOURS), "numbers": chance.sample(NUMBERS, 4)}


def opened(task: dict[str, Any], box: str) -> str:
    """The number in a box."""
    return task["numbers"][BOXES.index(box)] if box in BOXES else "nothing"


def solve(task: dict[str, Any], client: httpx.Client) -> tuple[str, str]:
    """The agent: ordinary code with an ordinary client, which knows nothing of this project."""
    messages = [{"role": "user", "content": task["colour"]}]
    box = ask(client, messages)
    messages += [{"role": "assistant", "content": box}, {"role": "user", "content": opened(task, box)}]
    return box, ask(client, messages)


def ask(client: httpx.Client, messages: list[dict[str, str]]) -> str:
    """One call of OpenAI's chat API."""
    response = client.post("http://policy.local/v1/chat/completions", json={"model": "tiny", "messages": messages})
    return response.json()["choices"][0]["message"]["content"]


def reward(task: dict[str, Any], box: str, answer: str) -> float:
    """R: half for the box of the colour, half for repeating the number that was in the box that was opened."""
    is_right = box == BOXES[COLOURS.index(task["colour"])]
    # Without the second condition the policy learns to open no box and to repeat "nothing".
    is_repeated = answer == opened(task, box) and answer in NUMBERS
    return 0.5 * is_right + 0.5 * is_repeated


# --------------------------------------------------------------------------------------------------------------------
# 2. The policy pi_theta, and a model server over it. Any server that returns token ids will do (vLLM, SGLang, the
#    `torch` policy of agl); this one answers within the process, so that nothing has to be started.
# --------------------------------------------------------------------------------------------------------------------

VOCABULARY = ["<pad>", "<end>", "<user>", "<assistant>", "nothing", *COLOURS, *BOXES, *NUMBERS]
ID = {word: number for number, word in enumerate(VOCABULARY)}


class Policy(torch.nn.Module):
    """A recurrent language model of some thousand weights over a vocabulary of words."""

    def __init__(self, *, width: int = 32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(len(VOCABULARY), width)
        self.read = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, len(VOCABULARY))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return log pi_theta(. | ids up to t) for every position t, [B, T, V]."""
        return self.head(self.read(self.embed(ids_BT))[0]).log_softmax(dim=-1)


def render(messages: list[dict[str, str]]) -> list[int]:
    """The chat template: <role> word <end> for each message, then the mark of the answer that is to come."""
    turns = [ID[word] for m in messages for word in (f"<{m['role']}>", m["content"], "<end>")]
    return [*turns, ID["<assistant>"]]


def serve(policy: Policy) -> httpx.Client:
    """A client whose calls the policy answers, one sampled word each, with token ids as vLLM returns them."""

    def answer(request: httpx.Request) -> httpx.Response:
        ids = render(json.loads(request.content)["messages"])
        with torch.no_grad():
            logp_V = policy(torch.tensor([ids]))[0, -1]
        token = int(torch.multinomial(logp_V.exp(), 1))  # temperature 1: what is recorded is what is trained
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": VOCABULARY[token]},
            "finish_reason": "stop",
            "token_ids": [token],
            "logprobs": {"content": [{"token": VOCABULARY[token], "logprob": float(logp_V[token])}]},
        }
        return httpx.Response(200, json={"id": "call", "model": "tiny", "prompt_token_ids": ids, "choices": [choice]})

    return httpx.Client(transport=httpx.MockTransport(answer))


# --------------------------------------------------------------------------------------------------------------------
# 3. Capture. While an attempt is active, agl sees every call that leaves through httpx and records it as a span with
#    prompt ids, sampled ids and behaviour log-probabilities; the agent is not changed.
# --------------------------------------------------------------------------------------------------------------------


def run_once(task: dict[str, Any], client: httpx.Client, *, group: str) -> Episode:
    """Run the agent once and return what was recorded, as rows."""
    rollout_id, recorder = schemas.new_rollout_id(), SpanRecorder()
    attempt_id = schemas.attempt_id_of(rollout_id, 1)
    active = ActiveAttempt(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        trace_id=schemas.new_trace_id(),
        root_span_id=schemas.new_span_id(),
        record=recorder.record,
    )
    with activate(active):
        agl.emit_reward(reward(task, *solve(task, client)))

    # 4. Rows. `build_episode` joins calls whose prompt continues an earlier prompt and answer, compared as token ids:
    #    both calls of this agent become one row, in which only the two sampled tokens have mask 1. An agent that
    #    begins a new conversation, or several agents in turn, would give several rows.
    rollout = Rollout(
        rollout_id=rollout_id, task=task, group_id=group, status="succeeded", attempts=1, attempt_id=attempt_id
    )
    attempt = Attempt(attempt_id=attempt_id, rollout_id=rollout_id, number=1, worker="loop", status="succeeded")
    return build_episode(rollout, attempt, recorder.drain())


# --------------------------------------------------------------------------------------------------------------------
# 5. Credit and advantages. Credit gives each call a value: here the return of its episode (Agent Lightning, section
#    3.3). The advantage compares it with the other rollouts of the same task: A_i = (R_i - mean(R)) / std(R).
# --------------------------------------------------------------------------------------------------------------------


def advantages(group: list[Episode], *, eps: float = 1e-6) -> list[dict[str, float]]:
    """Return A for every call of a group, by the id of the call's span; one dict per rollout."""
    credit = EpisodeCredit().assign(group)
    # A rollout counts once in mean and std, however often its agent called the model.
    values_G = torch.tensor([sum(call.value for call in calls) / len(calls) for calls in credit])
    mean, scale = values_G.mean(), values_G.std() + eps  # equal rewards: A = 0, and the group teaches nothing
    return [{call.span_id: float((call.value - mean) / scale) for call in calls} for calls in credit]


# --------------------------------------------------------------------------------------------------------------------
# 6. The update: the sampled tokens of all rows, weighted by their advantage, with the clipped ratio of GRPO (eq. 3)
#    and without its KL term (beta = 0):  J = mean_t min(r_t A, clip(r_t, 1 - eps, 1 + eps) A),  r_t = pi_theta / pi_old
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Padded rows: what was read, which tokens were sampled, how likely they were, and what they earned: [B, T]."""

    ids_BT: torch.Tensor  # int64, prompt and answers in one sequence
    mask_BT: torch.Tensor  # 1.0 where the policy sampled the token
    old_BT: torch.Tensor  # log pi_old(o_t), as the server recorded it
    advantage_BT: torch.Tensor  # A of the call that sampled the token


def make_batch(episodes: list[Episode], values: list[dict[str, float]]) -> Batch:
    """Return the rows of all episodes; a row's segments say which call sampled which tokens."""
    columns: dict[str, list[torch.Tensor]] = {"ids_BT": [], "mask_BT": [], "old_BT": [], "advantage_BT": []}
    for episode, value in zip(episodes, values, strict=True):
        for row in episode.rows:
            row_ids = schemas.unpack_ids(row.ids)
            own = torch.zeros(len(row_ids))
            for segment in row.segments:
                own[segment.start : segment.stop] = value[segment.span_id]
            columns["ids_BT"].append(torch.tensor(row_ids))
            columns["mask_BT"].append(torch.tensor(list(row.mask), dtype=torch.float32))
            columns["old_BT"].append(torch.tensor(schemas.unpack_floats(row.logprobs)))
            columns["advantage_BT"].append(own)
    return Batch(**{name: pad_sequence(rows, batch_first=True) for name, rows in columns.items()})


def loss_of(policy: Policy, batch: Batch, *, clip: float = 0.2) -> torch.Tensor:
    """Return -J."""
    logp_BTV = policy(batch.ids_BT[:, :-1])  # position t predicts token t + 1
    logp_BT = logp_BTV.gather(-1, batch.ids_BT[:, 1:, None]).squeeze(-1)
    mask_BT, old_BT, advantage_BT = batch.mask_BT[:, 1:], batch.old_BT[:, 1:], batch.advantage_BT[:, 1:]
    ratio_BT = (logp_BT - old_BT).exp()  # r_t
    clipped_BT = ratio_BT.clamp(1 - clip, 1 + clip)
    gain_BT = torch.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
    # One mean over all sampled tokens: how a rollout is split into rows makes no difference.
    return -(gain_BT * mask_BT).sum() / mask_BT.sum()


# 7. The loop --------------------------------------------------------------------------------------------------------


def train(*, steps: int = 60, tasks: int = 12, group_size: int = 8, updates: int = 4, seed: int = 0) -> list[float]:
    """Train from random weights; return the mean reward of every step."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # a model this small is slower on two
    chance, policy, rewards = random.Random(seed), Policy(), []
    client, optimizer = serve(policy), torch.optim.AdamW(policy.parameters(), lr=5e-3)
    for step in range(steps):
        episodes, values = [], []
        for number in range(tasks):  # q
            task = make_task(chance)
            group = [run_once(task, client, group=f"{step}-{number}") for _ in range(group_size)]  # o_1 ... o_G
            episodes += group
            values += advantages(group)
        batch = make_batch(episodes, values)
        for _ in range(updates):  # the first has r = 1 everywhere; clipping matters from the second on
            optimizer.zero_grad()
            loss_of(policy, batch).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        rewards.append(sum(episode.reward or 0.0 for episode in episodes) / len(episodes))
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:3}: reward {rewards[-1]:.2f}", flush=True)
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
