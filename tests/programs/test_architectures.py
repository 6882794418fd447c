"""A partitioned step of a transformers model equals that of transformers in one process."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path

import architectures
import pytest
import torch
from safetensors.torch import load_file, save_file
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.transformers import attention_interface, patch_attention
from tpshard.models.transformers.architecture import Architecture
from tpshard.models.transformers.tp_plan import dims_of_plan
from tpshard.parallelism.tracing.capture import capture
from tpshard.programs.compare.float64 import float64
from tpshard.programs.parts import step_programs
from tpshard.programs.server.paging import rows_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

RECIPE = """
name: theirs
cluster: {device: cpu}
model: {transformers: FOLDER, seq_len: 12, dtype: fp32}
batch: {global_sequences: 8}
compile: eager
"""


def setting_of(folder: Path, mesh: dict[str, int], more: str = "", key: str = "transformers") -> Setting:
    sizes = ", ".join(f"{axis}: {size}" for axis, size in mesh.items())
    text = RECIPE.replace("transformers: FOLDER", f"{key}: '{folder}'{more}")
    ranks = mesh.get("dp", 1) * mesh.get("fsdp", 1)
    return Setting.of(loads(text + f"mesh: {{{sizes}}}\n", [f"batch.per_device={8 // ranks}"]))


@pytest.mark.parametrize(
    ("name", "mesh", "several"),
    [
        ("llama", {"dp": 2, "fsdp": 2, "tp": 2}, True),
        ("gemma2", {"tp": 2}, True),
        ("gpt2", {"fsdp": 2, "tp": 2}, True),
        ("qwen3_moe", {"fsdp": 2, "tp": 2}, False),
        ("falcon", {"fsdp": 2, "tp": 2}, False),
        ("bloom", {"tp": 2}, False),
        ("mpt", {"tp": 2}, False),
        ("gpt_neo", {"fsdp": 2, "tp": 2}, False),
        ("stablelm", {"tp": 2}, False),
        ("roberta", {"fsdp": 2, "tp": 2}, False),
        ("gpt_oss", {"fsdp": 2, "tp": 2}, False),
        ("nemotron", {"tp": 2}, True),
        ("falcon_h1", {"tp": 2}, False),  # whose multipliers are buffers that only the constructor computes
        ("deepseek_v32", {"fsdp": 2, "tp": 2}, True),
        ("hy_v4", {"tp": 2}, True),
        ("dots3_note_text", {"tp": 2}, True),  # whose layers differ in their numbers of heads
        ("llama4_text", {"fsdp": 2, "tp": 2}, False),
        ("longcat_flash", {"fsdp": 2, "tp": 2}, True),
        ("jetmoe", {"tp": 2}, False),
        ("doge", {"tp": 2}, False),
        ("longrope", {"tp": 2}, False),
        ("dynamic", {"tp": 2}, False),
        ("trocr", {"tp": 2}, False),  # whose sinusoids are a plain attribute
    ],
)
def test_a_step_is_transformers_own(name: str, mesh: dict[str, int], several: bool, tmp_path: Path) -> None:
    setting = setting_of(architectures.folder(tmp_path / name, name), mesh)
    program = step_programs.micro_program(setting)
    batch = architectures.batch(several)
    with float64():
        values = architectures.values(name)
        loss, grads = architectures.reference(name, batch, several)
        trained = step_programs.trained_by(program)
        assert [p.name for p in program.inputs if p.kind == "parameter"] == list(values)
        assert trained == [path for path in values if path in grads]  # all others have no sum, and stay as they are
        sums = [torch.zeros_like(values[path]) for path in trained]
        actual, count, *summed = program.simulate(*values.values(), *sums, *batch.values())
    assert int(count) == int((batch["targets"] != -100).sum())
    assert float(actual) == pytest.approx(float(loss), rel=1e-7)
    rounding = 1e-12 * max(float(grad.abs().max()) for grad in grads.values())  # a key's bias has no other gradient
    for path, total in zip(trained, summed, strict=True):
        grad = grads[path]
        assert (total - grad).abs().max() <= 1e-6 * grad.abs().max() + rounding, path


@pytest.mark.parametrize(
    "name", ["nemotron", "bert", "deepseek_v32", "gpt_neo", "qwen3_moe", "llama4_text", "jetmoe", "doge"]
)
def test_documents_of_a_row_do_not_meet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a class's layers pass attention no `documents`, as Nemotron's, and where attention is not causal."""
    monkeypatch.setattr(
        patch_attention, "_OWN", {k: v for k, v in patch_attention._OWN.items() if k != "NemotronAttention"}
    )
    model, row = Architecture(architectures.config_of(name)).build(), architectures.batch(True)
    second = row["positions"][0].tolist().index(0, 1)
    logits = []
    with torch.no_grad():
        for start in (0, second):
            inputs = tuple(row[key][:, start:] for key in ("tokens", "documents", "positions"))
            logits.append(torch.func.functional_call(model, architectures.values(name), inputs)[:, second - start :])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_window_to_both_sides_is_that_of_transformers() -> None:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = ModernBertConfig(
        vocab_size=64, local_attention=4, architectures=["ModernBertForMaskedLM"], **sizes, **special
    )
    own = ModernBertForMaskedLM(config).eval()
    model, tokens = Architecture(config.to_dict()).build(), torch.arange(32).view(2, 16)
    with torch.no_grad():
        expected = own(tokens).logits
        actual = torch.func.functional_call(model, dict(own.named_parameters()), (tokens,))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_two_texts_is_named() -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_ff": 32,
              "num_layers": 1, "num_heads": 2, "d_kv": 16, "vocab_size": 64}  # fmt: skip
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder with a decoder"):
        Architecture(config).build()


def test_dims_come_from_the_class_from_the_recipe_or_from_propagation(tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "llama")
    setting = setting_of(folder, {"tp": 2}, ", dims: {'model.layers.*.mlp.gate_proj.weight': [null, embed]}")
    layer = "model.layers.1."
    assert setting.dims[layer + "self_attn.q_proj.weight"] == ("heads", "embed")
    assert setting.dims[layer + "self_attn.k_proj.weight"] == ("kv_heads", "embed")
    assert setting.dims[layer + "self_attn.o_proj.weight"] == ("embed", "heads")
    assert setting.dims[layer + "mlp.down_proj.weight"] == ("embed", "mlp")
    assert setting.dims[layer + "mlp.gate_proj.weight"] == ("", "embed")
    assert setting.dims["model.embed_tokens.weight"] == setting.dims["lm_head.weight"] == ("vocab", "embed")
    assert layer + "input_layernorm.weight" not in setting.dims
    programs = training.build(setting)
    explanation = programs.micro.explain(layer + "self_attn.q_proj.weight")
    assert "a dim by the class's plan, colwise" in explanation
    gate = dict(zip(programs.names, programs.micro.in_shardings))[layer + "mlp.gate_proj.weight"]
    assert gate[0] == "tp", "inferred from what it is multiplied with"
    assert any("input_layernorm.weight" in note and "inferred" in note for note in programs.micro.warnings)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("falcon_h1", {
            "self_attn.q_proj.weight": ("heads", "embed"), "self_attn.k_proj.weight": ("kv_heads", "embed"),
            "self_attn.o_proj.weight": ("embed", "heads"), "feed_forward.down_proj.weight": ("embed", "mlp"),
            "mamba.in_proj.weight": (), "mamba.out_proj.weight": (),
        }),
        ("gpt_oss", {
            "mlp.experts.gate_up_proj": ("expert", "embed", "mlp"), "mlp.experts.down_proj": ("expert", "mlp", "embed"),
            "mlp.experts.gate_up_proj_bias": ("expert", "mlp"), "mlp.experts.down_proj_bias": ("expert", "embed"),
            "mlp.router.weight": (),
        }),
        ("bert", {
            "attention.self.query.weight": ("heads", "embed"), "attention.output.dense.weight": ("embed", "heads"),
            "intermediate.dense.bias": ("mlp",), "output.dense.weight": ("embed", "mlp"),
        }),
        ("qwen3_next", {
            "linear_attn.in_proj_qkvz.weight": ("heads", "embed"), "linear_attn.out_proj.weight": ("embed", "heads"),
        }),
    ],
)  # fmt: skip
def test_layers_with_usual_names_are_divided_where_the_plan_says_nothing(
    name: str, expected: dict[str, tuple[str, ...]]
) -> None:
    named = dims_of_plan(Architecture(architectures.config_of(name)).build())
    found = {end: next((naming.dims for path, naming in named.items() if f".0.{end}" in path), ()) for end in expected}
    assert found == expected


def test_layers_with_heads_of_their_own_have_no_number_in_common() -> None:
    architecture = Architecture(architectures.config_of("dots3_note_text"))
    assert architecture.heads is None and Architecture(architectures.config_of("glm_moe_dsa")).heads is not None
    assert dims_of_plan(architecture.build())["model.layers.0.self_attn.q_b_proj.weight"].dims == ("heads", "embed")


def test_a_vector_of_heads_is_divided_as_the_plan_says() -> None:
    """As gpt-oss's attention sinks, or biases that have another name than `bias`."""
    model = Architecture(architectures.config_of("llama")).build()
    attention = model.get_submodule("model.layers.0.self_attn")
    attention.register_parameter("sinks", torch.nn.Parameter(torch.empty(4)))
    attention.register_parameter("gate_bias", torch.nn.Parameter(torch.empty(4)))
    layer = "model.layers.*.self_attn."
    model._tp_plan = {layer + "sinks": "colwise", layer + "gate_bias": "colwise"}  # type: ignore[assignment]
    named = dims_of_plan(model)
    assert {named[f"model.layers.0.self_attn.{leaf}"].dims for leaf in ("sinks", "gate_bias")} == {("heads",)}


def test_positions_begin_behind_the_id_of_padding_where_the_class_counts_so(tmp_path: Path) -> None:
    """As in RoBERTa, whose table of positions therefore has fewer than `max_position_embeddings` for tokens."""
    setting = setting_of(architectures.folder(tmp_path, "roberta"), {})
    assert (setting.spec.architecture.first_position, setting.spec.sizes.max_seq) == (2, 64)
    gpt2 = setting_of(architectures.folder(tmp_path / "gpt2", "gpt2"), {}).spec.architecture
    assert (gpt2.first_position, gpt2.max_seq) == (0, 64)


def test_experts_are_named_and_go_to_their_axis(tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "qwen3_moe")
    training.build(setting_of(folder, {"fsdp": 2, "tp": 2}))  # gate and up lie in one parameter, cut across the two
    setting = setting_of(folder, {"fsdp": 1, "ep": 2})
    assert setting.dims["model.layers.0.mlp.experts.gate_up_proj"] == ("expert", "mlp", "embed")
    assert setting.dims["model.layers.0.mlp.experts.down_proj"] == ("expert", "embed", "mlp")


def test_a_shared_expert_is_divided_as_the_plan_divides_the_layer_around_it(tmp_path: Path) -> None:
    """Qwen2-MoE's plan has `mlp.gate_proj`, and no `mlp.shared_expert.gate_proj`."""
    programs = training.build(setting_of(architectures.folder(tmp_path, "qwen2_moe"), {"tp": 2}))
    stored = {
        name.rpartition("shared_expert.")[2]: port.local
        for name, port in zip(programs.names, programs.micro.inputs)
        if "layers.1.mlp.shared_expert." in name
    }
    assert stored == {"gate_proj.weight": (8, 32), "up_proj.weight": (8, 32), "down_proj.weight": (32, 8)}


def test_layers_in_which_documents_meet_are_told(tmp_path: Path) -> None:
    """Attention keeps them apart in a hybrid class, its convolutions do not."""
    names = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    config = {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": 64, **names}
    hybrid = Architecture(config | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]})
    (note,) = hybrid.notes(hybrid.build())
    assert "Lfm2ShortConv mixes tokens outside of attention: documents in one row reach each other" in note
    llama = Architecture(architectures.config_of("llama"))
    assert llama.notes(llama.build()) == []


def test_an_unknown_folder_falls_to_transformers_and_says_so(tmp_path: Path) -> None:
    setting = setting_of(architectures.folder(tmp_path / "neox", "gpt_neox"), {}, key="hf")
    assert setting.spec.outline is None and type(setting.model).__name__ == "GPTNeoXForCausalLM"
    assert any("tpshard has no family for gpt_neox" in note for note in setting.notes)
    assert "tpshard has no family for gpt_neox" in training.build(setting).micro.warnings[0], "a plan shows the first"
    assert setting_of(architectures.folder(tmp_path / "llama", "llama"), {}, key="hf").spec.outline is not None


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        ("", {"auto_map": {"AutoModel": "code.Model"}}, "never does"),
        ("", {"architectures": ["NoSuchForCausalLM"]}, "has no model named `NoSuchForCausalLM`"),
        ("", {"architectures": ["LlamaModel"]}, "LlamaModel is no language model"),
        ("", {"hidden_size": "wide"}, "LlamaConfig refuses it"),
        (", dims: {'model.layers.*.mlp.gate.weight': [mlp, embed]}", {}, "did you mean model.layers.*.mlp.gate_proj"),
        (", dims: {'model.norm.weight': [mlp, embed]}", {}, "names 2 dims, and `model.norm.weight` has 1: [32]"),
    ],
)
def test_what_cannot_be_taken_is_said_once(more: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "llama", **changes)
    with pytest.raises(Mistakes) as error:
        training.build(setting_of(folder, {"tp": 2}, more))
    assert len(error.value.diagnostics) == 1 and message in str(error.value)
    assert error.value.exit == Exit.RECIPE


def test_a_folder_is_opened_once_while_its_files_are_the_same(tmp_path: Path) -> None:
    """As for the variants of a search; its layers are counted without building it."""
    folder = architectures.folder(tmp_path, "gpt_neox", weights=True)
    first = setting_of(folder, {}, key="hf")
    assert setting_of(folder, {}, key="hf").spec is first.spec
    assert first.layers == len(first.single.get_submodule("gpt_neox.layers"))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"layer_norm_eps": 0.5}))
    assert setting_of(folder, {}, key="hf").spec.raw["layer_norm_eps"] == 0.5


def test_a_folder_with_pickles_alone_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "llama")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(Mistakes) as error:
        setting_of(folder, {})
    assert error.value.exit == Exit.RECIPE and "pytorch_model.bin is a pickle" in str(error.value)


def test_a_plan_reads_what_a_folder_holds(tmp_path: Path) -> None:
    """Only the headers of its files are read."""
    folder = architectures.folder(tmp_path, "llama", weights=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Mistakes, match=r"missing keys for LlamaForCausalLM: model\.norm\.weight") as error:
        setting_of(folder, {})
    assert error.value.exit == Exit.RECIPE


@pytest.mark.parametrize("key", ["transformers", "hf"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        ("model.norm.weight", None, "model.norm.weight"),
        ("model.norm.weight", torch.ones(31), "model.norm.weight"),
        ("model.foreign", torch.ones(3), "model.foreign"),
    ],
)
def test_a_plan_tells_of_tensors_that_do_not_fit(
    key: str, name: str, tensor: str, value: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    """mixtral's experts are stored one by one, so that transformers' own loading checks it."""
    folder = architectures.folder(tmp_path, name, weights=True)
    setting_of(folder, {}, key=key)
    tensors = load_file(folder / "model.safetensors") | {tensor: value}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    with pytest.raises(Mistakes) as error:
        setting_of(folder, {}, key=key)
    assert error.value.exit == Exit.RECIPE and len(error.value.diagnostics) == 1 and message in str(error.value)


def test_a_missing_and_a_foreign_tensor_are_told_together(tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "llama", weights=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({"model.foreign": tensors.pop("model.norm.weight"), **tensors}, folder / "model.safetensors")
    with pytest.raises(Mistakes, match=r"missing keys for LlamaForCausalLM: model\.norm\.weight"):
        setting_of(folder, {})


def test_a_model_that_looks_at_values_is_refused_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(Mistakes) as error:
        training.build(setting_of(architectures.folder(tmp_path, "llama"), {}))
    assert "`return x if x.sum() > 0 else -x` in " in str(error.value) and __file__ in str(error.value)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("gpt_neox", 2),
        ("gemma2", 2),
        ("gemma3_text", 4),
        ("phi3", 2),
        ("falcon", 4),
        ("bloom", 2),
        ("mixtral", 2),
        ("gpt2", 1),
        ("falcon_alibi", 2),
        ("mpt", 1),
        ("gptj", 2),
        ("codegen", 1),
        ("gpt_neo", 2),
        ("stablelm", 2),
        ("gpt_oss", 2),
        ("llama4_text", 2),
        ("longcat_flash", 2),
        ("jetmoe", 1),
        ("deepseek_v32", 4),
    ],
)
def test_a_servers_step_is_transformers_own(name: str, tp: int, tmp_path: Path) -> None:
    """Attention to the cache replaces the class's attention, sliding windows included."""
    from servers import lockstep, prompts
    from tpshard.programs.server.serve_setting import ServeSetting, Size
    from tpshard.programs.server.served import model_to_serve
    from tpshard.programs.server.serving import build_serving
    from tpshard.serve.engine.weights import Weights

    recipe = setting_of(architectures.folder(tmp_path, name), {}).recipe
    recipe = loads(recipe.to_yaml(), [f"serve.mesh.tp={tp}"])
    programs = build_serving(ServeSetting.of(recipe, model_to_serve(recipe, "cpu"), "cpu"), [Size(8)])
    values = architectures.values(name)

    def block(path: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return values[path][tuple(slice(start, start + size) for start, size in zip(starts, sizes))]

    logits = lockstep(programs, Weights({path: tuple(v.shape) for path, v in values.items()}, block))
    tokens = torch.from_numpy(prompts().tokens)[None]
    own = architectures.own(name)
    with torch.no_grad():
        each = [torch.func.functional_call(own, values, (part,)).logits[0] for part in (tokens[:, :5], tokens[:, 5:])]
    torch.testing.assert_close(logits, torch.cat(each), rtol=1e-4, atol=1e-4)
    assert tp == 1 or any(c.kind == "all_reduce" for c in programs.any.collectives)


@pytest.mark.parametrize(
    ("name", "seq_len", "longest", "note"),
    [
        ("llama4_text", None, 5, "sequences have at most 5 tokens: some layers attend within chunks"),
        ("longrope", None, 8, "sequences have at most 8 tokens: the original rotations"),
        ("longrope", 32, 32, "sequences have at most 32 tokens: all use the rotations for long ones"),
        ("longrope", 6, 6, "sequences have at most 6 tokens: the original rotations"),
    ],
)
def test_a_server_says_where_it_ends(
    name: str, seq_len: int | None, longest: int, note: str, tmp_path: Path
) -> None:  # fmt: skip
    """Long rotations are those that transformers takes for a prompt of more tokens than the original length."""
    from servers import lockstep, prompts
    from tpshard.programs.server.serve_setting import ServeSetting, Size
    from tpshard.programs.server.served import model_to_serve
    from tpshard.programs.server.serving import build_serving
    from tpshard.serve.engine.weights import Weights

    folder = architectures.folder(tmp_path, name)
    asked = [] if seq_len is None else [f"model.seq_len={seq_len}"]
    recipe = loads(f"model: {{transformers: '{folder}'}}\nserve: {{dtype: fp32}}\n", asked)
    programs = build_serving(ServeSetting.of(recipe, model_to_serve(recipe, "cpu"), "cpu"), [Size(8)])
    assert programs.setting.max_seq == longest and any(one.startswith(note) for one in programs.notes)
    if longest == 32:
        values = architectures.values(name)

        def block(path: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
            return values[path][tuple(slice(start, start + size) for start, size in zip(starts, sizes))]

        logits = lockstep(programs, Weights({path: tuple(v.shape) for path, v in values.items()}, block))
        first = torch.from_numpy(prompts().tokens)[None, :5]
        longer = torch.cat([first, torch.full((1, 8), 3)], 1)
        with torch.no_grad():
            expected = torch.func.functional_call(architectures.own(name), values, (longer,)).logits[0, :5]
        torch.testing.assert_close(logits[:5], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("scores", "values"), [(6, 4), (4, 6)])
def test_attention_of_keys_and_values_of_unequal_width_is_one_operation(scores: int, values: int) -> None:
    """As in DeepSeek's latent attention."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, width, generator=generator) for width in (scores, scores, values))
    actual, _ = attention_interface.attend(
        torch.nn.Module(), q, k, v, None, documents=torch.zeros(2, 5, dtype=torch.int64)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


def test_what_a_class_s_layers_return_is_sharded_over_the_sequence_where_a_recipe_says_so(tmp_path: Path) -> None:
    setting = setting_of(architectures.folder(tmp_path, "qwen3_moe"), {"tp": 2})
    rules = '{rules: {seq_sp: tp, heads: tp}, annotate: {"model.layers.*.residual": [batch, seq_sp, embed]}}'
    program = step_programs.micro_program(Setting.of(loads(setting.recipe.to_yaml(), [f"sharding={rules}"])))
    residuals = {
        name: str(record.layout) for name, record in program.records.items() if record.label.endswith(".residual")
    }
    assert {"model.layers.0.residual", "model.layers.1.residual"} <= residuals.keys()
    assert all("tp" in layout for layout in residuals.values()), residuals


@pytest.mark.parametrize("name", ["openai-gpt", "mamba"])
def test_a_class_that_mixes_documents_is_named(name: str) -> None:
    architecture = Architecture(architectures.config_of(name))
    notes = architecture.notes(architecture.build())
    assert any("mixes tokens by itself: documents in one row may attend to each other" in note for note in notes)


def test_buffers_have_the_dtype_that_transformers_gives_them() -> None:
    """A mask that is multiplied has that of the scores, rotary frequencies are fp32 in any model."""
    masks = Architecture(architectures.config_of("openai-gpt")).build(torch.bfloat16).named_buffers()
    assert {buffer.dtype for name, buffer in masks if name.endswith("attn.bias")} == {torch.bfloat16}
    frequencies = Architecture(architectures.config_of("llama")).build(torch.bfloat16).buffers()
    assert {buffer.dtype for buffer in frequencies} == {torch.float32}


def test_a_class_computes_with_torchs_own_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the kernels of an installed package, which cannot be captured."""
    from transformers.integrations import hub_kernels
    from transformers.models.mamba import modeling_mamba

    installed = hub_kernels.use_kernel_func_from_hub_with_fallback(
        "sqrt", "math"
    )  # fails for a convolution's arguments
    monkeypatch.setattr(modeling_mamba, "causal_conv1d_fn", installed(inspect.unwrap(modeling_mamba.causal_conv1d_fn)))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(TypeError):
        architectures.own("mamba")(tokens)
    model = Architecture(architectures.config_of("mamba")).build()
    logits = torch.func.functional_call(model, architectures.values("mamba"), (tokens,))
    assert logits.shape == (1, 3, architectures.VOCAB)


def test_rows_written_into_new_memory_stay_apart() -> None:
    """DeepSeek writes both parts of its keys into an empty tensor; memory of other rows may not be written."""

    def halves(x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(1, 8, 6)
        y[..., :4].copy_(x)
        y[..., 4:].copy_(x[..., :2])
        return y * 2

    graph = capture(halves, [torch.empty(1, 8, 4)])
    assert rows_of(graph, {graph.inputs[0]: 1})[graph.outputs[0]].dim == 1
    graph = capture(lambda x: torch.arange(8).view(1, 8, 1).expand(1, 8, 4) * x, [torch.empty(1, 8, 4)])
    with pytest.raises(ValueError, match="depends on their places"):
        rows_of(graph, {graph.inputs[0]: 1})


def test_a_model_whose_tokens_meet_outside_of_attention_is_not_served(tmp_path: Path) -> None:
    from tpshard.programs.server.serve_setting import ServeSetting, Size
    from tpshard.programs.server.served import model_to_serve
    from tpshard.programs.server.serving import build_serving

    recipe = setting_of(architectures.folder(tmp_path, "openai-gpt"), {}).recipe
    with pytest.raises(Mistakes) as error:
        build_serving(ServeSetting.of(recipe, model_to_serve(recipe, "cpu"), "cpu"), [Size(8)])
    assert error.value.exit == Exit.FIT and "`transformer.h.0.attn` lets tokens of a step see" in str(error.value)
