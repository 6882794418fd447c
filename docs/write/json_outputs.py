"""What each command prints with `--json`, key by key: `write_reference.py` makes docs/reference/json.md of it.

`[]` stands for each entry of a list, `*` for any name or for all that lies below. A test runs the commands and holds
these keys against what they print.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ACT_ORDERS = (
    "Of act-ordered weights in a server, for each linear of a layer: `linear`, how many there are, whether its order "
    "was absorbed by the linears before, or what stands `between`."
)


@dataclass(frozen=True)
class Output:
    """One command's output."""

    title: str
    command: tuple[str, ...]
    """The arguments of the command that the test runs; none for what a test does not run."""
    keys: dict[str, str]
    sometimes: dict[str, str] = field(default_factory=dict)
    """Keys that only some recipes or options bring."""


PLAN = {
    "schema": "Version of this format. A new version may rename keys; the same version only adds some.",
    "name": "The recipe's name.",
    "what": "`train`, `prefill` or `decode`.",
    "fits": "Whether `memory.needed_bytes` is at most the device's memory, and `peak_bytes` at most `limit_bytes`.",
    "spare_bytes": "Memory of one device that is left; negative where it does not fit.",
    "params": "Parameters of the model, all of them.",
    "quantized": "The weights' format, such as `4 bits, groups of 128`; empty for dense weights.",
    "experts": "How tokens travel to sharded experts without a capacity, and why; empty for other models.",
    "mesh.*": "Size of each mesh axis.",
    "device.name": "The device file.",
    "device.memory_bytes": "Memory of one device.",
    "device.context_bytes": "The part of it that the driver and the libraries take.",
    "device.nodes": "Hosts.",
    "device.devices_per_node": "Devices of a host.",
    "device.peak_flops": "FLOP/s of one device for the dtype of the matrix products.",
    "batch.global_sequences": "Sequences of a step on all devices.",
    "batch.per_device": "Sequences of a micro-batch on one data rank.",
    "batch.micro_batches": "Micro-batches of a step.",
    "batch.seq_len": "Tokens of a sequence.",
    "batch.tokens": "Tokens of a step on all devices.",
    "memory.peak_bytes": "The most that tensors take at once on the fullest device.",
    "memory.reserved_bytes": "The same with what the allocator keeps beside them.",
    "memory.segmented_bytes": "`reserved_bytes` without the expandable segments that runs ask for; null on a CPU.",
    "memory.needed_bytes": "`reserved_bytes` and the device's context.",
    "memory.limit_bytes": "`fsdp.memory_limit`, or null.",
    "memory.by_category.*": "Bytes at the peak, by what they hold.",
    "memory.static_bytes.*": "Bytes of parameters, gradients, optimizer state and cache at rest.",
    "memory.peak_at": "The operation at which memory peaks.",
    "memory.largest[].value": "The largest tensors at the peak: name,",
    "memory.largest[].category": "what it holds,",
    "memory.largest[].bytes": "and bytes.",
    "time.step_s": "Seconds of a step.",
    "time.step_range_s": "The range of `step_s` on a device of which only the data sheet is known, or null.",
    "time.compute_s": "Seconds of computing.",
    "time.comm_s": "Seconds of collectives.",
    "time.exposed_comm_s": "Seconds of collectives during which nothing is computed.",
    "time.slowed_s": "Seconds by which computing is slower because collectives run beside it.",
    "time.idle_s": "Seconds that the slowest device waits for other stages of a pipeline.",
    "time.by_part[].part": "Part of the step (a micro-batch, the optimizer),",
    "time.by_part[].times": "how often it runs,",
    "time.by_part[].seconds": "and seconds of one run.",
    "time.by_work.*": "Seconds by kind of work.",
    "tokens_per_s_per_device": "Tokens a second, divided by the number of devices.",
    "mfu": "Model FLOP utilization: FLOPs of the model over what the devices can do in `step_s`.",
    "flop_efficiency": "FLOPs on one device alone over those of all devices: 1 where nothing is computed twice.",
    "flops_lost[].op": "Operations that are computed more than once: the op,",
    "flops_lost[].where": "its place in the model,",
    "flops_lost[].efficiency": "its FLOP efficiency,",
    "flops_lost[].wasted": "and the FLOPs that are computed twice.",
    "bottleneck": "What a step waits for most, in words.",
    "collectives[].kind": "One line for equal collectives: `all_gather`, "
    "`reduce_scatter`, `all_reduce`, `all_to_all`, `permute`, `send`, `recv`.",
    "collectives[].axes": "Mesh axes; an axis that is used in part is `[axis, first, size]`.",
    "collectives[].count": "How often in a step.",
    "collectives[].bytes": "Bytes of the larger of input and output on one device, of one collective.",
    "collectives[].wire_bytes": "Bytes that one device sends, of one collective.",
    "collectives[].time_s": "Seconds of all of them.",
    "collectives[].exposed_s": "The part of it during which nothing is computed.",
    "collectives[].of": "`parameter`, `gradient`, `activation`, `logits` or `loss`.",
    "collectives[].phase": "`forward`, `backward` or `optimizer`.",
    "collectives[].dtype": "What is sent.",
    "collectives[].link": "The link that the group spans, `inside` a host or `across` hosts.",
    "collectives[].algorithm": "How it is priced, such as `ring`.",
    "collectives[].members": "Tensors that a bucket joins.",
    "collectives[].asked": "Whether the recipe asks for it (fsdp, an annotation).",
    "collectives[].reason": "Why it is there, in words.",
    "shardings[].name": "Parameters, inputs and named activations: name,",
    "shardings[].shape": "global shape,",
    "shardings[].sharding": "mesh axes of each dim while it is used,",
    "shardings[].stored": "mesh axes of each dim at rest; null for an activation,",
    "shardings[].kind": "what it is,",
    "shardings[].annotated": "whether the recipe says so,",
    "shardings[].reason": "and why, in words.",
    "annotations.written": "Lines of `sharding` in the recipe that shard a tensor (entries; no defaults),",
    "annotations.given": "tensors that they shard,",
    "annotations.by_default": "tensors that defaults alone shard,",
    "annotations.inferred": "and values whose sharding was propagated.",
    "reshards[]": "Collectives that no annotation asks for, each with `kind`, `axes`, `value`, `count`, "
    "`bytes`, `time_s`, `reason`.",
    "warnings[]": "What to look at.",
    "provenance.*": "Where each figure comes from: exact, replayed (by the allocator's rules), calibrated, roofline.",
    "unfitted.*": "Per figure the constants under it that were not fitted on this device.",
    "accuracy": "How far off plans of this kind were on runs that nothing was fitted on.",
    "fingerprint": "Of the program: `train` of the same recipe prints the same.",
}  # fmt: skip
PLAN_SOMETIMES = {
    "trained.*": "Where a recipe has adapters, groups or stages, or freezes something: the `elements` trained `of` "
    "all; in `picks` for each pattern or group its `key`, its `patterns`, the number of `tensors` that it picks (of "
    "`targets` layers), their `elements`, and the `names` of the first and the last; in `stages` the `first` and the "
    "`last` step of each, its `shape`, and the share of the peak that it goes `to`.",
    "buckets[].*": "With fsdp: its collectives in the longest program, with the parameters that each joins. behind_s: "
    "seconds of computation that may hide it; it also goes on while another collective is waited for.",
    "pipeline.*": "With `pipeline`: schedule, form, bubble, layers of each stage; if staged, seconds, bytes, table.",
    "edits[].*": "Edits that make a plan fit which does not, with what each would need and take.",
    "suggestions[].*": "Edits that make a step faster, with memory and seconds of each.",
    "searched.*": "With `--suggest`: variants planned and unfit; unstorable, bounded and refused: not planned.",
    "programs[].*": "Of a server: rows and fingerprint of each program; with recurrent layers also `chunk`.",
    "act_orders[].*": ACT_ORDERS,
    "forecast.*": "With `--tokens`: days, device-hours, cost, energy and goodput of the whole run.",
}

STAGE = {
    "stage": "The name of the stage.",
    "of": "The pattern to which it is limited; empty for all of it.",
    "parts[].part": "`micro-batch`, a stage of a pipeline, or a server's step,",
    "parts[].lines[]": "and its text, line by line. With `--against`: `before`, `after`, `same`, `lines`.",
}
FITTED = {
    "edits[]": "`key: value` changes, the least harmful first; none where it fits as it is.",
    "harms[]": "Of each: `when`, `slower` or `batch`.",
    "needed_bytes": "Memory of one device with them.",
    "peak_bytes": "With `fsdp.memory_limit`: the peak of a step with them; else null.",
    "step_s": "Seconds of a step with them.",
    "exposed_s": "Of it waiting for communication.",
    "fits": "True.",
    "recipe": "As YAML.",
}
SEARCHED = {
    "candidates[].mesh.*": "The variants that fit, the fastest first: size of each mesh axis,",
    "candidates[].remat": "recomputation,",
    "candidates[].per_device": "sequences of a micro-batch,",
    "candidates[].more[]": "changes of other keys,",
    "candidates[].found.*": "memory of a device (`needed_bytes`), seconds of a step, of collectives and exposed,",
    "candidates[].tokens_per_s_per_device": "tokens a second, divided by the number of devices,",
    "candidates[].pareto": "and whether no other is both faster and smaller.",
    "refused": "Number of variants that contradict themselves or do not fit.",
    "untried[]": "Variants that were not built.",
    "as_written.*": "The recipe without changes, as `found`; null if it contradicts itself.",
    "recipe": "The fastest, as YAML; null if none fits.",
}
PINNED = {
    "pins.*": "Name or pattern: axes of each dim.",
    "left[]": "What could not be pinned.",
    "programs.*": "Fingerprint of each part's program, the same with and without the pins.",
    "recipe": "As YAML.",
}
CHECKED = {
    "run": "The folder.",
    "device": "The device file that its plan was priced by.",
    "rows[]": "Each with `figure`, `planned`, `measured`, `error` (planned / measured - 1) and `verdict`.",
    "distrust[]": "Constants of the device file, the likeliest first, in words.",
}

ANSWERS = {
    "schema": "Version of this format.",
    "for": "`serve`.",
    "device": "The device file.",
    "mesh.*": "Size of each axis of the server's mesh.",
    "traffic.*": "The load: tokens of a prompt and of an answer, requests a second, requests in all, seed.",
    "limits.ttft": "The limit of `--ttft` in seconds, or null.",
    "limits.tpot": "The limit of `--tpot` in seconds, or null.",
    "share": "The share of requests for which limits hold.",
    "cache.*": "Blocks, tokens and bytes of the cache, and the requests of this size that fit it.",
    "at_rate.rate": "At `--rate` (null without it), and likewise below `saturated` (every client sends its next "
    "request when the last is answered) and `highest` (the highest rate within the limits): requests "
    "that come a second,",
    "at_rate.requests_a_second": "requests that are answered a second,",
    "at_rate.tokens_a_second": "tokens of answers a second,",
    "at_rate.ttft_s[]": "seconds to the first token: median and 99th percentile,",
    "at_rate.tpot_s[]": "seconds of each further token: median and 99th percentile,",
    "at_rate.mean_running": "requests that run at a time,",
    "at_rate.refused": "requests refused,",
    "at_rate.preempted": "and requests preempted for want of cache;",
    "at_rate.kept": "whether the limits hold.",
    "saturated.*": "As `at_rate`.",
    "highest": "As `at_rate`; null without limits, or where no rate keeps them.",
    "curve[]": "With `--svg`: the same for rates up to the most.",
    "front[]": "With `--search`: servers that no other tried beats both in tokens a second and in the time of a token.",
    "refused[]": "With `--search`: meshes that cannot be served, and why.",
    "provenance": "Where the times of steps come from.",
    "programs[].*": "Rows and fingerprint of each program; with recurrent layers also `chunk`.",
    "host.*": "Seconds of the server's host besides the programs, per step, token and request; 0 where the device file "
    "has none.",
}  # fmt: skip

NEED = {
    "tp": "Devices of the server.",
    "mesh.*": "Size of each mesh axis.",
    "dtype": "Of the activations.",
    "memory.parameters": "Bytes of parameters on one device.",
    "memory.cache": "Bytes of keys and values on one device.",
    "cache.blocks": "Blocks of the cache,",
    "cache.block_size": "tokens of a block,",
    "cache.tokens": "and tokens in all.",
    "programs[].rows": "Tokens of a step for which there is a program,",
    "programs[].fingerprint": "and its fingerprint, the one of `plan --for decode` and of `/health`.",
    "kernels.*": "What computes the products, and how quantized weights lie.",
    "collectives_per_token[].*": "Kind, axes, bytes and count of the collectives of a step of one token.",
    "padding": "What is padded to fit the mesh, in words.",
}  # fmt: skip

DIAGNOSTICS = {
    "schema": "Version of this format.",
    "ok": "Whether there is no error; warnings do not count.",
    "exit": "The exit code of the command.",
    "diagnostics[].severity": "`error` or `warning`.",
    "diagnostics[].exit": "The exit code that this one alone would give.",
    "diagnostics[].message": "What is wrong.",
    "diagnostics[].file": "Where: file,",
    "diagnostics[].line": "line from 1,",
    "diagnostics[].col": "first column from 1,",
    "diagnostics[].end_col": "and the column after the last; null where there is no place.",
    "diagnostics[].text": "The whole line.",
    "diagnostics[].why": "A few words beside the place.",
    "diagnostics[].fix": "What would be legal.",
    "diagnostics[].also[]": "Further places that take part, each with `file`, `line`, `col`, `end_col`, `text`, `why`.",
}  # fmt: skip

FINDINGS = {
    "schema": "Version of this format.",
    "ok": "Whether nothing is to be mended.",
    "findings[].room": "What is looked at: versions, devices, links, disk, limits, ports.",
    "findings[].name": "The figure,",
    "findings[].value": "and its value in words.",
    "findings[].state": "`ok`, `note` or `bad`.",
    "findings[].fix": "What mends it.",
}  # fmt: skip

COMPARED = {
    "equal": "Whether all differences are rounding.",
    "losses[]": "The two losses of each step.",
    "largest.name": "The parameter whose gradients differ most,",
    "largest.step": "the step,",
    "largest.apart": "and the norm of the difference over the norm.",
    "distances[].*": "The same for every parameter and step.",
    "first_difference": "Null where they are equal; else name, op, module, phase and difference of the first value "
    "that differs by more than rounding.",
}  # fmt: skip

AGREES = {
    "agrees": "Whether rounding explains all differences.",
    "rows": "Held-out rows,",
    "tokens": "their target tokens that both computed,",
    "left_out": "and those beyond the longest prompt that the server takes.",
    "largest": "The largest difference of a token's log-probability in nats,",
    "bound": "and the most that rounding explains.",
    "mean": "The mean difference,",
    "mean_bound": "and the most that rounding explains.",
    "equal_bits": "Tokens whose two log-probabilities are the same number.",
    "beyond": "Tokens above the bound.",
    "first_difference": "The first of them, or null: row, position of the token before it, token, and its "
    "log-probability in training and in the server.",
    "model": "The checkpoint.",
    "dtype": "What both compute in.",
    "mesh": "The mesh of training,",
    "serve_mesh": "and of the server.",
    "notes[]": "What the server does otherwise than training, in words.",
}

QUANTIZING = {
    "bits": "Bits of a weight.",
    "group_size": "Inputs that share a scale.",
    "order": "The order of solving: act-order or that of the inputs.",
    "method": "`gptq` or `nearest`.",
    "linears[].*": "Name and shape of each linear, its error and that of round-to-nearest (norm of the outputs' "
    "difference over the norm of the outputs), and seconds.",
    "left_dense[]": "Linears that stay dense.",
    "short_of_tokens.*": "The calibration tokens of each linear that has fewer of them than inputs.",
    "loss_before": "Nats a token of held-out text, dense; null where not asked for,",
    "loss_after": "and quantized.",
    "loss_nearest": "and with all linears rounded to nearest instead; null with `--nearest`.",
    "held_out_tokens": "Tokens of that text.",
    "act_orders[].*": ACT_ORDERS,
}  # fmt: skip

EVALUATED = {
    "schema": "Version of this format.",
    "source": "SOURCE as given.",
    "model": "The folder of the checkpoint or model,",
    "step": "its step; null for a folder.",
    "loss": "Nats per target token over all texts; null without a target token.",
    "tokens": "Target tokens of all texts.",
    "seq_len": "Tokens of a sequence.",
    "dtype": "What the model was computed in.",
    "mesh.*": "Size of each mesh axis.",
    "results[].*": "Of each text: `data`, `sequences`, `tokens`, `loss` and `perplexity`.",
}  # fmt: skip
EVALUATED_SOMETIMES = {"tasks.*.*": "With --tasks, in place of the losses: the metrics of each task by name."}

NET = {
    "schema": "Version of this format.",
    "levels[].name": "A level of the network, from the nearest,",
    "levels[].devices": "devices of a host that it joins; 0 where it joins hosts,",
    "levels[].hosts": "hosts that it joins; 0: all,",
    "levels[].rate": "bytes/s that one device sends through it,",
    "levels[].latency_s": "seconds of a hop,",
    "levels[].oversubscribed": "how much more the devices below can send than it carries,",
    "levels[].rails": "whether it joins devices of the same place in their hosts,",
    "levels[].shared": "and whether all devices of a unit below share the link.",
    "axes[].axis": "A mesh axis,",
    "axes[].size": "its size,",
    "axes[].stride": "devices between neighbours along it,",
    "axes[].levels[].level": "a level that its groups use,",
    "axes[].levels[].joins": "and how many units of the level below are joined there.",
    "collectives[].kind": "Collectives of a step: kind,",
    "collectives[].axes": "axes,",
    "collectives[].of": "what is moved,",
    "collectives[].level": "the level that takes longest,",
    "collectives[].algorithm": "the algorithm priced,",
    "collectives[].count": "how many,",
    "collectives[].bytes": "bytes of their buffers,",
    "collectives[].time_s": "seconds of all of them,",
    "collectives[].exposed_s": "and those during which nothing is computed.",
    "placements[].order": "An order of the axes, outer to inner; the recipe's first,",
    "placements[].comm_s": "seconds of a step in which a collective runs,",
    "placements[].exposed_s": "in which computing waits for one,",
    "placements[].step_s": "of the whole step,",
    "placements[].whole": "and whether its own program was built; else the recipe's was priced so.",
}
ANSWERED = {
    "id": "As OpenAI's API: the answer's name,",
    "object": "its kind,",
    "created": "when it was made, in unix seconds,",
    "model": "the recipe's name,",
    "choices[].index": "0,",
    "choices[].logprobs": "null,",
    "choices[].finish_reason": "`stop` or `length`,",
    "usage.prompt_tokens": "tokens of the text or the conversation,",
    "usage.completion_tokens": "of the answer,",
    "usage.total_tokens": "of both,",
    "usage.prompt_tokens_details.cached_tokens": "and those of the prompt that were not computed again.",
}
GENERATED = {**ANSWERED, "choices[].text": "The text."}
CHATTED = {
    **ANSWERED,
    "choices[].message.role": "`assistant`. An answer is a line.",
    "choices[].message.content": "The text.",
}
SMALL = ("plan", "quickstart", "model.layers=1")
SERVE_PLAN = (*SMALL, "--for", "serve", "--prompt", "32", "--answer", "8", "--count", "20", "--json")
OUTPUTS = (
    Output("plan RECIPE", (*SMALL, "--json"), PLAN, PLAN_SOMETIMES),
    Output("plan RECIPE --stage STAGE", (*SMALL, "--stage", "graph", "--of", "layers.0.mlp", "--json"), STAGE),
    Output("plan RECIPE --net", (*SMALL, "--net", "--json"), NET),
    Output("plan RECIPE --for serve", (*SERVE_PLAN, "--rate", "1"), ANSWERS),
    Output("plan RECIPE --fit", (), FITTED),
    Output("plan RECIPE --search", (), SEARCHED),
    Output("plan RECIPE --pin", (), PINNED),
    Output("plan --check RUN", (), CHECKED),
    Output("serve RECIPE --check", ("serve", "quickstart", "model.layers=1", "--check", "--json"), NEED),
    Output(
        "validate RECIPE",
        ("validate", "quickstart", "fsdp.gather=1", "--json"),
        DIAGNOSTICS,
        {"trained.*": "By the name of each recipe without errors, what `plan` has as `trained`; empty without any."},
    ),
    Output("doctor", ("doctor", "--no-collective", "--json"), FINDINGS),
    Output("check RECIPE --against KEY=VALUE", (), COMPARED),
    Output("check RUN --serving", (), AGREES),
    Output("quantize SOURCE OUT", (), QUANTIZING),
    Output("evaluate SOURCE", (), EVALUATED, EVALUATED_SOMETIMES),
    Output("generate SOURCE TEXT", (), GENERATED),
    Output("chat SOURCE", (), CHATTED),
)


def unknown(printed: Any, output: Output) -> list[str]:
    """Paths of what was printed that no key of the output describes."""
    keys = [*output.keys, *output.sometimes]
    return [path for path in dict.fromkeys(_paths(printed)) if not any(_covers(key, path) for key in keys)]


def missing(printed: Any, output: Output) -> list[str]:
    """The required keys of the output that were not printed."""
    paths = list(_paths(printed))
    return [key for key in output.keys if not any(_covers(key, path) for path in paths)]


def _paths(value: Any, at: str = "") -> Iterator[str]:
    """The paths of all leaf values; an empty list or map counts as a leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _paths(inner, f"{at}.{key}" if at else key)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _paths(inner, f"{at}[]")
    else:
        yield at + "[]" * (value == [])


def _covers(key: str, path: str) -> bool:
    """Whether a documented key describes a printed path: `a[]` also describes everything below it."""
    stem = key.removesuffix(".*")
    return path == stem or path.startswith((stem + ".", stem + "[")) or (path.endswith("[]") and key.startswith(path))
