"""Issues the tokens of attempts, with their lifetimes."""

import time

from agl.schemas import Attempt, Rollout
from agl_run.tokens import AttemptTokens

TOKEN_HOURS = 24.0
"""Lifetime in hours of the token of an attempt without a time limit."""

TOKEN_SLACK_S = 60.0
"""Seconds that a token outlives the attempt's time limit, for calls in flight."""


def issue_token(tokens: AttemptTokens, rollout: Rollout, attempt: Attempt) -> str:
    """Issue a token for this attempt, valid for slightly longer than the attempt may take."""
    limit = rollout.retry.timeout_s
    seconds = TOKEN_HOURS * 3600 if limit is None else limit + TOKEN_SLACK_S
    return tokens.issue(rollout.rollout_id, attempt.attempt_id, expires_at=time.time() + seconds)
