"""Adapters compute what PEFT computes, over several updates, on every mesh; what a recipe freezes stays as it is."""

from __future__ import annotations

from pathlib import Path

import architectures
import gptq_folders
import pytest
import torch
from tpshard.cli.preflight.preflight import load_checked
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.adapters.peft_folder import PeftFolder, write_peft
from tpshard.parallelism.program import info
from tpshard.programs.compare.equality import compare
from tpshard.programs.compare.float64 import distance
from tpshard.programs.compare.lockstep import Lockstep
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

torch.set_num_threads(1)
STEPS, LR = 5, 1e-2
LORA = "adapters={lora: {rank: 4, alpha: 8}}"


def adapted(folder: Path, mesh: str = "{}", *overrides: str, key: str = "hf") -> Setting:
    recipe = (
        f"name: adapted\ncluster: {{device: cpu}}\nmesh: {mesh}\nmodel: {{{key}: {folder}, seq_len: 12, dtype: fp32}}\n"
        "batch: {global_sequences: 8}\ncompile: eager\noptimizer: {lr: 1.0e-2}\n"
    )
    return Setting.of(loads(recipe, (LORA, *overrides)))


def trained(setting: Setting) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a few steps, from the run's own initial values, and the parameters after them, in float64."""
    run = Lockstep(training.build(setting), architectures.VOCAB)
    for port in run.programs.stored:
        names = setting.members(port.name) or [port.name]
        shape = setting.shape_in_layer(port.name, port.shape)
        each = [setting.spec.initial_block(name, (0,) * len(shape), shape, setting.recipe.seed) for name in names]
        value = each[0] if setting.members(port.name) is None else torch.stack(each)
        run.values[port.key] = run.local(value.double() if value.dtype == torch.float32 else value, port)
    losses = [run.step(LR).loss for _ in range(STEPS)]
    return losses, run.weights()


def by_peft(
    setting: Setting, folder: Path, base: Path, own: torch.nn.Module | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same by PEFT on transformers' module, from the folder that tpshard writes of the initial values."""
    peft = pytest.importorskip("peft")
    spec = setting.spec
    assert isinstance(spec, AdaptedModel)

    def initial(name: str) -> torch.Tensor:
        shape = spec.shapes[name]
        return spec.initial_block(name, (0,) * len(shape), shape, setting.recipe.seed)

    write_peft(spec, initial, folder, base=str(base))
    import transformers

    own = own or transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float64, experts_implementation="eager"
    )
    model = peft.PeftModel.from_pretrained(own, folder, is_trainable=True, autocast_adapter_dtype=False).double()
    asked = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in asked if p.dim() > 1]
    groups = [{"params": matrices, "weight_decay": 0.1},
              {"params": [p for p in asked if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    batches, losses = Lockstep(training.build(setting), architectures.VOCAB).batches, []
    for _ in range(STEPS):
        ((tokens, targets),) = [(b["batch", "tokens"], b["batch", "targets"]) for b in batches.next()]
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(asked, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    model.save_pretrained(folder.with_name("after"))
    adapters = PeftFolder.of(folder.with_name("after"), spec.base)
    return losses, {name: adapters.read(name).double() for name in adapters.places}


CASES = [
    ("qwen2", "hf", ("adapters.lora={rank: 2, use_rslora: true, targets: [q_proj, mlp.down]}",)),
    ("mixtral", "hf", ("adapters.lora.targets=[wq, router, experts.down]",)), ("olmo2", "transformers", ()),
    ("llama", "hf", ("adapters.lora={dora: true, rank_pattern: {'layers.1.attention.wq': 3}, targets: [wq, wo]}",)),
    ("gpt2", "transformers", ("adapters.lora.modules_to_save=[ln_f]",)),
    ("llama", "hf", ("adapters.lora.targets=[embed_tokens, wq]",)),
    ("gpt2", "transformers", ("adapters.lora.targets=[wpe, c_attn]",)),
    ("gpt2", "transformers", ("adapters.lora.targets=[wte, lm_head]",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "overrides"), CASES)
def test_updates_are_those_of_peft(name: str, key: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    base = architectures.folder(tmp_path / "base", name, weights=True, router_aux_loss_coef=0.0)
    losses, weights = trained(adapted(base, "{}", *overrides, key=key))
    theirs, expected = by_peft(adapted(base, "{}", *overrides, key=key), tmp_path / "peft", base)
    assert losses == pytest.approx(theirs, rel=1e-6)
    apart = {path: distance(weights[path], value) for path, value in expected.items()}
    assert max(apart.values()) < 1e-5, apart


MESHES = [
    ("llama", "{fsdp: 2, tp: 2}", ("adapters.lora.targets=[tok_embed, wq]",)),
    ("mixtral", "{fsdp: 2}", ()), ("llama", "{fsdp: 2, tp: 2}", ("adapters.lora.dora=true",)),
    ("mixtral", "{ep: 2}", ("adapters.lora.targets=[wq, wo, experts.down]",)), ("olmo2", "{tp: 2}", ()),
    ("qwen2", "{pp: 2}", ("pipeline={schedule: 1f1b}", "batch.per_device=4")),
    ("llama", "{pp: 2}", ("pipeline={form: vectorized, schedule: gpipe}", "batch.per_device=4")),
    ("mixtral", "{pp: 2}", ("pipeline={schedule: 1f1b}", "batch.per_device=4",
                            "adapters.lora.targets=[gate_up_proj]")),
]  # fmt: skip


FUSED = [
    ("mixtral", "targets=[gate_up_proj, down_proj, wq]"),
    ("qwen3_moe", "targets=[experts.gate_up_proj, router]"),
    ("gpt_bigcode", "targets=[c_attn, c_fc]"), ("gpt_bigcode", "dora=true"),
    ("gpt_bigcode", "targets=[wte, lm_head, c_attn]"),
    ("deepseek_v32", "targets=[o_proj, gate_up_proj, experts.down_proj]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "lora"), FUSED)
def test_what_one_matrix_holds_shares_one_factor_as_by_peft(
    name: str, lora: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on meshes, where gate and up of all experts, or queries, keys and values, add to the gradient of one A."""
    own = {"architectures": ["GPTBigCodeForCausalLM"], "n_positions": 64, "multi_query": False, "n_layer": 2,
           "vocab_size": architectures.VOCAB, "n_embd": 32, "n_head": 4, "n_inner": 48, "bos_token_id": 1,
           "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
    monkeypatch.setitem(architectures.CONFIGS, "gpt_bigcode", own)
    base = architectures.folder(tmp_path / "base", name, weights=True, router_aux_loss_coef=0.0)
    lora = f"adapters.lora.{lora}"
    theirs, expected = by_peft(adapted(base, "{}", lora), tmp_path / "peft", base)
    for mesh in ("{}", "{fsdp: 2}", "{tp: 2}" if name == "gpt_bigcode" else "{ep: 2}", "{fsdp: 2, tp: 2}"):
        losses, weights = trained(adapted(base, mesh, lora))
        assert losses == pytest.approx(theirs, rel=1e-6), mesh
        apart = {path: distance(weights[path], value) for path, value in expected.items()}
        assert max(apart.values()) < 1e-5, (mesh, apart)
    assert name == "deepseek_v32" or any(one.shared for one in adapted(base, "{}", lora).spec.adapters.values())


@pytest.mark.parametrize(("name", "mesh", "overrides"), MESHES)
def test_meshes_agree(name: str, mesh: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """All factors begin away from zero here, which would hide the gradients of the others."""
    base = architectures.folder(tmp_path, name, weights=True)
    key = "transformers" if name == "olmo2" else "hf"
    plain = [o for o in overrides if not o.startswith("pipeline")]
    compared = compare(adapted(base, mesh, *overrides, key=key), adapted(base, "{}", *plain, key=key), steps=2)
    assert compared.equal, compared.largest


def quantized(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, bits: int = 4, ordered: bool = True
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A GPTQ folder, and the parameters of transformers' class that it stands for."""
    config = architectures.config_of(name)
    wider = {key: value for key, value in gptq_folders.WIDER.items() if key in config}
    monkeypatch.setitem(architectures.CONFIGS, name, config | wider | {"router_aux_loss_coef": 0.0})
    return gptq_folders.quantized(name, place, bits, ordered)


PACKED = [
    ("llama", "{fsdp: 2, tp: 2}", ("adapters.lora.dora=true",), 4, True), ("olmo2", "{tp: 2}", (), 8, True),
    ("mixtral", "{ep: 2}", ("adapters.lora.targets=[wq, gate_up_proj, experts.down]",), 3, True),
    ("qwen2", "{pp: 2}", ("pipeline={schedule: 1f1b}", "batch.per_device=4"), 2, True),
    ("llama", "{pp: 2}", ("pipeline={form: vectorized, schedule: gpipe}", "batch.per_device=4"), 4, False),
    ("llama", "{fsdp: 2, tp: 2}", (), 2, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh", "overrides", "bits", "ordered"), PACKED)
def test_a_quantized_base_stays_packed_on_every_mesh(
    name: str, mesh: str, overrides: tuple[str, ...], bits: int, ordered: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Several updates, by which B is no longer zero. Where PEFT can train the adapters, it does the same."""
    base, dense = quantized(name, tmp_path / "base", monkeypatch, bits, ordered)
    key, plain = "transformers" if name == "olmo2" else "hf", [o for o in overrides if o.startswith("adapters")]
    one, several = adapted(base, "{}", *plain, key=key), adapted(base, mesh, *overrides, key=key)
    losses, weights = trained(one)
    theirs, others = trained(several)
    assert losses == pytest.approx(theirs, rel=1e-10)
    assert weights.keys() == others.keys() > one.spec.packed
    added = [n for n in weights if n in one.spec.added]
    assert max(distance(others[n], weights[n]) for n in added) < 1e-10
    if name == "mixtral" or len(plain) < len(overrides):
        return
    own = architectures.own(name).double()
    own.load_state_dict(dense, strict=False)
    theirs, expected = by_peft(one, tmp_path / "peft", base, own)
    assert losses == pytest.approx(theirs, rel=1e-6)
    assert max(distance(weights[path], value) for path, value in expected.items()) < 1e-5


def test_a_packed_base_is_never_held_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass unpacks each weight again, with and without gathers."""
    base, _ = quantized("llama", tmp_path / "base", monkeypatch)
    for mesh in ("{}", "{fsdp: 2}"):
        program = training.build(adapted(base, mesh, "remat=none")).micro
        phases = [info(n).phase for n in program.graph.nodes if "dequantize" in str(n.target)]
        # the first layer's queries, keys and values read the embedding, of which no gradient is asked
        assert phases.count("forward") == 14 and phases.count("recompute") == 14 - 3


def test_what_a_packed_base_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, _ = quantized("llama", tmp_path / "base", monkeypatch)
    with pytest.raises(Mistakes, match=r"layers.0.attention.wq` is quantized, and cannot be trained"):
        adapted(base, "{}", "adapters.lora.modules_to_save=[wq]")
    planned = frozen(LORA, "adapters.packed=true", "quantize={group_size: 32}", mesh="{fsdp: 2}")
    assert {str(port.dtype) for port in training.build(planned).stored} >= {"torch.uint8", "torch.float16"}
    with pytest.raises(ValueError, match=r"the preset tiny has no quantized weights"):
        planned.spec.initial_block("layers.0.mlp.up.codes", (0, 0), (1, 1), 0)
    assert not frozen(LORA, "quantize={group_size: 32}").spec.packed


def frozen(*overrides: str, mesh: str = "{}") -> Setting:
    return Setting.of(loads(f"name: f\ncluster: {{device: cpu}}\nmesh: {mesh}\nmodel: {{preset: tiny}}\n", overrides))


def test_what_is_frozen_has_no_gradient_and_no_moments() -> None:
    setting = frozen("train.freeze=[tok_embed, layers.*.mlp, layers.0]", "model.dtype=bf16", mesh="{fsdp: 2}")
    programs = training.build(setting)
    own = {"layers.1.attention.wq.weight", "layers.3.mlp_norm.weight", "norm.weight", "output.weight"}
    assert own < set(programs.trained) and len(programs.trained) == 3 * 6 + 2
    stored = {port.name: port.dtype for port in programs.stored}
    assert stored["tok_embed.weight"] == torch.bfloat16 and stored["norm.weight"] == torch.float32
    moments = {name.removesuffix(".exp_avg") for port in programs.update.inputs if (name := port.name).endswith("avg")}
    assert moments == set(programs.trained)


@pytest.mark.parametrize(("override", "says"), [
    ("train.freeze=[tok_embd]", "`tok_embd` matches no parameter"),
    ("train.freeze=[tok_embd]|adapters={lora: {rank: 4}}", "`tok_embd` matches no parameter"),
    ("adapters={lora: {targets: [wx]}}", "`wx`"),
    ("adapters={lora: {rank: 65}}", r"rank_pattern: \{attention.wk: 64\}"),
    ("adapters={lora: {rank_pattern: {zz: 2}}}", "`zz`"),
    ("adapters={lora: {rank_pattern: {wq: 4, 'attention.wq': 2}}}", "decides nothing"),
    ("adapters={lora: {modules_to_save: [hat]}}", "`hat` is no module"),
])  # fmt: skip
def test_names_of_nothing_are_refused_at_their_place(override: str, says: str) -> None:
    with pytest.raises(Mistakes, match=says) as refused:
        frozen(*override.split("|"))
    (one,) = refused.value.diagnostics
    assert one.exit == Exit.RECIPE and one.where is not None and one.where.line == 1
    assert override[one.where.col - 1 :].startswith(("tok_embd", "wx", "65", "2", "hat"))


@pytest.mark.parametrize("said", ["adapters.lora.targets=[qq_proj]", "train.freeze=[no.such]"])
def test_names_in_a_class_of_transformers_are_validated(said: str, tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "olmo2", vocab_size=2048)
    with pytest.raises(Mistakes, match=r"qq_proj|no\.such") as raised:
        load_checked("quickstart", [f"model={{transformers: {folder}, seq_len: 32}}", said], text=True)
    assert raised.value.exit == Exit.RECIPE
