"""`agl plugins check` and `PluginConformance` name the losses and estimators of a plugin that do not work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from agl_inspect.terminal.program import cli
from agl_testing.conformance import PluginConformance

if TYPE_CHECKING:
    from agl_testing.plugins import PluginFolder

PLUGIN = """
from agl import hookimpl

@hookimpl(optionalhook=True)
def agl_objectives():
    return ["half_objectives"]
"""
MODULE = """
from agl_objectives import estimator, loss
from agl_objectives.contract import Estimates, LossTerms

@loss("half")
def half(tokens, *, share: float = 0.5):
    return LossTerms(loss_M=-share * tokens.advantages_M * tokens.logp_M)

@estimator("raw", compares="batch")
def raw(scores):
    return Estimates(found_S=scores.scores_S, unit_S=scores.scores_S)
"""


class HalfPlugin(PluginConformance):
    module = "agl_half"


def checked(plugins: PluginFolder, module: str) -> tuple[int, str]:
    """Install a plugin with these losses and estimators, and return what `agl plugins check` says about it."""
    plugins.install(PLUGIN, name="half", files={"half_objectives.py": module})
    done = CliRunner().invoke(cli, ["plugins", "check", "half"], catch_exceptions=False)
    return done.exit_code, done.output


def test_sound_losses_and_estimators_are_listed(agl_plugins: PluginFolder) -> None:
    expected = "tried: loss half, estimator raw\n1 plugin with 2 components: all well\n"
    assert (0, expected) == checked(agl_plugins, MODULE)
    HalfPlugin().test_agl_plugins_check_finds_no_error()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "-share * tokens.advantages_M * tokens.logp_M",
            "tokens.logp_M.sum()",
            "The loss 'half' returned loss_M = -4.5",
        ),
        ("tokens.logp_M)", "tokens.logprobs_M)", "The loss 'half' raised AttributeError"),
        (
            "tokens.logp_M)",
            "(tokens.logp_M - tokens.old_M).square().sqrt())",
            "The loss 'half' has the gradient [nan, ",
        ),
        ("*, share", "share", "the loss 'half' takes no parameter 'share'"),
        ("float = 0.5", "float = 'much'", "the loss 'half': share is \"much\""),
        ('"half"', '"gspo"', "names a loss 'gspo', and another one has this name"),
        ("unit_S=scores.scores_S", "unit_S=1.0", "The estimator 'raw' returned unit_S = a float"),
        ("from agl_objectives.contract", "from agl_objectives.contracts", "raised ModuleNotFoundError"),
    ],
)
def test_what_does_not_work_is_named_with_the_reason(
    agl_plugins: PluginFolder, old: str, new: str, message: str
) -> None:
    status, output = checked(agl_plugins, MODULE.replace(old, new))
    assert (1, True) == (status, message in output), output
    with pytest.raises(AssertionError) as raised:
        HalfPlugin().test_agl_plugins_check_finds_no_error()
    assert message in str(raised.value)
