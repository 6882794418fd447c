"""The recipe that most tests of this folder plan."""

RECIPE = """
name: small
cluster: {device: cpu, devices_per_node: 4}
mesh: {fsdp: 2, tp: 2}
model: {preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64, vocab: 2048, seq_len: 16}
batch: {global_sequences: 8, per_device: 2}
compile: eager
"""


def tight_device(memory_gib: float) -> str:
    """The file of a device with little memory, 64 of them on a host."""
    return f"""
schema: 1
name: tight
kind: cpu
backend: gloo
memory: {memory_gib} GiB
memory_bandwidth: 20 GB/s
rates: {{fp32: 100 GFLOP/s}}
host:
  devices: 64
  cores: 4
  inside: {{bandwidth: 2 GB/s, latency: 60 us, shared: true}}
  across: {{bandwidth: 1 GB/s, latency: 100 us, shared: true}}
"""
