"""Seam: a PipeSpec chain of three models, in which the middle one both verifies and drafts.

A sketch, not the strategy. It proves that the existing messages, rows and simulation allow drafts
to arrive unrequested at any time, a model's verdict to be one message and a commit another, and a
model to count its own rollbacks (docs/algorithms.md#model-chain).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.machine import (
    Allocate,
    Commit,
    Compute,
    Done,
    Input,
    OpenJob,
    Output,
    Poll,
    Received,
    Send,
)
from flowspec.core.protocol.messages import (
    Answer,
    Envelope,
    Message,
    Open,
    Returns,
    Segment,
    Submit,
)
from flowspec.core.protocol.sequence import SeqReader, SeqWriter
from flowspec.core.protocol.work import Choice, Part, Pass, PassDone, Pruned
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.model.base import RowArray
from flowspec.rehearse.simulator import Costs, Simulation
from tests.addresses import D0, M1, S1
from tests.toy import PROMPT, TARGET
from tests.toy_model import ToyLayers

RUN = RunKey("job", 1)
COUNT = 40
#: The models, the smallest first.
MODELS = (D0, M1, S1)
#: Ids ascend within one model's drafts: the number of rollbacks in the high part, the absolute
#: position in the low one.
SPAN = 1 << 20


class Imitation:
    """Runs the whole toy target and repeats its choice with frequency ``agreement``."""

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
    """Model ``index`` of the chain: verifies the previous model's drafts, drafts for the next.

    The first one receives the job and opens the others.
    """

    deadline = None
    continuing = False

    def __init__(self, index: int) -> None:
        self.index = index
        self.address = MODELS[index]
        self.last = self.address == MODELS[-1]
        self.output: list[int] = []
        self.drafted: dict[int, int] = {}  # position -> token, of the model before
        self.rollbacks = 0  # of this model's drafts
        self.drafts_round = 0  # of the previous model's drafts
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
        """The first model always drafts, up to a window; the others never wait for drafts."""
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
        assert self.seen.accept(envelope.sender, envelope.seq)
        if isinstance(message, Submit):
            opened = Open(RUN, len(PROMPT), 4000, Sampling())
            others = [self.send(model, opened) for model in MODELS[1:]]
            return [OpenJob(RUN, PROMPT, "sketch"), self.allocate(), *others]
        if isinstance(message, Open):
            return [self.allocate()]
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

    def allocate(self) -> Allocate:
        return Allocate(RUN, 4000, Sampling(), Returns())

    def roll_back(self, position: int, token: int) -> list[Output]:
        """The next model's verdict: ``token`` belongs at ``position``.

        Adopt it; notify the previous model if it differs.
        """
        at = position - len(PROMPT)
        if at < len(self.output) and self.output[at] == token:
            return []
        if at > len(self.output):
            return []  # it lags, and is corrected when it reaches the position
        self.output = [*self.output[:at], token]
        self.cached = min(self.cached, position)
        self.rolled_back_while_working = self.working
        self.rollbacks += 1
        return [*self.publish(at), *self.correct(position, token)]

    def correct(self, position: int, token: int) -> list[Output]:
        self.drafted.pop(position, None)
        return self.tell(
            -1, Answer(RUN, self.rollbacks, (self.rollbacks * SPAN + position,), (token,))
        )

    def tell(self, step: int, message: Message) -> list[Output]:
        """Send to the previous (-1) or next (1) model of the chain, if there is one."""
        index = self.index + step
        if index < 0 or (step > 0 and self.last):
            return []
        return [self.send(MODELS[index], message)]

    def send(self, to: Address, message: Message) -> Send:
        return Send(to, Envelope(self.address, self.writer.next(to), message))

    def publish(self, start: int) -> list[Output]:
        """Send own new tokens from output index ``start`` on to the next model, unrequested."""
        tokens = tuple(self.output[start:])
        positions = tuple(range(len(PROMPT) + start, len(PROMPT) + len(self.output)))
        ids = tuple(self.rollbacks * SPAN + position for position in positions)
        parents = tuple(node - 1 for node in ids)
        return self.tell(1, Segment(RUN, 0, self.rollbacks, ids, parents, positions, tokens))

    def start(self) -> list[Output]:
        """Start a pass over uncached rows, then over drafts that continue its own text."""
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
        parents = tuple(position - 1 for position in positions)
        part = Part(
            run=RUN,
            segment=0,
            ids=positions,
            parents=parents,
            positions=positions,
            tokens=tuple(text[self.cached :]),
            offsets=(),
            # A rollback may reach any row, so no row becomes context permanently.
            pruned=Pruned(accepted=(), live=tuple(range(self.cached))),
            answers=tuple(range(len(positions) - rows, len(positions))),
        )
        self.cached = len(self.sequence)
        return [Compute(Pass((part,)))]

    def verified(self, choices: Sequence[int]) -> list[Output]:
        self.working = False
        if self.rolled_back_while_working:
            self.cached = min(self.cached, len(self.sequence) - 1)
            return []  # computed on discarded text
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
        finish = "length" if done else ""
        context = len(PROMPT) - 1 + start
        return Commit(RUN, context, start, len(tokens), tokens, finish, (), ())


def run(agreement: float) -> tuple[Simulation, list[ChainModel]]:
    models = [ChainModel(index) for index in range(3)]
    seconds = {D0: 1.0, M1: 4.0, S1: 16.0}
    rates = [agreement, agreement, 1.0]
    nodes = {model.address: (model, Imitation(rates[model.index])) for model in models}
    simulation = Simulation(nodes, Costs(lambda node, work: seconds[node]))
    simulation.submit(RUN.job, JobSpec(prompt_ids=PROMPT, max_new_tokens=COUNT))
    simulation.run()
    return simulation, models


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.8, 1.0])
def test_only_the_last_models_text_is_committed(agreement: float) -> None:
    simulation, models = run(agreement)
    assert tuple(simulation.jobs[RUN.job].tokens) == TARGET.decode(PROMPT, COUNT, Sampling())
    assert models[1].unasked + models[2].unasked > 0, "no draft arrived while a model was computing"


def test_the_chain_is_faster_than_the_last_model_alone() -> None:
    simulation, _ = run(0.8)
    alone = 16.0 * len(simulation.jobs[RUN.job].tokens)
    assert simulation.jobs[RUN.job].committed_at[-1][0] < 0.7 * alone


def test_rollbacks_cascade_through_the_middle_model() -> None:
    _, models = run(0.5)
    assert models[1].rollbacks > 0
    assert models[0].rollbacks >= models[1].rollbacks
