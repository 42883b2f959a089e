"""Losses and estimators by name: those of this distribution, of an installed plugin, and functions of the user."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from agl.errors import ConfigError
from agl_objectives import loss
from agl_objectives.contract import Estimates, LossTerms, Scores, TokenBatch
from agl_objectives.losses import PPOClip
from agl_objectives.registry import find_estimator, find_loss, losses
from agl_objectives.testing import example_tokens

if TYPE_CHECKING:
    from agl_objectives.contract import Loss
    from agl_testing.plugins import PluginFolder


def plain(tokens: TokenBatch, *, scale: float = 1.0) -> LossTerms:
    """A loss that a user has written."""
    return LossTerms(loss_M=-scale * tokens.advantages_M * tokens.logp_M)


def raw(scores: Scores) -> Estimates:
    """An estimator that a user has written."""
    return Estimates(found_S=scores.scores_S, unit_S=torch.ones_like(scores.scores_S))


def test_a_function_of_ones_own_is_a_loss_and_its_keywords_are_the_parameters() -> None:
    found = find_loss(f"{__name__}:plain", {"scale": 2})
    tokens = example_tokens(0)
    assert torch.equal(-2.0 * tokens.advantages_M * tokens.logp_M, found.call(tokens).loss_M)
    assert ("token", False) == (found.entry.aggregation, found.entry.trains_silent)


class ReadsEntropy:
    """A loss that weighs tokens by their entropy; with `early` its survey wrongly reads the entropy too."""

    def __init__(self, *, early: bool = False) -> None:
        self._early = early

    def survey(self, tokens: TokenBatch) -> dict[str, torch.Tensor]:
        return {"mean_M": tokens.entropy_M * 2.0} if self._early else {}  # type: ignore[operator]

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        return LossTerms(loss_M=-tokens.advantages_M * tokens.logp_M * tokens.entropy_M)  # type: ignore[operator]


def test_entropies_are_known_to_a_loss_and_not_to_its_survey() -> None:
    assert find_loss(f"{__name__}:ReadsEntropy")
    with pytest.raises(ConfigError, match=r"TypeError: .*NoneType"):
        find_loss(f"{__name__}:ReadsEntropy", {"early": True})


def test_a_function_of_ones_own_is_an_estimator() -> None:
    zeros = torch.zeros(2, dtype=torch.int64)
    scores = Scores(scores_S=torch.tensor([1.0, 2.0]), group_S=zeros, tokens_S=zeros)
    assert [1.0, 2.0] == find_estimator(f"{__name__}:raw").call(scores).found_S.tolist()


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("gspoo", {}, r"No loss is named 'gspoo'; did you mean 'gspo'\? Use one of: ppo-clip, cispo.*module:name"),
        ("gspo", {"clip_hi": 1}, "loss 'gspo' takes no parameter 'clip_hi'; did you mean 'clip_high'"),
        ("gspo", {"clip_high": "much"}, 'clip_high is "much"; write a number without quotes, such as clip_high = 0.5'),
        ("gpg", {"scale": 1}, "its parameters are: none"),
        ("no_such_module:f", {}, "'no_such_module:f' cannot be imported: No module"),
        (f"{__name__}:absent", {}, "cannot be imported: module"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_to_write(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_loss(name, params)


def sums(tokens: TokenBatch) -> LossTerms:
    return LossTerms(loss_M=(tokens.advantages_M * tokens.logp_M).sum())


def undefined(tokens: TokenBatch) -> LossTerms:
    return LossTerms(loss_M=tokens.logp_M * float("nan"))


def detached(tokens: TokenBatch) -> LossTerms:
    return LossTerms(loss_M=-tokens.advantages_M * tokens.logp_M.detach())


def misspelt(tokens: TokenBatch) -> LossTerms:
    return LossTerms(loss_M=tokens.advantage_M)  # type: ignore[attr-defined]


def bare(tokens: TokenBatch) -> torch.Tensor:
    return tokens.logp_M


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "sums",
            r":sums' returned loss_M = .* for 6 trained tokens; return LossTerms\(loss_M=\.\.\.\) with one number",
        ),
        ("bare", "returned Tensor for 6 trained tokens"),
        ("undefined", r"returned \[nan, nan, nan, nan, nan, nan\] for six tokens"),
        ("detached", "returned numbers without a gradient, from which nothing is learnt"),
        ("misspelt", r"raised AttributeError: .*'advantage_M'.* at test_registry.py:\d+, when it was called"),
    ],
)
def test_a_loss_that_trains_nothing_is_refused_when_it_is_found(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_loss(f"{__name__}:{name}")


def as_tensor(scores: Scores) -> torch.Tensor:
    return scores.scores_S


def divided(scores: Scores) -> Estimates:
    spread = torch.stack([scores.scores_S[scores.group_S == group].std(correction=0) for group in scores.group_S])
    return Estimates(found_S=(scores.scores_S - scores.scores_S.mean()) / spread, unit_S=torch.ones(4))


def one_each(scores: Scores) -> Estimates:
    return Estimates(found_S=scores.scores_S, unit_S=torch.ones(1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("as_tensor", r"returned Tensor for four scores; return Estimates\(found_S=\.\.\., unit_S"),
        ("divided", r"returned found_S = .*inf.* for four scores, of which the last is alone in its group"),
        ("one_each", r"returned unit_S = \[1\.0\] for four scores"),
        ("misspelt", "raised AttributeError"),
    ],
)
def test_an_estimator_that_gives_no_advantages_is_refused_when_it_is_found(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_estimator(f"{__name__}:{name}")


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"No estimator is named 'gae'.*rloo"):
        find_estimator("gae")


PLUGIN = """
from agl import hookimpl

@hookimpl(optionalhook=True)
def agl_objectives():
    return ["half_loss"]
"""
MODULE = """
from agl_objectives import estimator, loss
from agl_objectives import loss
from agl_objectives.contract import Estimates, LossTerms
from agl_objectives.losses import gpg  # known already

@loss(NAME, aggregation="sequence")
def half(tokens, *, share: float = 0.5):
    return LossTerms(loss_M=-share * tokens.advantages_M * tokens.logp_M)

@estimator("raw", compares="batch")
def raw(scores):
    return Estimates(found_S=scores.scores_S, unit_S=scores.scores_S)
"""


def install(plugins: PluginFolder, *, name: str = "half", module: str = MODULE) -> None:
    plugins.install(PLUGIN, name="half", files={"half_loss.py": module.replace("NAME", repr(name))})


def test_losses_and_estimators_of_an_installed_plugin_are_found_and_those_of_a_disabled_one_are_not(
    agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(agl_plugins)
    found, tokens = find_loss("half", {"share": 0.25}), example_tokens(0)
    assert torch.equal(-0.25 * tokens.advantages_M * tokens.logp_M, found.call(tokens).loss_M)
    assert ("sequence", "batch") == (found.entry.aggregation, find_estimator("raw").entry.compares)
    assert "half" == losses()[-1].name
    monkeypatch.setenv("AGL_DISABLED_PLUGINS", "half")
    with pytest.raises(ConfigError, match=r"^No loss is named 'half'\."):
        find_loss("half")


def test_name_that_is_taken_is_refused_when_a_loss_is_looked_up(agl_plugins: PluginFolder) -> None:
    install(agl_plugins, name="gspo")
    with pytest.raises(ConfigError, match=r"^The plugin 'half' names a loss 'gspo', and another one has this name"):
        find_loss("gspo")


def test_plugin_whose_module_cannot_be_imported_is_named(
    agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(agl_plugins, module="import no_such_module")
    with pytest.raises(ConfigError, match="hook agl_objectives of agl_half names raised ModuleNotFoundError: No mod"):
        find_loss("gspo")
    monkeypatch.setenv("AGL_DISABLED_PLUGINS", "half")
    assert "gspo" == find_loss("gspo").entry.name


@loss("patient", aggregation="sequence", trains_silent=True)
def patient(tokens: TokenBatch) -> LossTerms:
    return LossTerms(loss_M=-tokens.advantages_M * tokens.logp_M)


def test_decorated_function_of_ones_own_says_how_it_trains() -> None:
    entry = find_loss(f"{__name__}:patient").entry
    assert ("sequence", True) == (entry.aggregation, entry.trains_silent)


class Doubled(PPOClip):
    """A subclass of a decorated loss."""

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        return LossTerms(loss_M=2.0 * super().__call__(tokens).loss_M)


@functools.wraps(patient)
def doubled(tokens: TokenBatch) -> LossTerms:
    """A wrapper of a decorated loss, which has a copy of its attributes."""
    return LossTerms(loss_M=2.0 * patient(tokens).loss_M)


@pytest.mark.parametrize(("name", "original"), [("Doubled", PPOClip()), ("doubled", patient)])
def test_subclass_or_wrapper_of_a_decorated_loss_is_a_loss_of_its_own(name: str, original: Loss) -> None:
    found = find_loss(f"{__name__}:{name}")
    tokens = example_tokens(0)
    assert torch.equal(2.0 * original(tokens).loss_M, found.call(tokens).loss_M)
    assert ("token", False) == (found.entry.aggregation, found.entry.trains_silent)


def test_wrapper_around_a_decorated_loss_of_a_plugin_does_not_hide_behind_its_name(agl_plugins: PluginFolder) -> None:
    install(agl_plugins, module=f"import functools\n{MODULE}half = functools.wraps(half)(lambda tokens: None)\n")
    with pytest.raises(ConfigError, match=r"^No loss is named 'half'"):
        find_loss("half")


def test_a_module_with_records_imports_no_torch() -> None:
    code = "import sys, agl_objectives.plugin, agl_objectives.contract; print('torch' in sys.modules)"
    assert b"False\n" == subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
