"""A radix tree of token sequences: which of them begin as a given one does, and how far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(slots=True)
class _Branch(Generic[K]):
    """The tokens between the node above and this one, and the keys whose sequences end here."""

    tokens: tuple[int, ...] = ()
    above: _Branch[K] | None = None
    below: dict[int, _Branch[K]] = field(default_factory=dict)  # by first token
    keys: list[K] = field(default_factory=list)

    def within(self) -> Iterator[K]:
        """The keys of all sequences that end here or below."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield from node.keys
            waiting += node.below.values()


class PrefixTree(Generic[K]):
    """Sequences by key; what several begin with is stored once. An empty one shares nothing."""

    def __init__(self) -> None:
        self._root: _Branch[K] = _Branch()
        self._ends: dict[K, _Branch[K]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: K) -> bool:
        return key in self._ends

    def insert(self, key: K, tokens: Sequence[int]) -> None:
        """Add a sequence; one that the key had before is replaced."""
        self.remove(key)
        node, length, inside = self._descend(tokens)
        if inside < len(node.tokens):
            node = _split(node, inside)
        left = tuple(tokens[length:])
        if left:
            node.below[left[0]] = node = _Branch(left, node)
        node.keys.append(key)
        self._ends[key] = node

    def remove(self, key: K) -> None:
        """Remove the sequence of ``key``, if it has one, and the nodes that only it needed."""
        node = self._ends.pop(key, None)
        if node is None:
            return
        node.keys.remove(key)
        while (above := node.above) is not None and not node.keys and not node.below:
            del above.below[node.tokens[0]]
            node = above
        if node.above is not None and not node.keys and len(node.below) == 1:
            _join(node)

    def shared(self, tokens: Sequence[int]) -> dict[K, int]:
        """By key, how many first tokens its sequence shares with ``tokens``; only those above 0."""
        node, length, inside = self._descend(tokens)
        found: dict[K, int] = {}
        passed: _Branch[K] | None = None
        while length > 0:
            # A sequence that was collected further down shares more.
            others = [child for child in node.below.values() if child is not passed]
            for key in (*node.keys, *(key for child in others for key in child.within())):
                found[key] = length
            length -= inside
            passed = node
            assert node.above is not None  # the root has no tokens
            node = node.above
            inside = len(node.tokens)
        return found

    def _descend(self, tokens: Sequence[int]) -> tuple[_Branch[K], int, int]:
        """Follow ``tokens`` from the root as far as they go.

        Returns the last node, the number of tokens followed, and of its own tokens among them.
        """
        node = self._root
        length = 0
        inside = 0
        while inside == len(node.tokens) and length < len(tokens):
            child = node.below.get(tokens[length])
            if child is None:
                break
            node = child
            inside = _common(child.tokens, tokens[length : length + len(child.tokens)])
            length += inside
        return node, length, inside


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    end = min(len(first), len(second))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), end)


def _split(node: _Branch[K], at: int) -> _Branch[K]:
    """A new node above ``node``, with the first ``at`` of its tokens."""
    above = node.above
    assert above is not None
    upper: _Branch[K] = _Branch(node.tokens[:at], above, {node.tokens[at]: node})
    above.below[upper.tokens[0]] = upper
    node.tokens = node.tokens[at:]
    node.above = upper
    return upper


def _join(node: _Branch[K]) -> None:
    """Give the tokens of ``node``, at which nothing ends, to the only node below it."""
    (child,) = node.below.values()
    above = node.above
    assert above is not None
    child.tokens = node.tokens + child.tokens
    child.above = above
    above.below[child.tokens[0]] = child
