"""Envelopes that decode, and that no honest worker would send."""

from __future__ import annotations

import random

from flowspec.core.protocol import messages as m
from flowspec.core.protocol.addresses import Address, Role
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling

#: Senders: those of a pipeline with two stages, and others.
SENDERS = (
    *(Address(Role.DRAFT), Address(Role.VERIFY, 1), Address(Role.VERIFY, 2)),
    *(
        Address(Role.SCHEDULER),
        Address(Role.GRAPH),
        Address(Role.MIDDLE, 1),
        Address(Role.VERIFY, 9),
    ),
)
_NUMBERS = (-1, 0, 0, 1, 1, 2, 3, 4, 5, 7, 9, 40, 1 << 20, (1 << 63) - 1)
_FIELDS = (
    ("prompt", "a text"),
    ("prompt_ids", "[5, 6, 7]"),
    ("max_new_tokens", "6"),
    ("strategy", "flowspec"),
    ("strategy", "pipedec"),
    ("strategy", "\x00"),
    ("reuse", "0"),
    ("logprobs", "2"),
    ("record", "1"),
    ("priority", "1e9"),
    ("messages", "[[]]"),
    ("unknown", ""),
)


class Hostile:
    """A seeded source of envelopes about a few jobs, of which there is a new one now and then.

    The numbers of each sender mostly fit.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._jobs = ["1-0", "2-0"]
        self._made = 0
        self._sent: dict[tuple[RunKey, Address], int] = {}

    def envelope(self) -> m.Envelope:
        """The next one; it mostly has the number that its receiver expects."""
        self._made += 1
        if self._made % 20 == 0:
            self._add_job()
        message = self.message()
        sender = self.random.choice((SENDERS[0], *SENDERS))
        key = (message.run, sender)
        if self.random.random() < 0.1:
            return m.Envelope(sender, self.random.choice((0, 1, 5, 1 << 40)), message)
        self._sent[key] = self._sent.get(key, 0) + 1
        return m.Envelope(sender, self._sent[key], message, self.random.choice((0, 0, 1)))

    def sound(self) -> tuple[m.Envelope, m.Envelope]:
        """The beginning of a new job as an honest draft worker sends it."""
        run = RunKey(self._add_job(), 1)
        self._sent[run, SENDERS[0]] = 2
        opened = m.Open(run, 3, 200, Sampling(), generations=(1, 1, 1))
        prompt = m.Segment(run, 0, 0, (0, 1, 2), (-1, 0, 1), (0, 1, 2), (7, 8, 9))
        return m.Envelope(SENDERS[0], 1, opened), m.Envelope(SENDERS[0], 2, prompt)

    def _add_job(self) -> str:
        self._jobs = [*self._jobs[-1:], f"{len(self._sent)}-{self._made}"]
        return self._jobs[-1]

    def message(self) -> m.Message:
        """A message of any kind, about any of the runs."""
        run, number, ids = self.run(), self.number, self.ids
        match self.random.choice(m.MESSAGES):
            case m.Submit:
                return self.submit(run)
            case m.Open:
                prefix = self.random.choice((None, m.Prefix(self.run(), max(0, number()))))
                returns = m.Returns(max(0, number()), self.flag())
                places = (
                    self.random.choice((3, max(0, number()))),
                    self.random.choice((200, max(0, number()))),
                )
                return m.Open(run, *places, Sampling(), returns, False, prefix, self.generations())
            case m.Segment:
                return self.segment(run)
            case m.Prune:
                return m.Prune(run, number(), ids(4), number(), ids(4))
            case m.Answer:
                rows = self.random.randrange(4)
                pairs = tuple(((number(), -1.0),) for _ in range(rows))
                top = self.random.choice(((), pairs))
                return m.Answer(run, number(), ids(rows, rows), ids(rows, rows), top, 0.5, number())
            case _:
                return self._small(run)

    def _small(self, run: RunKey) -> m.Message:
        number = self.number
        rare: tuple[m.Message, ...] = (
            m.Close(run, number(), (self.run(), self.run())),
            m.Revoke(RunKey(run.job, self.random.choice((1, 2)))),
            m.Fault(run, "a reason"),
        )
        often: tuple[m.Message, ...] = (
            m.Retain(run, number(), (self.run(),)),
            m.StageReport(run, number(), m.Meter(*(number() for _ in range(5)), 0.5)),
            m.Synced(run, self.random.choice(("", "1/2/3", "sync/1"))),
            m.PrefixLost(run, number()),
        )
        return self.random.choice(rare if self.random.random() < 0.2 else often)

    def submit(self, run: RunKey) -> m.Submit:
        """A job with fields of any sense, or with those of a good one."""
        fields = tuple(self.random.sample(_FIELDS, self.random.randrange(4)))
        if self.flag():
            fields = (("prompt_ids", "[5, 6, 7]"), ("max_new_tokens", "6"), *fields[:1])
        earlier = m.Earlier(self.ids(4), tuple(self.ids(2) for _ in range(3)))
        begun = self.random.choice((None, None, None, earlier))
        return m.Submit(run, fields, 0.5, self.generations(), begun)

    def generations(self) -> tuple[int, ...]:
        """Those of a pipeline whose workers have claimed their roles once; or any."""
        return (1, 1, 1) if self.random.random() < 0.8 else self.ids(3)

    def segment(self, run: RunKey) -> m.Segment:
        """Rows of the prompt as they should be, or any."""
        number = self.number
        if self.random.random() < 0.3:
            return m.Segment(run, 0, 0, (0, 1, 2), (-1, 0, 1), (0, 1, 2), (7, 8, 9))
        rows = self.random.randrange(5)
        columns = [self.ids(rows, rows) for _ in range(3)]
        tokens = self.random.choice(((), self.ids(rows, rows)))
        route = self.random.choice(((), (m.Hop("t", ("u",)), m.Hop("", ()))))
        task = self.random.choice(("", "t"))
        return m.Segment(
            run, number(), number(), *columns, tokens, self.flag(), task, route, 0.5, number(), 1
        )

    def run(self) -> RunKey:
        """One of a few runs."""
        return RunKey(self.random.choice(self._jobs), self.random.choice((1, 1, 1, 2, 0)))

    def number(self) -> int:
        """A number that a field may hold, at the edges more often than in between."""
        return self.random.choice(_NUMBERS)

    def ids(self, most: int, least: int = 0) -> tuple[int, ...]:
        """Numbers, ``least`` to ``most`` of them."""
        return tuple(self.number() for _ in range(self.random.randint(least, most)))

    def flag(self) -> bool:
        """True or false."""
        return self.random.random() < 0.5
