"""State that a pipeline's jobs share."""

from __future__ import annotations

from flowspec.core.run.history import History


class Seen(list[int]):
    pass


class Counted(list[int]):
    pass


def test_every_kind_is_made_once_and_kept() -> None:
    history = History()
    history.recall(Seen).append(7)
    assert history.recall(Seen) == [7]
    assert history.recall(Counted) == [], "another kind is another object"
    assert History().recall(Seen) == [], "and so is another pipeline's"
