"""Attempt tokens, and the places that must not show them."""

import os
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.errors import ConfigError, TokenError
from agl.schemas import Attempt, RetryPolicy, Rollout
from agl.tracing import redact
from agl_run.access.tokens import AdminKey, AttemptToken, AttemptTokens, issue_token

SECRET = b"0123456789abcdef"
TOKENS = AttemptTokens(SECRET)
TOKEN = TOKENS.issue("ro-1", "ro-1.1", expires_at=100.0)


def test_token_says_what_was_issued():
    expected = AttemptToken(rollout_id="ro-1", attempt_id="ro-1.1", expires_at=100.0, scope="attempt")
    assert expected == TOKENS.verify(TOKEN, now=99.9)
    assert expected == AttemptTokens(SECRET).verify(TOKEN, now=0)


def test_token_is_made_for_nobody_in_particular_unless_named():
    plain = AttemptToken(rollout_id="r", attempt_id="r.1", expires_at=5.0, scope="attempt", name="")
    assert plain == TOKENS.verify(TOKENS.issue("r", "r.1", expires_at=5.0), now=1.0)
    client = TOKENS.issue("", "", expires_at=5.0, scope="client", name="ada")
    expected = AttemptToken(rollout_id="", attempt_id="", expires_at=5.0, scope="client", name="ada")
    assert expected == TOKENS.verify(client, now=1.0)


def test_token_of_a_worker_is_for_its_experiment_and_no_attempt():
    plain = TOKENS.issue_for_worker("mine", expires_at=5.0)
    expected = AttemptToken(rollout_id="", attempt_id="", expires_at=5.0, scope="worker", experiment="mine", name="")
    assert expected == TOKENS.verify(plain, now=1.0)
    assert "ada" == TOKENS.verify(TOKENS.issue_for_worker("mine", expires_at=5.0, name="ada"), now=1.0).name


def test_token_of_a_worker_may_have_the_2048_characters_that_are_accepted():
    lengths: set[int] = set()
    for count in range(1300, 1500):
        try:
            token = TOKENS.issue_for_worker("e", expires_at=5.0, name="n" * count)
        except ConfigError:
            break
        assert "n" * count == TOKENS.verify(token, now=1.0).name
        lengths.add(len(token))
    assert 2048 == max(lengths)


@pytest.mark.parametrize(("timeout_s", "lifetime_s"), [(None, 86_400.0), (30.0, 90.0), (0.5, 60.5)])
def test_token_of_an_attempt_outlives_its_time_limit_by_a_minute(timeout_s: float | None, lifetime_s: float):
    rollout = Rollout(rollout_id="r", task="?", retry=RetryPolicy(timeout_s=timeout_s))
    attempt = Attempt(attempt_id="r.2", rollout_id="r", number=2, worker="w")
    before = time.time()
    claim = TOKENS.verify(issue_token(TOKENS, rollout, attempt), now=before)
    assert ("r", "r.2", "attempt") == (claim.rollout_id, claim.attempt_id, claim.scope)
    assert before + lifetime_s <= claim.expires_at <= time.time() + lifetime_s


def test_token_is_shaped_like_an_api_key():
    assert TOKEN.startswith("agl_")
    assert TOKEN.isascii()
    assert len(TOKEN) < 200


def test_token_of_an_admin_names_no_attempt():
    admin = TOKENS.verify(TOKENS.issue("", "", expires_at=5.0, scope="admin"), now=1.0)
    assert ("admin", "") == (admin.scope, admin.attempt_id)


def test_token_expires():
    with pytest.raises(TokenError, match=r"'ro-1\.1' expired 20 s ago"):
        TOKENS.verify(TOKEN, now=120.0)
    with pytest.raises(TokenError, match="expired"):
        TOKENS.verify(TOKEN, now=100.0)


def test_token_of_another_secret_is_forged():
    with pytest.raises(TokenError, match="signature"):
        AttemptTokens(b"another secret!!").verify(TOKEN, now=0)


@given(st.integers(0, len(TOKEN) - 1), st.characters())
def test_token_with_any_character_changed_is_refused(position: int, character: str):
    changed = TOKEN[:position] + character + TOKEN[position + 1 :]
    if changed == TOKEN:
        return
    with pytest.raises(TokenError):
        TOKENS.verify(changed, now=0)


@given(st.text())
def test_token_of_any_text_is_refused_without_repeating_it(text: str):
    with pytest.raises(TokenError) as caught:
        TOKENS.verify(f"agl_{text}", now=0)
    assert len(text) < 8 or text not in str(caught.value)


@pytest.mark.parametrize("text", ["", "agl_", "agl_.", "sk-provider", "Bearer x", "agl_" + "x" * 5000 + ".y"])
def test_token_that_is_none_is_malformed(text: str):
    with pytest.raises(TokenError, match="not an agl token"):
        TOKENS.verify(text, now=0)


@given(st.text(max_size=60), st.text(max_size=60), st.floats(1, 1e12))
def test_token_carries_any_ids(rollout_id: str, attempt_id: str, expires_at: float):
    token = TOKENS.issue(rollout_id, attempt_id, expires_at=expires_at)
    claim = TOKENS.verify(token, now=0)
    assert (rollout_id, attempt_id, expires_at) == (claim.rollout_id, claim.attempt_id, claim.expires_at)


def test_tokens_refuse_a_short_secret():
    with pytest.raises(ConfigError, match=r"^the secret given to AttemptTokens has 5 bytes, at least 16 are needed"):
        AttemptTokens(b"short")
    with pytest.raises(ConfigError, match="has 0 bytes"):
        AttemptTokens(b"")


def test_tokens_refuse_a_function_that_has_no_key():
    with pytest.raises(ConfigError, match=r"^the secret given to AttemptTokens has 0 bytes, at least 16 are needed"):
        AttemptTokens(lambda: b"")


def test_secret_in_bytes_is_one_key_and_a_function_returns_one_a_line():
    lines = SECRET + b"\n" + SECRET[::-1]
    assert AttemptTokens(lambda: lines).verify(TOKEN, now=0)
    assert AttemptTokens(lines).verify(AttemptTokens(lines).issue("r", "r.1", expires_at=5.0), now=0)
    with pytest.raises(TokenError, match="signature"):
        AttemptTokens(lines).verify(TOKEN, now=0)


def test_token_may_have_2048_characters_and_no_more():
    by_length = {len(token): token for token in (TOKENS.issue("r" * n, "", expires_at=2.0) for n in range(1400, 1560))}
    assert "r" in TOKENS.verify(by_length[2048], now=1.0).rollout_id
    longer = min(length for length in by_length if length > 2048)
    with pytest.raises(TokenError, match=f"not an agl token .*{longer} characters"):
        TOKENS.verify(by_length[longer], now=1.0)


class Clock:
    """A clock that returns the time to which it is set."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_admin_key_is_taken_by_everybody_with_the_secret_for_an_hour():
    key = AdminKey(SECRET, clock=Clock(1000.0))()
    process = f"{socket.gethostname()}:{os.getpid()}"
    expected = AttemptToken(rollout_id="", attempt_id="", expires_at=4600.0, scope="admin", name=process)
    assert expected == TOKENS.verify(key, now=4599.0)


def test_admin_key_is_made_anew_when_half_of_its_time_is_over():
    clock = Clock(1000.0)
    key = AdminKey(SECRET, clock=clock)
    first = key()
    clock.now = 2799.9
    assert first == key()
    clock.now = 2800.0
    second = key()
    assert 6400.0 == TOKENS.verify(second, now=clock.now).expires_at
    clock.now = 4599.9
    assert second == key()
    clock.now = 4600.0
    assert 8200.0 == TOKENS.verify(key(), now=clock.now).expires_at


def test_admin_key_goes_by_the_time_of_day_unless_told_otherwise():
    claim = TOKENS.verify(AdminKey(SECRET)(), now=time.time())
    assert 3000.0 < claim.expires_at - time.time() <= 3600.0


def test_redact_hides_credentials_and_keeps_the_rest():
    text = f"key {TOKEN}, Authorization: Bearer abcdefghijklmnop, sk-ant-abc123def456, x-api-key: 0123456789abcdef"
    assert redact(text) == "key agl_***, Authorization: Bearer ***, sk-***, x-api-key: ***".replace(
        "x-api-key", "api-key"
    )


def test_redact_returns_ordinary_text_itself():
    text = "the bearer of news took a task-force to risk-town; agl_core and agl_gateway are modules"
    assert redact(text) == text


def test_redact_hides_a_token_in_a_path():
    assert TOKEN not in redact(f"http://127.0.0.1:4747/rollout/ro-1/attempt/ro-1.1/key/{TOKEN}/v1")
