"""State that a pipeline's jobs share."""

from __future__ import annotations

from flowspec.core.run.history import History


class Seen(list[int]):
    pass


class Counted(list[int]):
    pass


def test_every_kind_is_made_once_and_kept() -> None:
    history = History()
    history.get(Seen).append(7)
    assert history.get(Seen) == [7]
    assert history.get(Counted) == [], "another kind is another object"
    assert History().get(Seen) == [], "and so is another pipeline's"
