"""A commit against as many bare writes, and a prune against a bare copy of the same rows."""

from __future__ import annotations

import time

import numpy as np

from flowspec.broker import codec
from flowspec.broker.base import CommitText
from flowspec.broker.keys import Keys
from flowspec.broker.redis_client import DirectClient
from flowspec.broker.redis_control import RedisControl
from flowspec.broker.redis_link import RedisLink
from flowspec.core.protocol.machine import Accepted, Commit
from flowspec.core.protocol.messages import Envelope, Prune, stage_node
from flowspec.core.tree.slots import SlotTable
from ops.bench.jobs import running_job

#: As many writes of the same sizes as a commit for four stages, without a single check.
BARE_WRITES = """
for stage = 1, 4 do
    redis.call('XADD', KEYS[stage], '*', 'f', 'd0', 'q', ARGV[1], 'm', ARGV[2])
    redis.call('HSET', KEYS[6], 'q:d0:' .. stage, ARGV[1])
end
redis.call('XADD', KEYS[5], '*', 'kind', 'tokens', 'offset', ARGV[1],
    'ids', ARGV[3], 'text', ARGV[4])
redis.call('HSET', KEYS[6], 'offset', ARGV[1], 'emitted', ARGV[1])
return 0
"""


def commits(url: str, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a bare EVALSHA of as many writes, and of our commit for four stages, in turn."""
    keys = Keys("commits")
    link = RedisLink(url, keys, "d0", 4)
    job = running_job(RedisControl(url, keys), stages=4)
    link.write([Accepted(job, 1, (1, 2), "bench")])
    client = DirectClient(url)
    (sha,) = client.run([("SCRIPT", "LOAD", BARE_WRITES)])
    keys = [*(f"bare:log:{stage}" for stage in range(1, 5)), "bare:out", "bare:job"]
    nodes = tuple(stage_node(stage) for stage in range(1, 5))
    bare = []
    ours = []
    for at in range(rounds):
        prune = Prune(job, 1, 1 + at, (at,), at + 1, tuple(range(at + 1, at + 13)))
        text = codec.encode(prune)
        began = time.monotonic()
        client.run([("EVALSHA", sha, 6, *keys, at, text, "[7, 8]", " seven")])
        bare.append(time.monotonic() - began)
        envelopes = tuple(Envelope("d0", at + 1, prune) for _ in nodes)
        commit = Commit(job, 1, 1 + at, at, 1, (7, 8), "", nodes, envelopes)
        began = time.monotonic()
        (code,) = link.write([CommitText(commit, " seven")])
        ours.append(time.monotonic() - began)
        assert code == 0, code
    return bare[20:], ours[20:]


def prunes(rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds to copy 12 rows in place: the same rows bare, 12 neighbouring rows bare, and our
    whole prune.

    8 layers of 7B shape (32 heads of 128, float32) after 1,024 rows of context; 80 tree rows to
    12.
    """
    import torch

    from flowspec.model.kv import TreeCache, runs

    torch.set_num_threads(1)
    context = 1024
    cache = TreeCache.allocate(8, 32, context + 200, 128, torch.float32)
    cache.storage.normal_()
    rng = np.random.default_rng(0)
    same = []
    block = []
    ours = []
    for _ in range(rounds):
        table, accepted, survivors = grown_table(rng, context)
        began = time.perf_counter()
        table.prune(accepted, survivors[0])
        plan = table.plan((), ())
        cache.begin_pass(plan.held, plan.moves)
        ours.append(time.perf_counter() - began)
        assert plan.moves is not None
        moves = list(runs(plan.moves))
        began = time.perf_counter()
        for start, source, count in moves:
            cache.storage[..., start : start + count, :] = cache.storage[
                ..., source : source + count, :
            ]
        same.append(time.perf_counter() - began)
        began = time.perf_counter()
        cache.storage[..., context : context + 12, :] = cache.storage[
            ..., context + 40 : context + 52, :
        ]
        block.append(time.perf_counter() - began)
    return same[10:], block[10:], ours[10:]


def grown_table(rng: np.random.Generator, context: int) -> tuple[SlotTable, list[int], list[int]]:
    """80 tree rows of which a prune keeps 12: accepted ones and survivors, scattered as in a real
    tree.
    """
    table = SlotTable(1)
    table.plan([0], [-1])
    table.prune([0], 1)
    table.context = table._base = context  # as after a prompt of that length
    kept = sorted(rng.choice(np.arange(2, 81), 11, replace=False).tolist())
    accepted = [1, *kept[:3]]
    survivors = kept[3:]
    parents = dict.fromkeys(range(2, 81), 1)
    parents |= {1: 0, **dict(zip(accepted[1:], accepted, strict=False))}
    parents |= {survivors[0]: accepted[-1], **dict.fromkeys(survivors[1:], survivors[0])}
    ids = list(range(1, 81))
    table.plan(ids, [parents[node] for node in ids])
    return table, accepted, survivors
