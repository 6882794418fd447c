"""Rows of published servers, as what their engines' steps compute, on which device, under which traffic."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tpshard.devices.read import device as read_device
from tpshard.plan.server.server_steps import server_of
from tpshard.plan.server.traffic import Traffic, quantile
from tpshard.programs.server.serve_setting import Size
from tpshard.programs.server.serving import build_serving
from tpshard.recipes.reading.load import loads

from engines.engine_steps import EngineProfile, EngineSteps, WeightFormat
from engines.step_work import StepWork, step_work
from published_models import keys_of, layers_of
from published_rows import Missing

DEVICES = {
    "A100-SXM-40GB": "a100-40g", "A100-SXM-80GB": "a100-80g", "A100-PCIe-80GB": "a100-pcie-80g",
    "A800-SXM-80GB": "a800", "H100-SXM-80GB": "h100-sxm-80g", "H200-SXM-141GB": "h200", "B200-SXM-180GB": "b200",
    "H20-96GB": "h20", "H20-141GB (3e)": "h20-141g", "L40S-48GB": "l40s", "L4-24GB": "l4",
    "RTX-6000-Ada-48GB": "rtx-6000-ada", "RTX-A6000-48GB": "rtx-a6000",
    "GH200-96GB": "h100-sxm-96g", "B300-SXM-288GB": "b300", "RTX-4090-24GB": "rtx-4090",
}  # fmt: skip
FIGURES = ("ttft", "tpot", "tokens/s")
FORMATS = {
    r"bf16|fp16": WeightFormat(),
    r"int4.*|awq.*": WeightFormat(0.52),
    r"int8 (gptq|w8a16).*": WeightFormat(1.02),
    r"int8.*": WeightFormat(1.0, "int8"),
    r"fp8 \(MLP only.*": WeightFormat(1.0, "fp8", "mlp"),
    r"fp8.*": WeightFormat(1.0, "fp8"),
    r"mxfp4 \(experts\).*": WeightFormat(0.53, "fp4", "experts"),
    r"nvfp4.*": WeightFormat(0.5625, "fp4"),
}
"""Patterns of published weights."""
CACHES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
ENGINES: tuple[tuple[str, EngineProfile], ...] = (
    (r"vLLM( 0\.[0-7]\..*| main.*|)", EngineProfile(
        "vLLM to 0.7", host_s=2.6e-3, row_s=2.2e-5, peers_s=1.5e-3, request_s=2.1e-2, launch_s=4.3e-5, narrow=0.78,
        mixes=False, captured=256,
    )),
    (r"vLLM 0\.([89]|1[0-3])\..*", EngineProfile(
        "vLLM 0.8 to 0.13", host_s=4.8e-4, row_s=2.6e-5, peers_s=1.6e-4, request_s=2.6e-2, launch_s=8e-6, narrow=0.52,
        running=1024,
    )),
    (r"vLLM .*", EngineProfile(
        "vLLM from 0.14", host_s=6.7e-4, row_s=2e-6, request_s=9.2e-3, launch_s=1e-5, narrow=0.55, running=1024,
    )),
    (r"SGLang.*", EngineProfile(
        "SGLang", host_s=3.3e-4, row_s=2e-6, peers_s=1e-4, request_s=9.5e-3, launch_s=4e-5, narrow=0.85, mixes=False,
        share=0.88, running=1024,
    )),
    (r"TensorRT-LLM \(NIM\).*", EngineProfile(
        "NIM", host_s=4.1e-3, request_s=1.3e-2, narrow=0.95, running=2048, reserves=True,
    )),
    (r"TensorRT-LLM.*", EngineProfile(
        "TensorRT-LLM", host_s=3.1e-4, row_s=2e-6, request_s=1e-2, narrow=0.79, running=2048, reserves=True,
    )),
    (r"LMDeploy TurboMind.*", EngineProfile("TurboMind", host_s=8e-4, request_s=1e-2)),
)  # fmt: skip
"""Patterns of engines and their versions, first match first."""
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean, "ITL mean": statistics.fmean, "p50": statistics.median, "median": statistics.median,
    "median of per-minute p50": statistics.median, "p90": lambda values: quantile(values, 0.9),
    "p95": lambda values: quantile(values, 0.95), "p99": lambda values: quantile(values, 0.99),
    "ITL p50": statistics.median,
}  # fmt: skip
"""What published figures are of the requests' own; `ITL p50` is of steps."""
VARIED = {"ShareGPT": 0.9, "uniform in 0.8-1.0": 0.11, "genai-perf": 0.3}
"""How much lengths differ from their mean, by what the note says."""
STEADY = ("closed loop for", "genai-perf")
"""Words of notes on closed loops whose figures leave out their start."""
MOST = 3000
"""Requests of a load that the source calls the maximum."""
AT_RATE = 500
"""Requests of a load with a rate."""
LOOPS = 10
"""Requests of a client of a closed loop."""


Constants = Mapping[str, float]
"""Constants by `NAME/FIELD`: of an engine, of a device's efficiency, or, under `kernels`, of all kernels."""
NONE: Constants = {}


@dataclass(frozen=True)
class ServedRow:
    """A published server: its steps, its traffic, and what was measured."""

    name: str
    model: str
    device: str
    tp: int
    engine: EngineProfile
    fitted: bool
    traffic: Traffic
    varied: float
    """The share by which its lengths differ from the traffic's at most."""
    weights: WeightFormat
    cache_bytes: float
    steady: bool
    """Whether its figures are of the middle of a long run."""
    measured: Mapping[str, tuple[str, float]]
    """For each of `FIGURES` that the row has, the statistic and the value, in seconds and tokens per second."""

    def steps(self, constants: Constants = NONE) -> EngineSteps:
        """The times of its steps, with other constants than the engine's and the device's own."""
        device, engine, weights = device_of(self.device), self.engine, self.weights
        if constants:
            device = replace(device, efficiency=replace(device.efficiency, **_of(self.device, constants)))
            kernels = replace(engine.kernels, **_of("kernels", constants))
            engine = replace(engine, kernels=kernels, **_of(engine.name, constants))
        products = {*device.rates, "fp4"} if "b200" in self.device or "b300" in self.device else {*device.rates}
        if weights.computed not in ("", *products):  # the weights are turned into the activations' dtype
            weights = replace(weights, computed="")
        return EngineSteps(work_of(self.model, self.tp), device, engine, weights, self.cache_bytes)


device_of = cache(read_device)


def _of(name: str, constants: Constants) -> dict[str, Any]:
    return {key.partition("/")[2]: value for key, value in constants.items() if key.partition("/")[0] == name}


def profile_of(engine: str, version: str, note: str) -> EngineProfile | None:
    """The profile of an engine's version; None if none is known."""
    named = f"{engine} {version.removeprefix('v')}".strip()
    profile = next((profile for pattern, profile in ENGINES if re.fullmatch(pattern, named)), None)
    longest = re.search(r"max-model-len (\d+)", note)
    if (
        profile is not None and longest and int(longest[1]) > 32768 and profile.name == "vLLM to 0.7"
    ):  # it then computes prompts in chunks
        return replace(profile, step_tokens=512, mixes=True)
    return profile


@cache
def work_of(model: str, tp: int) -> StepWork:
    """What a step of a published model computes on one of `tp` devices."""
    built = 4 if "gpt-oss" in model else 2
    recipe = loads(
        f"""
name: row
cluster: {{device: h100-sxm-80g, nodes: 1, devices_per_node: {tp}}}
mesh: {{tp: {tp}}}
model: {{{keys_of(f"{model} cut to {built} layers")}, dtype: bf16}}
serve: {{mesh: {{tp: {tp}}}, requests: 512}}
""",
        file=model,
    )
    setting, _, _ = server_of(recipe)
    sizes = (Size(64), Size(512))
    programs = build_serving(setting, sizes).by_size
    return step_work({size.rows: programs[size] for size in sizes}, layers_of(model), built)


def row_of(row: Mapping[str, str]) -> ServedRow:
    """Reads a row. Missing, with everything that cannot be said of it."""
    missing = dict[str, str]()
    weights = next((one for pattern, one in FORMATS.items() if re.fullmatch(pattern, row["weights"])), None)
    engine = profile_of(row["engine"], row["engine_version"], row["note"])
    cache_dtype = row["kv_dtype"] or ("fp8" if "fp8" in row["weights"] else "bf16")
    for key, known, value in (
        ("weights", weights, row["weights"]), ("model", keys_of(row["model"]), row["model"]),
        ("cluster.device", row["gpu"] in DEVICES, row["gpu"]), ("engine", engine, row["engine"]),
        ("cache", cache_dtype in CACHES, cache_dtype),
        ("serve.mesh", row["pp"] == row["dp"] == "1", f"pp {row['pp']}, ep {row['ep']}, dp {row['dp']}"),
    ):  # fmt: skip
        if not known:
            missing[key] = value
    if weights is None or engine is None or missing:
        raise Missing(missing)
    note, rate = row["note"], None if row["rate_rps"] in ("", "inf") else float(row["rate_rps"])
    queued = re.search(r"([\d,]+) (?:equal requests|ShareGPT prompts)", note)
    at_once = int(row["batch"] or (queued[1].replace(",", "") if queued else MOST))
    closed = not row["batch"] and bool(row["concurrency"]) and rate is None
    clients = int(row["concurrency"]) if closed else AT_RATE if rate is not None else at_once
    varied = next((share for words, share in VARIED.items() if words in note), 0.0)
    prompt, answer = int(row["input_len"]), int(row["output_len"])
    if min(prompt, answer, clients) < 1 or (rate is not None and not 0 < rate < 1e6):
        raise ValueError(f"{clients} clients, {prompt} and {answer} tokens, rate {rate}: not a load")
    traffic = Traffic(prompt, answer, rate, clients, max(8, LOOPS * clients) if closed else clients)
    measured = {
        name: (row[f"{name}_stat"], float(row[f"{name}_ms"]) / 1000)
        for name in FIGURES[:2] if float(row[f"{name}_ms"] or 0) > 0 and row[f"{name}_stat"] in STATISTICS
    }  # fmt: skip
    if float(row["output_tok_s_total"] or 0) > 0:
        measured["tokens/s"] = ("", float(row["output_tok_s_total"]))
    elif float(row["total_tok_s"] or 0) > 0:
        measured["tokens/s"] = ("", float(row["total_tok_s"]) * answer / (prompt + answer))
    steady = closed and any(words in note for words in STEADY)
    return ServedRow(
        row["id"], row["model"], DEVICES[row["gpu"]], int(row["tp"]), engine, row["use"] == "fit", traffic, varied,
        weights, CACHES[cache_dtype], steady, measured,
    )  # fmt: skip
