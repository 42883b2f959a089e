"""Choose a call's policy by caller, model name and host, and read the header that names the caller."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.contracts import Upstream
from agl.tracing import Who, decode_names, upstreams_for
from agl.tracing._routing import encode_names

NAMES = st.lists(st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()), max_size=8)
WORDS = ["writer", "critic", "gpt-4o", "gpt-4o-mini", "Qwen"]
HOST = "http://gpu:8000/v1"


def policy(name: str, agents: str = "", *, model: str = "", aliases: tuple[str, ...] = ()) -> Upstream:
    return Upstream(name=name, base_url=HOST, agents=agents, model=model, aliases=aliases)


def chosen(*upstreams: Upstream, **asked: object) -> list[str]:
    """Return the names of the chosen policies, which must be the same for every order of the configuration."""
    (found,) = {upstreams_for(order, **asked) for order in permutations(upstreams)}  # type: ignore[arg-type]
    return [upstream.name for upstream in found]


@st.composite
def policies(draw: st.DrawFn) -> list[Upstream]:
    names = draw(st.lists(st.sampled_from(WORDS), max_size=3, unique=True))
    aliases = st.sampled_from([(), ("gpt-*",), ("gpt-4o*", "Q*"), ("*",)])
    patterns = st.sampled_from(["", "write|critic", "wr.*", "critic"])
    return [
        policy(name, draw(patterns), model=draw(st.sampled_from(["", *WORDS])), aliases=draw(aliases)) for name in names
    ]


@pytest.mark.long
@given(NAMES)
def test_names_survive_the_header(names: list[str]):
    text = encode_names(names)
    assert tuple(names) == decode_names(text)
    assert text.isascii()
    assert " " not in text


def test_a_header_that_would_be_too_long_keeps_the_innermost_names():
    names = [f"{number}{'n' * 1000}" for number in range(9)]
    assert tuple(names[:3]) == decode_names(encode_names(names))


def test_header_is_percent_encoded_and_separated_by_commas():
    assert "a%2Fb,c%2Cd%20%2F%20%C3%A9" == encode_names(["a/b", "c,d / é"])
    assert "search%2Fweb" == encode_names(["search/web"])
    assert "" == encode_names([])


def test_header_has_room_for_4000_characters():
    assert ("n" * 4000,) == decode_names(encode_names(["n" * 4000, "agent"]))
    assert ("n" * 1999, "m" * 2000) == decode_names(encode_names(["n" * 1999, "m" * 2000]))
    assert ("n" * 2000,) == decode_names(encode_names(["n" * 2000, "m" * 2000]))
    assert () == decode_names(encode_names(["n" * 4001]))


def test_header_of_a_stranger_is_read_up_to_twice_that_length():
    assert ("n" * 3999, "m" * 4000) == decode_names(f"{'n' * 3999},{'m' * 9000}")


def test_names_go_from_the_innermost_out_to_the_agent():
    who = Who("solver", ("graph", "solver", "write", "search"), ("solver", "write", "search"))
    assert ("search", "write", "solver") == who.names


def test_the_innermost_name_decides_and_has_to_match_as_a_whole():
    upstreams = (policy("main"), policy("outer", "solver"), policy("inner", "write|rewrite"))
    assert ["inner"] == chosen(*upstreams, names=["write", "solver"])
    assert ["outer"] == chosen(*upstreams, names=["write_query", "solver"])
    assert [] == chosen(*upstreams, names=["check"])
    assert [] == chosen(*upstreams, names=[])


def test_two_policies_that_claim_one_name_are_both_found():
    assert ["a", "b"] == chosen(policy("a", "w.*"), policy("b", ".*e"), names=["write"])


def test_who_calls_comes_before_the_models_name_except_for_embeddings():
    upstreams = (policy("writer", "write"), policy("gpt-4o"))
    assert ["writer"] == chosen(*upstreams, model="gpt-4o", names=["write"])
    assert ["gpt-4o"] == chosen(*upstreams, model="gpt-4o", names=["check"])
    assert ["gpt-4o"] == chosen(*upstreams, model="gpt-4o", names=["write"], dialect="embeddings")


def test_a_policy_of_the_models_name_comes_before_an_alias_that_matches_it():
    assert ["gpt-4o"] == chosen(policy("writer", aliases=("gpt-*",)), policy("gpt-4o"), model="gpt-4o")


def test_a_name_comes_before_a_model_and_a_model_before_an_alias():
    named, served, aliased = policy("x"), policy("b", model="x"), policy("c", aliases=("x",))
    assert ["x"] == chosen(named, served, aliased, model="x")
    assert ["b"] == chosen(served, aliased, model="x")
    assert ["c"] == chosen(aliased, policy("other"), model="x")


def test_the_most_specific_alias_counts():
    upstreams = (policy("rest", aliases=("*",)), policy("gpt", aliases=("gpt-*",)), policy("mini", aliases=("*-mini",)))
    assert ["rest"] == chosen(*upstreams, model="o3")
    assert ["gpt"] == chosen(*upstreams, model="gpt-4o")
    assert ["mini"] == chosen(*upstreams, model="gpt-mini")


def test_call_that_names_no_model_is_for_no_policy_by_its_model():
    assert [] == chosen(policy("rest", aliases=("*",)), policy("other"))
    assert [] == chosen(policy("rest", aliases=("*",)), policy("other"), names=["write"])


def test_two_policies_of_one_model_are_both_found():
    assert ["a", "b"] == chosen(policy("b", model="Qwen"), policy("a", model="Qwen"), model="Qwen")


def test_a_single_policy_takes_what_came_to_the_gateway_and_what_goes_to_its_host():
    assert ["main"] == chosen(policy("main"), model="anything")
    assert ["main"] == chosen(policy("main"), model="anything", url=f"{HOST}/chat/completions")
    assert [] == chosen(policy("main"), model="anything", url="http://elsewhere/v1/chat/completions")
    assert [] == chosen(policy("main"), policy("other"), model="anything")
    assert [] == chosen(model="anything")


@given(policies(), st.sampled_from(["", "o3", *WORDS]), st.lists(st.sampled_from(["write", "critic", "x"]), max_size=2))
def test_the_choice_does_not_depend_on_the_order_of_the_policies(
    upstreams: list[Upstream], model: str, names: list[str]
):
    chosen(*upstreams, model=model, names=names)
