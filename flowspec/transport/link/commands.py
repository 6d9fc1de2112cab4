"""A worker's operations as Redis commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flowspec.core.protocol.addresses import SCHEDULER, Address, worker_addresses
from flowspec.core.protocol.bundles import Bundle
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.machine import Complete, Finish, OpenJob, Send
from flowspec.core.run.key import RunKey
from flowspec.transport.base import LOG_CAP, RETENTION_MS, CommitText, Op, PutRows, Record
from flowspec.transport.connections.redis_client import Command
from flowspec.transport.connections.scripts import load
from flowspec.transport.wire import codec, entries
from flowspec.transport.wire.keys import Keys


class Commands:
    """Builds the Redis commands of the worker ``address``.

    ``stages``, ``middles``: the numbers of verify stages and middle models of the pipeline.
    ``holder``: the worker's hold on its role; None: it has no lease, and its jobs no holders.
    """

    def __init__(
        self,
        keys: Keys,
        address: Address,
        stages: int,
        middles: int = 0,
        holder: Holder | None = None,
    ) -> None:
        self._keys = keys
        self._holder = str(holder) if holder is not None else ""
        self._address = address
        self._scripts = load()
        workers = worker_addresses(stages, middles)
        self._logs = [keys.log(worker) for worker in workers]
        self._index = {worker: at + 1 for at, worker in enumerate(workers)}

    def build(self, op: Op, stamp: str = "") -> Command:
        """The command for ``op``; ``stamp`` goes with what it delivers, now or later."""
        match op:
            case Send():
                return self._publish(op, stamp)
            case Bundle():
                return self._publish_together(op, stamp)
            case PutRows():
                return self._put_rows(op)
            case CommitText():
                return self._commit(op, stamp)
            case Complete(run, tasks):
                sender = str(self._address)
                arguments = [
                    run.epoch,
                    LOG_CAP,
                    sender,
                    0,
                    0,
                    "",
                    "",
                    stamp,
                    self._holder,
                    0,
                    *tasks,
                ]
                return self._call("publish", self._run_keys(run), arguments)
            case OpenJob(run, prompt, strategy):
                facts = [run.epoch, len(prompt) - 1, json.dumps(prompt), strategy, self._holder]
                named = [self._keys.job(run.job), self._keys.request(run.job)]
                return self._call("open_job", named, facts)
            case Finish():
                return self._finish(op)
            case Record(run, line):
                return self._call("record", [self._keys.recording(run)], [line, RETENTION_MS])

    def trim(
        self, stream: str, behind: str, read: Mapping[RunKey, int] = MappingProxyType({})
    ) -> Command:
        """Remove the entries of a stream of the worker's own before ``behind``.

        ``read``: of runs that had entries in its log, how many the worker has read so far.
        """
        named = [stream, self._keys.generations, *map(self._keys.run, read)]
        whose = [self._index[self._address], self._holder]
        return self._call("trim", named, [behind, *whose, *read.values()])

    def _run_keys(self, run: RunKey) -> list[str]:
        return [self._keys.job(run.job), self._keys.run(run), *self._logs]

    def _put_rows(self, op: PutRows) -> Command:
        name = ("j", op.run.job, "e", op.run.epoch, "s", op.segment)
        data = codec.encode_rows(op.rows)
        return ("XADD", self._keys.rows(op.to), "*", *name, *entries.payload_fields(data))

    def _publish(self, op: Send, stamp: str) -> Command:
        message = op.envelope.message
        arguments = [
            message.run.epoch,
            LOG_CAP,
            str(op.envelope.sender),
            self._index[op.to],
            op.envelope.seq,
            op.task,
            codec.encode(message),
            stamp,
            self._holder,
            len(op.after),
            *op.after,
            *op.completes,
        ]
        return self._call("publish", self._run_keys(message.run), arguments)

    def _publish_together(self, op: Bundle, stamp: str) -> Command:
        """The answer to this command is a list: a code for each message."""
        named = [self._keys.log(op.to)]
        arguments: list[object] = [
            LOG_CAP,
            str(op.sends[0].envelope.sender),
            self._index[op.to],
            stamp,
            self._holder,
        ]
        for send in op.sends:
            message = send.envelope.message
            named += [self._keys.job(message.run.job), self._keys.run(message.run)]
            arguments += [message.run.epoch, send.envelope.seq, codec.encode(message)]
        return self._call("publish_together", named, arguments)

    def _commit(self, op: CommitText, stamp: str) -> Command:
        commit = op.commit
        run = commit.run
        keys = self._keys
        arguments = [
            run.epoch,
            LOG_CAP,
            commit.offset,
            commit.advance,
            commit.emitted,
            len(commit.tokens),
            json.dumps(commit.tokens),
            op.text,
            op.sizes,
            commit.finish,
            codec.encode(commit.prunes[0].message),
            stamp,
            len(commit.prunes),
            self._holder,
            op.logprobs,
            *(envelope.seq for envelope in commit.prunes),
            *commit.completes,
        ]
        named = [keys.job(run.job), keys.run(run), keys.out(run.job), *self._logs]
        return self._call("commit_verdict", named, arguments)

    def _finish(self, op: Finish) -> Command:
        run = op.run
        keys = self._keys
        named = [
            keys.job(run.job),
            keys.run(run),
            keys.out(run.job),
            keys.recording(run),
            keys.running,
            keys.log(SCHEDULER),
            keys.request(run.job),
        ]
        stats = json.dumps(op.stats)
        arguments = [
            run.epoch,
            run.job,
            op.reason,
            op.error,
            stats,
            RETENTION_MS,
            self._holder,
            op.cause,
        ]
        return self._call("finish", named, arguments)

    def _call(self, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Command:
        return ("EVALSHA", self._scripts[name].sha, len(keys), *keys, *arguments)


def codes_of(op: Op, answer: Any) -> list[Code]:
    """What the ``answer`` to a command says of ``op``; of a bundle, of each message."""
    if isinstance(op, PutRows | Record):
        return [Code.OK]
    return [Code(one) for one in answer] if isinstance(op, Bundle) else [Code(answer)]
