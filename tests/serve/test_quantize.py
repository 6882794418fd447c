"""`tpshard quantize` writes a folder that others read, reports its errors, and refuses unsuitable sources."""

import json
import resource
import shutil
import stat
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tpshard.cli import quantize
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.kernels.quantized.gptq_format import GPTQFolder
from tpshard.kernels.quantized.gptq_solver import Settings, round_to_nearest
from tpshard.kernels.quantized.reorder import head_local_order
from tpshard.models import build, from_hf, to_hf
from tpshard.models.families.presets import PRESETS
from tpshard.models.family_model import FamilyModel
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.models.objectives.tasks import LanguageModel
from tpshard.recipes.reading.load import loads, with_changes
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.task_rows import text_rows
from tpshard.serve.quantizing.write_quantized import write_quantized

LLAMA = replace(PRESETS["tiny"], layers=2, width=64, heads=4, kv_heads=2, head_dim=32, mlp=96, vocab=128, max_seq=64,
                seq_len=32)  # fmt: skip
GRANITE = replace(LLAMA, family="granite", kv_heads=1, attention_bias=True, mlp_bias=True, tie_embeddings=True,
                  head_dim=16, mlp=128)  # fmt: skip


def random_model(config, seed=0):
    torch.manual_seed(seed)
    model = build(config, device="cpu")
    for name, parameter in model.named_parameters():
        ones = name.endswith("norm.weight")
        parameter.data = torch.ones_like(parameter) if ones else torch.randn_like(parameter) * 0.1
    return model


def text(sequences=6, seq=32, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 128, (sequences, seq), generator=g) // torch.randint(1, 9, (sequences, 1), generator=g)
    return text_rows(tokens, tokens.roll(-1, 1))


def quantizer(model, settings=None, order="global", **more):
    settings = settings or Settings(group_size=32)
    parameters = dict(model.named_parameters())

    def read(name):
        return parameters[name].detach()

    return Quantizer(FamilyModel(model.config), read, text(), text(4, seed=1), settings, order, **more)


@pytest.mark.parametrize("config", [LLAMA, GRANITE], ids=["llama", "granite"])
@pytest.mark.parametrize("order", ["global", "head_local", "none"])
def test_the_folder_holds_the_model_that_was_measured(config, order, tmp_path):
    model = random_model(config)
    steps = []
    settings = Settings(bits=4, group_size=16, sym=order != "none")
    job = quantizer(model, settings, order, step=lambda done, of, name: steps.append((done, of, name)))
    report = write_quantized(job, tmp_path / "out")
    linears = 12 if config is GRANITE else 14
    assert [s[0] for s in steps] == list(range(linears)) and {s[1] for s in steps} == {linears}
    assert len(report.linears) == linears and all(0 < x.error < 0.2 for x in report.linears)
    back = from_hf(tmp_path / "out", dtype=torch.float32)
    held_out = text(4, seed=1)

    def loss(model):
        with torch.no_grad():
            logits = model(held_out.batch["tokens"])
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), held_out.batch["targets"].flatten()))

    assert abs(loss(model) - report.loss_before) < 1e-4
    assert abs(loss(back) - report.loss_after) < 2e-3  # embedding, norms and head are in fp16 there
    assert report.loss_after != report.loss_before and report.held_out_tokens == 4 * 32
    rounded = write_quantized(quantizer(model, settings, "none", method="nearest"), tmp_path / "nearest")
    assert rounded.loss_nearest is None and report.loss_nearest == pytest.approx(rounded.loss_after, abs=1e-6)
    if config is LLAMA:
        folder = GPTQFolder(tmp_path / "out")
        o = folder.linear("model.layers.1.self_attn.o_proj")
        assert (head_local_order(o.group, 4, 2, 32) is not None) == (order != "global")
        assert o.sorted == (order == "none") == (not folder.config.desc_act)


def test_rounding_to_nearest_is_the_control():
    model = random_model(LLAMA)
    parameters = dict(model.named_parameters())
    actual = dict(quantizer(model, method="nearest").run())
    expected = round_to_nearest(parameters["layers.0.mlp.down.weight"].detach(), Settings(group_size=32))
    assert torch.equal(actual["model.layers.0.mlp.down_proj"].codes, expected.codes)
    gptq = quantizer(model)
    assert not torch.equal(dict(gptq.run())["model.layers.0.mlp.down_proj"].codes, expected.codes)
    down = next(x for x in gptq.report.linears if x.name == "layers.0.mlp.down")
    assert down.error < down.nearest_error


def test_sizes_that_groups_or_words_do_not_divide(tmp_path):
    uneven = replace(LLAMA, mlp=72)  # no multiple of 32: these stay dense
    report = write_quantized(quantizer(random_model(uneven), Settings(group_size=40)), tmp_path / "out")
    assert report.left_dense == [f"model.layers.{i}.mlp.{n}_proj" for i in (0, 1) for n in ("down", "gate", "up")]
    folder = GPTQFolder(tmp_path / "out")
    assert folder.linear("model.layers.0.self_attn.q_proj").groups == 2  # 40 and 24 of 64 inputs
    assert folder.config.of("model.layers.0.mlp.up_proj") is None
    assert from_hf(tmp_path / "out")(text().batch["tokens"]).shape == (6, 32, 128)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(bad, tmp_path):
    model = random_model(LLAMA)
    model.get_parameter("layers.1.mlp.up.weight").data[3, 5] = bad
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up\.weight holds values that are not finite"):
        write_quantized(quantizer(model), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_rows_of_zeros_stay_zeros(tmp_path):
    model = random_model(LLAMA)
    model.get_parameter("layers.0.mlp.up.weight").data[7] = 0
    write_quantized(quantizer(model), tmp_path / "out")
    assert not bool(from_hf(tmp_path / "out").get_parameter("layers.0.mlp.up.weight")[7].any())


def test_head_local_groups_that_do_not_fit_heads_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"attention\.wo: Groups of 24 inputs"):
        write_quantized(quantizer(random_model(LLAMA), Settings(group_size=24), "head_local"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def command(*arguments):
    from tpshard.cli.main import run

    return run(["quantize", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense Hugging Face folder with the sample's tokenizer."""
    from tpshard.train.data.sample import ensure_sample

    place = tmp_path_factory.mktemp("model") / "dense"
    to_hf(random_model(replace(LLAMA, vocab=2048)), place, tokenizer=ensure_sample().tokenizer)
    return place


def test_the_command_writes_reports_and_never_replaces(folder, tmp_path, capsys):
    out = tmp_path / "out"
    settings = ["quantize.bits=3", "quantize.group_size=32", "quantize.calibration.sequences=4"]
    assert command(folder, out, *settings, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["bits"] == 3 and len(shown["linears"]) == 14 and shown["loss_after"] > 0
    assert GPTQFolder(out).config.bits == 3 and (out / "tokenizer.json").is_file()
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) & 0o444 == 0o444
    before = (out / "config.json").read_bytes()
    for target, words in ((out, "exists"), (folder, "exists")):
        assert command(folder, target, *settings) == 2
        assert words in capsys.readouterr().err
    assert (out / "config.json").read_bytes() == before
    assert command(folder, folder, *settings, "--overwrite") == 2  # input = output
    assert "is the folder of the model itself" in capsys.readouterr().err
    assert command(out, tmp_path / "again") == 4
    assert "already quantized" in capsys.readouterr().err
    assert command(folder, tmp_path / "bad", "quantize.order=head_local", "quantize.group_size=24",
                   "quantize.calibration.sequences=2") == 4  # fmt: skip
    assert "quantize.order=global" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_calibration_reads_every_source_in_its_share(folder, tmp_path):
    for name, word in (("a", "one "), ("b", "two ")):
        (tmp_path / f"{name}.txt").write_text((word * 40 + "\n") * 60)
    sources = [{"source": str(tmp_path / "a.txt"), "weight": 3}, {"source": str(tmp_path / "b.txt"), "weight": 1}]
    model, recipe = quantize._open(str(folder), [f"data.sources={json.dumps(sources)}"])
    recipe = with_changes(recipe, ["quantize.calibration.sequences=64"])
    calibration, _ = quantize._text(model, recipe, LanguageModel(32), None, 32)
    tokenizer = FolderTokenizer(model.tokenizer)
    words = "".join(tokenizer.decode(row) for row in calibration.batch["tokens"].tolist())
    assert 0 < words.count("two") < words.count("one")
    recipe = loads(recipe.to_yaml(), [f"data.sources={json.dumps([{'source': str(tmp_path / 'gone.txt')}])}"])
    with pytest.raises(Mistakes, match=r"gone\.txt[\s\S]*`--text TEXT` calibrates on another text") as refused:
        quantize._text(model, recipe, LanguageModel(32), None, 32)
    assert refused.value.exit == Exit.DATA


def test_too_few_calibration_tokens_are_told(folder, tmp_path, capsys):
    """Four sequences of eight tokens for linears of more inputs: the errors of the table are those of these tokens."""
    few = ["quantize.calibration.sequences=4", "quantize.group_size=32", "--seq-len", "8"]
    assert command(folder, tmp_path / "few", *few) == 0
    said = capsys.readouterr()
    assert "14 of 14 linears have fewer calibration tokens than inputs" in said.err and "--seq-len" in said.err
    assert "rounded to nearest it would be" in said.out
    assert command(folder, tmp_path / "nearest", *few, "--nearest") == 0
    said = capsys.readouterr()
    assert "calibration tokens" not in said.err and "it would be" not in said.out
    assert command(folder, tmp_path / "more", "quantize.calibration.sequences=8", "quantize.group_size=32") == 0
    assert "fewer calibration tokens" not in capsys.readouterr().err


@pytest.fixture
def files_end():
    """Limits files to 64 KiB, which has the effect of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["quantize", "convert"])
def test_a_full_disk_is_said_and_leaves_nothing(name, folder, tmp_path, capsys, files_end):
    from tpshard.cli.main import run

    few = ["quantize.group_size=32", "quantize.calibration.sequences=2"] if name == "quantize" else []
    assert run([name, str(folder), str(tmp_path / "out"), *few]) == 5
    printed = capsys.readouterr().err
    assert (
        f"{tmp_path / 'out'} cannot be written" in printed
        and "File too large" in printed
        and "disk with room" in printed
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["quantize", "convert"])
def test_a_folder_that_holds_the_source_is_never_replaced(name, folder, tmp_path, capsys):
    from tpshard.cli.main import run

    source = tmp_path / "run" / "model"
    shutil.copytree(folder, source)
    assert run([name, str(source), str(tmp_path / "run"), "--overwrite"]) == 2
    assert f"contains the model that is read, {source}" in capsys.readouterr().err
    assert sorted(p.name for p in source.iterdir()) == sorted(p.name for p in folder.iterdir())


def test_text_is_never_cut_by_a_tokenizer_that_is_not_the_models(folder, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*token*"))
    few = ["quantize.group_size=32", "quantize.calibration.sequences=2"]
    assert command(bare, tmp_path / "out", *few) == 6
    assert "data.tokenizer=DIR" in capsys.readouterr().err
    assert command(bare, tmp_path / "out", *few, f"data.tokenizer={folder}") == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("value", "code", "fix"), [(float("nan"), 7, "an earlier checkpoint"), (1e30, 4, "a model whose values fit fp16")]
)
def test_values_that_cannot_be_quantized_are_named_with_what_to_do(value, code, fix, folder, tmp_path, capsys):
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, bad / "model.safetensors", {"format": "pt"})
    assert command(bad, tmp_path / "out", "quantize.group_size=32", "quantize.calibration.sequences=2") == code
    printed = capsys.readouterr().err
    assert "layers.1.mlp.up" in printed and f"fix: use {fix}" in " ".join(printed.split())
    assert not (tmp_path / "out").exists()


def test_pickles_and_hostile_files_are_refused(folder, tmp_path, capsys):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    torch.save(Bomb(), tmp_path / "model.pt")
    assert command(tmp_path / "model.pt", tmp_path / "out") == 2
    assert "pickle" in capsys.readouterr().err
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for file in folder.iterdir():
        (hostile / file.name).write_bytes(file.read_bytes())
    (hostile / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    assert command(hostile, tmp_path / "out") == 7
    (hostile / "model.safetensors").unlink()
    torch.save(Bomb(), hostile / "pytorch_model.bin")
    assert command(hostile, tmp_path / "out") == 7
    assert not (tmp_path / "executed").exists() and not (tmp_path / "out").exists()
