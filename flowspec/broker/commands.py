"""A worker's operations as Redis commands."""

from __future__ import annotations

import json
from collections.abc import Sequence

from flowspec.broker import codec
from flowspec.broker.base import LOG_CAP, RETENTION_MS, CommitText, Op, PutRows, Record
from flowspec.broker.keys import Keys
from flowspec.broker.redis_client import Command
from flowspec.broker.scripts import load
from flowspec.core.protocol.machine import Accepted, Complete, Finish, Send
from flowspec.core.protocol.messages import SCHEDULER, worker_nodes


class Commands:
    """Builds the command of each operation of ``node`` in a pipeline of ``stages`` verify stages
    and ``middles`` middle models.
    """

    def __init__(self, keys: Keys, node: str, stages: int, middles: int = 0) -> None:
        self._keys = keys
        self._node = node
        self._scripts = load()
        nodes = worker_nodes(stages, middles)
        self._logs = [keys.log(name) for name in nodes]
        self._stage_logs = self._logs[: stages + 1]
        self._index = {name: at + 1 for at, name in enumerate(nodes)}

    def build(self, op: Op, stamp: str = "") -> Command:
        """The command that carries out ``op``; ``stamp`` goes with what it delivers,
        now or later.
        """
        match op:
            case Send():
                return self._publish(op, stamp)
            case PutRows(to, job, epoch, segment, rows):
                data = codec.encode_rows(rows)
                return (
                    "XADD",
                    self._keys.rows(to),
                    "*",
                    "j",
                    job,
                    "e",
                    epoch,
                    "s",
                    segment,
                    "d",
                    data,
                )
            case CommitText():
                return self._commit(op, stamp)
            case Complete(job, epoch, tasks):
                arguments = [epoch, LOG_CAP, self._node, 0, 0, "", "", stamp, 0, *tasks]
                return self._call("publish", self._job_keys(job), arguments)
            case Accepted(job, epoch, prompt, strategy):
                facts = [epoch, len(prompt) - 1, json.dumps(prompt), strategy]
                return self._call("open_job", [self._keys.job(job)], facts)
            case Finish():
                return self._finish(op)
            case Record(job, line):
                return self._call("record", [self._keys.recording(job)], [line, RETENTION_MS])

    def _job_keys(self, job: str) -> list[str]:
        return [self._keys.job(job), self._keys.graph(job), *self._logs]

    def _publish(self, op: Send, stamp: str) -> Command:
        message = op.envelope.message
        arguments = [
            message.epoch,
            LOG_CAP,
            op.envelope.sender,
            self._index[op.to],
            op.envelope.seq,
            op.task,
            codec.encode(message),
            stamp,
            len(op.after),
        ]
        return self._call(
            "publish", self._job_keys(message.job), [*arguments, *op.after, *op.completes]
        )

    def _commit(self, op: CommitText, stamp: str) -> Command:
        commit = op.commit
        keys = self._keys
        arguments = [
            commit.epoch,
            LOG_CAP,
            commit.offset,
            commit.advance,
            commit.emitted,
            len(commit.tokens),
            json.dumps(commit.tokens),
            op.text,
            commit.finish,
            codec.encode(commit.prunes[0].message),
            stamp,
        ]
        named = [
            keys.job(commit.job),
            keys.graph(commit.job),
            keys.out(commit.job),
            *self._stage_logs,
        ]
        seqs = [envelope.seq for envelope in commit.prunes]
        return self._call("commit_verdict", named, [*arguments, *seqs, *commit.completes])

    def _finish(self, op: Finish) -> Command:
        keys = self._keys
        named = [keys.job(op.job), keys.graph(op.job), keys.out(op.job), keys.recording(op.job)]
        arguments = [op.epoch, op.job, op.reason, op.error, json.dumps(op.stats), RETENTION_MS]
        return self._call("finish", [*named, keys.running, keys.log(SCHEDULER)], arguments)

    def _call(self, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Command:
        return ("EVALSHA", self._scripts[name].sha, len(keys), *keys, *arguments)
