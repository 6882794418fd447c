"""The faults that `faults.py` produces: a line or two of shell each, the expected exit codes, and words of the output.

To add one, add a `Case`. The script runs in a folder with recipe.yaml, runs/small (trained, checkpoints of steps 2 and
4), hf (its Hugging Face folder) and tok (a tokenizer); the exit code is that of its last command.
"""

from __future__ import annotations

from dataclasses import dataclass

RECIPE = """\
name: small
cluster: {device: cpu}
mesh: {fsdp: 1}
model: {preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 48, seq_len: 64}
batch: {global_sequences: 4}
compile: eager
train: {steps: 4}
evaluate: {every_steps: 0}
checkpoint: {every_steps: 2}
logging: {every_steps: 1, wandb: null}
timeout_s: {start: 120, step: 120}
"""

SCRIPTS = {
    "tpshard": 'exec python -m tpshard.cli.main "$@"',
    "train": 'exec tpshard train recipe.yaml run.dir=new "$@"',
    "text": 'source=$1; shift; exec tpshard train recipe.yaml run.dir=new data.source=$source data.tokenizer=tok "$@"',
}
"""Commands that the cases may use. They become the process that they start, so that signals reach it."""

PRELUDE = """
logged() { grep -c '"loss"' new/metrics.jsonl 2>/dev/null || true; }
until_step() { for _ in $(seq 3000); do [ "$(logged)" -ge "$1" ] && return; sleep 0.1; done; }
lines() { python -c "import json; [print(json.dumps({'text': f'document $1 {i} of words ' * 9})) for i in range($2)]"; }
"""
"""Functions that the scripts may use."""


STORE = """
export AWS_ACCESS_KEY_ID=nobody AWS_SECRET_ACCESS_KEY=nothing AWS_DEFAULT_REGION=us-east-1
export AWS_ENDPOINT_URL=http://127.0.0.1:17655
moto_server -p 17655 >/dev/null 2>&1 & server=$!
store() { python -c "import fsspec; s3 = fsspec.filesystem('s3'); $1"; }
for _ in $(seq 100); do store "s3.mkdir('runs-of-faults')" 2>/dev/null && break; sleep 0.2; done
"""
"""Starts an S3 on loopback, whose process is `server`, with a bucket."""


@dataclass(frozen=True)
class Case:
    """A fault, and what has to come of it."""

    group: str
    name: str
    command: str
    codes: tuple[int, ...]
    words: str = ""
    """A regular expression that the output contains."""
    setup: str = ""
    needs: str = ""
    """What the machine must have: a key of `faults.NEEDS`."""

    @property
    def shown(self) -> str:
        """The script in one line."""
        return "; ".join(line.strip() for line in f"{self.setup}\n{self.command}".splitlines() if line.strip())


def group(name: str, *cases: tuple[str, str, int | tuple[int, ...]] | tuple[str, str, int | tuple[int, ...], str]
          | tuple[str, str, int | tuple[int, ...], str, str]) -> list[Case]:  # fmt: skip
    """Cases of one group, each as (fault, command, exit codes, words, needs)."""
    made = []
    for fault, command, codes, *more in cases:
        words, needs = [*more, "", ""][:2]
        made.append(Case(name, fault, command, codes if isinstance(codes, tuple) else (codes,), words, "", needs))
    return made


def written(text: str, command: str = "tpshard validate bad.yaml") -> str:
    """A script that writes bad.yaml by printf and reads it."""
    return f"printf '{text}' > bad.yaml\n{command}"


RECIPES = group(
    "Recipes",
    ("misspelt keys at two depths", written(r"modle: {preset: tiny}\ntrain: {stepz: 3}\n"), 3, "did you mean"),
    ("values out of range", "tpshard validate recipe.yaml optimizer.lr=-1 train.steps=1e99 mesh.tp=0", 3, "3 errors"),
    ("not a number", "tpshard validate recipe.yaml optimizer.lr=nan", 3, "optimizer.lr"),
    ("a duplicate key", written(r"model: {preset: tiny}\nmodel: {preset: tiny}\n"), 3, "bad.yaml:2"),
    ("a tag that would run code", written(r'name: !!python/object/apply:os.system ["touch owned"]\n') + "; code=$?\n"
     "test ! -e owned && exit $code", 3),
    ("an unclosed brace", written(r"model: {preset: tiny\n"), 3, "bad.yaml"),
    ("two documents", written(r"model: {preset: tiny}\n---\nname: b\n"), 3),
    ("an empty file", written(""), 3),
    ("a list at the top", written(r"- a\n"), 3),
    ("UTF-16", "iconv -t UTF-16 recipe.yaml > bad.yaml; tpshard validate bad.yaml", 3),
    ("aliases that grow without end", written(
        r"a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\nd: [*c, *c, *c, *c]\n"), 3),
    ("a number of YAML 1.1", written(r"model: {preset: tiny}\noptimizer: {eps: 010}\n"), 3, "read as"),
    ("a recipe that extends itself", written(r"extends: bad.yaml\nmodel: {preset: tiny}\n"), 3),
    ("an override without a value", "tpshard validate recipe.yaml mesh.tp", (2, 3), "mesh.tp"),
    ("an unknown schema", written(r"schema: 99\nmodel: {preset: tiny}\n"), 3, "99"),
    ("a rule with an unknown axis", "tpshard validate recipe.yaml sharding.rules.heads=xx", 3, "xx"),
    ("heads that tp does not divide", "tpshard plan recipe.yaml --dry-run mesh.tp=3 cluster.devices_per_node=3", 4),
    ("a batch that ranks do not divide",
     "tpshard plan recipe.yaml --dry-run mesh.fsdp=3 cluster.devices_per_node=3", 4, "global_sequences"),
    ("a dim that two axes split unevenly", "tpshard plan recipe.yaml --dry-run 'mesh={x: 2, tp: 2}' "
     "'sharding.rules.mlp=[x, tp]' model.mlp=50 cluster.devices_per_node=4", 4, "do not divide the 50 columns"),
    ("a dim that two axes split unevenly, padded",
     "train 'mesh={x: 2, tp: 2}' 'sharding.rules.mlp=[x, tp]' model.mlp=50 sharding.on_uneven=pad\n"
     "tpshard train recipe.yaml run.dir=alone model.mlp=50\n"
     "python -c \"import json; a, b = [[json.loads(r)['loss'] for r in open(f'{d}/metrics.jsonl') if '\\\"loss' in r] "
     "for d in ('new', 'alone')]; print('equal', len(a) == 4 and all(abs(x - y) < 1e-5 for x, y in zip(a, b)))\"",
     0, "equal True"),
    ("a model that its devices cannot hold", "tpshard plan recipe.yaml --dry-run model.width=8192 "
     "model.mlp=32768 cluster.devices_per_node=2 mesh.fsdp=2", 4, "edit: .*tp"),
    ("the plan twice", "for i in 1 2; do tpshard plan recipe.yaml --dry-run --no-cache --json > $i; done; cmp 1 2", 0),
    ("help without torch", "mkdir bad; echo 'raise SystemExit(9)' > bad/torch.py; PYTHONPATH=bad tpshard --help", 0),
    ("a recipe for GPUs on a machine without one",
     "tpshard train recipe.yaml 'cluster={device: h100-sxm-80g, devices_per_node: 1}'", 5),
)  # fmt: skip

PROCESSES = group(
    "Processes",
    ("a worker is killed", "train mesh.fsdp=2 train.steps=4000 & pid=$!; until_step 3\n"
     "kill -9 $(pgrep -P $pid | tail -n 1); wait $pid", 9, "rank . was lost: killed by SIGKILL"),
    ("the launcher is killed", "train mesh.fsdp=2 train.steps=4000 & pid=$!; until_step 3\nkill -9 $pid; wait $pid",
     137),
    ("killed and started again, three times", "for i in 1 2 3; do\n"
     "train train.steps=4000 checkpoint.every_steps=1 checkpoint.keep_last=2 & pid=$!\n"
     "until_step $((i * 4)); sleep 0.$i; pkill -9 -P $pid; wait $pid; done\n"
     "train train.steps=$(($(ls new/checkpoints | tail -n 1 | tr -dc 0-9 | sed 's/^0*//') + 1)) "
     "checkpoint.every_steps=1", 0, "continuing from step"),
    ("SIGTERM before a run begins", "train train.steps=4000 & pid=$!; sleep 0.7; kill -TERM $pid; wait $pid", 75),
    ("SIGTERM", "train mesh.fsdp=2 train.steps=4000 & pid=$!; until_step 3; kill -TERM $pid; wait $pid", 75,
     "stopped, as asked"),
    ("SIGUSR1", "train train.steps=4000 & pid=$!; until_step 3; kill -USR1 $pid; wait $pid", 75),
    ("Ctrl-C", "train train.steps=4000 & pid=$!; until_step 3; kill -INT $pid; wait $pid", 130, "interrupted"),
    ("a worker that stands still", "train mesh.fsdp=2 train.steps=4000 timeout_s.step=5 & pid=$!; until_step 3\n"
     "stopped=$(pgrep -P $pid | tail -n 1); kill -STOP $stopped; wait $pid", 9, "rank . does not answer"),
    ("two runs in one folder", "train train.steps=4000 & pid=$!; until_step 2; train; code=$?\n"
     "kill -TERM $pid; wait $pid; exit $code", 5, "another run uses new"),
    ("two containers with one host name in one folder",
     "train train.steps=4000 & pid=$!; until_step 2\n"
     "unshare --user --map-root-user --pid --fork train; code=$?\n"
     "kill -TERM $pid; wait $pid; exit $code", 5, "another run uses new", "namespaces"),
    ("a folder left by a killed container",
     "unshare --user --map-root-user --pid --fork --kill-child train train.steps=4000 & pid=$!\n"
     "until_step 7; kill -9 $pid; wait $pid; train train.steps=40", 0, "continuing from step", "namespaces"),
    ("ranks without a number on their host", "export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29653\n"
     "RANK=1 train mesh.fsdp=2 & RANK=0 train mesh.fsdp=2; code=$?; wait; exit $code", 0, "done after step 4"),
    ("a rank that is no number", "RANK=a WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 train", 5, "RANK is 'a'"),
    ("two runs in one SLURM step", "export SLURM_NTASKS=2 SLURM_JOB_ID=7 SLURM_STEP_ID=0\n"
     "for n in 4 6; do SLURM_PROCID=1 SLURM_LOCALID=1 train mesh.fsdp=2 train.steps=$n & \n"
     "SLURM_PROCID=0 SLURM_LOCALID=0 train mesh.fsdp=2 train.steps=$n && wait $! || exit; done\n"
     "test -z \"$(ls -A $TMPDIR/tpshard-*)\"", 0, "done after step 6"),
    ("a folder of another mode where SLURM tasks meet", "mkdir -m 755 tmp tmp/tpshard-$(id -u)\n"
     "export TMPDIR=$PWD/tmp SLURM_NTASKS=2 SLURM_JOB_ID=7 SLURM_STEP_ID=0\n"
     "SLURM_PROCID=1 SLURM_LOCALID=1 train mesh.fsdp=2", 5, "not a folder of this user alone"),
    ("a silent program at the rendezvous", "python -c \"import socket; s = socket.create_server(('127.0.0.1', 29654))\n"
     "kept = [s.accept() for _ in range(9)]\" & other=$!; sleep 1\n"
     "tpshard launch --nodes 2 --node-rank 1 --rendezvous 127.0.0.1:29654 -- train recipe.yaml run.dir=new mesh.fsdp=2 "
     "cluster.nodes=2 timeout_s.start=5; code=$?; kill $other; exit $code", 9, "does not answer"),
    ("an HTTP server at the rendezvous",
     "python -m http.server -b 127.0.0.1 29655 >/dev/null 2>&1 & other=$!; sleep 1\n"
     "tpshard launch --nodes 2 --node-rank 1 --rendezvous 127.0.0.1:29655 -- train recipe.yaml run.dir=new mesh.fsdp=2 "
     "cluster.nodes=2 timeout_s.start=5; code=$?; kill $other; exit $code", 9, "could not connect to 127.0.0.1:29655"),
    ("a host that never comes",
     "tpshard launch --nodes 2 --node-rank 0 --rendezvous 127.0.0.1:29656 -- train recipe.yaml "
     "run.dir=new mesh.fsdp=2 cluster.nodes=2 timeout_s.start=5", 9, "missing: rank 1"),
    ("two runs at once on one machine",
     "train mesh.fsdp=2 & tpshard train recipe.yaml run.dir=other mesh.fsdp=2; code=$?\n"
     "wait $! && exit $code", 0, "done after step 4"),
    ("a loss that is not finite",
     "train mesh.fsdp=2 optimizer.lr=1e12 schedule.warmup_steps=0 train.steps=20; code=$?\n"
     "test -s new/logs/nonfinite.jsonl && exit $code", 8, "not finite"),
    ("losses that are not finite, skipped", "train mesh.fsdp=2 optimizer.lr=1e12 schedule.warmup_steps=0 "
     "train.on_nonfinite=skip train.steps=6; code=$?; test -s new/logs/nonfinite.jsonl && exit $code", (0, 8),
     "not finite"),
    ("a loss that is not finite on one rank alone", """\
cat > odd.py <<'X'
import torch
from torch import nn
class Marked(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 16), nn.Linear(16, vocab)
    def forward(self, tokens, documents=None, positions=None):
        marked = (tokens == 95).any(1, keepdim=True)[..., None]
        return self.head(self.embed(tokens)) / torch.where(marked, float("nan"), 1.0)
X
mkdir d; for i in 0 1 2 3; do yes "some words of $i" | head -n 99 > d/$i.txt; done; sed -i '6s/of/~/' d/2.txt
sed '/^model:/c model: {module: "odd:Marked", args: {vocab: 320}, seq_len: 64, dtype: fp32}' recipe.yaml > odd.yaml
tpshard train odd.yaml run.dir=new mesh.fsdp=2 data.source=d data.tokenizer=bytes train.on_nonfinite=skip
code=$?; grep -q '2.txt:1' new/logs/nonfinite.jsonl && exit $code""",
     0, "step 2: loss nan.*skipped.*done after step 4"),
    ("a gradient that is infinite", """\
cat > odd.py <<'X'
import torch
from torch import nn
class Steep(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 16), nn.Linear(16, vocab)
        self.scale = nn.Parameter(torch.zeros(vocab))
    def forward(self, tokens, documents=None, positions=None):
        return self.head(self.embed(tokens)) + self.scale.sqrt()
X
sed '/^model:/c model: {module: "odd:Steep", args: {vocab: 2048}, seq_len: 64, dtype: fp32}' recipe.yaml > odd.yaml
tpshard train odd.yaml run.dir=new mesh.fsdp=2; code=$?
test -s new/logs/nonfinite.jsonl && exit $code""", 8, "gradient norm inf"),
    ("secrets in the arguments of workers", "train train.steps=4000 serve.api_key=hunter2 & pid=$!; until_step 1\n"
     "ps -o args= --ppid $pid | grep -c hunter2; kill -TERM $pid; wait $pid", 75, r"(?m)^0$"),
    ("no network and no address but loopback",
     "unshare --user --map-root-user --net sh -c 'ip link set lo up; train mesh.fsdp=2'",
     0, "done after step 4", "network"),
)  # fmt: skip

OUTPUT = group(
    "Output that nobody reads",
    ("no reader of stderr", "set -o pipefail; train 2>&1 | true; code=$?; test $(logged) = 4 && exit $code", 0),
    ("a reader of one line", "set -o pipefail; train 2>&1 | head -1; code=$?; test $(logged) = 4 && exit $code", 0),
    ("a log on a full disk", "train >/dev/full 2>&1; code=$?; test $(logged) = 4 && exit $code", 0),
    ("closed streams", "train <&- >&- 2>&-; code=$?; test $(logged) = 4 && exit $code", 0),
    ("an error that nobody reads", "train train.stepz=3 2>&1 >/dev/full 2>/dev/full", 3),
    ("JSON of which one line is read", "set -o pipefail; tpshard plan recipe.yaml --dry-run --json | head -1", 0),
    ("JSON on a full disk", "tpshard plan recipe.yaml --dry-run --json >/dev/full", 5, "stdout cannot be written"),
    ("an evaluation on a full disk", "tpshard evaluate runs/small --json >/dev/full", 5, "stdout cannot be written"),
    ("a server's check on a full disk", "tpshard serve runs/small --check >/dev/full", 5, "stdout cannot be written"),
    ("help on a full disk", "tpshard --help >/dev/full", 5, "stdout cannot be written"),
    ("a command's help on a full disk", "tpshard train --help >/dev/full", 5, "stdout cannot be written"),
    ("a plan that nobody reads is saved", "tpshard plan recipe.yaml run.dir=new 2>&1 | true; test -e new/plan.json", 0),
    ("a narrow terminal without colours and Unicode", "LC_ALL=C COLUMNS=40 tpshard plan recipe.yaml --dry-run", 0),
)

CHECKPOINTS = group(
    "Checkpoints and disks",
    ("a flipped bit", "python -c \"p='runs/small/checkpoints/step-000004/rank-00000.safetensors'; "
     "d=bytearray(open(p,'rb').read()); d[-9]^=1; open(p,'wb').write(d)\"\n"
     "tpshard train recipe.yaml train.steps=5", 0, "falling back to step-000002"),
    ("a truncated file", "truncate -s 999 runs/small/checkpoints/step-000004/rank-00000.safetensors\n"
     "tpshard train recipe.yaml train.steps=5", 0, "999 bytes"),
    ("a missing file", "rm runs/small/checkpoints/step-000004/rank-00000.safetensors\n"
     "tpshard train recipe.yaml train.steps=5", 0, "is missing"),
    ("an edited manifest", "sed -i 's/\"step\": 4/\"step\": 9/' runs/small/checkpoints/step-000004/manifest.json\n"
     "tpshard train recipe.yaml train.steps=5", 0, "changed or damaged"),
    ("every checkpoint is damaged", "truncate -s 9 runs/small/checkpoints/*/manifest.json\n"
     "tpshard train recipe.yaml train.steps=5", 7, "is damaged"),
    ("a damaged checkpoint is converted",
     "truncate -s 9 runs/small/checkpoints/*/rank*\ntpshard convert runs/small out; "
     "code=$?; test ! -e out && exit $code", 7),
    ("the checkpoints are gone", "rm -r runs/small/checkpoints\ntpshard train recipe.yaml train.steps=5", 7,
     "the checkpoints of runs/small are gone"),
    ("a run's last checkpoint cannot be written", "ulimit -f 200; train", 7, "was not written"),
    ("a full disk", "mkdir new; unshare --user --map-root-user --mount bash -c "
     "'mount -t tmpfs -o size=400k none new; tpshard train recipe.yaml run.dir=new'", (5, 7), "No space left",
     "namespaces"),
    ("a disk that is read only", "mkdir new; unshare --user --map-root-user --mount bash -c "
     "'mount -t tmpfs -o ro none new; tpshard train recipe.yaml run.dir=new/x'", 5, "Read-only", "namespaces"),
    ("a checkpoint of another model", "tpshard train recipe.yaml model.mlp=64 train.steps=5", 7),
    ("another mesh on resuming", "tpshard train recipe.yaml mesh.fsdp=2 train.steps=5", 0, "continuing from step 4"),
    ("a checkpoint in place of a run", "tpshard train runs/small/checkpoints/step-000004; code=$?\n"
     "test $(ls runs) = small && exit $code", 2, "continues its run"),
    ("a run that was copied within an object store",
     f"{STORE}\ntpshard train recipe.yaml run.dir=s3://runs-of-faults/a train.steps=2 >/dev/null 2>&1\n"
     "store \"s3.copy('runs-of-faults/a', 'runs-of-faults/b', recursive=True)\"\n"
     "of_first() { store \"print(sorted((f, s3.info(f)['ETag']) for f in s3.find('runs-of-faults/a')))\"; }\n"
     "of_first > before; tpshard train s3://runs-of-faults/b train.steps=4; code=$?\n"
     "of_first | cmp - before || code=99; kill $server; exit $code", 0, "continuing from step"),
    ("no checkpoint to serve", "tpshard serve recipe.yaml run.dir=none", 7, "no checkpoint"),
    ("a checkpoint that is being written", "rm runs/small/checkpoints/step-000004/manifest.json\n"
     "tpshard serve recipe.yaml serve.checkpoint=runs/small/checkpoints/step-000004", 7, "gets its manifest last"),
)  # fmt: skip

DATA = group(
    "Data",
    ("no such file", "text none.jsonl", 6, "there is no none.jsonl"),
    ("a pattern that matches nothing", "text 'none/*.jsonl'", 6, "no file matches"),
    ("a truncated gzip", "lines a 900 | gzip | head -c 3000 > a.jsonl.gz; text a.jsonl.gz", 6, "ends in the middle"),
    ("lines that are no JSON", "yes '{oops' | head -n 99 > a.jsonl; text a.jsonl", 6, "not JSON"),
    ("text that is null", "yes '{\"text\": null}' | head -n 99 > a.jsonl; text a.jsonl", 6, "not a string"),
    ("one bad line of many", "(printf '\\xff\\n'; lines a 400) > a.jsonl; text a.jsonl", 0,
     "skipped an unreadable row"),
    ("a text smaller than a step", "lines a 1 > a.jsonl; text a.jsonl batch.global_sequences=64", 6),
    ("an empty file among good ones", "mkdir d; for i in 1 2 3; do lines $i 99 > d/$i.jsonl; done; : > d/4.jsonl\n"
     "text d", 0, "no readable document in 4.jsonl"),
    ("a large file of blank lines among good ones", "mkdir d; for i in 1 2 3; do lines $i 99 > d/$i.jsonl; done\n"
     "yes '' | head -c 20000000 > d/4.jsonl; text d", 0, "no readable document in 4.jsonl"),
    ("text that changed in its middle", "lines a 3000 > a.jsonl; text a.jsonl >/dev/null 2>&1\n"
     "sed -i '1500s/words/WORDS/' a.jsonl; text a.jsonl train.steps=6", 6, "a.jsonl has changed"),
    ("text that changed, accepted", "lines a 3000 > a.jsonl; text a.jsonl >/dev/null 2>&1\n"
     "sed -i '1500s/words/WORDS/' a.jsonl; text a.jsonl train.steps=6 resume=force", 0, "done after step 6"),
    ("a tokenizer larger than the vocabulary", "tpshard validate recipe.yaml model.vocab=128", (3, 6), "vocabulary"),
    ("a tokenizer that is not there", "tpshard validate recipe.yaml data.source=recipe.yaml data.tokenizer=none", 6),
    ("the hub cannot be reached",
     "HF_ENDPOINT=http://127.0.0.1:9 train data.source=c4 data.tokenizer=tok", 6, "the hub"),
    ("an empty table among good ones", "mkdir d; python -c \"import pyarrow as a; from pyarrow import parquet as p\n"
     "p.write_table(a.table({'text': [f'document {i} of words' for i in range(900)]}), 'd/a.parquet')\"\n"
     ": > d/b.parquet; text d", 0, "no readable document in b.parquet"),
    ("text that changed where no run had read it", "lines a 200000 > a.jsonl; text a.jsonl >/dev/null 2>&1\n"
     "sed -i '150000s/words/WORDS/' a.jsonl; text a.jsonl train.steps=6", 6, "a.jsonl has changed"),
    ("wandb does not answer", "python -c \"import socket; s = socket.create_server(('127.0.0.1', 29671))\n"
     "kept = [s.accept() for _ in range(99)]\" & other=$!; sleep 1\n"
     "WANDB_BASE_URL=http://127.0.0.1:29671 WANDB_API_KEY=$(printf '0%.0s' $(seq 40)) "
     "train 'logging.wandb={mode: online}'; code=$?; kill $other; test $(logged) = 4 && exit $code", 0,
     "done after step 4"),
    ("wandb's process is killed", "train 'logging.wandb={mode: offline}' train.steps=90 & pid=$!; until_step 3\n"
     "for p in $(ps -eo pid,args | grep '[w]andb_process.py' | awk '{print $1}'); do "
     "case $(tr '\\0' '\\n' < /proc/$p/environ | grep ^TPSHARD_CACHE) in *$TPSHARD_CACHE) kill -9 $p;; esac; done\n"
     "wait $pid; code=$?; test $(logged) = 90 && exit $code", 0, "the run goes on"),
    ("wandb's disk is full", "mkdir -p new/wandb; unshare --user --map-root-user --mount bash -c '"
     "mount -t tmpfs -o size=8k none new/wandb\n"
     "tpshard train recipe.yaml run.dir=new \"logging.wandb={mode: offline}\"'\n"
     "code=$?; test $(logged) = 4 && exit $code", 0, "No space left on device; the run goes on", "namespaces"),
    ("wandb's folder cannot be made", "mkdir new; : > new/wandb; train 'logging.wandb={mode: offline}'; code=$?\n"
     "test $(logged) = 4 && exit $code", 0, "done after step 4"),
    ("wandb cannot be reached",
     "WANDB_BASE_URL=http://127.0.0.1:9 WANDB_API_KEY=$(printf '0%.0s' $(seq 40)) "
     "train 'logging.wandb={mode: online}'", 0, "done after step 4"),
)  # fmt: skip

FOLDERS = group(
    "Folders and paths",
    ("an output that a killed container left half", "cat > kill.py <<'X'\nimport os, sys\n"
     "from tpshard.files.atomic import write_aside\nwith write_aside('out'): os.kill(os.getpid(), 9)\nX\n"
     "for i in 1 2; do unshare --user --map-root-user --pid --fork --kill-child python kill.py; done\n"
     "unshare --user --map-root-user --pid --fork tpshard convert runs/small out\n"
     "test -e out/config.json -a -z \"$(ls -A | grep '^.out')\"", 0, "", "namespaces"),
    ("an output that exists", "tpshard convert runs/small hf", 2, "exists"),
    ("an output over a run that goes on", "train train.steps=4000 & pid=$!; until_step 2\n"
     "tpshard convert runs/small new --overwrite; code=$?; kill -TERM $pid; wait $pid; test -e new/metrics.jsonl && "
     "exit $code", 2),
    ("a name of 300 characters", "tpshard convert runs/small $(printf 'n%.0s' $(seq 300))", 2, "File name too long"),
    ("a loop of links", "ln -s a b; ln -s b a; tpshard convert runs/small a/out", 2, "symbolic links"),
    ("a recipe beyond a loop of links", "ln -s a b; ln -s b a; tpshard train a/recipe.yaml", 2),
    ("a pickle", "touch model.pt; tpshard quantize model.pt out", 2, "pickle"),
    ("an index that leads out of the folder", "echo '{\"weight_map\": {\"a\": \"../x.safetensors\"}}' "
     "> hf/model.safetensors.index.json; rm hf/model.safetensors; tpshard convert hf out", (3, 7)),
    ("a folder that brings code", "sed -i '1s/{/{\"auto_map\": {\"AutoModel\": \"evil.Model\"},/' hf/config.json\n"
     "echo 'open(\"owned\", \"w\")' > hf/evil.py; tpshard convert hf out; test ! -e owned", 0),
    ("a type that is a list", "sed -i 's/\"model_type\": \"llama\"/\"model_type\": [\"llama\"]/' hf/config.json\n"
     "tpshard convert hf out", (3, 6, 7)),
    ("weights that are not finite", "python -c \"import torch; from safetensors.torch import load_file, save_file\n"
     "p = 'hf/model.safetensors'; t = load_file(p); t['model.norm.weight'][0] = float('nan')\n"
     "save_file(t, p, {'format': 'pt'})\"\ntpshard quantize hf out quantize.group_size=16", (4, 6, 7), "NaN"),
    ("weights that are infinite", "python -c \"import torch; from safetensors.torch import load_file, save_file\n"
     "p = 'hf/model.safetensors'; t = load_file(p); t['model.layers.0.mlp.up_proj.weight'][0] = float('inf')\n"
     "save_file(t, p, {'format': 'pt'})\"\ntpshard quantize hf out quantize.group_size=16; code=$?\n"
     "test ! -e out && exit $code", (4, 6, 7), "inf|finite"),
    ("rows of zeros", "python -c \"import torch; from safetensors.torch import load_file, save_file\n"
     "p = 'hf/model.safetensors'; t = load_file(p); t['model.layers.0.mlp.up_proj.weight'][:16] = 0\n"
     "save_file(t, p, {'format': 'pt'})\"\ntpshard quantize hf out quantize.group_size=16", 0, "held-out loss|worse"),
    ("weights without a config", "rm hf/config.json; tpshard convert hf out", 7, "no config.json"),
    ("a model that is quantized already", "tpshard quantize hf out quantize.group_size=16 >/dev/null 2>&1\n"
     "tpshard quantize out again quantize.group_size=16", (2, 4, 7), "already quantized"),
    ("groups of another size than g_idx says", "tpshard quantize hf out quantize.group_size=16 >/dev/null 2>&1\n"
     "python -c \"import torch; from safetensors.torch import load_file, save_file; p = 'out/model.safetensors'\n"
     "t = load_file(p); n = 'model.layers.0.self_attn.q_proj.g_idx'; t[n][:3] = 1; save_file(t, p)\"\n"
     "tpshard convert out dense", 7, "inputs into group"),
    ("quantizing into its own source", "tpshard quantize hf hf --overwrite quantize.group_size=16; code=$?\n"
     "test -e hf/config.json && exit $code", 2),
    ("a header that claims more than the file has", "python -c \"open('hf/model.safetensors', 'wb').write("
     "(1 << 40).to_bytes(8, 'little') + b'{}')\"\ntpshard quantize hf out quantize.group_size=16; code=$?\n"
     "test ! -e out && exit $code", (6, 7)),
    ("a disk that is full while quantizing", "mkdir small; unshare --user --map-root-user --mount bash -c "
     "'mount -t tmpfs -o size=40k none small; tpshard quantize hf small/out quantize.group_size=16; code=$?; "
     "test ! -e small/out && exit $code'", (5, 7), "No space left", "namespaces"),
    ("a plan with an edited number", """tpshard plan recipe.yaml run.dir=p >/dev/null 2>&1
python -c "import base64, json, zlib; p = json.load(open('p/plan.json'))
step = zlib.decompress(base64.b64decode(p['step'])).decode().replace('[\\"tuple\\",48,32]', '[\\"tuple\\",48,16]')
p['step'] = base64.b64encode(zlib.compress(step.encode())).decode(); json.dump(p, open('p/plan.json', 'w'))"
train --plan p/plan.json; code=$?; test ! -e new && exit $code""", 3, "the programs in p/plan.json"),
    ("a plan of another model", "tpshard plan recipe.yaml run.dir=p >/dev/null 2>&1\n"
     "train --plan p/plan.json model.mlp=64", 4),
    ("little address space", "ulimit -v 400000; tpshard plan recipe.yaml --dry-run --no-cache", 5, "ulimit -v"),
    ("few open files", "ulimit -n 14; tpshard train recipe.yaml run.dir=new", 5, "ulimit -n"),
)  # fmt: skip

SERVING = group(
    "Serving",
    ("requests that are wrong, and one that is not", """\
tpshard serve runs/small serve.port=29661 & pid=$!
for _ in $(seq 600); do curl -sf 127.0.0.1:29661/ready >/dev/null && break; sleep 0.3; done
at="127.0.0.1:29661/v1/completions"
ask() { curl -s -o answer -w '%{http_code} ' $at -H 'content-type: application/json' -d "$1"; }
ask '{'; ask '[]'; ask '{"model": "small", "prompt": "a", "max_tokens": -1}'; ask '{"model": "small", "prompt": 3.5}'
ask '{"model": "small", "prompt": "a", "n": 1000000000}'; ask '{"model": "../../etc", "prompt": "a"}'
ask '{"model": "small", "prompt": "a", "max_tokens": 2}'; echo
kill -TERM $pid; wait $pid""", 0, "400 400 400 400 400 404 200", "curl"),
    ("clients that leave, a full queue, a slow reader", """\
tpshard serve runs/small serve.port=29664 serve.mesh.tp=1 serve.requests=2 serve.queue=2 & pid=$!
at=127.0.0.1:29664; json='content-type: application/json'
for _ in $(seq 600); do curl -sf $at/ready >/dev/null && break; sleep 0.3; done
blocks() { curl -s $at/metrics | grep -i '^tpshard_kv_blocks' | head -1; }
before=$(blocks); long='{"model": "small", "prompt": "a", "max_tokens": 60, "stream": true, "ignore_eos": true}'
for i in $(seq 20); do curl -s -m 0.2 $at/v1/completions -H "$json" -d "$long" >/dev/null & asked="$asked $!"; done
wait $asked; curl -s --limit-rate 200 $at/v1/completions -H "$json" -d "$long" >/dev/null & slow=$!
python -c "import json, threading, urllib.request as u, urllib.error; codes = []
def ask():
    r = u.Request('http://$at/v1/completions', json.dumps(dict(model='small', prompt='a', max_tokens=60,
        ignore_eos=True)).encode(), {'content-type': 'application/json'})
    try: codes.append(u.urlopen(r).status)
    except urllib.error.HTTPError as e: codes.append((e.code, e.headers['retry-after']))
    except OSError: codes.append(0)
threads = [threading.Thread(target=ask) for _ in range(1000)]; [t.start() for t in threads]; [t.join() for t in threads]
print('answered', 200 in codes, 'refused', (429, '1') in codes, 'others', set(codes) - {200, (429, '1'), 0})"
kill $slow; for _ in $(seq 100); do test "$(blocks)" = "$before" && break; sleep 0.1; done
echo "blocks $(test "$(blocks)" = "$before" && echo back); $before"; kill -TERM $pid; wait $pid""",
     0, r"answered True refused True others set\(\).*blocks back; tpshard_kv", "curl"),
    ("a worker of a server is killed", """\
tpshard serve runs/small serve.port=29665 serve.mesh.tp=2 & pid=$!; at=127.0.0.1:29665
for _ in $(seq 600); do curl -sf $at/ready >/dev/null && break; sleep 0.3; done
kill -9 $(pgrep -P $pid -f serve_worker | tail -n 1); code() { curl -s -o answer -w '%{http_code}' $at/health; }
for _ in $(seq 600); do code=$(code); test $code = 503 && break; sleep 0.02; done
for _ in $(seq 600); do curl -sf $at/health >/dev/null && break; sleep 0.3; done
echo "health $code then $(code)"; kill -TERM $pid; wait $pid""",
     0, "health 503 then 200", "curl"),
    ("SIGTERM beside a body that never comes", """\
tpshard serve runs/small serve.port=29666 serve.mesh.tp=1 serve.grace_s=2 & pid=$!; at=127.0.0.1:29666
for _ in $(seq 600); do curl -sf $at/ready >/dev/null && break; sleep 0.3; done
exec 9<>/dev/tcp/127.0.0.1/29666
printf 'POST /tokenize HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-length: 9\\r\\n\\r\\n{' >&9
sleep 1; kill -TERM $pid; wait $pid""", 0, "1 connections in the middle of a request are cut", "curl"),
    ("a port that is taken", "python -m http.server -b 127.0.0.1 29662 >/dev/null 2>&1 & other=$!; sleep 1\n"
     "tpshard serve runs/small serve.port=29662; code=$?; kill $other; exit $code", 5, "29662"),
    ("every interface without a key", "tpshard serve runs/small serve.host=0.0.0.0", (2, 3, 5), "key"),
    ("a checkpoint outside of every run", "tpshard serve runs/small serve.checkpoint=../../etc", 7),
    ("SIGTERM to a server", "tpshard serve runs/small serve.port=29663 & pid=$!\n"
     "for _ in $(seq 600); do curl -sf 127.0.0.1:29663/ready >/dev/null && break; sleep 0.3; done\n"
     "kill -TERM $pid; wait $pid", 0, "", "curl"),
)  # fmt: skip

CASES = [*RECIPES, *PROCESSES, *OUTPUT, *CHECKPOINTS, *DATA, *FOLDERS, *SERVING]
