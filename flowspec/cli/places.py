"""Where things are: the packaged models, and the state of a pipeline that `flowspec up` started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

from flowspec.cluster import Setup
from flowspec.errors import ConfigError
from flowspec.model.directory import default_pair
from flowspec.model.sources import NGRAM, open_models

#: What comes along and can only draft.
_DRAFTERS = (NGRAM, "head")
#: Verify stages of a pipeline nobody said more about.
DEFAULT_STAGES = 4


def check_alone(url: str | None, *flags: object) -> None:
    """ConfigError if flags of a private pipeline come with the URL of one that runs already."""
    if url and any(flag is not None for flag in flags):
        raise ConfigError(
            "--target, --draft, --models and --stages are for a private pipeline, and a running "
            "one is named by "
            "--redis-url or FLOWSPEC_REDIS_URL: leave out the one or the other"
        )


def check_target(target: str | None, draft: str | None) -> None:
    """ConfigError for a target of one's own without a draft; ModelError if it could not be a target
    anyway.
    """
    if target is None or draft is not None:
        return
    if target in _DRAFTERS:
        open_models(target, NGRAM)
    raise ConfigError(
        "--target needs --draft: the packaged draft has another tokenizer than your model"
    )


def setup_of(
    target: str | None, draft: str | None, models: str | None, stages: int | None
) -> Setup:
    """The setup flags ask for. A target of one's own needs a draft of one's own; ``models`` names
    both, and what lies between them, smallest first, joined by commas.
    """
    packaged_target, packaged_draft = default_pair()
    count = DEFAULT_STAGES if stages is None else stages
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
        return Setup(names[-1], names[0], count, tuple(names[1:-1]))
    check_target(target, draft)
    return Setup(target or packaged_target, packaged_draft if draft is None else draft, count)


@dataclass(frozen=True, slots=True)
class Running:
    """A pipeline that `flowspec up` started: its supervisor's process and its broker's URL.

    The supervisor holds a lock on a file as long as it lives: a process id alone may be somebody
    else's.
    """

    pid: int
    url: str

    @property
    def alive(self) -> bool:
        """Whether the supervisor still runs."""
        with contextlib.suppress(OSError), lock_file().open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def state_file() -> Path:
    """Where `flowspec up` notes what it started."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "flowspec" / "up.json"


def lock_file() -> Path:
    """What the supervisor keeps locked."""
    return state_file().with_suffix(".lock")


def running() -> Running | None:
    """The pipeline that was started here and still runs, if there is one."""
    try:
        noted = json.loads(state_file().read_text())
        found = Running(int(noted["pid"]), str(noted["url"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.alive else None


def url_or_running(url: str | None) -> str | None:
    """``url``, else that of the pipeline started here, else None: the client's default."""
    if url is not None:
        return url
    found = running()
    return found.url if found is not None else None
