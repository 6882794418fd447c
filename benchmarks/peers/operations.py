"""Builds the engine's `Graph` of a program's text: a statement becomes ATen ops, as a user of torch would write it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tpshard.parallelism.graph import Graph, Op, Ref, Value
from tpshard.parallelism.rules.contraction import contract

from peers.program_text import Call, Name, Shape, Text, numbers

aten = torch.ops.aten


class NoSuchOp(Exception):
    """torch has no op for a statement."""


class Builder:
    """Turns statements into ops; `values` by the text's names."""

    def __init__(self, text: Text):
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self.ties: dict[int, list[Value]] = {}
        self.inputs: list[Value] = []
        self.labels = text.labels
        whole = _index_names(text)
        for i, (name, shape) in enumerate(text.arguments):
            dtype = torch.int64 if name in whole else torch.float32
            self.inputs.append(Value(name, shape, dtype, None, i))
            self.values[name] = self.inputs[-1]
        for call in text.calls:
            self.statement(call)
        self.graph = Graph(self.inputs, self.ops, [self.values[name] for name in text.returned])
        self.graph.refresh_users()

    def statement(self, call: Call) -> None:
        if call.function == "shard_as":
            self.ties.setdefault(call.options.get("group", 0), []).extend(self.values[n.text] for n in call.args[0])
            return
        args = [self._read(a) for a in call.args]
        options = {k: self._read(v) for k, v in call.options.items()}
        make = MAKERS.get(call.function)
        if make is None:
            raise NoSuchOp(f"`{call.function}`")
        flat = [a for arg in (*args, *options.values()) for a in (arg if isinstance(arg, list) else [arg])]
        self.statement_operands = [a for a in flat if isinstance(a, Value)]
        """What the last statement reads."""
        returned = make(self, call, *args, **options)
        results = returned if isinstance(returned, (list, tuple)) else [returned]
        names = call.results
        if len(names) == 1 and len(call.shapes) > 1:
            names = [f"{names[0]}.{i}" for i in range(len(call.shapes))]
        for name, value, shape in zip(names, results, [*call.shapes, *[None] * len(results)]):
            if shape is not None and value.shape != shape:
                raise ValueError(f"`{name}` has shape {list(value.shape)}, not {list(shape)}")
            if value.producer is None or value.name in self.values:  # an identity: two names for one value
                value = self.emit(aten.clone.default, value)
            value.name = name
            self.values[name] = value

    def _read(self, arg: Any) -> Any:
        if isinstance(arg, Name):
            return self.values.get(arg.text, arg.text)
        return [self._read(a) for a in arg] if isinstance(arg, list) else arg

    def emit(self, target: Any, *args: Any, shape: Shape | None = None, **kwargs: Any) -> Any:
        """Adds an op; its results' shapes are the target's own on tensors without data, or `shape`."""
        operands: list[Value] = []

        def ref(arg: Any) -> Any:
            if isinstance(arg, Value):
                operands.append(arg)
                return Ref(len(operands) - 1)
            return [ref(a) for a in arg] if isinstance(arg, (list, tuple)) else arg

        def meta(arg: Any) -> Any:
            if isinstance(arg, Value):
                return torch.empty(arg.shape, dtype=arg.dtype, device="meta")
            return [meta(a) for a in arg] if isinstance(arg, (list, tuple)) else arg

        name = f"op{len(self.ops)}"
        op = Op(name, target, tuple(ref(a) for a in args), kwargs, operands, [])
        if shape is None:
            returned = target(*[meta(a) for a in args], **kwargs, **({} if operands else {"device": "meta"}))
            tensors = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        else:
            tensors = [torch.empty(shape, device="meta")]
        op.results = [
            Value(name if len(tensors) == 1 else f"{name}.{i}", tuple(t.shape), t.dtype, op, i)
            for i, t in enumerate(tensors)
        ]
        self.ops.append(op)
        return op.results[0] if len(tensors) == 1 else op.results


def _index_names(text: Text) -> set[str]:
    """Arguments that hold indices, found from the ops that read them."""
    index = {"gather": 1, "scatter": None, "index": 1, "embedding": 1, "index_add": 2, "index_select": 2}
    names: set[str] = set()
    for call in reversed(text.calls):
        key = call.function.split("_")[0] if call.function.startswith("scatter") else call.function
        if key in index:
            at = index[key]
            place = at if at is not None else (len(call.args) - 1) // 2
            if place < len(call.args) and isinstance(call.args[place], Name):
                names.add(call.args[place].text)
        if call.function.startswith("dynamic_"):
            names |= {a.text for a in call.options.get("start", ()) if isinstance(a, Name)}
        if any(r in names for r in call.results):
            flat = [b for a in call.args for b in (a if isinstance(a, list) else [a])]
            names |= {a.text for a in flat if isinstance(a, Name)}
    return names


# ---- pointwise ------------------------------------------------------------------------------------------------------
_SAME = {
    "negate": "neg", "sine": "sin", "cosine": "cos", "tangent": "tan", "exponential": "exp",
    "exponential_minus_one": "expm1",
    "log_plus_one": "log1p", "logistic": "sigmoid", "round_nearest_even": "round", "round_nearest_afz": "round",
    "is_finite": "isfinite", "not": "logical_not", "maximum": "maximum", "minimum": "minimum", "power": "pow",
    "subtract": "sub", "multiply": "mul", "divide": "div", "remainder": "remainder", "and": "logical_and",
    "or": "logical_or", "xor": "logical_xor", "compare": "lt", "copy": "clone", "identity": "clone", "alias": "clone",
    "convert": "clone", "optimization_barrier": "clone", "reduce_precision": "clone", "tanh": "tanh", "max": "maximum",
    "min": "minimum", "cbrt": "abs", "custom_call_erf": "erf",
}  # fmt: skip


def _pointwise(name: str) -> Callable[..., Any]:
    packet = getattr(aten, name)

    def make(b: Builder, call: Call, *args: Any, **options: Any) -> Any:
        target = next(getattr(packet, o) for o in ("Tensor", "default", "Tensor_Tensor") if o in packet.overloads())
        return b.emit(target, *[a for a in args if isinstance(a, (Value, int, float))])

    return make


MAKERS: dict[str, Callable[..., Any]] = {
    name: _pointwise(name)
    for name in ("add", "sub", "mul", "div", "neg", "sin", "cos", "tan", "exp", "log", "sqrt", "rsqrt", "abs", "sign",
                 "floor", "ceil", "relu", "tanh", "sigmoid", "erf", "clone", "maximum", "minimum", "pow", "atan2")
}  # fmt: skip
MAKERS |= {name: _pointwise(function) for name, function in _SAME.items()}


def maker_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        MAKERS[name] = make
        return make

    return add


@maker_of("clamp")
def _clamp(b: Builder, call: Call, x: Value, low: Any = None, high: Any = None, **options: Any) -> Any:
    low, high = options.get("min", low), options.get("max", high)
    b.statement_operands = [low, x, high]  # StableHLO's order
    return b.emit(aten.clamp.Tensor, x, low, high)


@maker_of("where")
@maker_of("select")
def _where(b: Builder, call: Call, condition: Value, x: Value, y: Value) -> Any:
    condition.dtype = torch.bool
    return b.emit(aten.where.self, condition, x, y)


@maker_of("mesh_split")
@maker_of("reshard")
@maker_of("sharding_constraint")
def _split(b: Builder, call: Call, x: Any, *_: Any) -> Any:
    if isinstance(x, str):  # `reshard(a0: shape : before -> after)` of a plan
        raise NoSuchOp("a bare reshard")
    return b.emit(torch.ops.tpshard.mesh_split.default, x, "", shape=x.shape)


@maker_of("propagation_barrier")
def _barrier(b: Builder, call: Call, x: Value, allowed: str = "both", **_: Any) -> Any:
    """`allowed`: the direction in which shardings still pass, which may be `both` or `none`."""
    return b.emit(torch.ops.tpshard.propagation_barrier.default, x, allowed.lower(), shape=x.shape)


MAKERS["shard_barrier_from"] = lambda b, call, x: _barrier(b, call, x, "backward")
MAKERS["shard_barrier_to"] = lambda b, call, x: _barrier(b, call, x, "forward")


# ---- made of nothing ------------------------------------------------------------------------------------------------
@maker_of("constant")
def _constant(b: Builder, call: Call, *_: Any, **__: Any) -> Any:
    return b.emit(aten.full.default, list(call.shapes[0]) if call.shapes else [], 1.0)


MAKERS["ones"] = lambda b, call, shape: b.emit(aten.ones.default, numbers(shape))


@maker_of("iota")
def _iota(b: Builder, call: Call, shape: Any = None, dim: int = 0, **_: Any) -> Any:
    shape = numbers(shape) if shape is not None else list(call.shapes[0])
    row = b.emit(aten.arange.default, shape[dim])
    view = [n if d == dim else 1 for d, n in enumerate(shape)]
    return _expand(b, _view(b, row, view), shape)


def _view(b: Builder, x: Value, shape: Sequence[int]) -> Value:
    return x if x.shape == tuple(shape) else b.emit(aten.view.default, x, list(shape))


def _expand(b: Builder, x: Value, shape: Sequence[int]) -> Value:
    return x if x.shape == tuple(shape) else b.emit(aten.expand.default, x, list(shape))


def _permuted(b: Builder, x: Value, order: Sequence[int]) -> Value:
    return x if list(order) == sorted(order) else b.emit(aten.permute.default, x, list(order))


# ---- shapes ---------------------------------------------------------------------------------------------------------
@maker_of("reshape")
@maker_of("view")
def _reshape(b: Builder, call: Call, x: Value, shape: Any = None) -> Any:
    return b.emit(aten.view.default, x, numbers(shape) if shape is not None else list(call.shapes[0]))


@maker_of("permute")
@maker_of("transpose")
def _permute(b: Builder, call: Call, x: Value, order: Any = None, **options: Any) -> Any:
    return b.emit(aten.permute.default, x, numbers(order if order is not None else options["dims"]))


@maker_of("broadcast")
@maker_of("broadcast_in_dim")
def _broadcast(b: Builder, call: Call, x: Value, dims: Any = (), to: Any = None) -> Any:
    places, shape = numbers(dims), numbers(to)
    x = _permuted(b, x, sorted(range(x.rank), key=lambda d: places[d]))
    size = dict(zip(sorted(places), x.shape))
    return _expand(b, _view(b, x, [size.get(d, 1) for d in range(len(shape))]), shape)


@maker_of("cat")
@maker_of("concatenate")
def _cat(b: Builder, call: Call, parts: Any, *rest: Any, dim: int = 0) -> Any:
    return b.emit(aten.cat.default, list(parts) if isinstance(parts, list) else [parts, *rest], dim)


@maker_of("slice")
def _slice(b: Builder, call: Call, x: Value, dims: Sequence[Any]) -> Any:
    for d, text in enumerate(dims):
        if isinstance(text, int) or re.fullmatch(r"-?\d+", str(text)):
            raise NoSuchOp("an index among slices")
        start, stop, step = ([int(p) if p.strip() else None for p in str(text).split(":")] + [None] * 3)[:3]
        if (start or 0) != 0 or (stop or x.shape[d]) != x.shape[d] or (step or 1) != 1:
            x = b.emit(aten.slice.Tensor, x, d, start or 0, x.shape[d] if stop is None else stop, step or 1)
    return x


MAKERS["flip"] = MAKERS["reverse"] = lambda b, call, x, dims: b.emit(aten.flip.default, x, numbers(dims))


@maker_of("pad")
def _pad(b: Builder, call: Call, x: Value, value: Any = 0, **options: Any) -> Any:
    if "lo_hi_interior" in options:
        each = [numbers(part.replace("_", " ")) for part in str(options["lo_hi_interior"]).split("x")]
        low, high, inside = ([e[i] if i < len(e) else 0 for e in each] for i in range(3))
    else:
        low, high, inside = numbers(options["low"]), numbers(options["high"]), numbers(options.get("interior", []))
    for d, gap in enumerate(inside):
        if gap and x.shape[d] > 1:  # written with a step into what holds the value everywhere
            length = (x.shape[d] - 1) * (gap + 1) + 1
            base = b.emit(aten.full.default, [*x.shape[:d], length, *x.shape[d + 1 :]], 0.0)
            x = b.emit(aten.slice_scatter.default, base, x, d, 0, length, gap + 1)
    widths = [w for lo, hi in zip(low[::-1], high[::-1]) for w in (lo, hi)]
    return b.emit(aten.constant_pad_nd.default, x, widths)


# ---- products and reductions ----------------------------------------------------------------------------------------
@maker_of("einsum")
def _einsum(b: Builder, call: Call, equation: str, x: Value, y: Value) -> Any:
    return b.emit(contract, x, y, equation.replace(" ", ""))


@maker_of("matmul")
@maker_of("dot")
def _matmul(b: Builder, call: Call, x: Value, y: Value, **_: Any) -> Any:
    left, right = "bmk"[-x.rank :] if x.rank > 1 else "k", "bkn"[-y.rank :] if y.rank > 1 else "k"
    return b.emit(contract, x, y, f"{left},{right}->" + "".join(dict.fromkeys(c for c in left + right if c != "k")))


@maker_of("reduce")
def _reduce(b: Builder, call: Call, *args: Any, op: str = "add", dims: Any = ()) -> Any:
    inputs = args[: max(1, len(args) // 2)]
    return [_reduced(b, x, op, numbers(dims)) for x in inputs]


def _reduced(b: Builder, x: Value, op: str, dims: list[int]) -> Value:
    if op in ("add", "sum"):
        return b.emit(aten.sum.dim_IntList, x, dims)
    if op in ("maximum", "max", "minimum", "min"):
        return b.emit(aten.amax.default if op.startswith("max") else aten.amin.default, x, dims)
    if op in ("multiply", "mul", "prod") and len(dims) == 1:
        return b.emit(aten.prod.dim_int, x, dims[0])
    raise NoSuchOp(f"a reduction by `{op}`")


@maker_of("sum")
def _sum(b: Builder, call: Call, x: Value, dim: Any = None) -> Any:
    return b.emit(aten.sum.dim_IntList, x, numbers(dim) if dim is not None else list(range(x.rank)))


MAKERS["variadic_reduce"] = lambda b, call, *inputs, dims=(): [_reduced(b, x, "add", numbers(dims)) for x in inputs]
for _name, _op in (("reduce_sum", "add"), ("reduce_max", "max"), ("reduce_min", "min"), ("reduce_add", "add")):
    MAKERS[_name] = lambda b, call, x, *_, dims=(), op=_op: _reduced(b, x, op, numbers(dims))


# ---- windows --------------------------------------------------------------------------------------------------------
def _window(text: str, rank: int) -> dict[str, list[list[int]]]:
    """`size=3x2 stride=2x1 pad=1_1x0_1 ...` -> per name a list per spatial dim."""
    window = {"size": [[1]] * rank, "stride": [[1]] * rank, "pad": [[0, 0]] * rank, "lhs_dilate": [[1]] * rank,
             "rhs_dilate": [[1]] * rank, "rhs_reversal": [[0]] * rank}  # fmt: skip
    for name, value in re.findall(r"(\w+)=(\S+)", text):
        window[name] = [numbers(p.replace("_", " ")) for p in value.split("x")]
    return window


@maker_of("reduce_window")
def _reduce_window(b: Builder, call: Call, x: Value, window: Any = "", op: str = "add", stride: Any = None,
                   pad: Any = None, **_: Any) -> Any:  # fmt: skip
    if "=" not in str(window):

        def part(name: str, value: Any) -> str:
            flat = re.sub(r"[()\s]", "", str(value)).replace(",", "_")
            return "" if value is None else f"{name}={flat}"

        window = " ".join([part("size", window), part("stride", stride), part("pad", pad)])
    size, step, pads = (_window(window, x.rank)[k] for k in ("size", "stride", "pad"))
    used = [d for d in range(x.rank) if size[d][0] != 1 or step[d][0] != 1 or any(pads[d])]
    lead = [d for d in range(x.rank) if d not in used]
    if len(used) > 2:
        raise NoSuchOp("a window over more than two dims")
    spatial = (lead[len(lead) - (2 - len(used)) :] if len(used) < 2 else []) + used
    lead = [d for d in lead if d not in spatial]
    moved = _permuted(b, x, [*lead, *spatial])
    grown = _view(b, moved, [*[1] * (2 - len(lead)), *moved.shape]) if len(lead) < 2 else moved
    widths = [w for d in spatial[::-1] for w in pads[d]]
    if any(widths):
        grown = b.emit(aten.constant_pad_nd.default, grown, widths)
    sizes, steps = [size[d][0] for d in spatial], [step[d][0] for d in spatial]
    if op in ("add", "sum"):
        out = b.emit(aten.avg_pool2d.default, grown, sizes, steps, [0, 0], False, True, 1)
    elif op.startswith("max"):
        out = b.emit(aten.max_pool2d_with_indices.default, grown, sizes, steps)[0]
    else:
        raise NoSuchOp(f"a window's `{op}`")
    out = _view(b, out, [*out.shape[2 - len(lead) :]]) if len(lead) < 2 else out
    return _permuted(b, out, [[*lead, *spatial].index(d) for d in range(x.rank)])


def _labels(text: str) -> tuple[str, str, str]:
    """`b01f_01io->b01f`, or `[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]`."""
    flat = re.sub(r"[\[\],\s]", "", text)
    left, out = flat.split("->")
    lhs, rhs = re.split(r"[_x]", left)
    return lhs, rhs, out


def _remark(b: Builder, call: Call, x: Value, w: Value) -> str:
    """The labels behind the arguments' shapes: `lhs: [128,56,56,64] (f01b), rhs: [128,56,56,256] (i01o)`. The result's
    are the left operand's, or, if sizes say otherwise, in the first order that these allow."""
    left, right = b.labels.get(x.name), b.labels.get(w.name)
    if not left or not right:
        return ""
    out = left
    if call.shapes:
        size = {"b": x.shape[left.index("b")], "f": w.shape[right.index("o")]}
        fits = (
            labels for labels in (left, *map("".join, itertools.permutations(sorted(left))))
            if all(n == size.get(c, n) for c, n in zip(labels, call.shapes[0]))
        )  # fmt: skip
        out = next(fits, left)
    return f"{left}_{right}->{out}"


@maker_of("conv")
@maker_of("convolution")
def _conv(b: Builder, call: Call, x: Value, w: Value, window: Any = "", feature_groups: int = 1, batch_groups: int = 1,
          **options: Any) -> Any:  # fmt: skip
    lhs, rhs, out = _labels(
        options.get("dim_labels") or options.get("dims") or _remark(b, call, x, w) or "bf01_oi01->bf01"
    )
    spatial = sorted(c for c in lhs if c.isdigit())
    rank = len(spatial)
    if str(window).startswith("{"):
        strides = re.search(r"stride = (\[[\d, ]*\])", window)
        pads = re.search(r"pad = (\[\[.*?\]\])", window)
        dilate = {k: re.search(rf"{k}_dilate = (\[[\d, ]*\])", window) for k in ("lhs", "rhs")}
        flat = numbers(pads[1]) if pads else [0] * 2 * rank
        at = {
            "stride": [[n] for n in (numbers(strides[1]) if strides else [1] * rank)],
            "pad": [flat[2 * i : 2 * i + 2] for i in range(rank)],
            "lhs_dilate": [[n] for n in (numbers(dilate["lhs"][1]) if dilate["lhs"] else [1] * rank)],
            "rhs_dilate": [[n] for n in (numbers(dilate["rhs"][1]) if dilate["rhs"] else [1] * rank)],
            "rhs_reversal": [[0]] * rank,
        }
    else:
        at = _window(str(window), rank)
        if "padding" in options:
            at["pad"] = [[n, n] for n in numbers(options["padding"])]
    at["size"] = [[w.shape[rhs.index(c)]] for c in spatial]
    product = _as_product(x, w, lhs, rhs, out, spatial, at)
    if product is not None and feature_groups == batch_groups == 1:
        equation, keeps = product  # dims of size 1 that no equation has are taken off, and put back
        flat = (_view(b, v, [n for n, keep in zip(v.shape, flags) if keep]) for v, flags in zip((x, w), keeps))
        result = b.emit(contract, *flat, equation)
        sizes = iter(result.shape)
        return _view(b, result, [next(sizes) if keep else 1 for keep in keeps[2]])
    if any(n != [1] for n in at["lhs_dilate"]):
        raise NoSuchOp("a convolution over dilated input")
    if rank == 0 or rank > 3:
        raise NoSuchOp(f"a convolution over {rank} dims")
    x = _permuted(b, x, [lhs.index(c) for c in ["b", "f", *spatial]])
    if batch_groups > 1:  # parts of the batch, each with its own output channels, are groups of channels
        n, channels, *rest = x.shape
        x = _view(b, x, [batch_groups, n // batch_groups, channels, *rest])
        x = _permuted(b, x, [1, 0, *range(2, rank + 3)])
        x, feature_groups = _view(b, x, [n // batch_groups, batch_groups * channels, *rest]), batch_groups
    w = _permuted(b, w, [rhs.index(c) for c in ["o", "i", *spatial]])
    flipped = [2 + i for i in range(rank) if at["rhs_reversal"][i] == [1] and at["size"][i] != [1]]
    w = b.emit(aten.flip.default, w, flipped) if flipped else w
    pads = [at["pad"][i] if len(at["pad"][i]) == 2 else [at["pad"][i][0]] * 2 for i in range(rank)]
    even = all(lo == hi and lo >= 0 for lo, hi in pads)
    if not even:
        x = b.emit(aten.constant_pad_nd.default, x, [p for pair in pads[::-1] for p in pair])
    widths = [lo for lo, _ in pads] if even else [0] * rank
    result = b.emit(
        aten.convolution.default, x, w, None, [s[0] for s in at["stride"]], widths, [d[0] for d in at["rhs_dilate"]],
        False, [0] * rank, feature_groups,
    )  # fmt: skip
    return _permuted(b, result, [["b", "f", *spatial].index(c) for c in out])


def _as_product(
    x: Value, w: Value, lhs: str, rhs: str, out: str, spatial: Sequence[str], at: dict[str, list[list[int]]]
) -> tuple[str, list[list[bool]]] | None:
    """The equation of a convolution whose windows only spell a product, as XLA writes einsums, and per tensor the dims
    that it has; None for other convolutions."""
    letter = {"b": "b", "f": "f", "i": "f", "o": "o"}
    left, right, result = dict(zip(lhs, lhs)), dict(zip(rhs, rhs)), dict(zip(out, out))
    for i, c in enumerate(spatial):
        n, m = x.shape[lhs.index(c)], w.shape[rhs.index(c)]
        size, stride, pad = at["size"][i][0], at["stride"][i][0], (at["pad"][i] * 2)[:2]
        dilate, reverse = at["lhs_dilate"][i][0], at["rhs_reversal"][i][0]
        if n == m == 1 and size == 1 and pad == [0, 0]:
            left[c] = right[c] = result[c] = ""
            continue
        if n == m == size and n > 1 and stride == max(1, n - 1) and dilate == n and pad == [0, 0]:
            continue  # a batch dim
        if n == m == size and pad == [0, 0]:
            result[c] = ""  # summed
        elif m == 1 and size == 1 and pad == [0, 0] and stride == 1:
            right[c] = ""  # only the left operand's
        elif n == 1 and size == m and pad == [m - 1, m - 1] and reverse:
            left[c] = ""  # only the right operand's
        else:
            return None

    def spell(labels: str, names: dict[str, str], operand: bool) -> tuple[str, list[bool]]:
        text, keeps = "", []
        for c in labels:
            keeps.append(not c.isdigit() or bool(names[c]))
            if c.isdigit():
                text += chr(ord("t") + int(c)) if names[c] else ""
            else:
                text += letter[c] if operand or c == "b" else "o"
        return text, keeps

    parts = [spell(lhs, left, True), spell(rhs, right, True), spell(out, result, False)]
    return f"{parts[0][0]},{parts[1][0]}->{parts[2][0]}", [keeps for _, keeps in parts]


# ---- by index -------------------------------------------------------------------------------------------------------
def _dims(options: dict[str, Any], *names: str) -> list[int]:
    for name in names:
        if name in options:
            return numbers(options[name])
    return []


def _index_parts(b: Builder, indices: Value, vector: int, count: int) -> list[Value]:
    """The indices of each indexed dim: the slices of the index vectors."""
    if vector == indices.rank:
        return [indices]
    return [b.emit(aten.select.int, indices, vector, i) for i in range(count)]


def _positions(b: Builder, size: int, dim: int, rank: int) -> Value:
    """0, 1, ... along one dim of the indices."""
    return _view(b, b.emit(aten.arange.default, size), [size if d == dim else 1 for d in range(rank)])


def _slots(
    b: Builder, x: Value, starts: dict[int, Value], batch: dict[int, int], windows: dict[int, int], rank: int
) -> list[Any]:
    """Torch's list of indices, None for a whole dim. starts: the first index of a dim, over `rank` dims. batch: the
    one of these along which a dim is counted. windows: the number of indices of a dim, along a further dim each."""
    slots: list[Any] = [None] * x.rank
    for d, at in batch.items():
        slots[d] = _positions(b, x.shape[d], at, rank + len(windows))
    for d, start in starts.items():
        slots[d] = _view(b, start, [*start.shape, *[1] * (rank - start.rank + len(windows))])
    for i, (d, count) in enumerate(windows.items()):
        row = _positions(b, count, rank + i, rank + len(windows))
        slots[d] = row if slots[d] is None else slots[d] if count == 1 else b.emit(aten.add.Tensor, slots[d], row)
    return slots


def _indexed(slots: Sequence[Any], rank: int, windows: dict[int, int]) -> list[tuple[str, int]]:
    """The dims of x[slots]: dims of the indices, and dims of x by their windows."""
    at = [d for d, s in enumerate(slots) if s is not None]
    start = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    whole = [("window", d) for d, s in enumerate(slots) if s is None]
    return [*whole[:start], *(("batch", i) for i in range(rank)), *(("window", d) for d in windows), *whole[start:]]


def _places(rank: int, windows: Sequence[int], window_dims: Sequence[int]) -> list[tuple[str, int]]:
    """The dims of a gather's result, or a scatter's updates: dims of x where `windows` says, else of the indices."""
    dims, counted = iter(window_dims), iter(range(rank))
    return [("window", next(dims)) if d in windows else ("batch", next(counted)) for d in range(rank)]


def _address(
    b: Builder, x: Value, indices: Value, sizes: dict[int, int], gone: Sequence[int], **o: Any
) -> tuple[list[Any], int, dict[int, int]]:
    """The indices of a gather or scatter, their rank, and the windows of dims that are read or written in part.
    sizes: of the windows of the dims that are kept. gone: dims without one. A window over all of a dim starts at 0."""
    batch, index_batch = (
        _dims(o, "operand_batching_dims", "input_batching_dims"),
        _dims(o, "start_indices_batching_dims", "scatter_indices_batching_dims"),
    )
    to = _dims(o, "start_index_map", "scatter_dims_to_operand_dims") or sorted(gone)
    vector = int(o.get("index_vector_dim", indices.rank))
    rank = indices.rank - (vector < indices.rank)
    windows = {d: n for d, n in sizes.items() if n != x.shape[d]}
    starts = {d: part for d, part in zip(to, _index_parts(b, indices, vector, len(to))) if d in windows or d in gone}
    batches = {d: at - (at > vector) for d, at in zip(batch, index_batch)}
    for d in gone:  # of size 1, with no index of its own
        if d not in starts:
            starts[d] = b.emit(aten.full.default, [1] * rank, 0, dtype=torch.int64)
    return _slots(b, x, starts, batches, windows, rank), rank, windows


@maker_of("gather")
def _gather(b: Builder, call: Call, x: Value, indices: Value, **o: Any) -> Any:
    offset, collapsed = _dims(o, "offset_dims"), _dims(o, "collapsed_slice_dims", "collapsed")
    batch, sizes = _dims(o, "operand_batching_dims"), _dims(o, "slice_sizes")
    window_dims = [d for d in range(x.rank) if d not in (*collapsed, *batch)]
    slots, rank, windows = _address(b, x, indices, {d: sizes[d] for d in window_dims}, collapsed, **o)
    if all(s is None for s in slots):
        raise NoSuchOp("a gather without indices")
    places = _indexed(slots, rank, windows)
    picked = b.emit(aten.index.Tensor, x, slots)
    return _permuted(b, picked, [places.index(place) for place in _places(picked.rank, offset, window_dims)])


def _scatter(b: Builder, call: Call, *args: Any, accumulate: bool, **o: Any) -> Any:
    count = (len(args) - 1) // 2
    indices = args[count]
    window, inserted = _dims(o, "update_window_dims"), _dims(o, "inserted_window_dims", "inserted")
    batch = _dims(o, "input_batching_dims")
    results = []
    for x, updates in zip(args[:count], args[count + 1 :]):
        window_dims = [d for d in range(x.rank) if d not in (*inserted, *batch)]
        sizes = {d: updates.shape[at] for d, at in zip(window_dims, window)}
        slots, rank, windows = _address(b, x, indices, sizes, inserted, **o)
        if all(s is None for s in slots):
            raise NoSuchOp("a scatter without indices")
        places = _places(updates.rank, window, window_dims)
        written = _permuted(b, updates, [places.index(place) for place in _indexed(slots, rank, windows)])
        results.append(b.emit(aten.index_put.default, x, slots, written, accumulate))
    return results


@maker_of("dynamic_slice")
def _dynamic_slice(b: Builder, call: Call, x: Value, start: Any = (), sizes: Any = (), **_: Any) -> Any:
    windows = {d: n for d, n in enumerate(numbers(sizes)) if n != x.shape[d]}
    slots = _slots(b, x, {d: start[d] for d in windows}, {}, windows, 0)
    if not windows:
        return b.emit(aten.clone.default, x)
    places = _indexed(slots, 0, windows)
    return _permuted(b, b.emit(aten.index.Tensor, x, slots), [places.index(("window", d)) for d in range(x.rank)])


@maker_of("dynamic_update_slice")
def _dynamic_update(b: Builder, call: Call, x: Value, update: Value, start: Any = (), **_: Any) -> Any:
    windows = {d: n for d, n in enumerate(update.shape) if n != x.shape[d]}
    if not windows:
        return b.emit(aten.clone.default, update)
    slots = _slots(b, x, {d: start[d] for d in windows}, {}, windows, 0)
    written = _permuted(b, update, [d for _, d in _indexed(slots, 0, windows)])
    return b.emit(aten.index_put.default, x, slots, written, False)


MAKERS["scatter"] = lambda b, call, *a, **o: _scatter(b, call, *a, accumulate=True, **o)
MAKERS["scatter_add"] = MAKERS["scatter"]  # Shardy's tests, whose restatement names no computation, add
MAKERS["scatter_min"] = lambda b, call, *a, **o: _scatter(b, call, *a, accumulate=False, **o)
MAKERS["scatter_max"] = MAKERS["scatter_min"]
MAKERS["index"] = lambda b, call, x, index: b.emit(aten.index.Tensor, x, [index])
MAKERS["topk"] = lambda b, call, x, k=1, dim=-1, **_: b.emit(aten.topk.default, x, k, dim)


@maker_of("index_add")
def _index_add(b: Builder, call: Call, x: Value, dim: int, index: Value, source: Value) -> Any:
    return b.emit(aten.index_put.default, x, [None] * dim + [index], source, True)


@maker_of("sort")
def _sort(b: Builder, call: Call, *inputs: Value, dim: int = -1, **_: Any) -> Any:
    values, places = b.emit(aten.sort.default, inputs[0], dim)
    if len(inputs) == 1:
        return [values, places]
    return [values, *(b.emit(aten.gather.default, x, dim, places) for x in inputs[1:])]


# ---- linear algebra -------------------------------------------------------------------------------------------------
@maker_of("linalg.cholesky")
@maker_of("cholesky")
def _cholesky(b: Builder, call: Call, x: Value, **_: Any) -> Any:
    return b.emit(aten.linalg_cholesky_ex.default, x)[0]


@maker_of("triangular_solve")
def _triangular(b: Builder, call: Call, a: Value, x: Value, **_: Any) -> Any:
    left = "left_side = true" in call.remarks or "left_side" not in call.remarks
    if not re.search(r"NO_TRANSPOSE|transpose_a = false", call.remarks) and "TRANSPOSE" in call.remarks:
        a = _permuted(b, a, [*range(a.rank - 2), a.rank - 1, a.rank - 2])
    return b.emit(aten.linalg_solve_triangular.default, a, x, upper="lower = true" not in call.remarks, left=left)


@maker_of("fft")
def _fft(b: Builder, call: Call, x: Value, type: str = "FFT", length: Any = ()) -> Any:
    sizes = numbers(length)
    dims = list(range(x.rank - len(sizes), x.rank))
    if type == "RFFT":
        return b.emit(aten._fft_r2c.default, x, dims, 0, True)
    x.dtype = torch.complex64
    if type == "IRFFT":
        return b.emit(aten._fft_c2r.default, x, dims, 2, sizes[-1])
    return b.emit(aten._fft_c2c.default, x, dims, 2 if type == "IFFT" else 0, type == "FFT")


@maker_of("custom_call")
def _custom(b: Builder, call: Call, *args: Any, **_: Any) -> Any:
    name = (re.search(r"@([\w.]+)", call.remarks) or ["", ""])[1]
    if name == "mhlo.erf":
        return b.emit(aten.erf.default, args[0])
    if name == "X64Combine":  # the two halves of a number
        return b.emit(aten.add.Tensor, *args)
    if name in ("MoveToHost", "MoveToDevice", "annotate_device_placement", "LayoutConstraint", "Sharding",
                "InspectSharding", "X64SplitHigh", "X64SplitLow"):  # fmt: skip
        return b.emit(aten.clone.default, args[0])
    if name in ("mhlo.topk", "TopK"):
        return b.emit(aten.topk.default, args[0], call.shapes[0][-1], -1)
    if name in ("ApproxTopK", "PartialReduce"):  # of positions that are given: top-k, and a lookup of these
        (dim,) = [d for d, n in enumerate(args[0].shape) if n != call.shapes[0][d]] or [-1]
        values, places = b.emit(aten.topk.default, args[0], call.shapes[0][dim], dim)
        return [values, b.emit(aten.gather.default, args[1], dim, places)]
    if name == "ProductOfElementaryHouseholderReflectors":
        return b.emit(aten.linalg_householder_product.default, *args, shape=call.shapes[0])
    if name in ("Qr", "QrDecompositionBlock"):
        return b.emit(aten.geqrf.default, args[0])
    if name in ("LuDecomposition", "Lu"):
        return b.emit(aten.linalg_lu_factor_ex.default, args[0])
    if name == "Eigh":
        values, vectors = b.emit(aten._linalg_eigh.default, args[0])
        return [vectors, values]
    if name == "Cholesky":
        return _cholesky(b, call, args[0])
    raise NoSuchOp(f"the custom call @{name}")
