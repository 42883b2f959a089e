import msgspec
import pytest

from agl.contracts import Credit
from agl.episodes import EpisodeCredit
from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, Transition
from agl_testing.conformance.credit import CreditConformance
from tests.cases import ATTEMPT, ROLLOUT


class TestEpisodeCredit(CreditConformance):
    @pytest.fixture
    def credit(self) -> Credit:
        return EpisodeCredit()


def episode(*rejects: str, reward: float | None = 1.0) -> Episode:
    calls = tuple(
        Transition(rollout_id="r", attempt_id="r.1", span_id=f"c{i}", turn=i, reject=reject)  # type: ignore[arg-type]
        for i, reject in enumerate(rejects)
    )
    return Episode(rollout=ROLLOUT, attempt=ATTEMPT, reward=reward, transitions=calls)


def test_episode_credit_gives_every_call_the_return() -> None:
    expected = [CallCredit(span_id=f"c{i}", value=0.5, baseline="g") for i in (0, 1)]
    assert [expected] == EpisodeCredit().assign([episode("", "", "late", reward=0.5)])


def test_episode_credit_without_a_group_compares_a_rollout_with_nothing() -> None:
    alone = msgspec.structs.replace(episode(""), rollout=msgspec.structs.replace(ROLLOUT, group_id=""))
    assert ["r"] == [given.baseline for given in EpisodeCredit().assign([alone])[0]]


def test_episode_credit_refuses_a_trained_episode_without_reward() -> None:
    with pytest.raises(ConfigError, match="rollout r has model calls to train on and no reward"):
        EpisodeCredit().assign([episode("", reward=None)])
    assert [[]] == EpisodeCredit().assign([episode("late", reward=None)])
