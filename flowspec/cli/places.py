"""Pipeline setups from flags, and the state of the pipeline that `up` or `serve` started."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from flowspec.cli import notes
from flowspec.cli.groups import ModelFlags
from flowspec.cluster import Places, Setup
from flowspec.core.run.fields import DEFAULT_STRATEGY
from flowspec.errors import ConfigError
from flowspec.model.drafters.kinds import NGRAM
from flowspec.model.drafters.sources import open_models
from flowspec.model.weights.directory import default_pair
from flowspec.model.weights.precision import AUTO
from flowspec.observe import note
from flowspec.plan.cluster_file import ClusterFile, read_cluster
from flowspec.strategies import build

#: Verify stages of a pipeline if no number is given.
DEFAULT_STAGES = 4


def check_alone(url: str | None, flags: ModelFlags) -> None:
    """ConfigError if flags of a private pipeline are given with the URL of a running one."""
    if url and flags.given:
        raise ConfigError(
            "--target, --draft, --models, --stages, --cluster and what they run on are for a "
            "private pipeline, "
            "and a running one is named by --redis-url or FLOWSPEC_REDIS_URL: "
            "leave out the one or the other"
        )


def draft_for(
    target: str | None, draft: str | None, packaged: str, strategy: str = DEFAULT_STRATEGY
) -> str:
    """``draft`` if given; else ``packaged`` for the packaged target, and n-grams for any other.

    Before n-grams are chosen, ``target`` is checked (ModelError), and a note goes to stderr if
    ``strategy`` drafts.
    """
    if draft is not None:
        return draft
    if target is None:
        return packaged
    open_models(target, NGRAM)
    if build(strategy, 1).draft_width:
        notes.drafts_by_ngrams(target)
    return NGRAM


def setup_of(flags: ModelFlags, strategy: str = DEFAULT_STRATEGY) -> Setup:
    """The setup for these flags; ``strategy``: what will be decoded with.

    ``models``: the draft, any middle models and the target, smallest first, joined by commas.
    ``cluster``: a cluster file, instead of all others but what the drafters run on.
    """
    if flags.cluster is not None:
        if replace(flags, draft_dtype=None, draft_device=None, cluster=None).given:
            raise ConfigError(
                "--cluster names the models, the stages and what they run on: "
                "leave out --target, --draft, --models, --stages, --dtype and --device"
            )
        drafting = (flags.draft_dtype, flags.draft_device)
        return cluster_setup(read_cluster(flags.cluster), drafting)
    target = flags.target
    draft = flags.draft
    models = flags.models
    run_on = (flags.dtype, flags.device, flags.draft_dtype, flags.draft_device)
    packaged_target, packaged_draft = default_pair()
    places = Places(*(AUTO if flag is None else flag for flag in run_on))
    count = DEFAULT_STAGES if flags.stages is None else flags.stages
    if models is not None:
        if (target, draft) != (None, None):
            raise ConfigError(
                "--models names the draft and the target too: leave out --target and --draft"
            )
        names = [name.strip() for name in models.split(",")]
        if len(names) < 2 or not all(names):
            raise ConfigError(
                f"--models is {models!r}; expected at least DRAFT,TARGET, smallest first"
            )
        return Setup(names[-1], names[0], count, tuple(names[1:-1]), places=places)
    drafts = draft_for(target, draft, packaged_draft, strategy)
    return Setup(target or packaged_target, drafts, count, places=places)


def cluster_setup(cluster: ClusterFile, drafting: Sequence[str | None] = (None, None)) -> Setup:
    """The setup of a planned pipeline; ``drafting``: precision and device of the drafters."""
    own = (cluster.dtypes, cluster.devices)
    dtype, device = drafting
    return Setup(
        cluster.model,
        cluster.draft,
        len(cluster.stages),
        layers=cluster.layers,
        context=cluster.context,
        places=Places(*own, dtype or cluster.draft_dtype, device or AUTO),
    )


@dataclass(frozen=True, slots=True)
class Running:
    """A pipeline that `up` or `serve` started: the process that does, its broker's URL, its model.

    That process holds a file lock while it runs: a process id alone may have been reused.
    """

    pid: int
    url: str
    target: str

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        with contextlib.suppress(OSError), lock_file().open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def state_file() -> Path:
    """The file that says what was started here; OSError if the user has no home."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        why = "the user has no home folder; set HOME or XDG_STATE_HOME"
        raise OSError(errno.ENOENT, why, "~") from None
    return Path(base) / "flowspec" / "up.json"


def lock_file() -> Path:
    """The file that the process behind a pipeline keeps locked."""
    return state_file().with_suffix(".lock")


def lock_pipeline() -> BinaryIO | None:
    """The lock file, locked for as long as this process or one that inherits it keeps it open.

    Nothing is recorded then of a pipeline that was killed. None: another one has the lock. OSError
    if there can be none.
    """
    lock_file().parent.mkdir(parents=True, exist_ok=True)
    lock = lock_file().open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if isinstance(error, BlockingIOError):
            return None
        raise
    state_file().unlink(missing_ok=True)
    return lock


def note_running(url: str, target: str) -> None:
    """Record this process and its pipeline in one step; private, as the URL has the password."""
    file = state_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(f"{file}.{os.getpid()}")
    draft.touch(mode=0o600)
    noted = {"pid": os.getpid(), "url": url, "target": target}
    draft.write_text(json.dumps(noted), encoding="utf-8")
    draft.replace(file)


def running() -> Running | None:
    """The pipeline that was started here, if it still runs."""
    try:
        noted = json.loads(state_file().read_text(encoding="utf-8"))
        found = Running(int(noted["pid"]), str(noted["url"]), str(noted["target"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.alive else None


def was_running() -> bool:
    """Whether a pipeline was started here, and did not end as it should."""
    try:
        return state_file().exists()
    except OSError:
        return False


def url_for_prompts(url: str | None, private: Setup | None) -> str | None:
    """The pipeline that answers prompts: ``url``, else the one started here; None: a private one.

    ``private``: that which flags describe. A note says which it is where one is started here.
    """
    found = None if url else running()
    if found is None:
        return url or None
    if private is not None:
        model = _model(private.target)
        note(
            f"starts a private pipeline of {model}, as flags describe one; the running one goes on"
        )
        return None
    note(f"the pipeline that runs here answers, of {_model(found.target)}")
    return found.url


def _model(target: str) -> str:
    return "the packaged model" if target == default_pair()[0] else target


def url_or_running(url: str | None) -> str | None:
    """``url``, else that of the pipeline started here, else None: the client's default."""
    if url is not None:
        return url
    found = running()
    return found.url if found is not None else None
