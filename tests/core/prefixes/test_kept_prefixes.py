"""Which runs' rows are kept, for how long, and how much of them a run begins with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.prefixes.kept_prefixes import (
    LEAST_ROWS,
    MOST_RUNS,
    DrafterKind,
    KeptPrefixes,
    Reuse,
    most_blocks,
)
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import BLOCK_ROWS, in_blocks

MODEL = DrafterKind()
HEAD = DrafterKind(refreshed=True)
BLOCKS = DrafterKind(refreshed=True, block=True)
TEXT = tuple(range(100, 140))


def key(number: int) -> RunKey:
    return RunKey(f"job {number}", 1)


def keep(
    kept: KeptPrefixes, number: int, text: tuple[int, ...], drafted: tuple[int, ...] = ()
) -> int:
    rows, _ = kept.close(key(number), "", text, drafted)
    kept.confirm(key(number))
    return rows


def test_rows_are_used_once_all_stages_have_them() -> None:
    kept = KeptPrefixes(100)
    assert kept.close(key(1), "", TEXT, ()) == (40, (key(1),))
    assert kept.find("", (*TEXT, 1), ()) is None
    assert kept.confirm(key(1)) == 40
    assert kept.find("", (*TEXT, 1), ()) == Reuse(key(1), 40)
    assert kept.find("", TEXT, ()) == Reuse(key(1), 39), "the last row has to be computed"
    assert kept.find("other", (*TEXT, 1), ()) is None
    assert kept.find("", TEXT[:LEAST_ROWS], ()) is None


def test_a_draft_head_needs_a_row_of_the_target() -> None:
    kept = KeptPrefixes(100)
    keep(kept, 1, TEXT, (37,))
    longer = (*TEXT, 1)
    assert kept.find("", longer, [MODEL]) == Reuse(key(1), 40, (37,))
    assert kept.find("", longer, [HEAD]) == Reuse(key(1), 36, (37,))
    assert kept.find("", longer, [BLOCKS]) == Reuse(key(1), 36, (36,))
    assert kept.find("", longer, [MODEL, HEAD]) is None, "there are no rows of the second one"
    assert kept.find("", (*TEXT[:30], 1), [HEAD]) == Reuse(key(1), 29, (30,))


def test_a_longer_text_takes_the_place_of_what_it_begins_with() -> None:
    kept = KeptPrefixes(100)
    keep(kept, 1, TEXT, (40,))
    assert keep(kept, 2, (*TEXT, 1), ()) == 41, "without a drafter's rows"
    assert kept.runs == (key(1), key(2))
    keep(kept, 3, (*TEXT, 1, 2), (41,))
    assert kept.runs == (key(3),)
    assert set(kept.take_dropped()) == {key(1), key(2)}
    assert kept.take_dropped() == ()
    assert keep(kept, 4, TEXT, (30,)) == 0, "it is known already"
    assert kept.runs == (key(3),)


def test_rows_of_a_run_that_goes_on_are_usable_at_once() -> None:
    kept = KeptPrefixes(100)
    assert kept.share(key(1), "", TEXT) == (40, (key(1),))
    assert kept.find("", (*TEXT, 1), [MODEL]) == Reuse(key(1), 40, (0,)), "no drafter's so far"
    assert kept.find("", (*TEXT, 1), [HEAD]) is None
    kept.share_drafted(key(1), (40,))
    assert kept.find("", (*TEXT, 1), [HEAD]) == Reuse(key(1), 39, (40,))
    assert kept.share(key(2), "", TEXT) == (0, ()), "they are known"
    assert kept.share(key(3), "other", TEXT) == (40, (key(1), key(3)))


def test_a_text_without_a_drafters_rows_gives_way_to_one_that_will_have_them() -> None:
    kept = KeptPrefixes(100)
    kept.share(key(1), "", TEXT)
    assert kept.share(key(2), "", TEXT, drafters=1) == (40, (key(2),))
    assert kept.share(key(3), "", TEXT) == (0, ()), "it began with these"
    kept.share_drafted(key(2), (40,))
    assert kept.share(key(4), "", TEXT, drafters=1) == (0, ())
    assert kept.share(key(5), "", TEXT, drafters=2) == (40, (key(2), key(5)))


def test_a_run_that_ends_leaves_the_rest_of_its_text_too() -> None:
    kept = KeptPrefixes(100)
    kept.share(key(1), "", TEXT)
    kept.share_drafted(key(1), (40,))
    longer = (*TEXT, *range(20))
    assert kept.close(key(1), "", longer, (55,)) == (60, (key(1),))
    assert kept.find("", (*longer, 1), [MODEL]) == Reuse(key(1), 40, (40,)), "as long as it closes"
    kept.confirm(key(1))
    assert kept.find("", (*longer, 1), [MODEL]) == Reuse(key(1), 60, (55,))
    assert kept.take_dropped() == ()


def test_a_run_that_is_cancelled_leaves_what_it_shared() -> None:
    kept = KeptPrefixes(100)
    kept.share(key(1), "", TEXT)
    kept.revert(key(1))
    assert kept.runs == (key(1),)
    kept.close(key(1), "", (*TEXT, *range(20)), ())
    kept.revert(key(1))
    assert kept.rows == 40
    assert kept.find("", (*TEXT, *range(20), 1), ()) == Reuse(key(1), 40)
    kept.close(key(2), "", TEXT[::-1], ())
    kept.revert(key(2))
    kept.revert(key(3))
    assert kept.runs == (key(1),)
    assert kept.take_dropped() == (key(2),)


def test_a_run_whose_text_is_known_by_its_end_leaves_nothing_of_its_own() -> None:
    kept = KeptPrefixes(200)
    kept.share(key(1), "", TEXT)
    longer = (*TEXT, *range(20))
    kept.close(key(2), "", longer, ())
    assert kept.runs == (key(2),), "the longer text begins with the shared one"
    kept.share(key(1), "", TEXT)
    kept.confirm(key(2))
    assert kept.close(key(1), "", longer, ()) == (0, ())
    assert kept.runs == (key(2),)
    assert kept.confirm(key(1)) == 0
    assert kept.take_dropped() == (key(1), key(1))


def test_what_was_not_used_for_longest_goes_first() -> None:
    kept = KeptPrefixes(100)
    keep(kept, 1, TEXT)
    keep(kept, 2, TEXT[::-1])
    assert kept.find("", (*TEXT, 1), ()) is not None
    keep(kept, 3, TEXT[5:])
    assert kept.runs == (key(1), key(3))
    kept.drop(key(2))
    kept.drop(key(1))
    assert kept.take_dropped() == (key(2), key(1))
    assert kept.confirm(key(1)) == 0


def test_a_pipeline_may_keep_nothing() -> None:
    kept = KeptPrefixes(0)
    assert kept.close(key(1), "", TEXT, ()) == (0, ())
    assert kept.find("", TEXT, ()) is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),  # what is done
            st.integers(0, 90),
            st.lists(st.integers(0, 1), min_size=1, max_size=40),
            st.sampled_from(["", "a"]),
        ),
        max_size=120,
    ),
    st.integers(0, 120),
)
def test_bounds_hold_and_finds_are_right(
    operations: list[tuple[int, int, list[int], str]], most: int
) -> None:
    kept = KeptPrefixes(most)
    texts: dict[RunKey, tuple[str, list[int]]] = {}
    closed = 0
    for what, number, text, salt in operations:
        if what == 0:
            closed += 1
            rows, runs = kept.close(key(closed + 1000), salt, text, ())
            assert rows in (0, min(most, len(text)))
            if rows:
                texts[key(closed + 1000)] = (salt, text[:rows])
                assert runs == kept.runs
        elif what == 4:
            closed += 1
            if kept.share(key(closed + 1000), salt, text)[0]:
                texts[key(closed + 1000)] = (salt, text[:most])
        elif what == 5 and kept.runs:
            kept.revert(kept.runs[number % len(kept.runs)])
        elif what == 1 and kept.runs:
            kept.confirm(kept.runs[number % len(kept.runs)])
        elif what == 2 and kept.runs:
            kept.drop(kept.runs[number % len(kept.runs)])
        else:
            found = kept.find(salt, text, ())
            if found is not None:
                assert found.source in kept.runs
                own, known = texts[found.source]
                assert own == salt
                assert LEAST_ROWS <= found.rows < len(text)
                assert known[: found.rows] == text[: found.rows]
        assert kept.rows <= most
        assert len(kept.runs) <= MOST_RUNS
        blocks = sum(in_blocks(len(texts[run][1])) for run in kept.runs) // BLOCK_ROWS
        assert blocks <= most_blocks(most)
        assert set(kept._trees) == {texts[run][0] for run in kept.runs}
