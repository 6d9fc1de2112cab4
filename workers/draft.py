"""The draft worker, ``python -m workers.draft``; its settings are in the pipeline's record."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT
from flowspec.core.run.limits import BLOCK_ROWS, Limits
from flowspec.errors import ConfigError
from flowspec.model.base import DraftExecutor, HasFacts
from flowspec.model.drafters.drafter_choice import levels_of, wanting_hidden
from flowspec.model.drafters.kinds import NGRAM
from flowspec.model.drafters.sources import fingerprint, load_sources, source_names, target_needs
from flowspec.model.layers.taps import Taps
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.precision import AUTO
from flowspec.observe import logger, note
from flowspec.rehearse.devices.setup import EMULATED
from flowspec.rehearse.replay import header
from flowspec.roles.lease import Lease
from flowspec.roles.performers import DraftPerformer
from flowspec.roles.text_process import TextProcess
from flowspec.start.boot import Facts, Process, add_placing, make_worker, parser, run
from flowspec.start.forks import can_fork
from flowspec.start.models import check_fingerprint, context_of, kept_rows_of, located, open_target
from flowspec.start.wiring import Wiring, add_rows, serve_wired
from flowspec.strategies import build
from flowspec.strategies.auto.decisions import with_drafter_names
from flowspec.transport.base import (
    CHAT_TEMPLATE,
    CONTEXT,
    ENDS,
    Claim,
    drafts_of,
    middles_of,
)

#: Loads the drafter of a name for a target, in a precision and on a device.
Load = Callable[[str, ModelDirectory, str | None, str], DraftExecutor]

#: The key in a job's stats of what its stages run on, and the facts of a stage there.
RUNS_ON = "runs_on"
PLACE = ("precision", "device", "kernels", "rows_independent")

Claims = Callable[[], Mapping[str, Claim]]


class _Naming:
    """Adds the drafters' names, and what the stages run on, to a job's stats.

    Machines, and so recordings, only have the drafters' numbers. ``kept``: the leases, with the
    stages' facts, as they were a moment ago; ``asked``: as they are, which takes a round trip.
    """

    def __init__(self, stages: int, drafts: Sequence[str], kept: Claims, asked: Claims) -> None:
        self._drafts = drafts
        self._kept = kept
        self._asked = asked
        self._stage_numbers = range(1, stages + 1)

    def __call__(self, stats: Mapping[str, object]) -> dict[str, object]:
        named = with_drafter_names(stats, self._drafts)
        if named.get("tokens"):
            named[RUNS_ON] = self._places()
        return named

    def _places(self) -> list[dict[str, object]]:
        """Precision, device and kernels of every stage, as far as their workers are there."""
        facts = self._facts(self._kept())
        if not all("precision" in known for known in facts):
            facts = self._facts(self._asked())  # a stage that was loading when last looked at
        return [{key: known.get(key) for key in PLACE} for known in facts]

    def _facts(self, claims: Mapping[str, Claim]) -> list[Mapping[str, Any]]:
        held = (claims.get(f"verify-{stage}") for stage in self._stage_numbers)
        return [claim.facts if claim is not None else {} for claim in held]


class _LoadedDrafter(NamedTuple):
    """A loaded drafter, and the limits of the pipeline's models."""

    performer: DraftPerformer
    limits: Limits


def load_named(draft: str, target: ModelDirectory, dtype: str | None, device: str) -> DraftExecutor:
    """The drafter that the pipeline's record names."""
    return load_sources(draft, target, dtype=dtype, device=device)


def main(load: Load = load_named, given_arguments: Sequence[str] | None = None) -> None:
    """Serve the role with the drafter of ``load``; the arguments are the process's by default."""
    given = _read_arguments(given_arguments)
    with closing(TextProcess(forks=can_fork())) as texts:  # before there are threads
        _serve(load, given, texts)


def _serve(load: Load, given: argparse.Namespace, texts: TextProcess) -> None:
    process = Process(given.redis_url)
    control = process.control()
    record = process.pipeline_record(control)
    facts = Facts()
    loaded: list[_LoadedDrafter] = []  # once

    def serve(wiring: Wiring, lease: Lease) -> None:
        if not loaded:
            loaded.append(_load(load, given, record, facts, texts))
        performer, limits = loaded[0]
        performer.drop()
        texts.drop()
        peers = wiring.peers
        with closing(process.control()) as asking, closing(wiring.link(lease.holder)) as link:
            naming = _Naming(
                int(record["stages"]),
                drafts_of(record),
                asking.claims if peers is None else lambda: peers.claims,
                asking.claims,
            )
            machine = DraftMachine(
                limits,
                build,
                most_rows=given.most_rows or int(record.get("most_rows", 0)),
                row_unit=BLOCK_ROWS,
                generation=lease.holder.generation,
            )
            worker = make_worker(
                record,
                machine,
                link,
                performer,
                lease,
                header=header(limits),
                texts=texts,
                naming=naming,
            )
            facts.ask(worker.facts)
            process.ready(f"drafts by {record['draft'] if given.draft is None else given.draft}")
            worker.run(process.stop(lease, worker))

    serve_wired(process, record, DRAFT, given, facts, serve)
    control.close()


def _load(
    load: Load,
    given: argparse.Namespace,
    record: Mapping[str, str],
    facts: Facts,
    texts: TextProcess,
) -> _LoadedDrafter:
    """The performer and the limits of its models; ``facts`` learns what they are."""
    from flowspec.model.text.tokenizer import Tokenizer

    target, drafter = _load_models(load, given, record)
    if isinstance(drafter, HasFacts):
        known = drafter.facts()
        facts.know(known)
        logger().info("drafter loaded", **known)
    returned = Taps.read(record["taps"]).width if "taps" in record else target.hidden_size
    tokenizer = Tokenizer(target)
    ends = texts.open(target.path)
    if ends is None:
        ends = target.eos
        logger().warning("the chat template fails, so it names no token that ends a text")
    limits = _limits(record, target, drafter, ends)
    facts.know(
        {
            CONTEXT: limits.context,
            CHAT_TEMPLATE: tokenizer.has_chat_template,
            ENDS: [
                tokenizer.detokenizer.token(token).data.decode(errors="replace")
                for token in sorted(ends)
            ],
        }
    )
    return _LoadedDrafter(DraftPerformer(drafter, tokenizer, returned), limits)


def _read_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser("draft")
    arguments.add_argument(
        "--target", help="where the target is on this machine (default: as the record says)"
    )
    arguments.add_argument(
        "--draft",
        help="the drafts as found on this machine, joined by + and : as in the record "
        "(default: as the record says)",
    )
    arguments.add_argument(
        "--most-rows",
        type=int,
        default=0,
        help="KV rows that a stage has for all jobs at once; one without room waits "
        "(default: as the record says)",
    )
    add_placing(arguments)
    add_rows(arguments)
    found = arguments.parse_args(given)
    if found.most_rows < 0:
        raise ConfigError(f"--most-rows is {found.most_rows}; expected 0 or more")
    return found


def _load_models(
    load: Load, given: argparse.Namespace, record: Mapping[str, str]
) -> tuple[ModelDirectory, DraftExecutor]:
    """The target's folder and the drafter, both checked against the record."""
    draft = record["draft"] if given.draft is None else given.draft
    if given.draft is None:
        for name in source_names(draft):
            if name != NGRAM:
                joined = "" if name == draft else " (all drafts, joined as there)"
                located(None, name, f"--draft{joined}")
    check_fingerprint(fingerprint(draft), record["draft_fingerprint"], draft)
    target = open_target(
        located(given.target, record["target"], "--target"), record, target_needs(draft)
    )
    dtype = given.dtype or record["draft_dtype"]
    if EMULATED in record and dtype == AUTO:
        dtype = None  # as in simulations
    device = given.device or record["draft_device"]
    note(f"loading the drafter {draft}")
    return target, load(draft, target, dtype, device)


def _limits(
    record: Mapping[str, str],
    target: ModelDirectory,
    drafter: DraftExecutor,
    eos: frozenset[int],
) -> Limits:
    wanting = wanting_hidden(drafter)
    return Limits(
        int(record["stages"]),
        context_of(record, target),
        target.vocabulary,
        eos,
        middles=len(middles_of(record)),
        hidden=wanting[0],
        others=wanting[1:],
        levels=levels_of(drafter),
        kept_rows=kept_rows_of(record, target),
    )


if __name__ == "__main__":
    run(main, "draft")
