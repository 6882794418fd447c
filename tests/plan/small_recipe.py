"""The recipe that most tests of this folder plan."""

RECIPE = """
name: small
cluster: {device: cpu, devices_per_node: 4}
mesh: {fsdp: 2, tp: 2}
model: {preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64, vocab: 2048, seq_len: 16}
batch: {global_sequences: 8, per_device: 2}
compile: eager
"""
