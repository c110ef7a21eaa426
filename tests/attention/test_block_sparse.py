"""Block-sparse attention equals dense attention under the same mask, in outputs and gradients, and visits only the
blocks that it needs.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from partita import PartitaError
from partita.attention import Layout, block_sparse, flex, gathered_blocks
from partita.attention.block_pairs import BlockPairs, block_pairs
from partita.attention.flex import block_mask
from partita.attention.segments import Sizes, documents_by_position, documents_of, whole_samples
from tests.attention.reference import BLOCK, LAYOUTS, assert_alike, dense, layout, mask_of
from tests.kit import seeds
from tests.kit.plans import matrix, sampled

WIDTH = 16


def tensors(num_queries: int, num_keys: int, heads: int = 4, key_heads: int = 2) -> list[Tensor]:
    seeds.start()
    shapes = [(2, heads, num_queries, WIDTH), (2, key_heads, num_keys, WIDTH), (2, key_heads, num_keys, WIDTH)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def with_gradients(out: Tensor, given: list[Tensor], weights: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, given, weights)]


def compare(pattern: Layout, given: list[Tensor], mask: Tensor, what: str, **said: Tensor) -> Tensor:
    """Compare outputs and gradients with dense attention under the mask; return the output."""
    out = block_sparse(*given, pattern, **said)
    weights = torch.randn_like(out)
    mine = with_gradients(out, given, weights)
    assert_alike(mine, with_gradients(dense(*given, mask), given, weights), what)
    return out


@matrix(pattern=LAYOUTS, causal=(True, False), lengths=((64, 64), (61, 61), (19, 53), (1, 40)))
def test_as_dense_under_the_same_mask(pattern: str, causal: bool, lengths: tuple[int, int]) -> None:
    chosen = layout(pattern, causal)
    compare(chosen, tensors(*lengths), mask_of(chosen, *lengths)[None, None], f"{pattern}, {lengths}")


@matrix(pattern=LAYOUTS, causal=(True, False))
def test_documents_are_as_if_each_stood_alone(pattern: str, causal: bool) -> None:
    chosen, length = layout(pattern, causal), 61
    lengths = ((13, 1, 40, 7), (61,))
    documents = torch.stack(
        [torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in lengths]  # [2, 61]
    )
    mask = torch.zeros(2, 1, length, length, dtype=torch.bool)
    for sample, each in enumerate(lengths):
        start = 0
        for size in each:
            mask[sample, 0, start : start + size, start : start + size] = mask_of(chosen, size, size)
            start += size
    compare(chosen, tensors(length, length), mask, pattern, documents=documents)


@matrix(pattern=LAYOUTS, causal=(True, False), side=("right", "inside"))
def test_padding(pattern: str, causal: bool, side: str) -> None:
    chosen, length = layout(pattern, causal), 45
    seen = torch.ones(2, length, dtype=torch.bool)
    seen[0, slice(30, None) if side == "right" else slice(9, 33)] = False
    mask = mask_of(chosen, length, length).expand(2, 1, -1, -1).clone()
    if side == "right":  # the pattern is that of the sample without its padding
        mask[0] = F.pad(mask_of(chosen, length, 30, first=0), (0, 15))
    mask &= seen[:, None, None]
    compare(chosen, tensors(length, length), mask, f"{pattern}, {side}", seen=seen)


@pytest.mark.parametrize("pattern", LAYOUTS)
def test_padding_before_a_sample(pattern: str) -> None:
    """After left padding, the pattern begins at the first real key; queries before it see nothing and give zeros."""
    chosen, length, start = layout(pattern, True), 45, 15
    seen = (torch.arange(length) >= torch.tensor([[start], [0]])).expand(2, length)
    mask = mask_of(chosen, length, length).expand(2, 1, -1, -1).clone()
    mask[0] = False
    mask[0, 0, start:, start:] = mask_of(chosen, length - start, length - start)
    out = compare(chosen, tensors(length, length), mask, pattern, seen=seen)
    assert not out[0, :, :start].any()


def test_a_sample_without_keys_gives_zeros() -> None:
    given = tensors(24, 24)
    seen = torch.tensor([[True], [False]]).expand(2, 24)
    out = block_sparse(*given, layout("longformer", True), seen=seen)
    gradients = torch.autograd.grad(out.square().sum(), given)
    assert not out[1].any()
    assert all(not each[1].any() and each[0].isfinite().all() for each in gradients)


def test_derivatives_in_double_precision() -> None:
    given = [each.detach().double()[:1, :, :, :2].requires_grad_() for each in tensors(9, 9, 2, 1)]
    pattern = Layout("longformer", 2, 3, 1)
    assert torch.autograd.gradcheck(lambda *each: block_sparse(*each, pattern), given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_as_near_as_dense_attention_in_them(dtype: torch.dtype) -> None:
    chosen = layout("bigbird", True)
    exact = tensors(64, 64)
    rough = [each.detach().to(dtype).requires_grad_() for each in exact]
    mask, weights = mask_of(chosen, 64, 64)[None, None], torch.randn(2, 4, 64, WIDTH)
    true = with_gradients(dense(*exact, mask), exact, weights)
    mine = with_gradients(block_sparse(*rough, chosen), rough, weights.to(dtype))
    other = with_gradients(dense(*rough, mask), rough, weights.to(dtype))
    for a, b, c in zip(mine, other, true, strict=True):
        assert a.dtype == dtype
        assert (a.double() - c.double()).norm() <= 1.5 * (b.double() - c.double()).norm()


def test_values_of_another_width() -> None:
    q, k, _ = tensors(40, 40)
    v = torch.randn(2, 2, 40, 24, requires_grad=True)
    chosen = layout("fixed", True)
    out = compare(chosen, [q, k, v], mask_of(chosen, 40, 40)[None, None], "width 24")
    assert out.shape == (2, 4, 40, 24)


def test_dropout_is_dense_attention_with_the_same_weights_dropped() -> None:
    """With the identity as values, the output is the attention weights, and shows which ones were dropped."""
    chosen, length, share = layout("longformer", True), 48, 0.4
    q, k, v = tensors(length, length, key_heads=4)
    unit = torch.eye(length).expand(2, 4, -1, -1)
    mask = mask_of(chosen, length, length)

    def drawn(values: Tensor) -> Tensor:
        torch.manual_seed(seeds.chosen())
        return block_sparse(q, k, values, chosen, dropout=share)

    weights = (q @ k.mT / WIDTH**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    dropped = drawn(unit).detach()
    kept = dropped != 0
    assert_alike([dropped], [weights.detach() * kept / (1 - share)], "weights")
    assert abs(kept[mask.expand_as(kept)].double().mean().item() - (1 - share)) < 0.03
    out, reference = drawn(v), (weights * kept / (1 - share)) @ v
    assert_alike(
        with_gradients(out, [q, k, v], torch.ones_like(out)),
        with_gradients(reference, [q, k, v], torch.ones_like(out)),
        "dropout",
    )
    assert not torch.equal(drawn(v), block_sparse(q, k, v, chosen, dropout=share))


def test_the_size_of_pieces_changes_nothing() -> None:
    given, chosen = tensors(96, 96), layout("bigbird", True)
    weights = torch.randn(2, 4, 96, WIDTH)
    whole = with_gradients(block_sparse(*given, chosen), given, weights)
    with mock.patch.object(gathered_blocks, "PIECE", 1):
        pieces = with_gradients(block_sparse(*given, chosen), given, weights)
    assert_alike(pieces, whole, "pieces", 1e-6)


@matrix(pattern=LAYOUTS, causal=(True, False), what=("whole", "documents", "rectangle"))
def test_blocks_that_are_visited_are_those_that_are_seen(pattern: str, causal: bool, what: str) -> None:
    """The visited blocks are exactly those with a visible pair, and blocks marked as whole are fully visible."""
    chosen = layout(pattern, causal)
    found, mask = some_visits(chosen, what)
    sizes = found.sizes
    filled = torch.zeros(sizes.samples, found.num_rows * BLOCK, found.num_cols * BLOCK, dtype=torch.bool)
    filled[:, : sizes.queries, : sizes.keys] = mask
    grid = filled.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).transpose(2, 3).flatten(3)
    visible = grid.any(-1)
    filled[:, sizes.queries :] = True  # padded queries are ignored
    fully = filled.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).transpose(2, 3).flatten(3).all(-1)
    fully[..., sizes.keys // BLOCK :] = False
    visited, whole = torch.zeros(2, *grid.shape[:3], dtype=torch.bool)
    row = (found.row // found.num_rows, found.row % found.num_rows, found.col)
    visited[row], whole[row] = True, found.whole
    assert torch.equal(visited, visible)
    assert (fully | ~whole).all()
    if pattern in ("dense", "sliding"):  # with a single range, every full block is detected
        assert torch.equal(whole, fully)


def some_visits(chosen: Layout, what: str) -> tuple[BlockPairs, Tensor]:
    """Return the block pairs of a batch, and its mask [samples, queries, keys]."""
    if what != "documents":
        sizes = Sizes(1, 61 if what == "whole" else 30, 61)
        return block_pairs(chosen, sizes, whole_samples(sizes)), mask_of(chosen, sizes.queries, 61)[None]
    sizes = Sizes(2, 61, 61)
    documents = torch.stack([torch.arange(61) // 23, torch.arange(61) // 16])
    mask = torch.zeros(2, 61, 61, dtype=torch.bool)
    for sample, size in enumerate((23, 16)):
        for start in range(0, 61, size):
            stop = min(start + size, 61)
            mask[sample, start:stop, start:stop] = mask_of(chosen, stop - start, stop - start)
    return block_pairs(chosen, sizes, documents_of(sizes, documents)), mask


@matrix(pattern=LAYOUTS, causal=(True, False), what=("whole", "documents"))
def test_the_gpu_kernel_is_given_the_same(pattern: str, causal: bool, what: str) -> None:
    chosen = layout(pattern, causal)
    found, mask = some_visits(chosen, what)
    given = block_mask(found, torch.device("cpu"))
    sample, query, key = torch.meshgrid(*(torch.arange(n) for n in mask.shape), indexing="ij")
    assert torch.equal(given.mask_mod(sample, torch.tensor(0), query, key), mask)
    listed = given.to_dense().bool()[:, 0]
    expected = torch.zeros_like(listed)
    expected[found.row // found.num_rows, found.row % found.num_rows, found.col] = True
    assert torch.equal(listed, expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("what", sampled(["whole", "documents", "padded"], "documents"))
def test_the_way_to_the_gpu_kernel(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled FlexAttention, forward only, equals dense attention, with lengths padded to full blocks, grouped
    heads, and block lists that are reused.
    """
    monkeypatch.setattr(flex, "runs_on", lambda device: True)
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    chosen = replace(layout("variable", True), block=48)
    given = [each.detach() for each in tensors(61, 61)]
    said, mask = {}, mask_of(chosen, 61, 61).expand(2, 1, 61, 61)
    if what == "padded":
        said["seen"] = (torch.arange(61) < torch.tensor([[40], [61]])).expand(2, 61)
        mask = mask & said["seen"][:, None, None]
        mask[0] = F.pad(mask_of(chosen, 61, 40, first=0), (0, 21))
    elif what == "documents":
        said["documents"] = torch.stack([torch.arange(61) // 23, torch.arange(61) // 16])
        mask = some_visits(chosen, what)[1][:, None]
    for time in ("first", "again"):
        assert_alike([block_sparse(*given, chosen, **said)], [dense(*given, mask)], f"{what}, {time}")
    with pytest.raises(PartitaError, match="attention.block: expected a multiple of 16 on a GPU .* got 8"):
        block_sparse(*given, layout("variable", True))


def test_more_lengths_than_dynamo_compiles_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length is compiled, up to ``MAX_KERNELS``; more lengths are an error, and never run uncompiled."""
    torch._dynamo.reset()
    kernels = CompileCounter()
    monkeypatch.setattr(flex, "runs_on", lambda device: True)
    monkeypatch.setattr(flex, "_compiled", lambda: torch.compile(flex_attention, backend=kernels, dynamic=False))
    monkeypatch.setattr(flex, "MAX_KERNELS", 3)
    chosen = replace(layout("sliding", True), block=16)
    given = {blocks: [each.detach() for each in tensors(16 * blocks, 16 * blocks)] for blocks in range(1, 5)}
    with dynamo.patch(recompile_limit=1, accumulated_recompile_limit=1):
        for length in (1, 2, 3, 2):
            block_sparse(*given[length], chosen)
        assert kernels.frame_count == 3
        with pytest.raises(
            PartitaError, match=r"attention: torch.compile has compiled .* 3 layouts .* fewer different lengths"
        ):
            block_sparse(*given[4], chosen)
        assert (dynamo.recompile_limit, dynamo.accumulated_recompile_limit) == (1, 1)
    assert not dynamo.fail_on_recompile_limit_hit
    torch._dynamo.reset()


def test_packed_documents_cost_what_they_are_and_a_window_what_it_is() -> None:
    """Packed documents visit only the blocks of each document, and a window only its own blocks. All pairs of blocks
    are never enumerated, which would take minutes at this length.
    """
    dense_layout, length = Layout("dense", 64), 64 * 1024
    sizes = Sizes(1, length, length)
    documents = (torch.arange(length) // 4096)[None]
    packed = block_pairs(dense_layout, sizes, documents_of(sizes, documents))
    assert len(packed.row) == 16 * (64 * 65 // 2)
    window = block_pairs(Layout("sliding", 64, 1024), sizes, whole_samples(sizes))
    assert len(window.row) == 1024 * 17 - 16 * 17 // 2


def test_documents_by_position() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1], [3, 4, 5, 6, 7, 8, 9, 10]])
    assert documents_by_position(positions).tolist() == [[0, 0, 0, 1, 1, 2, 3, 3], [0] * 8]  # type: ignore[union-attr]
    assert documents_by_position(positions[1:]) is None


def test_changed_tensors_are_looked_at_again() -> None:
    given, seen = tensors(24, 24), torch.ones(2, 24, dtype=torch.bool)
    chosen = layout("sliding", True)
    before = block_sparse(*given, chosen, seen=seen)
    seen[:, 3:9] = False
    mask = mask_of(chosen, 24, 24) & seen[0]
    assert not torch.equal(before, block_sparse(*given, chosen, seen=seen))
    assert_alike([block_sparse(*given, chosen, seen=seen)], [dense(*given, mask[None, None])], "changed")


def test_tensors_that_do_not_fit_together_are_shown() -> None:
    q, k, v = (each.detach() for each in tensors(24, 24))
    chosen = layout("sliding", True)
    with pytest.raises(PartitaError, match=r"expected \[samples, heads, positions, width\] each; got q \[4, 24, 16\]"):
        block_sparse(q[0], k[0], v[0], chosen)
    with pytest.raises(PartitaError, match="multiple of the key heads; got q .* k .*3"):
        block_sparse(q, k[:, :1].expand(-1, 3, -1, -1), v[:, :1].expand(-1, 3, -1, -1), chosen)
    with pytest.raises(PartitaError, match="of one dtype"):
        block_sparse(q, k.double(), v, chosen)
    with pytest.raises(PartitaError, match=r"seen: expected bool \[2, 24\]"):
        block_sparse(q, k, v, chosen, seen=torch.ones(2, 23, dtype=torch.bool))
    with pytest.raises(PartitaError, match=r"documents: expected \[2, 24\]"):
        block_sparse(q, k, v, chosen, documents=torch.zeros(2, 23))
    with pytest.raises(PartitaError, match="dropout: expected a share"):
        block_sparse(q, k, v, chosen, dropout=1.0)
