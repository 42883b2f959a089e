"""Registers the algorithms, the model server and the export format of this distribution, without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl import AlgorithmEntry, PolicyEntry, hookimpl
from agl.contracts import CommandEntry

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl
def agl_algorithms() -> Iterable[AlgorithmEntry]:
    """Yield the algorithms that train the weights of a policy in this process."""
    yield AlgorithmEntry(
        name="sft",
        factory="agl_algo_torch.sft:SFT",
        summary="supervised fine-tuning on dialogues",
        tunes=("weights",),
        needs_token_ids=False,
    )
    yield AlgorithmEntry(
        name="grpo",
        factory="agl_algo_torch.grpo:GRPO",
        summary="policy gradients with group-relative advantages (GRPO, RLOO, REINFORCE++, Dr. GRPO)",
        tunes=("weights",),
        shares=True,
    )
    yield AlgorithmEntry(
        name="ppo",
        factory="agl_algo_torch.ppo:PPO",
        summary="policy gradients with a learned value function (PPO, GAE)",
        tunes=("weights",),
    )
    yield AlgorithmEntry(
        name="distill",
        factory="agl_algo_torch.distill:Distill",
        summary="on-policy distillation from a teacher with the same tokenizer",
        tunes=("weights",),
    )
    yield AlgorithmEntry(
        name="sdpo",
        factory="agl_algo_torch.sdpo:SDPO",
        summary="self-distillation from errors, words of rewards and siblings that succeeded (SDPO)",
        tunes=("weights",),
    )
    yield AlgorithmEntry(
        name="dpo",
        factory="agl_algo_torch.preferences:DPO",
        summary="preferences between rollouts of one task (DPO)",
        tunes=("weights",),
        shares=True,
    )
    yield AlgorithmEntry(
        name="ipo",
        factory="agl_algo_torch.preferences:IPO",
        summary="preferences between rollouts of one task, up to a margin (IPO)",
        tunes=("weights",),
        shares=True,
    )
    yield AlgorithmEntry(
        name="kto",
        factory="agl_algo_torch.preferences:KTO",
        summary="rollouts that are good or bad by themselves (KTO)",
        tunes=("weights",),
        shares=True,
    )
    yield AlgorithmEntry(
        name="rft",
        factory="agl_algo_torch.rft:RFT",
        summary="supervised fine-tuning on the best rollouts (rejection sampling)",
        tunes=("weights",),
        shares=True,
    )


@hookimpl
def agl_policies() -> Iterable[PolicyEntry]:
    """Yield the embedded model server."""
    yield PolicyEntry(
        name="torch",
        factory="agl_algo_torch.serving.policy:TorchPolicy",
        summary="OpenAI-compatible server over the model in training, in this process",
        trains=True,
    )


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Yield the format `merged` of `agl data export`; see `agl_inspect.exports`."""
    yield CommandEntry(
        name="merged",
        parent="export",
        factory="agl_algo_torch.learner.weights:write_merged",
        summary="the weights of a policy with its adapter merged, as a Hugging Face directory",
    )
