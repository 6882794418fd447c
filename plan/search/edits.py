"""Edits of a recipe that would make it fit, each priced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tpshard.parallelism.pricing.allocator import PAGE
from tpshard.plan.report.report import Edit, Report
from tpshard.plan.search import search_pipelines
from tpshard.plan.search.search import price_changes
from tpshard.plan.search.search_result import as_edit
from tpshard.programs.step.variants import Variants
from tpshard.recipes.keys.schema import Recipe

MOST_EDITS = 9
"""The largest number of edits of a recipe that are priced."""
CHUNKS = 8
"""The chunks of a loss that are tried: an eighth of the logits is small beside the gradient of the head."""
LARGE = 30_000
"""Operations of a program above which a plan looks for one edit that fits instead of three: each takes half as long as
the plan."""
_STATE = ("parameters", "gradients", "optimizer")
_LEAVES = {
    "loss.chunks": (*_STATE, "activations", "gathered"), "remat": _STATE, "fsdp.reshard_after_forward": _STATE,
    "batch.per_device": _STATE,
}  # fmt: skip
"""Of keys that save some kinds of memory alone: the kinds at the peak that they leave as they are."""


def edits(report: Report, recipe: Recipe, count: int = 3, variants: Variants | None = None) -> list[Edit]:
    """The smallest edits that make the recipe fit, smallest first; if none does, those that come closest.

    An edit that extends a fitting one is tried only if there are too few others, and one that leaves more in memory
    than a device has not at all. `variants` has the recipe's programs.
    """
    variants = variants or Variants()
    count = count if report.pricing.parts[0].size < LARGE else 1
    done: list[tuple[int, Edit]] = []
    fitting: list[frozenset[str]] = []
    further: list[list[str]] = []
    todo = _smaller(report, recipe) if report.job.what == "train" else _served_smaller(report, recipe)

    def in_turn() -> Iterator[list[str]]:
        for change in todo:
            if any(keys <= _keys(change) for keys in fitting):
                further.append(change)
            else:
                yield change
        yield from further

    for change in in_turn():
        if not _may_fit(change, report):
            continue
        if len(done) == MOST_EDITS or len(fitting) == count:
            break
        price = price_changes(recipe, change, variants, report.job.what)
        if price is not None:
            done.append((price.counted_bytes, as_edit(change, price)))
            if price.fits:
                fitting.append(_keys(change))
    nearest = sorted(done, key=lambda one: (one[0], one[1].change))[:count]
    return [edit for _, edit in done if edit.fits] or [edit for _, edit in nearest]


def _may_fit(changes: Sequence[str], report: Report) -> bool:
    """Whether what the changes leave at the peak fits a device, and keeps the recipe's limit."""
    left = set.intersection(*(set(_LEAVES.get(key, ())) for key in _keys(changes)))
    held = sum(size for kind, size in report.pricing.worst.at_peak.items() if kind in left)
    device, limit = report.pricing.device, report.pricing.limit
    return held + device.context_bytes <= device.memory_bytes and (limit is None or held <= limit)


def _keys(changes: Sequence[str]) -> frozenset[str]:
    return frozenset(change.partition("=")[0] for change in changes)


def _smaller(report: Report, recipe: Recipe) -> Iterator[list[str]]:
    """Edits that reduce memory, the least intrusive first."""
    job, batch = report.job, report.job.per_device
    yield from search_pipelines.smaller(report, recipe, job.mesh)
    if recipe.fsdp.reshard_after_forward is not True:
        yield ["fsdp.reshard_after_forward=true"]
    if recipe.fsdp.accumulate.reduce == "last":
        yield ["fsdp.accumulate.reduce=each"]
    if recipe.remat == "none":
        yield ["remat=selective"]
    if loss_may_be_chunked(recipe):
        yield [f"loss.chunks={CHUNKS}"]
    if recipe.remat != "full":
        yield ["remat=full"]
    if batch > 1:
        yield [f"batch.per_device={batch // 2}"]
        if recipe.remat != "full":
            yield [f"batch.per_device={batch // 2}", "remat=full"]
        if batch > 2:
            yield [f"batch.per_device={max((d for d in range(1, batch // 4 + 1) if batch % d == 0), default=1)}"]
    if job.mesh.get("dp", 1) > 1 and "fsdp" in job.mesh:
        yield ["mesh.dp=1", f"mesh.fsdp={job.mesh['fsdp'] * job.mesh['dp']}"]
    if recipe.cluster is not None:
        yield from _more_devices(recipe, job.mesh)
    if recipe.fsdp.master_dtype == "fp32":
        yield ["fsdp.master_dtype=bf16", "remat=full"]
    if recipe.compile == "eager":
        yield ["compile=inductor"]


def loss_may_be_chunked(recipe: Recipe) -> bool:
    """Whether `loss.chunks` may be tried; a model whose logits are not simply its head's product refuses it."""
    return recipe.loss.chunks == 1 and recipe.task in ("lm", "mlm") and recipe.model.seq_len % CHUNKS == 0


def _more_devices(recipe: Recipe, sizes: Mapping[str, int]) -> Iterator[list[str]]:
    cluster = recipe.cluster
    assert cluster is not None
    tp, fsdp = sizes.get("tp", 1), sizes.get("fsdp", 1)
    if tp * 2 <= cluster.devices_per_node and fsdp % 2 == 0:
        yield [f"mesh.tp={tp * 2}", f"mesh.fsdp={fsdp // 2}"]
    for times in (2, 4, 8):
        wider = [f"cluster.nodes={cluster.nodes * times}", f"mesh.fsdp={fsdp * times}"]
        yield wider
        if recipe.remat != "full":
            yield [*wider, "remat=full"]


def _served_smaller(report: Report, recipe: Recipe) -> Iterator[list[str]]:
    """Edits of a server that reduce memory, the least intrusive first."""
    tp, requests, length = report.job.mesh.get("tp", 1), recipe.serve.requests, recipe.model.seq_len
    cache = report.pricing.parts[0].always["cache"]
    left = cache + report.spare_bytes - min(PAGE, cache // 64)  # a page more may be reserved than is used
    if left >= max(2**20, cache // 8):
        yield [f"serve.cache_mb={left // 2**20}"]
    most = recipe.cluster.devices_per_node if recipe.cluster is not None else tp * 8
    for times in (2, 4, 8):
        if tp * times <= most:
            yield [f"serve.mesh.tp={tp * times}"]
        if requests >= times:
            yield [f"serve.requests={requests // times}"]
        if length % times == 0:
            yield [f"model.seq_len={length // times}"]
    if requests > 1:
        yield [f"serve.mesh.tp={max(tp, most)}", "serve.requests=1"]
