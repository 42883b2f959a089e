"""Keys, tokens and certificates: who may call a model, run an attempt, or read a store."""

from agl_run.access.tokens import (
    PLACEHOLDER_KEY,
    AdminKey,
    AttemptToken,
    AttemptTokens,
    IssuedClaim,
    Secret,
    TokenScope,
    issue_token,
)

__all__ = [
    "PLACEHOLDER_KEY",
    "AdminKey",
    "AttemptToken",
    "AttemptTokens",
    "IssuedClaim",
    "Secret",
    "TokenScope",
    "issue_token",
]
