"""Which policy an agent's calls go to: the names, the header that carries them, and who claims a call."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl._who import Who
from agl.contracts import Upstream
from agl.errors import ConfigError
from agl.tracing._roles import check_patterns, claimants, decode_names, encode_names, names_of

NAMES = st.lists(st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()), max_size=8)


def policy(name: str, agents: str = "") -> Upstream:
    return Upstream(name=name, base_url="http://127.0.0.1:1/v1", agents=agents)


@given(NAMES)
def test_names_survive_the_header(names: list[str]):
    text = encode_names(names)
    assert tuple(names) == decode_names(text)
    assert text.isascii()
    assert " " not in text


def test_a_header_that_would_be_too_long_keeps_the_innermost_names():
    names = [f"{number}{'n' * 1000}" for number in range(9)]
    assert tuple(names[:3]) == decode_names(encode_names(names))


def test_names_go_from_the_innermost_out_to_the_agent():
    who = Who("solver", ("graph", "solver", "write", "search"), ("solver", "write", "search"))
    assert ("search", "write", "solver") == names_of(who)


def test_the_innermost_name_decides_and_has_to_match_as_a_whole():
    upstreams = (policy("main"), policy("outer", "solver"), policy("inner", "write|rewrite"))
    assert ["inner"] == [found.name for found in claimants(upstreams, ["write", "solver"])]
    assert ["outer"] == [found.name for found in claimants(upstreams, ["write_query", "solver"])]
    assert () == claimants(upstreams, ["check"])
    assert () == claimants(upstreams, [])


def test_two_policies_that_claim_one_name_are_both_found():
    upstreams = (policy("a", "w.*"), policy("b", ".*e"))
    assert ["a", "b"] == [found.name for found in claimants(upstreams, ["write"])]


def test_patterns_that_name_one_agent_twice_are_refused():
    with pytest.raises(ConfigError, match=r"both take the calls of agent 'write'"):
        check_patterns({"a": "check|write", "b": "wr.*"})
    check_patterns({"a": "check|write", "b": "rewrite"})


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ConfigError, match=r"\[policy.a\] agents = '\(' is no regular expression"):
        check_patterns({"a": "("})
