"""The operations that the programs of `partitioner_programs.py` are written against, in torch and in jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from tpshard.parallelism import Mesh, mesh_split


class Torch:
    """The operations of a program, in torch."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.names = mesh, list(mesh.axes)

    einsum = staticmethod(torch.einsum)
    relu = staticmethod(torch.relu)
    roll = staticmethod(torch.roll)
    logsumexp = staticmethod(torch.logsumexp)
    silu = staticmethod(F.silu)
    softmax = staticmethod(torch.softmax)
    cat = staticmethod(torch.cat)
    topk = staticmethod(torch.topk)
    argmax = staticmethod(torch.argmax)
    cumsum = staticmethod(torch.cumsum)
    flip = staticmethod(torch.flip)
    permute = staticmethod(torch.permute)

    def sort(self, x: Any, dim: int) -> Any:
        return torch.sort(x, dim).values

    def take(self, table: Any, index: Any) -> Any:
        return F.embedding(index, table)

    def pick(self, x: Any, index: Any) -> Any:
        return torch.gather(x, -1, index[..., None].long())[..., 0]

    def one_hot(self, index: Any, count: int) -> Any:
        return (index[..., None] == torch.arange(count)).float()

    def scatter_add(self, rows: int, index: Any, x: Any) -> Any:
        return torch.zeros(rows, x.shape[1]).index_add(0, index, x)

    def conv(self, x: Any, w: Any, stride: int = 1, padding: int | None = None, dilation: int = 1) -> Any:
        """Of images or volumes; groups follow from the weight's shape. padding: by default what keeps the size."""
        padding = dilation * (w.shape[-1] // 2) if padding is None else padding
        layer = F.conv2d if x.ndim == 4 else F.conv3d
        return layer(x, w, None, stride, padding, dilation, x.shape[1] // w.shape[1])

    def upsample(self, x: Any, w: Any, stride: int) -> Any:
        return F.conv_transpose2d(x, w, None, stride, (w.shape[-1] - stride) // 2)

    def unfold(self, x: Any, kernel: int, stride: int, padding: int) -> Any:
        """The columns of images: [n, channels x kernel x kernel, positions]."""
        return F.unfold(x, kernel, stride=stride, padding=padding)

    def diagonal(self, x: Any) -> Any:
        return torch.diagonal(x, 0, -2, -1)

    def around(self, x: Any, width: int) -> Any:
        """Images with rows of the other side above and below."""
        return F.pad(x, (0, 0, width, width), mode="circular")

    def windows_of(self, x: Any, count: int) -> Any:
        """The means of `count` windows of images' rows, which may be of several heights."""
        return F.adaptive_avg_pool2d(x, (count, x.shape[-1]))

    def pooled_back(self, x: Any) -> Any:
        """The largest element of each 2 x 2 window in its place, zeros in the others."""
        values, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(values, places, 2)

    def bags(self, table: Any, index: Any) -> Any:
        return F.embedding_bag(index, table, mode="sum")

    def bilinear(self, x: Any, y: Any, w: Any) -> Any:
        return F.bilinear(x, y, w)

    def distances(self, x: Any, y: Any) -> Any:
        return torch.cdist(x, y)

    def prod(self, x: Any) -> Any:
        return torch.prod(x, 1)

    def layer_norm(self, x: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:])

    def twice(self, x: Any) -> Any:
        """Images of twice the height and width, each element four times."""
        return F.interpolate(x, scale_factor=2)

    def mirror(self, x: Any) -> Any:
        """Images with one row more above and below, mirrored."""
        return F.pad(x, (0, 0, 1, 1), mode="reflect")

    def pad(self, x: Any, before: int, after: int) -> Any:
        """Zeros around the first dim."""
        return F.pad(x, [0, 0] * (x.ndim - 1) + [before, after])

    def sort_by(self, keys: Any, values: Any) -> Any:
        keys, order = torch.sort(keys, -1)
        return keys, torch.gather(values, -1, order)

    def barrier(self, x: Any) -> Any:
        return x  # nothing moves over it anyway

    def causal(self, scores: Any) -> Any:
        n, m = scores.shape[-2:]
        return scores.masked_fill(torch.arange(m)[None] > torch.arange(n)[:, None], -1e9)

    def grad(self, loss: Callable[..., Any], at: Sequence[Any]) -> Any:
        return torch.autograd.grad(loss(*at), list(at))

    def split(self, x: Any, *dims: Any) -> Any:
        return mesh_split(x, self.mesh, [self.names.index(d) if d else -1 for d in dims])


class Jax:
    """The same operations in jax."""

    def __init__(self, jax: ModuleType, mesh: Any):
        import jax.numpy as jnp

        self.jax, self.jnp, self.mesh = jax, jnp, mesh
        self.einsum, self.roll, self.cumsum, self.flip = jnp.einsum, jnp.roll, jnp.cumsum, jnp.flip
        self.cat, self.sort, self.argmax = jnp.concatenate, jnp.sort, jnp.argmax
        self.permute = jnp.transpose
        self.relu, self.silu, self.softmax, self.one_hot = jax.nn.relu, jax.nn.silu, jax.nn.softmax, jax.nn.one_hot
        self.topk, self.logsumexp = jax.lax.top_k, jax.scipy.special.logsumexp

    def take(self, table: Any, index: Any) -> Any:
        return table[index]

    def pick(self, x: Any, index: Any) -> Any:
        return self.jnp.take_along_axis(x, index[..., None], -1)[..., 0]

    def scatter_add(self, rows: int, index: Any, x: Any) -> Any:
        return self.jnp.zeros((rows, x.shape[1])).at[index].add(x)

    def conv(self, x: Any, w: Any, stride: int = 1, padding: int | None = None, dilation: int = 1) -> Any:
        padding, dims = dilation * (w.shape[-1] // 2) if padding is None else padding, x.ndim - 2
        return self.jax.lax.conv_general_dilated(
            x, w, (stride,) * dims, [(padding, padding)] * dims, rhs_dilation=(dilation,) * dims,
            feature_group_count=x.shape[1] // w.shape[1],
        )  # fmt: skip

    def upsample(self, x: Any, w: Any, stride: int) -> Any:
        around = w.shape[-1] - 1 - (w.shape[-1] - stride) // 2
        return self.jax.lax.conv_general_dilated(
            x, w[:, :, ::-1, ::-1], (1, 1), [(around, around)] * 2, lhs_dilation=(stride, stride),
            dimension_numbers=("NCHW", "IOHW", "NCHW"),
        )  # fmt: skip

    def unfold(self, x: Any, kernel: int, stride: int, padding: int) -> Any:
        around = [(padding, padding)] * 2
        columns = self.jax.lax.conv_general_dilated_patches(x, (kernel, kernel), (stride, stride), around)
        return columns.reshape(*columns.shape[:2], -1)

    def diagonal(self, x: Any) -> Any:
        return self.jnp.diagonal(x, 0, -2, -1)

    def around(self, x: Any, width: int) -> Any:
        return self.jnp.pad(x, [(0, 0), (0, 0), (width, width), (0, 0)], mode="wrap")

    def windows_of(self, x: Any, count: int) -> Any:
        n = x.shape[2]
        return self.jnp.stack([x[:, :, i * n // count : -((i + 1) * -n // count)].mean(2) for i in range(count)], 2)

    def pooled_back(self, x: Any) -> Any:
        n, c, h, w = x.shape
        windows = x.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, c, h // 2, w // 2, 4)
        chosen = self.one_hot(windows.argmax(-1), 4) * windows
        return chosen.reshape(n, c, h // 2, w // 2, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(x.shape)

    def bags(self, table: Any, index: Any) -> Any:
        return table[index].sum(1)

    def bilinear(self, x: Any, y: Any, w: Any) -> Any:
        return self.einsum("bi,oij,bj->bo", x, w, y)

    def distances(self, x: Any, y: Any) -> Any:
        return self.jnp.sqrt(((x[:, None] - y[None]) ** 2).sum(-1) + 1e-30)

    def prod(self, x: Any) -> Any:
        return self.jnp.prod(x, 1)

    def layer_norm(self, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred / self.jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)

    def twice(self, x: Any) -> Any:
        return self.jnp.repeat(self.jnp.repeat(x, 2, 2), 2, 3)

    def mirror(self, x: Any) -> Any:
        return self.jnp.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)], mode="reflect")

    def pad(self, x: Any, before: int, after: int) -> Any:
        return self.jnp.pad(x, [(before, after), *[(0, 0)] * (x.ndim - 1)])

    def sort_by(self, keys: Any, values: Any) -> Any:
        return self.jax.lax.sort((keys, values), dimension=keys.ndim - 1, num_keys=1)

    def barrier(self, x: Any) -> Any:
        return self.jax.lax.optimization_barrier(x)

    def causal(self, scores: Any) -> Any:
        n, m = scores.shape[-2:]
        return self.jnp.where(self.jnp.arange(m)[None] > self.jnp.arange(n)[:, None], -1e9, scores)

    def grad(self, loss: Callable[..., Any], at: Sequence[Any]) -> Any:
        return self.jax.grad(loss, tuple(range(len(at))))(*at)

    def split(self, x: Any, *dims: Any) -> Any:
        spec = self.jax.sharding.PartitionSpec(*dims)
        return self.jax.lax.with_sharding_constraint(x, self.jax.sharding.NamedSharding(self.mesh, spec))
