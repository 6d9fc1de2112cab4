"""Runs on emulated devices: real worker processes over Redis, their clocks from a profile.

Results are in nominal seconds, whatever the stretch, and always *emulated*. A run is valid only if
the machine kept up: the share of inputs read after something they might have changed is measured,
and above ``OVERTAKEN_SHARE`` the run is refused.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowspec.client import Client
from flowspec.cluster import Cluster, Places, Setup
from flowspec.core.run.spec import JobSpec
from flowspec.errors import ClusterError, ConfigError, JobFailed
from flowspec.model.drafters.sources import choices
from flowspec.model.weights.directory import default_pair
from flowspec.rehearse.compare.simulate import Ran
from flowspec.rehearse.compare.texts import Text
from flowspec.rehearse.devices.profile import Profile, source_parts
from flowspec.rehearse.devices.setup import EMULATED, Emulation
from flowspec.transport.base import OutputEntry, roles_of
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.redis_client import BrokerClient, DirectClient
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.control.replies import output_entries
from flowspec.transport.wire.entries import xread
from flowspec.transport.wire.keys import Keys

#: Largest share of inputs that may be read after something they might have changed.
OVERTAKEN_SHARE = 0.01
#: Largest share of the machine's cores that a run with automatic stretch keeps busy.
BUSY_SHARE = 1 / 3
#: Stretch and most tokens of a probe.
PROBE_STRETCH = 4.0
PROBE_TOKENS = 12
#: How often per second the broker checks the timeouts of waiting workers.
_TICKS = 500
#: Most entries of an output per read.
_BATCH = 64
#: Bare writes measured.
_WRITES = 300
#: Longest wait for every worker's counters, seconds.
_FACTS_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over the workers since they were started.

    ``inputs``: messages read. ``late``: of those, read after their time on the wall clock.
    ``overtaken``: of those, read after something they might have changed. ``cpu_seconds``: of the
    workers and the broker. ``software_seconds``: nominal seconds charged for software.
    """

    inputs: int
    late: int
    overtaken: int
    cpu_seconds: float
    software_seconds: float

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.inputs - other.inputs,
            self.late - other.late,
            self.overtaken - other.overtaken,
            self.cpu_seconds - other.cpu_seconds,
            self.software_seconds - other.software_seconds,
        )

    def check(self, stretch: float) -> None:
        """ClusterError if too many inputs were overtaken."""
        if self.overtaken > OVERTAKEN_SHARE * self.inputs:
            raise ClusterError(
                f"the emulation fell behind: {self.overtaken} of {self.inputs} inputs came after "
                f"what they might have changed, at most {OVERTAKEN_SHARE:.0%} may; "
                f"use a stretch above {stretch:g}, or a machine with less to do"
            )


@dataclass(frozen=True, slots=True)
class Emulated:
    """Consecutive runs on one emulated cluster.

    ``different``: indices of runs whose text is not the target's own; only rounding at a tie should
    cause one.
    """

    runs: tuple[Ran, ...]
    different: tuple[int, ...]
    counts: Counts
    stretch: float


def probe(
    text: Text,
    strategy: str,
    profile: Profile,
    stages: int,
    *,
    models: tuple[str, ...] = (),
    source: str = "slm",
    free_software: bool = False,
) -> float:
    """The stretch at which ``strategy`` keeps the machine at most ``BUSY_SHARE`` busy.

    From a short run.
    """
    short = replace(text, output=text.output[:PROBE_TOKENS])
    with EmulatedCluster(
        profile,
        stages,
        models=models,
        source=source,
        stretch=PROBE_STRETCH,
        free_software=free_software,
    ) as cluster:
        done = cluster.run_all([short], strategy)
    stats = done.runs[0].stats
    nominal = _served_seconds(stats) + stats["decode_seconds"]
    return stretch_for(done.counts.cpu_seconds, nominal, len(os.sched_getaffinity(0)))


def stretch_for(cpu_seconds: float, nominal_seconds: float, cores: int) -> float:
    """The stretch at which this work in this nominal time keeps ``cores`` ``BUSY_SHARE`` busy."""
    needed = cpu_seconds / (nominal_seconds * cores * BUSY_SHARE)
    return max(1.0, math.ceil(10 * needed) / 10)


@dataclass(slots=True)
class EmulatedJob:
    """A job on an emulated cluster, as far as its output has been read.

    ``committed_at``: per commit its nominal time and the number of tokens after it. ``stats``: of
    the ended job.
    """

    text: Text
    cursor: str = "0"
    tokens: list[int] = field(default_factory=list)
    committed_at: list[tuple[float, int]] = field(default_factory=list)
    stats: Mapping[str, Any] | None = None

    def take(self, entry: OutputEntry) -> None:
        """Read a further entry of the output; JobFailed for an error."""
        self.cursor = entry.cursor
        fields = entry.fields
        if fields["kind"] == "tokens":
            self.tokens += json.loads(fields["ids"])
            self.committed_at.append((float(fields["at"]), len(self.tokens)))
        elif fields["kind"] == "error":
            raise JobFailed(fields["text"])
        else:
            self.stats = json.loads(fields["stats"])


class EmulatedCluster:
    """A pipeline of real workers that emulates ``stages`` devices of ``profile``.

    ``models``: target, draft and the middle models of a chain, smallest first (default: the
    packaged pair). ``source``: the profile's name for that draft. ``stretch``: wall seconds per
    nominal second. ``free_software``: do not charge the software's own time. ``jobs``: how many
    run at once. ConfigError if ``source`` and ``models`` have different numbers of drafters to
    choose from.
    """

    def __init__(
        self,
        profile: Profile,
        stages: int,
        *,
        models: tuple[str, ...] = (),
        source: str = "slm",
        stretch: float = 1.0,
        free_software: bool = False,
        jobs: int = 1,
    ) -> None:
        self._emulation = Emulation(profile, stages, source, stretch, free_software)
        target, draft, *middles = models or default_pair()
        if len(choices(draft)) != len(source_parts(source)):
            raise ConfigError(
                f"draft {draft!r} and draft source {source!r} have {len(choices(draft))} and "
                f"{len(source_parts(source))} drafters to choose from; "
                "expected the same number, in the same order"
            )
        # Texts are compared with the library's float32 model.
        places = Places("float32", "cpu", "float32", "cpu")
        self._setup = Setup(target, draft, stages, tuple(middles), places=places, jobs=jobs)
        self._settle = stretch * max(
            profile.stage_seconds(stage, stages, 64) for stage in (1, stages)
        )

    def start(self) -> None:
        """Start everything; the bare hop is measured while nothing else runs."""
        self._broker = PrivateBroker(ticks=_TICKS)
        url = self._broker.start()
        try:
            hop = 0.0 if self._emulation.free_software else bare_hop(url)
            self._cluster = Cluster(
                replace(self._setup, emulated=replace(self._emulation, hop=hop)), url=url
            )
            self._cluster.start()
            self._control = RedisControl(url, Keys())
            self._client = Client(url)
            self._reader = BrokerClient(url)
        except BaseException:
            self._broker.stop()
            raise

    def stop(self) -> None:
        """Stop everything."""
        for connection in (self._reader, self._client, self._control):
            connection.close()
        self._cluster.stop()
        self._broker.stop()

    def run_all(self, texts: Iterable[Text], strategy: str) -> Emulated:
        """Run ``strategy`` on ``texts`` one after another; the counts are of these runs only."""
        before = self.counts()
        runs = []
        different = []
        for at, text in enumerate(texts):
            run, output = self.run(text, strategy)
            runs.append(run)
            if output != text.output:
                different.append(at)
        return Emulated(
            tuple(runs), tuple(different), self.counts() - before, self._emulation.stretch
        )

    def run(self, text: Text, strategy: str, *, reuse: bool = False) -> tuple[Ran, tuple[int, ...]]:
        """Run one job to its end; return the run, in nominal seconds, and its token ids.

        ``reuse``: as in ``JobSpec``; runs are compared, so none shortens another's prompt.
        """
        name = self.submit(text, strategy, reuse=reuse)
        job = EmulatedJob(text)
        while job.stats is None:
            self.read({name: job})
        # A stage may still be computing pruned rows; it must be idle for the next job.
        time.sleep(self._settle)
        return _ran(job.stats, job.committed_at), tuple(job.tokens)

    def submit(self, text: Text, strategy: str, *, reuse: bool = False) -> str:
        """Submit a job, as in ``run``, and return its id."""
        spec = JobSpec(
            prompt_ids=text.prompt,
            max_new_tokens=len(text.output),
            sampling=text.sampling,
            strategy=strategy,
            reuse=reuse,
        )
        return self._client.submit_spec(spec).id

    def read(self, jobs: Mapping[str, EmulatedJob]) -> None:
        """Wait for further output of any of ``jobs``, by id, at most a second, and take it."""
        outputs = {Keys().out(name): job for name, job in jobs.items()}
        cursors = {stream: job.cursor for stream, job in outputs.items()}
        (found,) = self._reader.run([xread(cursors, 1.0, _BATCH)])
        for stream, entries in found or ():
            for entry in output_entries(entries):
                outputs[stream.decode()].take(entry)
        self._cluster.check()

    def now(self) -> float:
        """The nominal time."""
        return Emulation.read(self._control.pipeline()[EMULATED]).nominal(time.monotonic())

    def counts(self) -> Counts:
        """The sums of every worker's counters, as of now or slightly later."""
        record = self._control.pipeline()
        since = self.now()
        deadline = time.monotonic() + _FACTS_SECONDS
        while time.monotonic() < deadline:
            self._cluster.check()
            claims = self._control.claims()
            facts = [claims[role].facts for role in roles_of(record) if role in claims]
            if len(facts) == len(roles_of(record)) and all(fact["at"] >= since for fact in facts):
                names = ("inputs", "late", "overtaken", "cpu_seconds", "software_seconds")
                inputs, late, overtaken, cpu, software = (
                    sum(fact[name] for fact in facts) for name in names
                )
                return Counts(
                    inputs, late, overtaken, cpu + _broker_cpu(self._cluster.url), software
                )
            time.sleep(0.05)
        raise ClusterError(
            f"the workers' counters did not come within {_FACTS_SECONDS:g} s: "
            "the machine is too busy"
        )

    def __enter__(self) -> EmulatedCluster:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _ran(stats: Mapping[str, Any], committed: Sequence[tuple[float, int]]) -> Ran:
    began = committed[0][0] - _served_seconds(stats) if committed else 0.0
    return Ran(stats, tuple((at - began, count) for at, count in committed))


def bare_hop(url: str) -> float:
    """Seconds of a bare message through the broker beyond the CPU time of its ends.

    The median of writes that wait for the reply, which takes as long as a message to a blocked
    reader.
    """
    client = DirectClient(url)
    waits = []
    for _ in range(_WRITES):
        began = time.monotonic()
        spent = time.thread_time()
        client.run([("XADD", "bare", "MAXLEN", "~", 100, "*", "d", "hop")])
        waits.append((time.monotonic() - began) - (time.thread_time() - spent))
    client.run([("DEL", "bare")])
    client.close()
    return max(0.0, statistics.median(waits))


def _broker_cpu(url: str) -> float:
    client = connect(url)
    info: Any = client.info("cpu")
    client.close()
    return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])


def _served_seconds(stats: Mapping[str, Any]) -> float:
    """Nominal seconds from a job's assignment to its first token; it is queued in real time."""
    served: float = stats["ttft_seconds"] - stats["queue_seconds"]
    return served
