"""Every loss and estimator of this distribution conforms to the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agl_objectives.registry import find_estimator, find_loss
from agl_objectives.testing import EstimatorConformance, LossConformance

if TYPE_CHECKING:
    from agl_objectives.contract import Estimator, Loss


class TestPPOClip(LossConformance):
    @pytest.fixture(params=[{}, {"clip_dual": 1.1}, {"clip_low": 0.05, "clip_high": 0.05}], ids=str)
    def loss(self, request: pytest.FixtureRequest) -> Loss:
        return find_loss("ppo-clip", request.param).call


class TestGSPO(LossConformance):
    @pytest.fixture
    def loss(self) -> Loss:
        # With the paper's bounds every token of the example would be clipped.
        return find_loss("gspo", {"clip_low": 0.2, "clip_high": 0.2}).call


class TestGMPO(LossConformance):
    @pytest.fixture
    def loss(self) -> Loss:
        return find_loss("gmpo").call


class TestSAPO(LossConformance):
    @pytest.fixture
    def loss(self) -> Loss:
        return find_loss("sapo").call


class TestCISPO(LossConformance):
    has_value = False

    @pytest.fixture
    def loss(self) -> Loss:
        return find_loss("cispo").call


class TestDPPO(LossConformance):
    has_value = False

    @pytest.fixture(params=["tv", "kl"])
    def loss(self, request: pytest.FixtureRequest) -> Loss:
        return find_loss("dppo", {"divergence": request.param}).call


class TestClipCov(LossConformance):
    compares_batch = True

    @pytest.fixture
    def loss(self) -> Loss:
        return find_loss("clip-cov", {"ratio": 0.2, "cov_low": 0.1}).call


class TestKLCov(LossConformance):
    compares_batch = True
    trains_silent = True

    @pytest.fixture
    def loss(self) -> Loss:
        return find_loss("kl-cov", {"ratio": 0.2}).call


class TestGPG(LossConformance):
    @pytest.fixture
    def loss(self) -> Loss:
        return find_loss("gpg").call


class TestDRO(LossConformance):
    trains_silent = True

    @pytest.fixture
    def loss(self) -> Loss:
        return find_loss("dro").call


class TestGroupEstimators(EstimatorConformance):
    @pytest.fixture(params=["grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "max_rl", "hierarchical_grpo"])
    def estimator(self, request: pytest.FixtureRequest) -> Estimator:
        return find_estimator(request.param).call


class TestBatchEstimators(EstimatorConformance):
    compares_batch = True

    @pytest.fixture(params=["gpg", "reinforce++", "reinforce++-baseline", "rae"])
    def estimator(self, request: pytest.FixtureRequest) -> Estimator:
        return find_estimator(request.param).call
