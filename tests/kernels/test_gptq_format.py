"""GPTQ folders are read and written like a bit stream in one Python integer."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tpshard.kernels.quantized.gptq_config import GPTQConfig, read_config
from tpshard.kernels.quantized.gptq_format import GPTQFolder, decode, encode, write_into
from tpshard.kernels.quantized.packing import pack_stream, unpack_stream
from tpshard.kernels.quantized.quantized import Quantized, group_count, group_index

BITS = (2, 3, 4, 8)


def stream(values: list[int], bits: int) -> list[int]:
    """Independent reference: one long little-endian integer, cut into signed 32-bit words."""
    number = sum(value << (k * bits) for k, value in enumerate(values))
    words = [number >> (32 * i) & 0xFFFFFFFF for i in range(len(values) * bits // 32)]
    return [w - (1 << 32) if w >> 31 else w for w in words]


def random_linear(inputs=96, outputs=64, bits=4, group_size=32, order=False, sym=False, bias=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    groups = group_count(inputs, group_size)
    group = group_index(inputs, group_size)
    if order:
        group = group[torch.randperm(inputs, generator=g)]
    middle = 1 << (bits - 1)
    zeros = torch.randint(1, 1 << bits, (groups, outputs), generator=g)
    return Quantized(
        torch.randint(0, 1 << bits, (inputs, outputs), generator=g).to(torch.uint8),
        (torch.rand(groups, outputs, generator=g) * 0.05 + 1e-3).half(),
        (torch.full_like(zeros, middle) if sym else zeros).to(torch.uint8),
        group,
        bits,
        torch.randn(outputs, generator=g).half() if bias else None,
    )


@pytest.mark.parametrize("bits", BITS)
def test_a_stream_of_fields_is_one_little_endian_integer(bits):
    values = torch.randint(0, 1 << bits, (96, 3), generator=torch.Generator().manual_seed(bits))
    packed = pack_stream(values, bits)
    assert packed.dtype == torch.int32
    assert packed.T.tolist() == [stream(column, bits) for column in values.T.tolist()]
    assert torch.equal(unpack_stream(packed, bits), values.to(torch.uint8))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group_size", [-1, 32, 40, 96])
@pytest.mark.parametrize("order", [False, True])
def test_encoding_and_decoding_are_inverse(bits, form, group_size, order):
    linear = random_linear(bits=bits, group_size=group_size, order=order, bias=order)
    tensors = encode(linear, form)
    assert tensors["qweight"].shape == (96 * bits // 32, 64) and tensors["scales"].dtype == torch.float16
    stored = linear.zeros.int() - (1 if form == "gptq" else 0)
    assert tensors["qzeros"].tolist() == [stream(row, bits) for row in stored.tolist()]
    config = GPTQConfig(bits=bits, group_size=group_size, desc_act=order, sym=False, checkpoint_format=form)
    back = decode(tensors, config)
    for name in ("codes", "scales", "zeros", "group"):
        assert torch.equal(getattr(back, name), getattr(linear, name)), name
    assert (back.bias is None) == (not order)


def test_dense_weights_are_one_fp16_product_bit_for_bit():
    linear = random_linear(order=True, bits=8)
    scales, zeros = linear.scales.numpy(), linear.zeros.numpy().astype("int32")
    group = linear.group.numpy()
    steps = linear.codes.numpy().astype("int32") - zeros[group]
    expected = scales[group] * steps.astype("float16")
    assert torch.equal(linear.dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_whole_word_zeros_are_read_and_a_borrow_is_refused(bits):
    """Subtracting 1 from a whole word equals subtracting it from each code; a borrow from a code of 0 is refused."""
    linear = random_linear(bits=bits)
    ones = sum(1 << i for i in range(0, 32, bits))
    words = encode(linear, "gptq_v2")["qzeros"].long() & 0xFFFFFFFF
    whole = (words - ones) & 0xFFFFFFFF
    assert torch.equal(encode(linear, "gptq")["qzeros"].long() & 0xFFFFFFFF, whole)
    zero = replace(linear, zeros=linear.zeros.index_fill(1, torch.tensor([1]), 0))
    with pytest.raises(ValueError, match="zero of 0"):
        encode(zero, "gptq")
    words = encode(zero, "gptq_v2")["qzeros"].long() & 0xFFFFFFFF
    borrowed = (words - ones) & 0xFFFFFFFF
    signed = torch.where(borrowed >= 1 << 31, borrowed - (1 << 32), borrowed).to(torch.int32)
    tensors = encode(zero, "gptq_v2") | {"qzeros": signed}
    with pytest.raises(ValueError, match=r"layers\.7.*read differently"):
        decode(tensors, GPTQConfig(bits=bits, group_size=32), "layers.7")


def test_group_index_traps():
    linear = random_linear(group_size=32)
    config = GPTQConfig(group_size=32)
    tensors = encode(linear)
    without = {k: v for k, v in tensors.items() if k != "g_idx"}
    assert torch.equal(decode(without, config).group, group_index(96, 32))
    assert torch.equal(decode(tensors | {"g_idx": torch.zeros(96, dtype=torch.int32)}, config).group, linear.group)
    negative = torch.where(linear.group == 2, -1, linear.group)
    assert torch.equal(decode(tensors | {"g_idx": negative}, config).group, linear.group)
    with pytest.raises(ValueError, match="act-order"):
        decode(without, replace(config, desc_act=True))
    with pytest.raises(ValueError, match="groups outside"):
        decode(tensors | {"g_idx": linear.group + 1}, config)
    shuffled = linear.group[torch.randperm(96, generator=torch.Generator().manual_seed(1))]
    with pytest.raises(ValueError, match="g_idx of zeros"):
        decode(tensors | {"g_idx": torch.zeros(96, dtype=torch.int32)}, replace(config, desc_act=True))
    # the tensor decides, not the flag
    assert torch.equal(decode(tensors | {"g_idx": shuffled}, replace(config, desc_act=False)).group, shuffled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qweight": torch.zeros(13, 64, dtype=torch.int32)}, "fit 4 bits"),
        ({"qzeros": torch.zeros(3, 7, dtype=torch.int32)}, "fit 4 bits"),
        ({"qweight": torch.zeros(12, 64)}, "int32"),
        ({"scales": torch.full((3, 64), float("nan")).half()}, "not finite"),
        ({"scales": torch.ones(4, 64).half(), "qzeros": torch.zeros(4, 8, dtype=torch.int32)}, "4 groups"),
        ({"bias": torch.zeros(63).half()}, "bias"),
        ({"g_idx": torch.zeros(95, dtype=torch.int32)}, "g_idx"),
        ({"g_idx": torch.ones(96, dtype=torch.bool)}, "g_idx.*bool.*not a vector of int32"),
        ({"g_idx": torch.arange(96) // 32 + (1 << 32)}, "groups outside of the 3"),
        ({"g_idx": torch.full((96,), -4)}, "groups outside of the 3"),
        ({"g_idx": torch.arange(96) // 33}, "33 inputs into group 0; groups have 32"),
        ({"g_idx": torch.arange(96) % 2}, "48 inputs into group 0"),
        ({"g_idx": torch.ones(96, dtype=torch.int32)}, "0 inputs into group 0"),
        ({"scales": torch.ones(3, 64, dtype=torch.int32)}, "scales.*not a matrix of floats"),
        ({"scales": torch.full((3, 64), 1e9)}, "scales has values that are not finite in fp16"),
        ({"bias": torch.full((64,), float("nan"))}, "bias has values that are not finite"),
        ({"qweight": torch.zeros(768, dtype=torch.int32)}, "qweight.*not a matrix of int32"),
    ],
)
def test_contradicting_tensors_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=f"proj.*{message}"):
        decode(encode(random_linear()) | change, GPTQConfig(group_size=32), "proj")


def test_folder_round_trip_in_shards(tmp_path):
    linears = {f"model.layers.{i}.mlp.up_proj": random_linear(seed=i, order=True, bias=i == 1) for i in range(3)}
    dense = {"model.embed_tokens.weight": torch.randn(16, 8), "model.norm.weight": torch.ones(8)}
    config = GPTQConfig(group_size=32, desc_act=True, sym=False)
    for name, shard_bytes in (("one", 10**9), ("many", 4000)):
        out = tmp_path / name
        out.mkdir()
        write_into(out, {"model_type": "llama"}, linears.items(), dense.items(), config, shard_bytes)
        folder = GPTQFolder(out)
        assert folder.config == config and folder.modules == sorted(linears) and folder.dense == sorted(dense)
        for module, linear in linears.items():
            read = folder.linear(module)
            assert torch.equal(read.dequantize(), linear.dequantize()) and torch.equal(read.group, linear.group)
        assert torch.equal(folder.tensor("model.embed_tokens.weight"), dense["model.embed_tokens.weight"])
        assert not list(out.glob("part-*"))
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2


def test_both_homes_and_old_spellings_of_the_settings(tmp_path):
    assert read_config(tmp_path) is None
    (tmp_path / "quantize_config.json").write_text(json.dumps({"wbits": 3, "q_group_size": 64, "desc_act": True}))
    assert read_config(tmp_path) == GPTQConfig(bits=3, group_size=64, desc_act=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_config(tmp_path) == GPTQConfig(bits=3, group_size=64, desc_act=True)
    inner = {"bits": 8, "group_size": -1, "quant_method": "gptq", "format": "gptq_v2", "sym": False}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": inner}))
    assert read_config(tmp_path) == GPTQConfig(bits=8, group_size=-1, sym=False, checkpoint_format="gptq_v2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5, "group_size": 32}, "bits 5"),
        ({"bits": "4", "group_size": 32}, "bits '4'"),
        ({"bits": 4, "group_size": 0}, "group_size 0"),
        ({"bits": 4, "quant_method": "awq"}, "awq"),
        ({"bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"bits": 4, "dynamic": {"(": {}}}, "regular expression"),
        ({"bits": 4, "dynamic": {"a": {"checkpoint_format": "gptq_v2"}}}, "checkpoint_format"),
        ({"bits": 4, "dynamic": {r"(a)\1": {}}}, "regular expression of RE2"),
        ({"bits": 4, "dynamic": {"a" * 1001: {}}}, "more than 1000 characters"),
        ({"bits": 4, "dynamic": {str(i): {} for i in range(1001)}}, "at most 1000"),
        ({"bits": 4, "desc_act": "yes"}, "desc_act 'yes' is neither true nor false"),
        ({"bits": 4, "sym": 1}, "sym 1 is neither"),
        ({"bits": 4, "damp_percent": [0.1]}, "damp_percent"),
        ({"bits": 4, "damp_percent": float("nan")}, "damp_percent nan is not a number"),
        ({"bits": 4, "group_size": 10**30}, "group_size 1000"),
        ({"bits": [4]}, "bits"),
        ({"bits": 4, "quant_method": {}}, "quant_method"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(tmp_path, settings, message):
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_dynamic_overrides_are_honoured(tmp_path):
    linears = {"a.down_proj": random_linear(bits=8, group_size=96), "a.up_proj": random_linear()}
    dynamic = {r".*down_proj": {"bits": 8, "group_size": 96}, r"-:lm_head": {}}
    config = GPTQConfig(group_size=32, sym=False, dynamic=dynamic)
    write_into(tmp_path, {}, linears.items(), [("lm_head.weight", torch.ones(4, 4))], config)
    folder = GPTQFolder(tmp_path)
    assert [folder.linear(m).bits for m in folder.modules] == [8, 4]
    assert all(torch.equal(folder.linear(m).codes, linears[m].codes) for m in folder.modules)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"]["dynamic"] = {"-:a.up_proj": {}}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"a\.up_proj is quantized although"):
        GPTQFolder(tmp_path)


def test_a_pattern_that_backtracks_is_matched_in_linear_time():
    """Python's engine would take longer than the universe has existed."""
    config = GPTQConfig(dynamic={r"-:(a+)+$": {}, r"(a|aa)*b": {"bits": 8}, r"-:.*\.1[0-9]\..*": {}})
    assert config.of("a" * 500 + "c") == config and config.of("a" * 500) is None
    assert config.of("a" * 500 + "b").bits == 8 and config.of("model.layers.17.mlp") is None


def test_a_linear_of_another_form_is_refused_by_its_header(tmp_path):
    write_into(tmp_path, {}, [("a", random_linear())], (), GPTQConfig(group_size=32))
    stored = load_file(tmp_path / "model.safetensors")
    for suffix, change in (("qweight", torch.zeros(768, dtype=torch.int32)), ("scales", torch.ones(3, 64).int())):
        save_file(stored | {f"a.{suffix}": change}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"a.{suffix} is "):
            GPTQFolder(tmp_path)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", 3])
def test_shard_names_never_leave_the_folder(tmp_path, name):
    save_file({"a.qweight": torch.zeros(1)}, tmp_path / "evil.safetensors")
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.qweight": name}}))
    with pytest.raises(
        ValueError, match=r"not (a safetensors file of|the name of a file in) this folder|no weight_map"
    ):
        GPTQFolder(folder)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}", (50).to_bytes(8, "little") + b"[" * 50]
)
def test_hostile_headers_and_pickles_are_refused(tmp_path, content):
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        GPTQFolder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.pt").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match="pickle, which is never loaded"):
        GPTQFolder(tmp_path)


def test_truncated_file_is_refused(tmp_path):
    write_into(tmp_path, {}, [("a", random_linear())], (), GPTQConfig(group_size=32))
    file = tmp_path / "model.safetensors"
    assert set(load_file(file)) == {"a.qweight", "a.qzeros", "a.scales", "a.g_idx"}
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cannot be read"):
        GPTQFolder(tmp_path)
