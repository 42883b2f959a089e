"""Registers the policy `vllm` without importing its module."""

from collections.abc import Iterable

from agl import PolicyEntry, hookimpl


@hookimpl
def agl_policies() -> Iterable[PolicyEntry]:
    """Register vLLM servers, started here or attached to."""
    yield PolicyEntry(
        name="vllm",
        factory="agl_vllm.policy:VLLMPolicy",
        summary="vLLM servers, started or attached to, with checked weight updates",
        trains=True,
    )
