"""The rounds of the hub, without clock, processes or pipes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import ConfigError
from mmtrain.launch.hub import Hub
from mmtrain.launch.membership import Node

SILENT_S = 10.0


def node(name: str) -> Node:
    return Node(name=name, ranks=1, store="file:///tmp", digest="version=1")


def begun(*names: str) -> Hub:
    """A hub whose nodes have been in a round, at 0 s."""
    hub = Hub(SILENT_S, start_s=100.0)
    for name in names:
        hub.start(name, 0.0)
    for name in names:
        assert hub.next_round(0.0) is None, "the first round waits for all that start"
        hub.ask(node(name), 0.0)
    assert asked(hub, 0.0) == " ".join(names)
    return hub


def asked(hub: Hub, now_s: float) -> str | None:
    """Names of the nodes of the round that is complete."""
    found = hub.next_round(now_s)
    return None if found is None else " ".join(one.name for one in found)


def test_a_round_is_complete_when_all_members_have_asked():
    hub = begun("a", "b", "c")
    for name in "ca":
        hub.ask(node(name), 1.0)
        assert asked(hub, 1.0) is None
    hub.ask(node("b"), 2.0)
    assert asked(hub, 2.0) == "a b c"
    assert asked(hub, 2.0) is None, "each ask counts once"


def test_a_node_that_starts_is_not_waited_for_but_is_in_the_round_after_it_asked():
    hub = begun("a", "b")
    hub.start("c", 1.0)
    hub.ask(node("a"), 1.0)
    hub.ask(node("b"), 1.0)
    assert asked(hub, 1.0) == "a b"
    hub.ask(node("c"), 2.0)
    hub.ask(node("a"), 2.0)
    assert asked(hub, 2.0) is None
    hub.ask(node("b"), 2.0)
    assert asked(hub, 2.0) == "a b c"
    hub.ask(node("a"), 3.0)
    hub.ask(node("b"), 3.0)
    assert asked(hub, 3.0) is None, "now it is a member"


def test_a_node_that_ends_is_not_waited_for_whether_it_asked_or_not():
    hub = begun("a", "b", "c")
    hub.ask(node("a"), 1.0)
    hub.ask(node("b"), 1.0)
    hub.lose("b")
    assert asked(hub, 1.0) is None
    hub.lose("c")
    assert asked(hub, 1.0) == "a"


def test_a_silent_node_is_left_out_and_its_ask_counts_when_it_goes_on():
    hub = begun("a", "b")
    hub.ask(node("b"), 1.0)
    hub.ask(node("a"), 12.0)
    assert asked(hub, 12.0) == "a"
    hub.hear("b", 13.0)
    assert asked(hub, 13.0) is None
    hub.ask(node("a"), 13.5)
    assert asked(hub, 13.5) == "a b"


def test_a_node_that_goes_on_without_an_ask_is_not_waited_for():
    hub = begun("a", "b")
    hub.ask(node("a"), 12.0)
    assert asked(hub, 12.0) == "a"
    hub.hear("b", 13.0)
    hub.ask(node("a"), 13.0)
    assert asked(hub, 13.0) == "a"
    hub.ask(node("b"), 14.0)
    hub.ask(node("a"), 14.0)
    assert asked(hub, 14.0) == "a b"


def test_where_no_member_is_left_a_round_waits_for_nodes_that_start():
    hub = begun("a")
    hub.start("b", 1.0)
    hub.start("c", 1.0)
    hub.lose("a")
    hub.ask(node("b"), 2.0)
    assert asked(hub, 2.0) is None
    hub.hear("b", 100.0)
    assert asked(hub, 100.0) is None
    hub.hear("b", 102.0)
    assert asked(hub, 102.0) == "b", "c was not heard in 100 s"


def test_a_hub_that_was_stopped_itself_calls_nobody_silent():
    hub = begun("a", "b")
    hub.shift(50.0)
    hub.ask(node("a"), 51.0)
    assert asked(hub, 51.0) is None


def test_a_name_that_starts_twice_is_refused():
    with pytest.raises(ConfigError, match="two nodes have the name 'a'"):
        begun("a").start("a", 1.0)


actions = st.lists(st.tuples(st.sampled_from(["start", "ask", "hear", "lose", "wait"]), st.sampled_from("abcd")))


@given(actions)
def test_a_round_has_each_live_member_once_and_nobody_that_did_not_ask(actions):
    hub, now_s = Hub(SILENT_S), 0.0
    heard: dict[str, float] = {}
    outstanding: set[str] = set()
    members: set[str] = set()
    for action, name in actions:
        if action == "wait":
            now_s += 6.0
        elif action == "lose":
            hub.lose(name)
            heard.pop(name, None)
            outstanding.discard(name)
            members.discard(name)
        elif action == "start" and name not in heard:
            hub.start(name, now_s)
            hub.hear(name, now_s)
            heard[name] = now_s
        elif action in ("ask", "hear") and name in heard:
            hub.hear(name, now_s)
            heard[name] = now_s
            if action == "ask" and name not in outstanding:
                hub.ask(node(name), now_s)
                outstanding.add(name)
        live = {name for name, at in heard.items() if now_s - at <= SILENT_S}
        members &= live
        found = hub.next_round(now_s)
        complete = bool(live) and (members or live) <= outstanding
        assert (found is not None) == complete
        if found is not None:
            assert [one.name for one in found] == sorted(live & outstanding)
            members |= live & outstanding
            outstanding -= live
