"""Middle models of a chain: each verifies what the model before it drafted and drafts for the next.

A middle model is one whole model in a worker of its own, driven like a pipeline of one stage: it
gets rows, answers with its own choices, and drops what a prune makes dead. Its *text* is the path
from the root to its tip; each of its rows is computed at most once. It runs at its own speed and
may lag behind the target: each model has its own context, and catches up before it continues.
Rollbacks need no message: the tree masks the rows of an abandoned branch out, and the next prune
removes them. Source: PipeSpec (docs/algorithms.md#model-chain).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.protocol.addresses import Address, Role, middle_address
from flowspec.core.protocol.messages import Answer, Prune
from flowspec.core.run.key import RunKey
from flowspec.core.session.outbox import Outbox
from flowspec.core.session.strategy import Strategy, View
from flowspec.core.tree.tree import Node, Tree

#: Value (log) of a middle model's own choice as a draft: no drafter's candidate is more reliable.
CHOICE_VALUE = -0.1


@dataclass(slots=True)
class _ChainedModel:
    """One middle model.

    ``tip``: the last node of its text. ``context``: its context length. ``behind``: nodes committed
    since its last prune, the first of them its root. ``choices``: its own token after every row
    that it has computed and not dropped.
    """

    tip: int
    context: int
    behind: list[Node] = field(default_factory=list)
    choices: dict[int, int] = field(default_factory=dict)
    busy: bool = True  # at first with the prompt


class ModelChain:
    """A run's middle models 1..``middles``, the smallest first; ``prefix``: tokens of the text."""

    def __init__(
        self, run: RunKey, prefix: int, middles: int, tree_rows: int, outbox: Outbox
    ) -> None:
        self._run = run
        self._tree_rows = tree_rows
        self._outbox = outbox
        first = prefix - 1
        self._models = {model: _ChainedModel(first, first) for model in range(1, middles + 1)}

    @property
    def tips(self) -> dict[int, int]:
        """The last node of every middle model's text."""
        return {model: chained.tip for model, chained in self._models.items()}

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The middle models' workers."""
        return tuple(map(middle_address, self._models))

    def includes(self, sender: Address) -> bool:
        """Whether ``sender`` is one of the chain's models."""
        return sender.role is Role.MIDDLE and sender.number in self._models

    def commit(self, accepted: Sequence[Node], tree: Tree) -> None:
        """The target has accepted nodes; the tree has its new root.

        A model with another text adopts the target's, whether it was ahead or behind.
        """
        for chained in self._models.values():
            chained.behind += accepted
            self._extend(chained, tree)

    def land(self, model: int, answer: Answer, view: View) -> None:
        """Take a middle model's choices.

        Its text continues as far as they agree with the draft it was given, and ends with its own
        choice. A lower model with another text adopts it.
        """
        chained = self._models[model]
        tree = view.tree
        chained.choices.update(zip(answer.ids, answer.tokens, strict=True))
        chained.busy = False
        if not view.decoding:  # the token after the prompt is the target's to choose
            return
        self._extend(chained, tree)
        for lower in range(1, model):
            below = self._models[lower]
            if chained.tip not in tree.path(below.tip):
                below.tip = chained.tip
                self._extend(below, tree)

    @staticmethod
    def _extend(chained: _ChainedModel, tree: Tree) -> None:
        if chained.tip not in tree:
            chained.tip = tree.root
        while chained.tip in chained.choices:
            choice = chained.choices[chained.tip]
            chained.tip = tree.add(chained.tip, choice, CHOICE_VALUE)

    def feed(self, strategy: Strategy, view: View) -> None:
        """Send every free model the rows that the strategy wants verified next, if any."""
        for model, chained in self._models.items():
            if not chained.busy and view.decoding:
                end = strategy.next_for_middle(view, model, chained.tip)
                if end is not None:
                    self._send(model, chained, view.tree, end)

    def _send(self, model: int, chained: _ChainedModel, tree: Tree, end: int) -> None:
        """Send a prune for the committed rows, then the rows that the model lacks up to ``end``.

        It gets as many rows as it has room for; a model far behind catches up in several turns.
        """
        rows = [*chained.behind, *(tree[node] for node in tree.path(end))]
        fresh = [row for row in rows if row.id not in chained.choices]
        if not fresh:
            return
        self._prune(model, chained, rows, tree)
        room = self._tree_rows - len(chained.choices)
        if room > 0:
            chained.busy = True
            segment = self._outbox.segment(1, fresh[:room])
            self._outbox.send(middle_address(model), segment)

    def _prune(self, model: int, chained: _ChainedModel, rows: Sequence[Node], tree: Tree) -> None:
        """Send a prune that makes the committed rows which the model has computed its context."""
        computed = 0
        for row in chained.behind:
            if row.id not in chained.choices:
                break
            computed += 1
        if not computed:
            return
        accepted = tuple(row.id for row in rows[:computed])
        below = {row.id for row in rows[computed:]} | tree.nodes.keys()
        chained.choices = {node: token for node, token in chained.choices.items() if node in below}
        retained = tuple(sorted(chained.choices))
        prune = Prune(self._run, chained.context, accepted, rows[computed].id, retained)
        self._outbox.send(middle_address(model), prune)
        chained.context += computed
        chained.behind = chained.behind[computed:]
