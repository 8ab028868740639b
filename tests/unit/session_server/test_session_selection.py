"""Leaves, samples and what of them trains: one reward per rollout, each token once."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import ConfigError, RequestError
from segue.events.sample import RewardRecorded
from segue.events.session import SessionOpened
from segue.wire.mask import SamplingMask
from segue.wire.rows import RowLedger
from segue.wire.sample import check_sample, sample_to_frame, samples_from_bundle
from session_server.assemble import assemble, total_reward
from session_server.graph import Delivered, Graph, Node, TurnTokens
from session_server.messages import Message
from session_server.selection import Steps, shared_once

OPENED = SessionOpened(
    session_id="s", token_digest="", rollout_id="r", group=1, member=0, seed=0, purpose="train", temperature=1.0,
    ttl_s=1.0, token_budget=1000,
)  # fmt: skip


def grow(
    graph: Graph, parent: Node | None, prompt: int, output: int, *, delivered: Delivered = Delivered.YES, **more: object
) -> Node:
    """Append a turn with so many tokens, all different over the graph."""
    first = 1 + sum(len(n.tokens.prompt) + len(n.tokens.output) for n in graph.nodes)
    ids = np.arange(first, first + prompt + output, dtype=np.int32)
    version = len(graph.nodes)
    tokens = TurnTokens(
        ids[:prompt], ids[prompt:], -np.ones(output, np.float32), ((0, output, version),) if output else (),
        SamplingMask.of([[int(i), 900] for i in ids[prompt:]]) if more.get("masked") else None,
    )  # fmt: skip
    messages = tuple(
        Message({"role": role, "content": f"{role}{len(graph.nodes)}"}, "strict") for role in ("user", "assistant")
    )
    node = Node(
        f"turn-{len(graph.nodes)}", parent, "chat", messages, tokens, "stop", 1, "", "", 0,
        more.get("rows"), delivered,
    )  # fmt: skip
    graph.add(node)
    return node


def samples_of(graph: Graph, *, steps: Steps | None = None, max_tokens: int | None = None, **rewards: float):
    found = [RewardRecorded(session_id="s", reward_key=k, value=v, turn=int(k[1:])) for k, v in rewards.items()]
    made = assemble(OPENED, graph, found, {"m": "x"}, reward=0.5, max_tokens=max_tokens, steps=steps)
    assert made is not None
    for sample in made.samples:
        check_sample(sample)
    return made.samples


def trained(sample) -> list[int]:
    return sample.tokens[sample.loss_mask == 1].tolist()


def test_a_session_without_branches_is_one_sample_in_the_frame_it_always_had():
    graph = Graph()
    first = grow(graph, None, 2, 3)
    grow(graph, first, 1, 2)
    (sample,) = samples_of(graph, t0=1.0)
    assert (sample.sample_id, sample.metadata) == ("sample-r", {"m": "x"})
    assert sample.tokens.tolist() == list(range(1, 9))
    assert sample.turn_index.tolist() == [-1, -1, 0, 0, 0, -1, 1, 1]
    assert sample.turn_rewards[0] == 1.0
    assert np.isnan(sample.turn_rewards[1])
    made = assemble(OPENED, graph, [], {}, reward=0.5)
    assert made.frame(with_mask=True) == sample_to_frame(made.samples[0])


def test_each_leaf_is_a_sample_and_what_they_share_trains_once():
    graph = Graph()
    stem = grow(graph, None, 2, 3)
    left, right = grow(graph, stem, 1, 2), grow(graph, stem, 1, 4)
    one, two = samples_of(graph)
    assert one.tokens.tolist() == [*range(1, 6), *range(6, 9)]
    assert two.tokens.tolist() == [*range(1, 6), *range(9, 14)]
    assert trained(one) == [3, 4, 5, 7, 8]
    assert trained(two) == [10, 11, 12, 13]
    assert (one.sample_id, two.sample_id) == ("sample-r.0", "sample-r.1")
    assert (one.metadata["leaf"], two.metadata["leaf"]) == (left.turn_id, right.turn_id)
    assert {(s.rollout_id, s.reward, s.group_id) for s in (one, two)} == {("r", 0.5, "train-1")}
    assert set(one.turn_index.tolist()) == {-1, 0, 1}
    assert set(two.turn_index.tolist()) == {-1, 2}  # no two turns of a rollout share a number


def test_branches_travel_in_one_frame_and_come_back_apart():
    graph = Graph()
    stem = grow(graph, None, 2, 3, masked=True)
    grow(graph, stem, 1, 2, masked=True)
    grow(graph, stem, 1, 4, masked=True)
    made = assemble(OPENED, graph, [], {}, reward=0.5)
    back = samples_from_bundle(made.frame(with_mask=True), with_mask=True)
    assert [s.sample_id for s in back] == ["sample-r.0", "sample-r.1"]
    for sample, same in zip(made.samples, back, strict=True):
        assert sample_to_frame(same, with_mask=True) == sample_to_frame(sample, with_mask=True)
    sizes = np.diff(back[1].mask.offsets)
    assert sizes.tolist() == [2 if m else 1 for m in back[1].loss_mask]  # what the other trains is forced here


def test_an_answer_nobody_got_and_one_passed_over_do_not_train():
    graph = Graph()
    stem = grow(graph, None, 2, 2)
    grow(graph, stem, 1, 2)  # passed over: a sibling goes on
    kept = grow(graph, stem, 1, 2)
    last = grow(graph, kept, 1, 2)
    grow(graph, last, 1, 2, delivered=Delivered.NO)
    (sample,) = samples_of(graph)
    assert sample.tokens.tolist() == [node_id for node in last.path() for node_id in _ids(node)]
    assert sample.turn_index.max() == 2


def _ids(node: Node) -> list[int]:
    return [*node.tokens.prompt.tolist(), *node.tokens.output.tolist()]


def test_a_later_commit_or_delivery_does_not_reach_a_snapshot():
    graph = Graph()
    stem = grow(graph, None, 2, 2)
    lost = grow(graph, stem, 1, 2, delivered=Delivered.NO)
    before = graph.snapshot()
    lost.delivered = Delivered.YES
    grow(graph, stem, 1, 2)
    assert [node.turn_id for node in before.leaves()] == ["turn-0"]
    assert [len(s.tokens) for s in samples_of(before)] == [4]
    assert before.nodes[0].tokens is stem.tokens


def test_cutting_to_a_length_keeps_whole_turns_and_no_leaf_twice():
    graph = Graph()
    stem = grow(graph, None, 2, 3)
    grow(graph, stem, 1, 2)
    grow(graph, stem, 1, 9)
    assert [len(s.tokens) for s in samples_of(graph, max_tokens=20)] == [8, 15]
    assert [len(s.tokens) for s in samples_of(graph, max_tokens=8)] == [8]
    assert [len(s.tokens) for s in samples_of(graph, max_tokens=7)] == [5]
    with pytest.raises(RequestError, match="no turn fits into 4 tokens") as error:
        samples_of(graph, max_tokens=4)
    assert error.value.status == 422


def test_rows_that_do_not_match_the_tokens_are_a_422_that_names_the_row():
    graph = Graph()
    rows = RowLedger(1, 1, 4).append(0, np.zeros((3, 1, 1), np.uint8))
    grow(graph, None, 2, 3, rows=rows)
    with pytest.raises(RequestError, match="5 committed tokens have 4 route rows, recorded are 3: row 3 is") as error:
        samples_of(graph)
    assert error.value.status == 422


def test_a_path_that_is_masked_in_parts_only_is_refused():
    graph = Graph()
    grow(graph, grow(graph, None, 1, 1, masked=True), 1, 1)
    with pytest.raises(RequestError, match="turn turn-1 has no sampling mask"):
        samples_of(graph)


SHAPE = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=14
)


@given(SHAPE)
def test_every_token_of_a_kept_path_trains_exactly_once(steps):
    graph = Graph()
    for choice, prompt, output, got in steps:
        parent = graph.nodes[choice % len(graph.nodes)] if graph.nodes and choice else None
        grow(graph, parent, prompt, output, delivered=Delivered.YES if got else Delivered.NO)
    made = assemble(OPENED, graph, [], {}, reward=1.0)
    kept = {node.turn_id: node for leaf in graph.leaves() for node in leaf.path()}
    if made is None:
        assert not kept
        return
    expected = sorted(i for node in kept.values() for i in node.tokens.output.tolist())
    assert sorted(i for sample in made.samples for i in trained(sample)) == expected
    assert sum(int(s.loss_mask.sum()) for s in made.samples) == len(expected)


def branched() -> Graph:
    graph = Graph()
    stem = grow(graph, None, 2, 3)
    grow(graph, stem, 1, 2)
    grow(graph, stem, 1, 4)
    return graph


def test_other_steps_may_choose_and_finish():
    steps = Steps(lambda graph: graph.leaves()[-1:], lambda drafts: [draft.sample for draft in drafts])
    (sample,) = samples_of(branched(), steps=steps)
    assert trained(sample) == [3, 4, 5, 10, 11, 12, 13]


def test_tokens_of_older_weights_may_be_left_out_of_the_loss():
    graph = Graph()
    grow(graph, None, 2, 5, masked=True)
    node = graph.nodes[0]
    node.tokens = replace(node.tokens, spans=((0, 2, 7), (2, 3, 8), (3, 5, 9)))
    grow(graph, node, 1, 2, masked=True)
    (usual,) = samples_of(graph)
    (newest,) = samples_of(graph, steps=Steps.load("", "session_server.selection:newest_only"))
    assert trained(usual) == [3, 4, 5, 6, 7, 9, 10]
    assert trained(newest) == [6, 7, 9, 10]
    assert newest.tokens.tolist() == usual.tokens.tolist()


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (Steps(select=lambda g: [g.nodes[0], g.nodes[0]]), "gave one leaf twice"),
        (Steps(select=lambda g: ["turn-0"]), "no turn of the session"),
        (Steps(select=lambda g: 1 / 0), "failed: ZeroDivisionError"),
        (Steps(finish=lambda d: [x.sample for x in d]), "trains token 2 of sample sample-r.1 a second time"),
        (Steps(finish=lambda d: [d[0].sample] * 2), "gave the sample sample-r.0 twice"),
        (Steps(finish=lambda d: [replace(d[0].sample, reward=9.0)]), "changed tokens, reward or identity"),
        (Steps(finish=lambda d: [replace(d[0].sample, tokens=d[0].sample.tokens + 1)]), "changed tokens"),
        (
            Steps(finish=lambda d: [replace(d[0].sample, loss_mask=np.ones(8, np.uint8))]),
            "trains token 0 of sample sample-r.0, which was not sampled",
        ),
    ],
)
def test_a_step_that_breaks_a_rule_is_a_422_that_names_it(steps, words):
    with pytest.raises(RequestError, match=words) as error:
        samples_of(branched(), steps=steps)
    assert error.value.status == 422
    assert "test_session_selection:" in error.value.message


def test_steps_are_named_by_entry_points():
    module = types.ModuleType("own_steps")
    module.finish = shared_once
    sys.modules["own_steps"] = module
    try:
        assert Steps.load("", "own_steps:finish") == Steps()
        with pytest.raises(ConfigError, match="session_server.select_leaves = 'own_steps:nothing' names no function"):
            Steps.load("own_steps:nothing", "")
    finally:
        del sys.modules["own_steps"]


def test_one_reward_per_rollout_the_whole_before_the_mean_of_its_turns():
    def reward(value: float, turn: int) -> RewardRecorded:
        return RewardRecorded(session_id="s", reward_key=f"{turn}-{value}", value=value, turn=turn)

    assert total_reward([]) is None
    assert total_reward([reward(1.0, 0), reward(0.0, 1)]) == 0.5
    assert total_reward([reward(1.0, 0), reward(0.25, -1), reward(0.75, -1)]) == 0.75
