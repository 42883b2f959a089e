"""Keys, tokens and certificates: who may call a model, run an attempt, or read a store."""

from agl_run.access.tokens import PLACEHOLDER_KEY as PLACEHOLDER_KEY
from agl_run.access.tokens import AdminKey as AdminKey
from agl_run.access.tokens import AttemptToken as AttemptToken
from agl_run.access.tokens import AttemptTokens as AttemptTokens
from agl_run.access.tokens import IssuedClaim as IssuedClaim
from agl_run.access.tokens import Secret as Secret
from agl_run.access.tokens import TokenScope as TokenScope
from agl_run.access.tokens import issue_token as issue_token
