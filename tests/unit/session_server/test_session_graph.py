"""The message graph: attachment, siblings, leaves, tokens along paths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from session_server.graph import Delivered, Graph, Node, TurnTokens
from session_server.messages import Message, parse_messages


def tokens(prompt: list[int], output: list[int]) -> TurnTokens:
    n = len(output)
    return TurnTokens(np.array(prompt, np.int32), np.array(output, np.int32), np.zeros(n, np.float32), ((0, n, 0),))


def node(graph: Graph, parent: Node | None, *contents: str, delivered: Delivered = Delivered.YES, **changes) -> Node:
    """Append a turn whose last content is its answer."""
    roles = ["user"] * (len(contents) - 1) + ["assistant"]
    messages = tuple(
        Message({"role": role, "content": content}, "strict") for role, content in zip(roles, contents, strict=True)
    )
    made = Node(
        changes.get("turn_id", f"turn-{len(graph.nodes)}"), parent, changes.get("context", "chat"), messages,
        changes.get("tokens", tokens([1], [2])), "stop", 1, "digest", "", 0, None, delivered,
    )  # fmt: skip
    graph.add(made)
    return made


def request(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": c} for i, c in enumerate(contents)]


def test_a_request_attaches_to_the_deepest_prefix():
    graph = Graph()
    one = node(graph, None, "a", "b")
    two = node(graph, one, "c", "d")
    assert graph.attach(request("a", "b", "c", "d", "e"), "chat") is two
    assert graph.attach(request("a", "b", "x"), "chat") is one
    assert graph.attach(request("a", "x", "c"), "chat") is None
    assert graph.attach(request("a", "b", "c", "d", "e"), "tools") is None


def test_of_equal_paths_the_latest_is_taken():
    graph = Graph()
    node(graph, None, "a", "b")
    later = node(graph, None, "a", "b")
    assert graph.attach(request("a", "b", "c"), "chat") is later


def test_a_longer_injected_history_wins_over_a_shorter_chain():
    graph = Graph()
    one = node(graph, None, "a", "b")
    messages = tuple(Message(m, "strict") for m in request("a", "b", "c", "d"))
    long = Node("long", None, "chat", messages, tokens([1], [2]), "stop", 1, "", "", 0)
    graph.add(long)
    assert graph.attach(request("a", "b", "c", "d", "e"), "chat") is long
    assert graph.attach(request("a", "b", "z"), "chat") is one


def test_a_leaf_that_was_never_delivered_does_not_train_but_its_parent_does():
    graph = Graph()
    one = node(graph, None, "a", "b")
    node(graph, one, "c", "d", delivered=Delivered.NO)
    assert graph.leaves() == [one]


def test_an_answer_of_unknown_delivery_trains():
    graph = Graph()
    only = node(graph, None, "a", "b", delivered=Delivered.UNKNOWN)
    assert graph.leaves() == [only]


def test_a_leaf_passed_over_for_its_extended_sibling_does_not_train():
    graph = Graph()
    one = node(graph, None, "a", "b")
    node(graph, one, "c", "dropped")
    kept = node(graph, one, "c", "d")
    last = node(graph, kept, "e", "f")
    assert graph.leaves() == [last]


def test_siblings_none_of_which_was_extended_all_train():
    graph = Graph()
    one = node(graph, None, "a", "b")
    assert graph.leaves() == [one]
    leaves = [node(graph, one, "c", answer) for answer in "xyz"]
    assert graph.leaves() == leaves


def test_separate_roots_train_each():
    graph = Graph()
    main = node(graph, None, "a", "b")
    agent = node(graph, None, "sub", "b")
    last = node(graph, main, "c", "d")
    assert graph.leaves() == [agent, last]


@given(st.lists(st.tuples(st.integers(0, 10), st.sampled_from("ab"), st.sampled_from("xy")), min_size=1, max_size=25))
def test_whatever_was_committed_is_found_again_with_all_its_tokens(steps):
    graph, paths = Graph(), {}
    for number, (choice, question, answer) in enumerate(steps):
        parent = graph.nodes[choice % (len(graph.nodes) + 1) - 1] if graph.nodes and choice else None
        made = node(graph, parent, question, answer, tokens=tokens([number], [number, -number]))
        before = paths[parent.turn_id] if parent else ([], [])
        paths[made.turn_id] = (before[0] + [question, answer], before[1] + [number, number, -number])
    for made in graph.nodes:
        texts, ids = paths[made.turn_id]
        found = graph.attach(request(*texts, "next"), "chat")
        assert found is not None
        assert paths[found.turn_id][0] == texts
        assert found.order >= made.order
        assert made.path_ids().tolist() == ids
        assert made.total_tokens == len(ids)
    assert sum(len(n.tokens.prompt) + len(n.tokens.output) for n in graph.nodes) == 3 * len(steps)
    assert [n.order for n in graph.nodes] == list(range(len(steps)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 12))
def test_token_turns_attach_to_the_longest_token_prefix(ids, cut):
    graph, parent, at = Graph(), None, 0
    for token in ids:
        made = Node(f"t{at}", parent, "tokens", (), tokens([token], [token + 10]), "stop", 1, "", "", 0)
        graph.add(made)
        parent, at = made, at + 1
    flat = [i for token in ids for i in (token, token + 10)]
    cut = min(cut, len(ids))
    found = graph.attach_tokens(np.array([*flat[: 2 * cut], 99], np.int32), "tokens")
    assert (found.depth + 1 if found else 0) == cut


@pytest.mark.parametrize(
    ("mode", "a", "b", "same"),
    [
        ("strict", {"content": "x", "refusal": None, "tool_calls": None}, {"content": "x"}, True),
        ("strict", {"content": "x", "reasoning_content": "y"}, {"content": "x"}, True),
        ("strict", {"content": "x", "reasoning_content": "y"}, {"content": "x", "reasoning_content": "z"}, False),
        ("strict", {"content": "x", "reasoning_content": "y"}, {"content": "x", "reasoning_content": ""}, False),
        ("strict", {"content": "x"}, {"content": "x", "reasoning_content": "y"}, False),
        ("role_content", {"content": "x", "reasoning_content": "y"}, {"content": "x"}, True),
        ("strict", {"content": ""}, {"content": None}, True),
        ("strict", {"content": [{"type": "text", "text": "x"}]}, {"content": "x"}, True),
    ],
)
def test_comparison_modes(mode, a, b, same):
    left, right = parse_messages([{"role": "assistant", **a}, {"role": "assistant", **b}])
    message = Message(left, mode)
    assert message.same(right) is same
    assert message.same(right) is same  # the second time from its remembered spelling


@pytest.mark.parametrize(
    ("mode", "other", "same"),
    [
        ("strict", '{"b":2,"a":1}', False),
        ("tool_arguments", '{"b":2,"a":1}', True),
        ("tool_arguments", '{"b":2,"a":1.0}', False),
        ("tool_arguments", '{"a":1,"a":1,"b":2}', False),
    ],
)
def test_tool_arguments_compare_as_json_where_asked(mode, other, same):
    def call(arguments: str, index: int) -> dict[str, object]:
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "index": index, "function": function}]}

    assert Message(call('{"a": 1, "b": 2}', 0), mode).same(call(other, 1)) is same
