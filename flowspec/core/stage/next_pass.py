"""Which of the waiting segments make up a stage's next pass.

A pass takes the first waiting segment of every run, in the order of their arrival. What came in one
entry is there at one moment, so runs that share a pass at the first stage share the later ones,
too, unless one of them has an earlier segment waiting. Keeping the others back with it would fill
the pipeline with passes of few runs: a slower stage behind could not join them either. One segment
of each run: what a run's passes hold then does not depend on other runs, and a recording of it
replays alone.

Chunks of prompts are many and wait at one moment, so they must not fill every pass: one of them
leads a pass, the segments of decoding runs follow, and further chunks take what room is left. Of
several prompts the oldest one and the one with the fewest rows left lead in turn: a question does
not wait for two documents, and no document waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.bundles import MOST_ROWS
from flowspec.core.protocol.messages import Segment
from flowspec.core.run.key import RunKey


class WaitingSegments:
    """The segments that wait at a stage, in the order of their arrival."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._shortest_leads = True  # of several prompts, at the next pass

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, segment: Segment) -> None:
        """Append ``segment``."""
        self._segments.append(segment)

    def firsts(self) -> list[Segment]:
        """The first segment of every run that waits."""
        found: dict[RunKey, Segment] = {}
        for segment in self._segments:
            found.setdefault(segment.run, segment)
        return list(found.values())

    def take(self, *, prompts: bool = True) -> list[Segment]:
        """Remove and return the segments of the next pass.

        The first one, whatever its size; of runs that decode those before one that does not fit,
        of prompts all that fit. Chunks of prompts wait for the others unless ``prompts``.
        """
        firsts = self.firsts()
        decoding = [segment for segment in firsts if not is_of_prompt(segment)]
        chunks = [segment for segment in firsts if is_of_prompt(segment)]
        taken = self._leading(chunks) if chunks and (prompts or not decoding) else []
        may_have_chunks = bool(taken)
        for segment in decoding:
            if taken and not _fit([*taken, segment]):
                break  # what comes later does not overtake it
            taken.append(segment)
        for segment in chunks if may_have_chunks else []:
            if segment is not taken[0] and _fit([*taken, segment]):
                taken.append(segment)
        self.remove(taken)
        return taken

    def _leading(self, chunks: Sequence[Segment]) -> list[Segment]:
        """The chunk that leads the next pass, of several prompts' first ``chunks``."""
        oldest = chunks[0]
        shortest = min(chunks, key=lambda chunk: self.rows(chunk.run))
        if shortest is oldest:
            return [oldest]
        leads = shortest if self._shortest_leads else oldest
        self._shortest_leads = not self._shortest_leads
        return [leads]

    def remove(self, segments: Sequence[Segment]) -> None:
        """Remove ``segments``."""
        gone = {(segment.run, segment.segment) for segment in segments}
        self._segments = [one for one in self._segments if (one.run, one.segment) not in gone]

    def drop(self, run: RunKey) -> None:
        """Remove the segments of ``run``."""
        self._segments = [one for one in self._segments if one.run != run]

    def rows(self, run: RunKey) -> int:
        """Rows of ``run`` that wait."""
        return sum(len(one.ids) for one in self._segments if one.run == run)


def is_of_prompt(segment: Segment) -> bool:
    """Whether ``segment`` is a chunk of its run's prompt: it comes before the first round."""
    return segment.round == 0


def _fit(segments: Sequence[Segment]) -> bool:
    """Whether ``segments`` may share a pass: ``MOST_ROWS`` rows, and what each allows.

    Beside a chunk of a prompt the pass is a large one anyway, so that more rows cost little.
    """
    most = MOST_ROWS
    if not any(map(is_of_prompt, segments)):
        most = min(segment.together or MOST_ROWS for segment in segments)
    return sum(len(segment.ids) for segment in segments) <= most
