"""API keys: read from a file, kept as digests, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from flowspec.errors import ConfigError

#: Shortest key accepted, characters.
SHORTEST = 8
_BEARER = "bearer "


class ApiKeys:
    """The keys of which a request must bring one; none: every request is served."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(map(_digest, keys))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, authorization: str) -> bool:
        """Whether a request with this ``Authorization`` header is served.

        The time that it takes does not depend on the keys.
        """
        if not self._digests:
            return True
        given = _given(authorization)
        if not given:
            return False
        digest = _digest(given)
        # All of them are compared, whichever of them it is.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def salt_of(keys: ApiKeys, authorization: str, chosen: str) -> str:
    """What jobs must have in common to share rows: the API key, and what a request ``chosen``."""
    owner = _given(authorization) if keys else ""
    if not owner and not chosen:
        return ""
    return hashlib.sha256(f"{owner}\n{chosen}".encode(errors="replace")).hexdigest()[:32]


def read_keys(file: Path) -> ApiKeys:
    """The keys in ``file``, one a line; ConfigError if there are none, or one is too short.

    Empty lines and those that begin with ``#`` are left out.
    """
    try:
        lines = [line.strip() for line in file.read_text("utf-8-sig").splitlines()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--api-key-file {file} cannot be read: {reason}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {file} has no keys; write one a line")
    for number, line in enumerate(lines, start=1):
        usable = line.isascii() and line.isprintable() and " " not in line
        if line in keys and (len(line) < SHORTEST or not usable):
            raise ConfigError(
                f"--api-key-file {file}: line {number} is no key; expected at least {SHORTEST} "
                "ASCII characters without spaces"
            )
    return ApiKeys(keys)


def _given(authorization: str) -> str:
    """The key in an ``Authorization`` header; empty: it has none."""
    given = authorization.strip()
    return given[len(_BEARER) :].strip() if given[: len(_BEARER)].lower() == _BEARER else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
