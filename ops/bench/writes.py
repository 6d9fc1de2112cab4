"""A commit against the same number of bare writes, a prune against a bare copy of its rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flowspec.core.protocol.addresses import DRAFT, stage_address
from flowspec.core.protocol.machine import Commit, OpenJob
from flowspec.core.protocol.messages import Envelope, Prune
from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.core.tree.live_rows import LiveRows
from flowspec.rehearse.emulated_link import EmulatedLink
from flowspec.transport.base import CommitText
from flowspec.transport.connections.redis_client import DirectClient
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire import codec
from flowspec.transport.wire.keys import Keys
from ops.bench.jobs import running_job

if TYPE_CHECKING:
    from flowspec.model.rows.kv import TreeCache

RUN = RunKey("j", 1)
#: Rows of context before the tree that is pruned.
CONTEXT = 1024

#: The writes of a commit for four stages, same number and sizes, without its checks.
BARE_WRITES = """
for stage = 1, 4 do
    redis.call('XADD', KEYS[stage], '*', 'f', 'd0', 'q', ARGV[1], 'm', ARGV[2])
    redis.call('HSET', KEYS[6], 'q:d0:' .. stage, ARGV[1])
end
redis.call('XADD', KEYS[5], '*', 'kind', 'tokens', 'offset', ARGV[1],
    'ids', ARGV[3], 'text', ARGV[4], 'sizes', '[6]')
redis.call('HSET', KEYS[6], 'offset', ARGV[1], 'emitted', ARGV[1])
return 0
"""


def commits(url: str, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a bare EVALSHA with the same writes and of our commit for four stages, in turn."""
    keys = Keys("commits")
    link = EmulatedLink(url, keys, DRAFT, 4)
    run = RunKey(running_job(RedisControl(url, keys), stages=4), 1)
    link.write([OpenJob(run, (1, 2), "bench")])
    client = DirectClient(url)
    (sha,) = client.run([("SCRIPT", "LOAD", BARE_WRITES)])
    bare_keys = [*(f"bare:log:{stage}" for stage in range(1, 5)), "bare:out", "bare:job"]
    stages = tuple(stage_address(stage) for stage in range(1, 5))
    bare = []
    ours = []
    for at in range(rounds):
        prune = Prune(run, 1 + at, (at,), at + 1, tuple(range(at + 1, at + 13)))
        text = codec.encode(prune)
        began = time.monotonic()
        client.run([("EVALSHA", sha, 6, *bare_keys, at, text, "[7, 8]", " seven")])
        bare.append(time.monotonic() - began)
        envelopes = tuple(Envelope(DRAFT, at + 1, prune) for _ in stages)
        commit = Commit(run, 1 + at, at, 1, (7, 8), "", stages, envelopes)
        began = time.monotonic()
        (code,) = link.write([CommitText(commit, " seven", (0,))])
        ours.append(time.monotonic() - began)
        assert code == 0, code
    return bare[20:], ours[20:]


def prunes(rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a bare copy of the rows a prune moves, of 12 adjacent rows, and of our prune.

    The prune keeps 12 of 80 tree rows behind 1,024 context rows, in 8 layers of a 7B model's shape
    (32 heads of 128, float32).
    """
    import torch

    from flowspec.model.rows.kv import TreeCache, copies

    torch.set_num_threads(1)
    context = CONTEXT
    storage = TreeCache.allocate(8, 32, context + 200, 128, torch.float32).storage
    storage.normal_()
    rng = np.random.default_rng(0)
    same = []
    block = []
    ours = []
    for _ in range(rounds):
        cache = TreeCache(storage)
        rows, accepted, survivors = grown_tree(rng, cache)
        began = time.perf_counter()
        rows.prune(accepted, survivors[0])
        placement = cache.begin_pass(next_part(rows, (), ()))
        ours.append(time.perf_counter() - began)
        assert placement.moves is not None
        moves = list(copies(placement.moves))
        began = time.perf_counter()
        for start, source, count in moves:
            storage[..., start : start + count, :] = storage[..., source : source + count, :]
        same.append(time.perf_counter() - began)
        began = time.perf_counter()
        storage[..., context : context + 12, :] = storage[..., context + 40 : context + 52, :]
        block.append(time.perf_counter() - began)
    return same[10:], block[10:], ours[10:]


def grown_tree(rng: np.random.Generator, cache: TreeCache) -> tuple[LiveRows, list[int], list[int]]:
    """Add 80 tree rows behind the context to new rows and ``cache``; choose 12 to keep.

    Returns the rows, the accepted ids and the survivors, scattered as in a real tree.
    """
    root = CONTEXT
    rows = LiveRows(root + 1)
    cache.begin_pass(next_part(rows, range(root), range(-1, root - 1), context=root))
    ids = range(root, root + 80)
    kept = sorted(rng.choice(np.arange(root + 1, root + 80), 11, replace=False).tolist())
    accepted = [root, *kept[:3]]
    survivors = kept[3:]
    parents = dict.fromkeys(ids, root)
    parents |= {root: root - 1, **dict(zip(accepted[1:], accepted, strict=False))}
    parents |= {survivors[0]: accepted[-1], **dict.fromkeys(survivors[1:], survivors[0])}
    cache.begin_pass(next_part(rows, ids, [parents[node] for node in ids]))
    return rows, accepted, survivors


def next_part(
    rows: LiveRows, ids: Sequence[int], parents: Sequence[int], *, context: int = 0
) -> Part:
    """The part of a pass over ``ids`` for a cache whose rows are ``rows``."""
    pruned = rows.begin_pass(ids, parents, context)
    ids = tuple(ids)
    return Part(RUN, 0, ids, tuple(parents), ids, ids, (), context, pruned)
