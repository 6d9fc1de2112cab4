"""Middle models of a chain: each verifies what the model before it drafted and drafts for the next.

A middle model is one whole model in a worker of its own, driven like a pipeline of one stage: it
gets rows, answers with its own choices, and drops what a prune makes dead. Its *text* is the
path from the root to its tip; a row of it is computed at most once. It runs at its own speed, so
it may lag behind what the target has committed: each link keeps its own context, and catches up
before it goes on. Source: PipeSpec (``algorithms.md`` 5.1). Rollbacks need no message of their
own: rows of a branch that was given up are masked out by the tree, and go with the next prune.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.job.outbox import Outbox
from flowspec.core.job.strategy import Strategy, View
from flowspec.core.protocol.messages import Answer, Prune, middle_node
from flowspec.core.tree.tree import Node, Tree

#: What a middle model's own choice is worth as a draft (log): it is the best guess there is.
CHOICE_VALUE = -0.1


@dataclass(slots=True)
class _ChainedModel:
    """One middle model. ``behind``: committed nodes since its last prune, the first of them its
    root.

    ``choices``: its own token after every row it has computed and still holds.
    """

    tip: int
    offset: int
    behind: list[Node] = field(default_factory=list)
    choices: dict[int, int] = field(default_factory=dict)
    busy: bool = True  # with the prompt, at first


class ModelChain:
    """A job's middle models 1..``middles``, the smallest first."""

    def __init__(
        self,
        job: str,
        epoch: int,
        prompt: Sequence[int],
        middles: int,
        tree_rows: int,
        out: Outbox,
    ) -> None:
        self._job = job
        self._epoch = epoch
        self._tree_rows = tree_rows
        self._out = out
        first = len(prompt) - 1
        self._links = {model: _ChainedModel(first, first) for model in range(1, middles + 1)}
        self._nodes = {middle_node(model): model for model in self._links}

    @property
    def tips(self) -> dict[int, int]:
        """Where every middle model's text ends."""
        return {model: link.tip for model, link in self._links.items()}

    @property
    def nodes(self) -> tuple[str, ...]:
        """The middle models' workers."""
        return tuple(self._nodes)

    def model_of(self, sender: str) -> int | None:
        """Which middle model ``sender`` is; None: none of them."""
        return self._nodes.get(sender)

    def commit(self, accepted: Sequence[Node], tree: Tree) -> None:
        """The target has accepted nodes; the tree has its new root.

        A model whose text the target left adopts the target's: fast-forward and rollback are the
        same.
        """
        for link in self._links.values():
            link.behind += accepted
            self._extend(link, tree)

    def land(self, model: int, result: Answer, view: View) -> None:
        """Take in a middle model's choices: its text goes on where they agree with what it was
        given, and ends with its own word. A lower model that said otherwise adopts it.
        """
        link = self._links[model]
        tree = view.tree
        link.choices.update(zip(result.ids, result.tokens, strict=True))
        link.busy = False
        if not view.planted:  # its own first token after the prompt; the target's comes first
            return
        self._extend(link, tree)
        for lower in range(1, model):
            below = self._links[lower]
            if link.tip not in tree.path(below.tip):
                below.tip = link.tip
                self._extend(below, tree)

    @staticmethod
    def _extend(link: _ChainedModel, tree: Tree) -> None:
        if link.tip not in tree:
            link.tip = tree.root
        while link.tip in link.choices:
            link.tip = tree.add(link.tip, link.choices[link.tip], CHOICE_VALUE)

    def feed(self, strategy: Strategy, view: View) -> None:
        """Give every free model what its strategy wants verified; a model whose turn it is not
        waits.
        """
        for model, link in self._links.items():
            if not link.busy and view.planted:
                end = strategy.feed(view, model, link.tip)
                if end is not None:
                    self._send(model, link, view.tree, end)

    def _send(self, model: int, link: _ChainedModel, tree: Tree, end: int) -> None:
        """A prune for what it holds of the committed text, then what it lacks up to ``end``, or as
        much of that as it has room for: one far behind catches up in several turns.
        """
        rows = [*link.behind, *(tree[node] for node in tree.path(end))]
        fresh = [row for row in rows if row.id not in link.choices]
        if not fresh:
            return
        done = next(
            (at for at, row in enumerate(link.behind) if row.id not in link.choices),
            len(link.behind),
        )
        if done:
            accepted = tuple(row.id for row in rows[:done])
            root = rows[done].id
            below = {row.id for row in rows[done:]} | tree.nodes.keys()
            link.choices = {node: token for node, token in link.choices.items() if node in below}
            prune = Prune(
                self._job, self._epoch, link.offset, accepted, root, tuple(sorted(link.choices))
            )
            self._out.send(middle_node(model), prune)
            link.offset += done
            link.behind = link.behind[done:]
        room = self._tree_rows - len(link.choices)
        if room > 0:
            link.busy = True
            self._out.send(middle_node(model), self._out.segment(1, fresh[:room]))
