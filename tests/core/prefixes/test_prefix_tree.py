"""The radix tree of token sequences, against a list of them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowspec.core.prefixes.prefix_tree import PrefixTree

#: Two tokens only, so that sequences share beginnings.
SEQUENCES = st.lists(st.integers(0, 1), max_size=10)


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )


class Operations(RuleBasedStateMachine):
    """The tree and a plain dictionary take the same operations."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: PrefixTree[int] = PrefixTree()
        self.plain: dict[int, list[int]] = {}

    @rule(key=st.integers(0, 8), tokens=SEQUENCES)
    def insert(self, key: int, tokens: list[int]) -> None:
        self.tree.insert(key, tokens)
        self.plain[key] = tokens

    @rule(key=st.integers(0, 8))
    def remove(self, key: int) -> None:
        self.tree.remove(key)
        self.plain.pop(key, None)

    @rule(tokens=SEQUENCES)
    def look(self, tokens: list[int]) -> None:
        wanted = {key: shared(known, tokens) for key, known in self.plain.items()}
        assert self.tree.shared(tokens) == {key: count for key, count in wanted.items() if count}

    @invariant()
    def holds_what_it_must_and_no_more(self) -> None:
        assert len(self.tree) == len(self.plain)
        assert all(key in self.tree for key in self.plain)
        waiting = [self.tree._root]
        while waiting:
            node = waiting.pop()
            for first, child in node.below.items():
                assert child.tokens[0] == first
                assert child.above is node
                assert child.keys or len(child.below) > 1  # else it would be one with another
                waiting.append(child)


TestOperations = Operations.TestCase


@given(SEQUENCES, SEQUENCES)
def test_equal_sequences_of_two_keys_end_at_one_node(tokens: list[int], asked: list[int]) -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.insert("a", tokens)
    tree.insert("b", tokens)
    both = tree.shared(asked)
    assert both.get("a") == both.get("b")
    tree.remove("a")
    assert tree.shared(asked).get("b") == both.get("b")
