"""The settings that either side chooses from, equally many."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.errors import ConfigError
from flowspec.strategies import build
from ops.peer.llama import DraftOptions

#: llama.cpp's maximum draft lengths, and the probability below which a draft ends early.
LENGTHS = (2, 3, 4, 6, 8, 12, 16)
CUT = 0.5
#: Drafts of every length, without and with the cut; plain decoding comes on top.
DRAFTS = (*map(str, LENGTHS), *(f"{most}@{CUT:g}" for most in LENGTHS))
#: As many lookups of n-grams, where there is no draft model: length looked up, x, length drafted.
LOOKUPS = (*(f"{lookup}x{most}" for lookup in (1, 2, 3) for most in (2, 4, 8, 16)), "5x8", "5x16")
#: As many of ours, plain decoding included. Few rows per pass: all processes share the cores.
STRATEGIES = (
    "autoregressive",
    "auto",
    "auto:rows=4",
    "auto:rows=16",
    "flowspec",
    "flowspec:segment=8,width=4,loops=4,nodes=32,merge_loops=3,merge_nodes=16,expand_nodes=8",
    "flowspec:segment=1,width=1,loops=4,nodes=4,merge_loops=4,merge_nodes=4,expand_nodes=2",
    "specpipe:width=1",
    "specpipe:width=8",
    "specpipe:width=8,levels=2",
    "specpipe:width=16,levels=4",
    "chain",
    "chain:window=4,confidence=30",
    "chain:window=8",
    "speculative:lookahead=4",
)


def parted(setting: str) -> tuple[str, str]:
    """The strategy and the drafter of a setting of ours; no drafter: the pipeline's own."""
    strategy, named, drafter = setting.partition("@")
    if named and not drafter:
        raise ConfigError(f"--strategies {setting!r} names no drafter behind its @")
    return strategy, drafter


def drafting(text: str) -> DraftOptions:
    """Parse ``8``, ``8@0.5`` or ``2x8``; ConfigError for anything else."""
    lookup, looks_up, rest = text.rpartition("x")
    most, _, least = rest.partition("@")
    try:
        made = DraftOptions(int(most), float(least or 0), int(lookup) if looks_up else 0)
    except ValueError:
        made = DraftOptions(0)
    if made.most < 1 or not 0 <= made.least < 1 or bool(looks_up) != (made.lookup > 0):
        raise ConfigError(
            f"--drafts {text!r} is not a draft; expected a length of 1 or more, optionally with "
            "@ and a probability, or behind the length of what is looked up and an x"
        )
    return made


def check(strategies: Sequence[str], drafts: Sequence[DraftOptions], stages: int) -> None:
    """ConfigError unless both sides have equally many different, valid settings."""
    for strategy in strategies:
        build(parted(strategy)[0], stages)
    for name, given in (("--strategies", strategies), ("--drafts", drafts)):
        if len(set(given)) != len(given):
            raise ConfigError(f"{name} has a setting twice; give each once")
    if len(strategies) != len(drafts) + 1:
        raise ConfigError(
            f"ours has {len(strategies)} settings, llama.cpp {len(drafts) + 1} (--drafts and plain "
            "decoding); give as many of either, or the best of the longer list is favoured"
        )
