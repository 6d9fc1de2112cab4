"""A verify stage's executor: one block of layers and the KV rows of its jobs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Choice, Kept, Part, Pass, PassDone, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import CONTIGUOUS, PAGED
from flowspec.core.run.sampling import Sampling
from flowspec.errors import FlowSpecError, ModelError, StateError
from flowspec.model.base import ROW, RowArray
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.layers.tap_shares import TapShares
from flowspec.model.layers.taps import Taps
from flowspec.model.layers.trial import check_family
from flowspec.model.rows.arrays import joined, split, taken, to_array, to_tensor
from flowspec.model.rows.kept_rows import KeptRows
from flowspec.model.rows.paged import PagedCache, PagedStore, RowCache
from flowspec.model.rows.placement import Placement
from flowspec.model.rows.several import each_of, out_of_memory
from flowspec.model.sampling.choice import choose_rows, top_logprobs
from flowspec.model.weights.directory import ModelDirectory


class _PlacedPart(NamedTuple):
    """A part with its rows, its job's KV rows, their places, and whether sums are to go with it."""

    part: Part
    rows: RowArray | None
    cache: RowCache
    placement: Placement
    wanted: bool


#: A part's choices, and its rows to send on.
_Computed = tuple[Choice, RowArray]


class ModelStage:
    """A verify stage's executor: one block and the KV rows of its jobs.

    ``taps``: the block's share of a drafter's sum. Runs that return hidden rows then carry the sum,
    and the last stage returns it in their place. ``store``: the pool that all runs' rows lie in;
    None: every run has a store of its own.
    """

    def __init__(
        self,
        block: LayerBlock,
        taps: TapShares | None = None,
        store: PagedStore | None = None,
    ) -> None:
        self._block = block
        self._taps = taps
        self._store = store
        self._runs: dict[RunKey, tuple[RowCache, Sampling, Returns]] = {}
        self._kept: KeptRows[Any] = KeptRows()
        self.evict = self._kept.evict
        self._row_seconds: float | None = None

    @property
    def block(self) -> LayerBlock:
        """The block that this stage runs."""
        return self._block

    def facts(self) -> dict[str, object]:
        """See ``LayerBlock.facts``; and the seconds of a lone row, if one could be tried."""
        tried = {} if self._row_seconds is None else {ROW: round(self._row_seconds, 6)}
        return {**self._block.facts(), **tried}

    def room(self) -> dict[str, object]:
        """The store, and its blocks by now if there is a pool, for ``status``."""
        if self._store is None:
            return {"kv": {"store": CONTIGUOUS}}
        return {"kv": {"store": PAGED, **self._store.facts()}}

    @property
    def model_seconds(self) -> float:
        """CPU seconds spent in the model itself so far; the rest of the passes is overhead."""
        return self._block.seconds

    @property
    def clock(self) -> Callable[[], float] | None:
        """``model_seconds``; None on a GPU, which computes while the thread goes on."""
        return (lambda: self.model_seconds) if self._block.device.type == "cpu" else None

    def try_row(self) -> None:
        """Compute one row, token 0 or zeros, so that the first pass is neither slow nor unknown.

        A block that cannot is left to the jobs, which are told why.
        """
        block, run = self._block, RunKey("trial", 1)
        rows = None
        if not block.first:
            rows = to_array(torch.zeros(1, block.config.hidden_size, dtype=block.dtype))
        tokens, answers = (0,) if block.first else (), (0,) if block.last else ()
        part = Part(run, 0, (0,), (-1,), (0,), tokens, (0,), context=1, answers=answers)
        self.allocate(run, 1, Sampling(), Returns())
        began = time.monotonic()
        with contextlib.suppress(FlowSpecError):
            self.run(Pass((part,)), [rows])
            self._row_seconds = time.monotonic() - began
        self.release(run)

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        store = self._store
        cache = self._block.new_cache(capacity) if store is None else store.new_cache()
        self._runs[run] = (cache, sampling, returns)

    def release(self, run: RunKey) -> None:
        cache, *_ = self._runs.pop(run, (None,))
        if isinstance(cache, PagedCache):
            cache.free()

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        """See ``KeepsRows``; so too below."""
        (wanted,) = caches
        self._kept.keep(run, self._runs[run][0], wanted)

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        (rows,) = held
        self._kept.resume(self._runs[run][0], source, rows)

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        given = list(zip(work.parts, inputs, strict=True))
        if len(given) > 1:
            return self._together(given)
        with contextlib.suppress(torch.OutOfMemoryError):
            ((choice, rows),) = self._compute([self._place(given[0])])
            return PassDone((choice,)), [rows]
        raise StateError(out_of_memory(self._block.device))

    def _together(
        self, given: Sequence[tuple[Part, RowArray | None]]
    ) -> tuple[PassDone, list[RowArray]]:
        """A pass over several jobs' rows; what is wrong with one's fails that one alone."""
        choices: list[Choice | WorkFailed] = []
        outputs: list[RowArray] = []
        block = self._block
        results = each_of(given, self._place, self._compute, joins=block.joins, device=block.device)
        for found in results:
            choice, rows = (found, np.empty(0)) if isinstance(found, WorkFailed) else found
            choices.append(choice)
            outputs.append(rows)
        return PassDone(tuple(choices)), outputs

    def _place(self, given: tuple[Part, RowArray | None]) -> _PlacedPart:
        part, rows = given
        cache, _, returns = self._runs[part.run]
        return _PlacedPart(part, rows, cache, cache.begin_pass(part), returns.hidden)

    def _compute(self, placed: Sequence[_PlacedPart]) -> list[_Computed]:
        """Choices and rows to send on of every part, from one pass."""
        parts = [one.part for one in placed]
        rows = [one.rows for one in placed]
        caches = [one.cache for one in placed]
        placements = [one.placement for one in placed]
        wanted = [one.wanted for one in placed]
        if self._taps is not None and any(wanted):
            found = self._taps.run(parts, rows, caches, placements, wanted)
        else:
            hidden = self._block.run_together(parts, rows, caches, placements)
            found = [(own, to_array(own)) for own in hidden]
        self._check_finite(joined([own for own, _ in found]), rows)
        choices = self._choices(parts, [own for own, _ in found])
        return [(choice, left) for choice, (_, left) in zip(choices, found, strict=True)]

    def _check_finite(self, found: torch.Tensor, given: Sequence[RowArray | None]) -> None:
        """ModelError if a row of a job has a value that is NaN or infinite.

        ``given``: the rows into the pass; a stage sends none that are.
        """
        # A sum is the cheaper look; one that is out of range itself says nothing.
        if math.isfinite(found.sum()) or found.isfinite().all():
            return
        width = found.shape[1]  # a drafter's sums may lie beside a row
        wide = torch.float32, torch.device("cpu")  # holds every type of rows; float16 does not
        arrived = [to_tensor(rows[:, :width], *wide) for rows in given if rows is not None]
        if not all(rows.isfinite().all() for rows in arrived):
            raise ModelError(
                "rows came from the stage before that are NaN or infinite: they were altered on "
                "the way; run the job again, and look at the memory of both machines"
            )
        raise ModelError(
            f"a pass gave rows that are NaN or infinite in {found.dtype}: their range is too "
            "small for this model, or its weights are damaged; try --dtype bfloat16 or float32"
        )

    def _choices(self, parts: Sequence[Part], hidden: Sequence[torch.Tensor]) -> tuple[Choice, ...]:
        """Each part's choices, from the head's product over all answered rows."""
        asked = [
            taken(rows, part.answers)
            for part, rows in zip(parts, hidden, strict=True)
            if part.answers
        ]
        if not asked:
            return (Choice(),) * len(parts)
        found = self._block.logits(joined(asked))
        logits = iter(split(found, [len(part.answers) for part in parts if part.answers]))
        return tuple(
            self._choose(part, next(logits)) if part.answers else Choice() for part in parts
        )

    def _choose(self, part: Part, logits: torch.Tensor) -> Choice:
        _, sampling, returns = self._runs[part.run]
        indices = [part.positions[row] + 1 for row in part.answers]
        tokens = choose_rows(logits, sampling, indices)
        if not returns.top:
            return Choice(tokens)
        best = top_logprobs(logits, returns.top, tokens)
        return Choice(tokens, tuple(tuple(zip(*pair, strict=True)) for pair in best))


def load_stage(
    directory: ModelDirectory,
    layers: range,
    placing: Placing | None = None,
    taps: Taps | None = None,
    drafter: ModelDirectory | None = None,
    blocks: int = 0,
) -> ModelStage:
    """The executor of the verify stage with ``layers``; the rest as in ``LayerBlock``.

    ``taps`` and ``drafter``: what the pipeline's drafter reads inside the target, as in
    ``TapShares``. ``blocks``: of a pool for the KV rows of all runs; 0: every run has its own.
    ModelError if the model's family is not tested and stages of it are not what the whole is.
    """
    check_family(directory)
    first = layers.start == 0
    last = layers.stop == directory.layers
    block = LayerBlock(directory, layers, first=first, last=last, placing=placing)
    shares = TapShares(block, layers, taps, drafter) if taps is not None else None
    stage = ModelStage(block, shares, block.new_store(blocks) if blocks else None)
    stage.try_row()
    return stage
