"""Patterns that assign agents' calls to policies are checked before a run."""

import pytest

from agl.errors import ConfigError
from agl_run.checks.planning import check_patterns


def test_patterns_that_name_one_agent_twice_are_refused():
    with pytest.raises(ConfigError, match=r"both take the calls of agent 'write'"):
        check_patterns({"a": "check|write", "b": "wr.*"})
    check_patterns({"a": "check|write", "b": "rewrite"})


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ConfigError, match=r"\[policy.a\] agents = '\(' is not a regular expression"):
        check_patterns({"a": "("})
