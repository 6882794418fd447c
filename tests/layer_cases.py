"""Cases of the ops of layers, look-ups and linear algebra, which `tests/parallelism/test_ops.py` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from op_case import Case, call, f, flat, ints, of, truths
from torch import Tensor

aten = torch.ops.aten


def both(fn: Callable[..., Any], *inputs: Any) -> Case:
    """A function of tensors and its gradients."""

    def run(*tensors: Tensor) -> Any:
        tensors = tuple(t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors)
        result = [m for m in flat(fn(*tensors)) if m.requires_grad]
        expected = [t for t in tensors if t.requires_grad]
        loss = sum((m.sin() * m.detach().cos()).sum() for m in result)
        return [*(m.detach() for m in result), *torch.autograd.grad(loss, expected)]

    return of(run, *inputs)


def _square(x: Tensor) -> Tensor:
    """A well-conditioned symmetric matrix."""
    return x @ x.mT + 2 * torch.eye(x.shape[-2], dtype=x.dtype)


def _pools(rank: int) -> dict[str, list[Case]]:
    """Cases of pooling, padding and resizing over a number of dims."""
    x = f(2, 3, *[6, 4, 4][:rank])
    pool, average = getattr(F, f"max_pool{rank}d"), getattr(F, f"avg_pool{rank}d")
    unpool, adaptive = getattr(F, f"max_unpool{rank}d"), getattr(F, f"adaptive_max_pool{rank}d")
    mean = getattr(F, f"adaptive_avg_pool{rank}d")
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[rank]
    pooled, averaged = f"max_pool{rank}d_with_indices", f"avg_pool{rank}d"
    cases: dict[str, list[Case]] = {
        f"reflection_pad{rank}d": [both(lambda x: F.pad(x, [1, 2] * rank, mode="reflect"), x)],
        f"replication_pad{rank}d": [both(lambda x: F.pad(x, [1, 2] * rank, mode="replicate"), x)],
        f"upsample_nearest{rank}d": [
            both(lambda x: F.interpolate(x, scale_factor=2), x),
            both(lambda x: F.interpolate(x, size=[5] * rank), x),
        ],
        f"_upsample_nearest_exact{rank}d": [both(lambda x: F.interpolate(x, size=[5] * rank, mode="nearest-exact"), x)],
        f"upsample_{linear}{rank}d": [both(lambda x: F.interpolate(x, size=[5] * rank, mode=linear), x)],
    }
    if rank > 1:
        cases |= {
            pooled: [
                both(lambda x: pool(x, 2), x), both(lambda x: pool(x, 3, 2, 1), x),
                both(lambda x: pool(x, 2, 1, 0, 2, ceil_mode=True), x),
            ],
            averaged: [
                both(lambda x: average(x, 2), x), both(lambda x: average(x, 3, 2, 1), x),
                both(lambda x: average(x, 3, 1, 1, count_include_pad=False), x),
                both(lambda x: average(x, 3, 2, 1, ceil_mode=True), x),
                both(lambda x: average(x, 3, 3, 1, ceil_mode=True, count_include_pad=False), x),
                both(lambda x: average(x, 3, 1, 1, ceil_mode=True, divisor_override=5), x),
            ],
            f"adaptive_max_pool{rank}d": [both(lambda x: adaptive(x, [3] * rank), x)],
            f"_adaptive_avg_pool{rank}d": [both(lambda x: mean(x, [3] * rank), x)],
        }  # fmt: skip
    if rank == 2:
        for mode in ("bicubic", "bilinear"):
            sized = {"size": [5, 3], "mode": mode, "antialias": True}
            cases[f"_upsample_{mode}2d_aa"] = [
                both(lambda x, sized=sized: F.interpolate(x, **sized), x),
                both(lambda x, m=mode: F.interpolate(x, size=[5, 9], mode=m, antialias=True, align_corners=True), x),
            ]
        cases["upsample_bicubic2d"] = [both(lambda x: F.interpolate(x, size=[5, 3], mode="bicubic"), x)]
    result = {f"aten.{name} aten.{name}_backward": each for name, each in cases.items()}
    if rank > 1:
        result[f"aten.max_unpool{rank}d"] = [
            of(lambda x: unpool(pool(x, 2), pool(x, 2, return_indices=True)[1].clone(), 2), x)  # windows unknown
        ]
    return result


def _batch_norm(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    mean, var = torch.zeros_like(w), torch.ones_like(w)
    trained = F.batch_norm(x, mean, var, w, b, training=True)
    return [trained + F.batch_norm(x, mean, var, w, b), mean * var]


def _decompose(x: Tensor) -> list[Tensor]:
    """Cases of decompositions, compared by values that do not depend on the signs of vectors."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    q, r = torch.linalg.qr(x)
    return [u @ vh, s, q @ r]


LAYERS: dict[str, list[Case]] = {
    "aten.convolution_backward": [
        both(lambda x, w: F.conv1d(x, w, None, 1, 2, 2), f(4, 6, 6), f(4, 6, 3)),
        both(lambda x, w, b: F.conv2d(x, w, b, 2, 1, 1, 3), f(2, 6, 7, 4), f(6, 2, 3, 3), f(6)),
        both(lambda x, w: F.conv_transpose1d(x, w, None, 2, 1, 1), f(4, 6, 6), f(6, 4, 3)),
    ],
    **_pools(1), **_pools(2), **_pools(3),
    "aten.grid_sampler_2d aten.grid_sampler_2d_backward": [
        both(lambda x, g: F.grid_sample(x, g, align_corners=False), f(2, 3, 4, 4), f(2, 6, 2, 2))
    ],
    "aten.grid_sampler_3d aten.grid_sampler_3d_backward": [
        both(lambda x, g: F.grid_sample(x, g, align_corners=False), f(2, 3, 4, 4, 2), f(2, 6, 2, 2, 3))
    ],
    "aten.native_batch_norm aten.native_batch_norm_backward": [both(_batch_norm, f(4, 6, 3), f(6), f(6))],
    "aten.native_group_norm aten.native_group_norm_backward": [
        both(lambda x, w, b: F.group_norm(x, 2, w, b), f(4, 6, 3), f(6), f(6))
    ],
    "aten._weight_norm_interface aten._weight_norm_interface_backward": [
        both(lambda v, g: torch._weight_norm(v, g, 0), f(4, 6), f(4, 1))
    ],
    "aten.multilabel_margin_loss_forward": [
        of(lambda x, y, how=how: F.multilabel_margin_loss(x, y - 1, reduction=how), f(4, 6), ints(7, 4, 6))
        for how in ("none", "mean", "sum")
    ],
    "aten.var_mean.correction": [both(lambda x: torch.var_mean(x, [0]), f(4, 6))],
    # views
    "aten.view.default": [call(aten.view.default, f(4, 6), [24])],
    "aten.view.dtype": [
        of(lambda x: x.view(torch.int64) >> 50, f(4, 6)), of(lambda x: x.contiguous().view(torch.int32) >> 20, f(4, 6)),
    ],
    "aten.unfold": [both(lambda x: x.unfold(1, 3, 2), f(4, 7)), of(lambda x: x.unfold(0, 2, 2), f(4, 6))],
    "aten.im2col aten.col2im windows_of sum_of_windows": [
        both(lambda x: F.unfold(x, (3, 2), (2, 1), (1, 0), (1, 2)), f(2, 3, 7, 6)), 
        both(lambda x: F.unfold(x, 2, stride=2), f(3, 4, 6)),
        both(lambda x: F.fold(x, (6, 5), 3, padding=1), f(2, 18, 30)),
        both(lambda x, w: torch.einsum("ok,nkl->nol", w, F.unfold(x, 3, padding=1)), f(2, 2, 6, 4), f(4, 18)),
    ],
    "aten.diagonal aten.diagonal_backward": [
        both(lambda x: x.diagonal(1, 0, 1), f(4, 6, 2)),
        both(lambda x: (x.diagonal(-1, 2, 0), x.diagonal(0, 1, 2)), f(6, 4, 5)),
        of(lambda x: x.diagonal(0, 0, 2), truths(6, 2, 6)),
        of(lambda x: aten.diagonal_backward.default(x, [2, 4, 6], 0, 1, 2), f(2, 4)),
    ],
    "aten.diagonal_scatter": [
        call(aten.diagonal_scatter.default, f(4, 6), f(4), 1),
        call(aten.diagonal_scatter.default, f(4, 2, 6), f(2, 3), -1, 0, 2),
    ],
    "aten._conj aten.view_as_complex aten.view_as_real": [
        both(lambda x: torch.view_as_real(torch.view_as_complex(x.contiguous()).conj() * 2), f(4, 6, 2))
    ],
    "aten._neg_view": [of(lambda x: torch.view_as_complex(x.contiguous()).conj().imag * 2, f(4, 6, 2))],
    "aten.contiguous": [of(lambda x: torch.linalg.det(_square(x)), f(4, 2, 3))],
    "dense_exactly": [of(lambda x: x.view(torch.int64) >> 50, f(4, 6))],
    "dense_last": [of(lambda x: F.scaled_dot_product_attention(x, x, x), f(4, 2, 3, 8))],
    # orders
    "aten.logcumsumexp": [
        both(lambda x: x.logcumsumexp(1), f(4, 6)), of(lambda x: x.flip(0).logcumsumexp(0).flip(0), f(5, 2)),
    ],
    "aten.cummax": [
        both(lambda x: x.cummax(1).values, f(4, 6)),
        of(lambda x: tuple(x.cummax(0)), ints(3, 8, 2)),
        of(lambda x: torch.where(x > 0.5, torch.nan, x).cummax(0).indices, f(8, 4)),
    ],
    "aten.cummin": [both(lambda x: x.cummin(0).values, f(4, 6)), of(lambda x: tuple(x.cummin(1)), ints(3, 2, 7))],
    "aten.median.dim": [of(lambda x: x.median(1), f(4, 6))],
    "aten.nanmedian.dim": [of(lambda x: x.nanmedian(0), f(4, 6))],
    "aten.median.default": [of(lambda x: x.median(), f(4, 6))],
    "aten.nanmedian.default": [of(lambda x: x.nanmedian(), f(4, 6))],
    "aten.mode": [of(lambda x: x.mode(1), ints(9, 4, 6))],
    "scan_to_end": [both(lambda x: x.cumsum(1), f(4, 6)), of(lambda x: x.flip(0).cumsum(0).flip(0), ints(9, 5, 2))],
    "aten.kthvalue": [of(lambda x: x.kthvalue(2, 1), f(4, 6))],
    "aten.histc": [of(lambda x: torch.histc(x, 4, 0.0, 2.0), f(4, 6))],
    "aten.searchsorted": [
        of(lambda x, v: torch.searchsorted(x.cumsum(-1), v), f(4, 6), f(4, 3)),
        of(lambda x, v: torch.searchsorted(x.cumsum(-1), v), f(6), f(4, 3)),
    ],
    # by index
    "aten._unsafe_index": [call(aten._unsafe_index.Tensor, f(4, 6), [None, ints(6, 8)])],
    "aten._unsafe_index_put": [call(aten._unsafe_index_put.default, f(4, 6), [ints(4, 8), None], f(8, 6), True)],
    "aten.scatter.reduce": [call(aten.scatter.reduce, f(4, 6), 0, ints(4, 3, 6), f(3, 6), reduce="add")],
    "aten.scatter_reduce": [
        call(aten.scatter_reduce.two, f(4, 6), 1, ints(6, 4, 3), f(4, 3), "amax"),
        call(aten.scatter_reduce.two, f(4, 6), 0, ints(4, 8, 6), f(8, 6), "mean", include_self=False),
        *(
            both(
                lambda x, i, s, h=how, c=own: x.scatter_reduce(0, i, s, h, include_self=c),
                f(4, 6), ints(3, 9, 6), f(9, 6),
            )
            for how in ("sum", "prod", "mean", "amin") for own in (True, False)
        ),
        call(aten.scatter_reduce.two, ints(9, 4, 6), 0, ints(4, 8, 6), ints(9, 8, 6), "amax", include_self=False),
    ],
    "aten.index_reduce": [
        call(aten.index_reduce.default, f(4, 6), 0, ints(4, 8), f(8, 6), "amax"),
        call(aten.index_reduce.default, f(4, 6), 1, ints(6, 3), f(4, 3), "prod", include_self=False),
    ],
    "aten._embedding_bag aten._embedding_bag_backward": [
        both(lambda k, t, m=mode: F.embedding_bag(k, t, mode=m), ints(12, 4, 2), f(12, 6))
        for mode in ("sum", "mean", "max")
    ],
    "aten._embedding_bag_per_sample_weights_backward": [
        both(lambda k, t, s: F.embedding_bag(k, t, per_sample_weights=s, mode="sum"), ints(12, 4, 2), f(12, 6), f(4, 2))
    ],
    "aten._embedding_bag_forward_only": [of(lambda k, t: F.embedding_bag(k, t), ints(12, 4, 2), f(12, 6))],
    "aten.empty_strided": [of(lambda x: aten.empty_strided.default([4, 6], [1, 4]).fill_(2.0) + x, f(4, 6))],
    # transforms
    "aten._fft_r2c aten._fft_c2r": [both(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2), f(4, 2, 6))],
    "aten._fft_c2c": [of(lambda x: torch.fft.fft2(torch.complex(x, x), dim=(0, 2)).abs(), f(4, 2, 6))],
    # matrices
    "aten.linalg_inv_ex": [both(lambda x: torch.linalg.inv(_square(x)), f(4, 2, 3))],
    "aten.linalg_cholesky_ex aten.linalg_solve_triangular": [
        both(lambda x: torch.linalg.cholesky(_square(x)), f(4, 2, 3))
    ],
    "aten._linalg_solve_ex aten.linalg_lu_solve": [
        both(lambda x, y: torch.linalg.solve(_square(x), y), f(4, 3, 3), f(4, 3, 2)),
        of(lambda x, y: torch.linalg.solve(_square(x), y), f(4, 3, 3), f(4, 3)),
    ],
    "aten.cholesky_solve": [of(lambda y, x: torch.cholesky_solve(y, _square(x).tril()), f(4, 3, 2), f(4, 3, 3))],
    "aten.cholesky_inverse": [of(lambda x: torch.cholesky_inverse(_square(x).tril()), f(4, 3, 3))],
    "aten.linalg_lu_factor_ex aten.lu_unpack": [
        of(lambda x: torch.lu_unpack(*torch.linalg.lu_factor(_square(x))), f(4, 3, 3))
    ],
    "aten.linalg_lu": [of(lambda x: torch.linalg.lu(_square(x)), f(4, 3, 3))],
    "aten.geqrf": [of(lambda x: tuple(torch.geqrf(x)), f(4, 3, 2))],
    "aten.linalg_qr aten._linalg_svd": [of(_decompose, f(4, 3, 2))],
    "aten.linalg_householder_product": [of(lambda x, t: torch.linalg.householder_product(x, t), f(4, 3, 2), f(4, 2))],
    "aten._linalg_eigh": [both(lambda x: torch.linalg.eigvalsh(_square(x)), f(4, 2, 3))],
    "aten.linalg_eig": [of(lambda x: torch.linalg.eig(_square(x)).eigenvalues.real.sort().values, f(4, 3, 3))],
    "aten._linalg_eigvals": [
        of(lambda x: aten._linalg_eigvals.default(_square(x)).real.sort().values, f(4, 3, 3))
    ],
    "aten._linalg_det": [both(lambda x: torch.linalg.det(_square(x)), f(4, 2, 3))],
    "aten._linalg_slogdet": [both(lambda x: torch.linalg.slogdet(_square(x)), f(4, 2, 3))],
    "aten.linalg_pinv.atol_rtol_tensor": [of(lambda x: torch.linalg.pinv(x), f(4, 3, 2))],
    "aten._euclidean_dist": [
        both(lambda x, y: torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist"), f(4, 6, 3), f(4, 8, 3))
    ],
    "aten._cdist_forward aten._cdist_backward": [both(lambda x, y: torch.cdist(x, y, p=1.0), f(4, 6, 3), f(4, 8, 3))],
    "aten.linalg_matrix_exp": [both(lambda x: torch.linalg.matrix_exp(x), f(4, 2, 2))],
}  # fmt: skip
