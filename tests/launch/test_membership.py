import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import ConfigError
from mmtrain.launch.membership import (
    Membership,
    Node,
    check_admitted,
    make_digest,
    members_digest,
    new_name,
    next_membership,
    node_of,
    nodes_of,
)

DIGEST = make_digest({"version": "0.9.0", "config": "steps = 10\n"})


def node(name: str, **changes) -> Node:
    return replace(Node(name=name, ranks=2, store=f"file:///tmp/{name}", digest=DIGEST), **changes)


def settled(*names: str, generation: int = 3, leaving: str = "") -> list[Node]:
    """Nodes that have taken up one generation."""
    nodes = [node(name, generation=generation, leaving=name in leaving.split()) for name in names]
    return [replace(one, members=members_digest(nodes)) for one in nodes]


def test_a_job_begins_with_generation_1_in_the_order_of_names():
    membership = next_membership([node("b"), node("c"), node("a")])
    assert (membership.generation, membership.names) == (1, ("a", "b", "c"))
    assert (membership.num_ranks, membership.first_rank("c")) == (6, 4)


def test_nothing_changes_while_all_nodes_of_a_generation_go_on():
    nodes = settled("a", "b")
    assert next_membership(nodes).generation == 3
    assert next_membership([replace(one, step=7) for one in reversed(nodes)]).generation == 3


@pytest.mark.parametrize(
    "changed",
    [
        lambda a, b, c: [a, b],
        lambda a, b, c: [a, b, c, node("d")],
        lambda a, b, c: [a, b, node("d")],
        lambda a, b, c: [a, b, replace(c, anew=True)],
        lambda a, b, c: [a, b, replace(c, leaving=True)],
        lambda a, b, c: [a, b, replace(c, generation=2)],
        lambda a, b, c: [a, b, replace(c, members=members_digest([a, c]))],
    ],
    ids=["lost", "joins", "replaced", "anew", "leaving", "returned", "another generation of this number"],
)
def test_any_change_makes_the_next_generation(changed):
    nodes = changed(*settled("a", "b", "c"))
    membership = next_membership(nodes)
    assert (membership.generation, membership.names) == (4, tuple(one.name for one in nodes))


def test_a_node_that_was_leaving_before_changes_nothing():
    assert next_membership(settled("a", "b", leaving="b")).generation == 3


def test_all_nodes_of_a_round_agree_whatever_generation_each_of_them_is_in():
    a, b = settled("a", "b", generation=4)
    (alone,) = settled("b", generation=4)
    assert next_membership([a, b]).generation == 4
    assert next_membership([a, alone]).generation == 5, "b was cut off and counted by itself"


def test_a_running_job_goes_on_without_a_newcomer_that_does_not_fit():
    a, b = settled("a", "b")
    other = make_digest({"version": "0.8.0", "config": "steps = 10\n"})
    for newcomer, said in [
        (node("c", ranks=4), "nodes a and c cannot be in one job: they have 2 and 4 ranks"),
        (node("c", digest=other), "the first has version=0.9.0, the second version=0.8.0; start all nodes with"),
    ]:
        assert next_membership([newcomer, a, b]) == next_membership([a, b])
        check_admitted("a", [newcomer, a, b])
        with pytest.raises(ConfigError, match=said):
            check_admitted("c", [newcomer, a, b])


def test_nodes_that_begin_must_fit():
    with pytest.raises(ConfigError, match=r"a and b cannot be in one job: they have 2 and 3 ranks.*--nproc-per-node"):
        next_membership([node("a"), node("b", ranks=3)])
    with pytest.raises(ConfigError, match=r"config=[0-9a-f]{16}, the second config=[0-9a-f]{16}; start all"):
        next_membership([node("a"), node("b", digest=make_digest({"version": "0.9.0", "config": "steps = 11\n"}))])


def test_two_running_jobs_at_one_lighthouse_are_refused():
    (a,), (b,) = settled("a"), settled("b")
    with pytest.raises(ConfigError, match=r"each job with a lighthouse of its own"):
        next_membership([a, replace(b, digest="version=1")])


def test_a_name_that_joins_twice_is_refused():
    with pytest.raises(ConfigError, match=r"two nodes have the name 'a' .*tmp/a and file:///tmp/z.*end one of them"):
        next_membership([node("a"), node("a", store="file:///tmp/z")])


names = st.text("abcXYZ0189._-", min_size=1, max_size=8)
nodes = st.builds(
    Node,
    name=names,
    ranks=st.integers(1, 1024),
    store=st.sampled_from(["tcp://10.0.0.1:29500", "tcp://[::1]:1", "file:///a folder/x"]),
    digest=st.just(DIGEST),
    generation=st.integers(0, 2**53),
    members=st.text("0123456789abcdef", max_size=64),
    anew=st.booleans(),
    step=st.none() | st.integers(0, 2**53),
    leaving=st.booleans(),
)


@given(st.lists(nodes, min_size=1, unique_by=lambda one: one.name), st.integers(1, 2**53))
def test_what_is_written_is_read(some, generation):
    membership = Membership(generation=generation, nodes=tuple(sorted(some, key=lambda one: one.name)))
    assert Membership.from_json(membership.to_json(), "here") == membership


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=5))
def test_other_json_is_refused_with_one_line(values):
    for read in (lambda: nodes_of(values, "here"), lambda: Membership.from_json(json.dumps(values), "here")):
        with pytest.raises(ConfigError, match=r"^here: [^\n]*$"):
            read()


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("name", "a b", "1 to 100 letters"),
        ("name", "a\n", "1 to 100 letters"),
        ("name", "a" * 101, "1 to 100 letters"),
        ("name", 1, "1 to 100 letters"),
        ("ranks", True, "from 1 to 1024"),
        ("ranks", 0, "from 1 to 1024"),
        ("ranks", 2.0, "from 1 to 1024"),
        ("store", "http://a:1", "tcp://host:port"),
        ("store", "file:///a\n", "tcp://host:port"),
        ("digest", "", "1 to 10 words"),
        ("generation", -1, "from 0 to"),
        ("generation", 2**53 + 1, "from 0 to"),
        ("members", "g", "hexadecimal"),
        ("anew", 1, "true or false"),
        ("step", False, "null or a whole number"),
        ("leaving", None, "true or false"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_rule(key, value, rule):
    good = json.loads(Membership(generation=1, nodes=(node("a"),)).to_json())["nodes"][0]
    assert node_of(good, "here") == node("a")
    with pytest.raises(ConfigError, match=rf"^here: node .*: {key} = .*; it is .*{rule}[^\n]*$"):
        node_of({**good, key: value}, "here")


def test_keys_that_are_unknown_or_missing_are_refused():
    good = json.loads(Membership(generation=1, nodes=(node("a"),)).to_json())["nodes"][0]
    for wrong in ({**good, "more": 1}, {key: good[key] for key in list(good)[1:]}):
        with pytest.raises(ConfigError, match=r"it is an object with the keys anew, digest, generation, leaving"):
            node_of(wrong, "here")
    with pytest.raises(ConfigError, match=r"with different names in their order"):
        Membership.from_json(json.dumps({"generation": 1, "nodes": [{**good, "name": "b"}, good]}), "here")


def test_each_start_of_a_node_has_a_name_of_its_own():
    made = {new_name() for _ in range(100)}
    assert len(made) == 100
    assert all(node(name).name == name for name in made)
