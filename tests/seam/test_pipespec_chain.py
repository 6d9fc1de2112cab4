"""Seam: a PipeSpec chain of three models, in which the middle one both verifies and drafts.

A sketch, not the strategy. It proves that drafted nodes may arrive unasked at any time, that a
link's verdict is one message and a commit another, and that a link counts its own rollbacks,
with the messages, slots and simulation as they are (``algorithms.md`` 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowspec.core.protocol.machine import (
    Allocate,
    Choice,
    Commit,
    Done,
    Input,
    Output,
    Part,
    Pass,
    PassDone,
    Poll,
    Received,
    Run,
    Send,
)
from flowspec.core.protocol.messages import Answer, Envelope, Message, Open, Returns, Segment
from flowspec.core.protocol.sequence import SeqReader, SeqWriter
from flowspec.core.run.sampling import Sampling
from flowspec.core.tree.slots import Moves
from flowspec.drivers.sim import Costs, Simulation
from flowspec.model.base import RowArray
from flowspec.model.toy import ToyLayers
from tests.toy import PROMPT, TARGET

JOB = "job"
COUNT = 40
#: Ids grow within a link: rollbacks so far in the high part, absolute position in the low one.
SPAN = 1 << 20


class Imitation:
    """Runs the toy target whole and repeats its choice in ``agreement`` of the cases."""

    def __init__(self, agreement: float) -> None:
        self.layers = ToyLayers(TARGET, 0, TARGET.layers)
        self.allocate = self.layers.allocate
        self.release = self.layers.release
        self.agreement = agreement

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        states = self.layers.forward(work.parts[0], None)
        right = self.layers.choose(work.parts[0], states).tokens
        rows = work.parts[0].answers
        tokens = tuple(
            token
            if int(states[row]) % 1000 < self.agreement * 1000
            else (token + 1) % TARGET.vocabulary
            for row, token in zip(rows, right, strict=True)
        )
        return PassDone((Choice(tokens),)), [states]


class ChainModel:
    """Model ``index`` of the chain: verifies what the model before it drafts, drafts for the one
    after.
    """

    deadline = None
    continuing = False

    def __init__(self, index: int, last: int) -> None:
        self.index = index
        self.last = index == last
        self.output: list[int] = []
        self.drafted: dict[int, int] = {}  # position -> token, of the model before
        self.rollbacks = 0  # of what this model drafts
        self.drafts_round = 0  # of what it is given
        self.cached = 0  # rows of prompt + output the model holds
        self.seen = SeqReader()
        self.writer = SeqWriter()
        self.asked: tuple[int, ...] = ()
        self.working = False
        self.stopped = False
        self.unasked = 0  # drafts that arrived while a pass was running
        self.rolled_back_while_working = False

    @property
    def sequence(self) -> list[int]:
        return [*PROMPT, *self.output]

    @property
    def runnable(self) -> bool:
        """The first model always drafts on, up to a window; the others never wait for drafts."""
        ahead = len(self.output) < COUNT + 8
        return not self.working and not self.stopped and ahead

    def step(self, event: Input, now: float) -> Sequence[Output]:
        match event:
            case Received(envelopes):
                return [output for envelope in envelopes for output in self.receive(envelope)]
            case Poll():
                return self.start()
            case Done(result) if isinstance(result, PassDone):
                return self.verified(result.choices[0].tokens)
        raise AssertionError(event)

    def receive(self, envelope: Envelope) -> list[Output]:
        message = envelope.message
        if isinstance(message, Open):
            return [Allocate(JOB, 1, 4000, Sampling(), Returns())]
        assert self.seen.accept(envelope.sender, envelope.seq)
        if isinstance(message, Segment):
            self.unasked += self.working
            if message.round > self.drafts_round:
                self.drafted.clear()
                self.drafts_round = message.round
            if message.round == self.drafts_round:
                self.drafted.update(zip(message.positions, message.tokens, strict=True))
            return []
        assert isinstance(message, Answer)
        return self.roll_back(message.ids[0] % SPAN, message.tokens[0])

    def roll_back(self, position: int, token: int) -> list[Output]:
        """The link's verdict: ``token`` belongs at ``position``. Adopt it; tell the model before,
        if it differs.
        """
        at = position - len(PROMPT)
        if at < len(self.output) and self.output[at] == token:
            return []
        if at > len(self.output):
            return []  # it lags: it will be corrected when it gets there
        self.output = [*self.output[:at], token]
        self.cached = min(self.cached, position)
        self.rolled_back_while_working = self.working
        self.rollbacks += 1
        return [*self.publish(at), *self.correct(position, token)]

    def correct(self, position: int, token: int) -> list[Output]:
        self.drafted.pop(position, None)
        return self.tell(
            -1, Answer(JOB, 1, self.rollbacks, (self.rollbacks * SPAN + position,), (token,))
        )

    def tell(self, step: int, message: Message) -> list[Output]:
        """Send to the model before (-1) or after (1) in the chain, if there is one."""
        index = self.index + step
        if index < 0 or (step > 0 and self.last):
            return []
        return [
            Send(f"m{index}", Envelope(f"m{self.index}", self.writer.next(f"m{index}"), message))
        ]

    def publish(self, start: int) -> list[Output]:
        """New own tokens from output index ``start`` on go to the next model, unasked."""
        tokens = tuple(self.output[start:])
        positions = tuple(range(len(PROMPT) + start, len(PROMPT) + len(self.output)))
        ids = tuple(self.rollbacks * SPAN + position for position in positions)
        parents = tuple(node - 1 for node in ids)
        return self.tell(1, Segment(JOB, 1, 0, self.rollbacks, ids, parents, positions, tokens))

    def start(self) -> list[Output]:
        """One pass: what the model has not cached yet, then the drafts beyond its own text, if they
        agree.
        """
        self.working = True
        self.rolled_back_while_working = False
        text = self.sequence
        tail = len(text)
        while self.index and tail in self.drafted and tail - len(text) < 8:
            text = [*text, self.drafted[tail]]
            tail += 1
        positions = tuple(range(self.cached, tail))
        self.asked = tuple(text[len(self.sequence) :])
        rows = len(self.asked) + 1
        parents = tuple(range(-1, len(positions) - 1))
        part = Part(
            JOB,
            1,
            0,
            positions,
            positions,
            tuple(text[self.cached :]),
            (),
            self.cached,
            self.cached,
            Moves(self.cached, ()),
            parents,
            tuple(range(len(positions) - rows, len(positions))),
        )
        self.cached = len(self.sequence)
        return [Run(Pass((part,)))]

    def verified(self, choices: Sequence[int]) -> list[Output]:
        self.working = False
        if self.rolled_back_while_working:
            self.cached = min(self.cached, len(self.sequence) - 1)
            return []  # computed on text that is gone
        start = len(self.output)
        for token, drafted in zip(choices, (*self.asked, None), strict=True):
            self.output.append(token)
            if token in TARGET.eos and self.last:
                break
            if token != drafted:
                break
        self.cached = len(self.sequence) - 1
        self.output = self.output[:COUNT] if self.last else self.output
        outputs = self.publish(start)
        wrong = len(self.output) - start <= len(self.asked) and self.asked
        if wrong or (self.index and not self.asked):
            outputs += self.correct(len(self.sequence) - 1, self.output[-1])
        if self.last:
            outputs.append(self.commit(start))
        return outputs

    def commit(self, start: int) -> Commit:
        tokens = tuple(self.output[start:])
        done = len(self.output) >= COUNT or bool(TARGET.eos & set(tokens))
        self.stopped = done
        return Commit(JOB, 1, start, start, len(tokens), tokens, "length" if done else "", (), ())


def run(agreement: float) -> tuple[Simulation, list[ChainModel]]:
    models = [ChainModel(index, 2) for index in range(3)]
    seconds = {"m0": 1.0, "m1": 4.0, "m2": 16.0}
    rates = [agreement, agreement, 1.0]
    nodes = {f"m{at}": (model, Imitation(rates[at])) for at, model in enumerate(models)}
    simulation = Simulation(nodes, Costs(lambda node, work: seconds[node]))  # type: ignore[arg-type]
    for name in nodes:
        simulation.post(name, Envelope("scheduler", 1, Open(JOB, 1, len(PROMPT), 4000, Sampling())))
    simulation.run()
    return simulation, models


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.8, 1.0])
def test_only_the_last_models_text_is_committed(agreement: float) -> None:
    simulation, models = run(agreement)
    assert tuple(simulation.jobs[JOB].tokens) == TARGET.decode(PROMPT, COUNT, Sampling())
    assert models[1].unasked + models[2].unasked > 0, (
        "no draft ever arrived while a model was at work"
    )


def test_the_chain_is_faster_than_the_last_model_alone() -> None:
    simulation, _ = run(0.8)
    alone = 16.0 * len(simulation.jobs[JOB].tokens)
    assert simulation.jobs[JOB].committed_at[-1][0] < 0.7 * alone


def test_rollbacks_cascade_through_the_middle_model() -> None:
    _, models = run(0.5)
    assert models[1].rollbacks > 0
    assert models[0].rollbacks >= models[1].rollbacks
