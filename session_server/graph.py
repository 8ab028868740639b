"""The message graph of one session: pure data, no I/O, no clock.

A node is one committed turn and stores only what it adds: the appended messages and its answer, the prompt tokens
before its output, its output. Invariants: a node never changes and is never removed (only its delivery state moves
forward); its tokens follow its parent's without a gap; `order` is the order of commits and the only ordering key; a
request attaches to the deepest node whose whole path of messages is a prefix of the request's, ties to the latest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from segue.events.turn import Span
from segue.wire.ids import EncodedIds
from segue.wire.mask import SamplingMask
from segue.wire.rows import RowLedger
from session_server.messages import ChatMessage, Message


class Delivered(Enum):
    """Whether the answer was written to its client in full."""

    NO = "no"
    UNKNOWN = "unknown"
    """Committed before this process started."""
    YES = "yes"


@dataclass(frozen=True, slots=True, eq=False)
class TurnTokens:
    """What a turn adds. prompt: int32[p] before its output; output: int32[n]; logprobs: float32[n];
    spans: weight versions over the output; ids beyond the vocabulary never get here. mask: what each output token was
    chosen from, None unless the run cuts its sampling; then the log-probs are renormalised over it."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[Span, ...]
    mask: SamplingMask | None = None


@dataclass(slots=True, eq=False)
class Node:
    turn_id: str
    parent: Node | None
    context: str
    """Digest of what shapes the prompt beside the messages (tools, or a token-level turn); equal along a path."""
    messages: tuple[Message, ...]
    """Appended request messages and then the answer; empty in token-level turns."""
    tokens: TurnTokens
    finish_reason: str
    parts: int
    request_digest: str
    idempotency_key: str
    created_s: int
    rows: RowLedger | None = None
    """Route rows of the whole path down to here, shared with the parent's."""
    delivered: Delivered = Delivered.NO
    children: list[Node] = field(default_factory=list)
    encoded: EncodedIds | None = None
    """Ids of the path down to here, if a turn went on from here last; see `encoded_ids`."""
    order: int = -1
    total_tokens: int = 0
    total_messages: int = 0
    depth: int = 0
    last_id: int = -1

    def __post_init__(self) -> None:
        before = self.parent
        self.total_tokens = len(self.tokens.prompt) + len(self.tokens.output) + (before.total_tokens if before else 0)
        self.total_messages = len(self.messages) + (before.total_messages if before else 0)
        self.depth = before.depth + 1 if before else 0
        for ids in (self.tokens.output, self.tokens.prompt):
            if len(ids):
                self.last_id = int(ids[-1])
                break
        else:
            self.last_id = before.last_id if before else -1

    @property
    def prompt_tokens(self) -> int:
        return self.total_tokens - len(self.tokens.output)

    def path(self) -> list[Node]:
        """Root first, this node last."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        found.reverse()
        return found

    def path_ids(self) -> NDArray[np.int32]:
        """int32[total_tokens]"""
        return np.concatenate([piece for node in self.path() for piece in (node.tokens.prompt, node.tokens.output)])

    def encoded_ids(self) -> EncodedIds:
        """The ids of `path_ids`. Kept at the last node that was asked, which takes them over from its ancestor: once a
        path, so that they grow with its tokens and not with its turns."""
        missing: list[Node] = []
        node: Node | None = self
        while node is not None and node.encoded is None:
            missing.append(node)
            node = node.parent
        known = EncodedIds() if node is None or node.encoded is None else node.encoded
        if not missing:
            return known
        if node is not None:
            node.encoded = None
        pieces = [piece for found in reversed(missing) for piece in (found.tokens.prompt, found.tokens.output)]
        self.encoded = known.joined(pieces)
        return self.encoded


@dataclass(slots=True, eq=False)
class Graph:
    roots: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """In commit order; a node's `order` is its index here."""
    by_id: dict[str, Node] = field(default_factory=dict)
    by_digest: dict[str, list[Node]] = field(default_factory=dict)
    by_key: dict[str, Node] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        """Commit a node; its `order` is set here. Called in the order of the log."""
        if node.turn_id in self.by_id:
            raise ValueError(f"node {node.turn_id} is in the graph already")
        node.order = len(self.nodes)
        (self.roots if node.parent is None else node.parent.children).append(node)
        if node.parent is not None:
            node.parent.delivered = Delivered.YES  # its answer came back in a request
        self.nodes.append(node)
        self.by_id[node.turn_id] = node
        self.by_digest.setdefault(node.request_digest, []).append(node)
        if node.idempotency_key:
            self.by_key[node.idempotency_key] = node

    def attach(self, messages: Sequence[ChatMessage], context: str) -> Node | None:
        """The node with the longest path of messages that is a prefix of `messages`; None for a new root."""
        best: Node | None = None
        reached = [node for node in self.roots if node.context == context and _follows(node, messages, 0)]
        while reached:
            below: list[Node] = []
            for node in reached:
                if best is None or (node.total_messages, node.order) > (best.total_messages, best.order):
                    best = node
                for child in node.children:
                    if _follows(child, messages, node.total_messages):
                        below.append(child)
            reached = below
        return best

    def attach_tokens(self, ids: NDArray[np.int32], context: str) -> Node | None:
        """The deepest node of `context` whose token path is a proper prefix of `ids`; None for a new root."""
        best: Node | None = None
        reached = [node for node in self.roots if node.context == context and _tokens_follow(node, ids, 0)]
        while reached:
            best = max([*reached, *([best] if best else [])], key=lambda node: (node.total_tokens, node.order))
            reached = [c for node in reached for c in node.children if _tokens_follow(c, ids, node.total_tokens)]
        return best

    def snapshot(self) -> Graph:
        """A graph that later commits and deliveries do not reach; its nodes share tokens, messages and rows."""
        copy = Graph()
        for node in self.nodes:
            parent = copy.by_id[node.parent.turn_id] if node.parent is not None else None
            copy.add(replace(node, parent=parent, children=[]))
        return copy

    def leaves(self) -> list[Node]:
        """Leaves that train, in commit order: all but those never delivered, and those passed over for a sibling.

        A leaf counts as passed over if a sibling was extended and it was not; roots are siblings if they answer the
        same request. A node whose only children were never delivered is a leaf itself.
        """
        dropped: set[str] = set()
        kept: list[Node] = []
        for node in reversed(self.nodes):  # children come before their parents
            if any(child.turn_id not in dropped for child in node.children):
                continue
            if node.delivered is Delivered.NO:
                dropped.add(node.turn_id)
            elif not self._passed_over(node):
                kept.append(node)
        kept.reverse()
        return kept

    def _passed_over(self, node: Node) -> bool:
        if node.parent is not None:
            return any(other is not node and other.children for other in node.parent.children)
        return any(
            other is not node and other.children and other.context == node.context and _same_request(other, node)
            for other in self.roots
        )


def _follows(node: Node, messages: Sequence[ChatMessage], start: int) -> bool:
    if start + len(node.messages) > len(messages):
        return False
    for own in node.messages:
        other = messages[start]
        if other != own.raw and not own.same(other):  # the first saves a call for each message of a long history
            return False
        start += 1
    return True


def _tokens_follow(node: Node, ids: NDArray[np.int32], start: int) -> bool:
    middle, end = start + len(node.tokens.prompt), node.total_tokens
    if end >= len(ids):
        return False
    return bool(
        np.array_equal(ids[start:middle], node.tokens.prompt) and np.array_equal(ids[middle:end], node.tokens.output)
    )


def _same_request(a: Node, b: Node) -> bool:
    """Two answers to one request: equal in everything but the answer."""
    if len(a.messages) != len(b.messages):
        return False
    if not a.messages:
        return np.array_equal(a.tokens.prompt, b.tokens.prompt)
    return all(x.form == y.form for x, y in zip(a.messages[:-1], b.messages[:-1], strict=True))
