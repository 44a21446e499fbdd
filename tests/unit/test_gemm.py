"""Products with experts' weights: every backend gives what one product after the other does."""

import pytest
import torch
from torch import Tensor

from lightning_mcore_lora.adapters import gemm
from lightning_mcore_lora.adapters.gemm import BACKENDS, add_times, outer, times

EXPERTS, K, M = 4, 8, 16


def _case(sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = ((sum(sizes), K), (EXPERTS, M, K), (sum(sizes), M))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 0, 2], [2, 2, 2, 2], [1, 4, 0, 0]], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_backends_are_equal(name: str, sizes: list[int], dtype: torch.dtype) -> None:
    x, w, y = _case(sizes, dtype)
    backend = BACKENDS[name]
    if not backend.can(x, w, sizes):
        assert name == "batched"
        assert len(set(sizes)) > 1
        return
    parts = zip(x.double().split(sizes), y.double().split(sizes), w.double(), strict=True)
    product, gradient = (list(each) for each in zip(*((a @ v.T, b.T @ a) for a, b, v in parts), strict=True))
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype] * 10
    assert (backend.times(x, w, sizes) - torch.cat(product)).abs().max() < bound
    assert (backend.outer(y, x, sizes) - torch.stack(gradient)).abs().max() < bound
    added = torch.ones_like(y)
    backend.add_times(added, x, w, sizes)
    assert (added - 1 - torch.cat(product)).abs().max() < bound
    back = backend.times(y, w.mT, sizes)  # as backward calls it
    assert back.shape == x.shape


def test_the_first_that_can_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _ = _case([2, 2, 2, 2], torch.float32)
    assert gemm._backend(x, w, [2, 2, 2, 2]) is BACKENDS["grouped_mm"]
    assert gemm._backend(x.double(), w.double(), [2, 2, 2, 2]) is BACKENDS["batched"]
    assert gemm._backend(x.double(), w.double(), [1, 3, 2, 2]) is BACKENDS["looped"]
    assert gemm._backend(x[:, :5], w[..., :5], [1, 3, 2, 2]) is BACKENDS["looped"], "a width that is not aligned"
    assert gemm._backend(x[:0], w, [0, 0, 0, 0]) is BACKENDS["batched"]
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert gemm._backend(x, w, [1, 3, 2, 2]) is BACKENDS["looped"], "an older torch"


def test_one_weight_takes_any_shape() -> None:
    x, w = torch.randn(3, 2, K), torch.randn(M, K)
    assert torch.equal(times(x, w), x @ w.T)
    y = torch.randn(3, 2, M)
    assert torch.equal(outer(y, x, w), y.flatten(0, 1).T @ x.flatten(0, 1))
    added = y.clone()
    add_times(added, x, w)
    assert torch.allclose(added, y + x @ w.T)
