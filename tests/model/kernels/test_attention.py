"""Attention in C beside torch's float64, over rows that lie anyhow."""

from __future__ import annotations

import pytest
import torch

from flowspec.errors import ModelError
from flowspec.model.kernels.attention import ExactAttention, exact_attention_for
from flowspec.model.layers.lean import attend
from flowspec.model.rows.kv import Slots

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def made(dim: int, dtype: torch.dtype) -> ExactAttention:
    found = exact_attention_for(dim, dtype, CPU)
    if found is None:
        pytest.skip("this machine cannot compile it")
    return found


class Case:
    """Random rows of a job: ``count`` queries, of which some see not all of ``slots``."""

    def __init__(
        self,
        *,
        count: int,
        slots: int,
        dim: int = 64,
        heads: int = 6,
        key_heads: int = 2,
        dtype: torch.dtype = torch.float32,
        size: float = 1.0,
    ) -> None:
        source = torch.Generator().manual_seed(count * slots + dim)
        rows = torch.randn((count, heads, dim), generator=source) * size
        self.queries = rows.to(dtype).transpose(0, 1)
        # A store is longer than a job's rows, so heads do not lie one behind the other.
        store = torch.randn((2, key_heads, slots + 7, dim), generator=source).to(dtype)
        self.kept: tuple[torch.Tensor, ...] = (store[:, :, :slots],)
        hidden = torch.rand((count, slots), generator=source) < 0.3
        hidden[:, 0] = False
        one = torch.zeros((count, slots), dtype=torch.float64).masked_fill(hidden, -torch.inf)
        self.bias = one.repeat(heads // key_heads, 1)[None]
        self.scale = dim**-0.5
        self.dtype = dtype

    def found(self) -> torch.Tensor:
        heads, count, dim = self.queries.shape
        found = torch.empty((count, heads, dim), dtype=self.dtype)
        made(dim, self.dtype).into(found, self.queries, self.kept, self.bias, self.scale)
        return found

    def wanted(self) -> torch.Tensor:
        return attend(self.queries, Slots((), self.kept), self.bias, self.scale)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether both are the same but for a tie in the rounding from float64."""
    # Rounding to bfloat16 goes over float32, as torch's does.
    most = torch.finfo(found.dtype).eps / 2 * (1 + 1e-4)
    return bool(((found.double() - wanted).abs() <= most * wanted.abs()).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_it_finds_what_torch_finds(
    dim: int, heads: int, key_heads: int, dtype: torch.dtype
) -> None:
    for count in (1, 2, 5, 16):
        for slots in (1, 15, 16, 33, 200):
            case = Case(
                count=count, slots=slots, dim=dim, heads=heads, key_heads=key_heads, dtype=dtype
            )
            assert same(case.found(), case.wanted()), (count, slots)


@pytest.mark.parametrize("size", [0.0, 1e-6, 300.0])
def test_scores_of_any_size(size: float) -> None:
    case = Case(count=4, slots=90, size=size)
    assert same(case.found(), case.wanted())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    case = Case(count=7, slots=100, dtype=dtype)
    together = case.found()
    for row in range(7):
        alone = Case(count=7, slots=100, dtype=dtype)
        alone.queries = alone.queries[:, row : row + 1]
        alone.bias = case.bias[:, row : row + 1].contiguous()
        assert torch.equal(alone.found()[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_it_does_not_see_may_lie_between_others(dtype: torch.dtype) -> None:
    case = Case(count=3, slots=64, dtype=dtype)
    seen = torch.rand(64, generator=torch.Generator().manual_seed(3)) < 0.5
    seen[0] = True
    case.bias[:, :, ~seen] = -torch.inf
    between = case.found()
    case.kept = (case.kept[0][:, :, seen].contiguous(),)
    case.bias = case.bias[:, :, seen].contiguous()
    assert torch.equal(case.found(), between)


def test_rows_of_another_type_or_number_are_refused() -> None:
    case = Case(count=2, slots=20)
    case.queries = case.queries.bfloat16()
    with pytest.raises(ModelError, match="several types"):
        case.found()
    case = Case(count=2, slots=20)
    case.bias = case.bias[:, :, :19].contiguous()
    with pytest.raises(ModelError, match="19 slots, of which 20 are kept"):
        case.found()


def test_what_a_row_does_not_see_changes_nothing() -> None:
    case = Case(count=2, slots=60)
    before = case.found()
    unseen = case.bias[0, :2].isinf().all(0)
    assert unseen.any()
    case.kept[0][:, :, unseen] = 1e30
    assert torch.equal(case.found(), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_pieces_are_as_those_in_one(dtype: torch.dtype) -> None:
    case = Case(count=5, slots=77, dtype=dtype)
    whole = case.found()
    (rows,) = case.kept
    case.kept = tuple(part.clone() for part in torch.split(rows, [16, 1, 32, 28], dim=2))
    assert torch.equal(case.found(), whole)


def test_threads_change_no_bit() -> None:
    case = Case(count=9, slots=150, heads=8, key_heads=4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = case.found()
        torch.set_num_threads(3)
        assert torch.equal(case.found(), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    case = Case(count=4, slots=40, dtype=dtype)
    before = case.found()
    case.queries[1, 2, 5] = torch.nan
    found = case.found()
    assert found[2, 1].isnan().all()
    found[2, 1] = before[2, 1]
    assert torch.equal(found, before)


def test_heads_that_do_not_come_out_even_are_not_for_it() -> None:
    assert exact_attention_for(72, torch.float32, CPU) is None
    assert exact_attention_for(64, torch.float16, CPU) is None
    assert exact_attention_for(64, torch.float32, torch.device("cuda")) is None
