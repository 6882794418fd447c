"""The texts of `tpshard job`: what SLURM, Kubernetes, torchrun and SkyPilot need to start a recipe's run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpshard.diagnostics.exits import Exit
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.text.write import dump, looks_secret

RETRIED = (int(Exit.PREEMPTED), int(Exit.WORKER_LOST))
"""Exit codes after which the same command continues the run: preempted (saved), and a worker lost."""
PORT = 29500
"""The port on which rank 0 listens."""
GRACE_S = 120
"""Seconds between SIGTERM and the end, for the last checkpoint."""
ACCELERATORS = {
    "a100-40g": "A100", "a100-80g": "A100-80GB", "h100-sxm-80g": "H100", "h100-sxm-96g": "GH200", "h200": "H200",
    "h200-x4": "H200", "b200": "B200", "b300": "B300", "gb200": "GB200", "gb300": "GB300", "rtx-4090": "RTX4090",
    "rtx-a6000": "RTXA6000", "rtx-6000-ada": "RTX6000-Ada", "a100-pcie-80g": "A100-80GB", "l4": "L4", "l40s": "L40S",
}  # fmt: skip
"""SkyPilot's names of the shipped devices."""
STORE_SECRETS = {"s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")}
"""The variables with the credentials of an object store, where no role of the machine has them."""
STORE_SETTINGS = ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
"""Further variables that say where a store is."""


@dataclass(frozen=True)
class EngineJob:
    """A run as an engine starts it."""

    recipe: Recipe
    source: str
    """The recipe as on the command line."""
    overrides: tuple[str, ...]
    hosts: int
    devices: int
    """Devices per host."""
    gpu: bool
    retries: int
    """Restarts after an exit code of `RETRIED`."""
    folder: str = ""
    """The shared folder or object store of run folders; "" for the recipe's own run.dir."""
    image: str = ""
    hours: float = 0
    """Limit of the whole job; 0: none."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further options of sbatch."""

    @property
    def name(self) -> str:
        """The recipe's name in the form that engines allow: lower case, digits and dashes."""
        return re.sub(r"[^a-z0-9]+", "-", self.recipe.name.lower()).strip("-")[:40] or "run"

    def train(self) -> list[str]:
        """The command `tpshard train RECIPE KEY=VALUE...`, with the run in the shared folder."""
        shared = [f"run.dir={self.folder.rstrip('/')}/{self.recipe.name}"] if self.folder else []
        return ["tpshard", "train", self.source, *self.overrides, *shared]

    @property
    def store(self) -> str | None:
        """The run's place in an object store, unless the engine's own folder is named."""
        return None if self.folder else self.recipe.run.store

    def variables(self) -> list[str]:
        """The environment variables that the recipe names, except for unset ones that have a default."""
        found = re.findall(r"\$\{oc\.env:([A-Za-z0-9_]+)(,?)", self.recipe.to_yaml())
        return list(
            dict.fromkeys(name for name, default in found if name != "HOME" and (name in os.environ or not default))
        )

    def secrets(self) -> list[str]:
        """The environment variables with secrets; their values are never written."""
        names = [name for name in self.variables() if looks_secret(name)]
        wandb = self.recipe.logging.wandb
        names += ["WANDB_API_KEY"] if wandb is not None and wandb.mode == "online" else []
        source = str(self.recipe.data.stored()["source"])
        return list(dict.fromkeys([*names, *(["HF_TOKEN"] if source.startswith(("hub:", "hf:")) else [])]))

    def optional_secrets(self) -> list[str]:
        """The secrets without which the run may go on: wandb is then offline, and a role may open an object store."""
        wandb = self.recipe.logging.wandb
        names = ["WANDB_API_KEY"] if wandb is not None and wandb.mode == "auto" else []
        return [*names, *STORE_SECRETS.get((self.store or "").partition("://")[0], ())]

    def plain(self) -> list[str]:
        """The other environment variables that the recipe names."""
        settings = [name for name in STORE_SETTINGS if self.store is not None and name in os.environ]
        return list(dict.fromkeys([*(name for name in self.variables() if name not in self.secrets()), *settings]))


def slurm(job: EngineJob) -> str:
    """An sbatch script: one task per device, and a new place in the queue after an exit code of `RETRIED`."""
    options = {
        "job-name": job.name, "nodes": job.hosts, "ntasks-per-node": job.devices,
        **({"gpus-per-node": job.devices} if job.gpu else {}),
        **({"time": _hours(job.hours)} if job.hours else {}),
        **job.extra, "output": f"{job.name}-%j.log", "open-mode": "append", "signal": f"TERM@{GRACE_S}",
    }  # fmt: skip
    codes = "|".join(map(str, RETRIED)) + "|13[4-9]|143"
    needs = [f': "${{{name}:?is not set}}"' for name in (*job.plain(), *job.secrets())]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{key}={value}" for key, value in options.items()),
            "#SBATCH --requeue",
            "# Started by `sbatch`; the environment is that of sbatch. SIGTERM before the end saves a checkpoint.",
            *needs,
            f"srun --kill-on-bad-exit=0 {_line(job.train())}",
            "code=$?",
            f'case "$code" in {codes})  # preempted and saved, or a worker lost or killed: the run can continue',
            f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.retries} ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;',
            "esac",
            'exit "$code"',
        ]
    ) + "\n"  # fmt: skip


def kubernetes(job: EngineJob) -> str:
    """A ConfigMap with the recipe, and a JobSet that restarts after an exit code of `RETRIED` and no other."""
    in_claim = job.store is None
    command = ["tpshard", "train", "/recipe/recipe.yaml", *[f"run.dir=/runs/{job.recipe.name}"] * in_claim]
    if job.hosts > 1:  # `$(NAME)` is replaced by Kubernetes
        head = f"{job.name}-workers-0-0.{job.name}:{PORT}"
        launch = ["launch", "--nodes", str(job.hosts), "--node-rank", "$(JOB_COMPLETION_INDEX)", "--rendezvous", head]
        command = ["tpshard", *launch, "--", *command[1:]]
    container: dict[str, Any] = {
        "name": "worker", "image": job.image, "command": command,
        "env": [
            *({"name": name, "value": os.environ.get(name, "")} for name in job.plain()),
            *({"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name}}} for name in job.secrets()),
            *({"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name, "optional": True}}}
              for name in job.optional_secrets()),
        ],
        "volumeMounts": [
            {"name": "recipe", "mountPath": "/recipe"}, *[{"name": "runs", "mountPath": "/runs"}] * in_claim,
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }  # fmt: skip
    if job.hosts > 1:
        container["ports"] = [{"containerPort": PORT}]
    if job.gpu:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.devices}}
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": GRACE_S, "containers": [container],
        "volumes": [
            {"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}},
            *[{"name": "runs", "persistentVolumeClaim": {"claimName": job.folder or f"{job.name}-runs"}}] * in_claim,
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }  # fmt: skip
    refused = {"containerName": "worker", "operator": "NotIn", "values": sorted(RETRIED)}
    batch = {
        "parallelism": job.hosts, "completions": job.hosts, "completionMode": "Indexed", "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": refused}]},
        **({"activeDeadlineSeconds": int(job.hours * 3600)} if job.hours else {}),
        "template": {"spec": pod},
    }  # fmt: skip
    stop = {"name": "not-retried", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": job.retries, "rules": [stop]},
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": batch}}],
        },
    }  # fmt: skip
    recipe = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{job.name}-recipe"},
        "data": {"recipe.yaml": job.recipe.to_yaml()},
    }  # fmt: skip
    return dump(recipe) + "---\n" + dump(jobset)


def torchrun(job: EngineJob) -> str:
    """A line for every host. torchrun restarts after any failure, whatever its exit code."""
    places = ["--standalone"] if job.hosts == 1 else [
        f"--nnodes={job.hosts}", f"--rdzv-id={job.name}", "--rdzv-backend=c10d", f"--rdzv-endpoint=$HEAD:{PORT}",
    ]  # fmt: skip
    options = [*places, f"--nproc-per-node={job.devices}", f"--max-restarts={job.retries}", "--no-python"]
    return f"torchrun {' '.join(options)} {_line(job.train())}\n"


def sky(job: EngineJob) -> str:
    """A SkyPilot task, for `sky jobs launch`, which recovers it after an exit code of `RETRIED`."""
    resources: dict[str, Any] = {
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": sorted(RETRIED)},
    }
    if job.gpu:
        assert job.recipe.cluster is not None, "GPUs come from the recipe's cluster"
        device = job.recipe.cluster.device
        resources["accelerators"] = f"{ACCELERATORS.get(device, device)}:{job.devices}"
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    train = ["train", "recipe.yaml", *([f"run.dir=/runs/{job.recipe.name}"] if job.folder else [])]
    text = f"cat > recipe.yaml <<'RECIPE'\n{job.recipe.to_yaml()}RECIPE\n"
    if job.hosts > 1:
        text += 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
        launch = f'tpshard launch --nodes {job.hosts} --node-rank "$SKYPILOT_NODE_RANK" --rendezvous "$head:{PORT}"'
        text += f"{launch} -- {_line(train)}\n"
    else:
        text += _line(["tpshard", *train]) + "\n"
    secrets = [*job.secrets(), *(name for name in job.optional_secrets() if job.store and name in os.environ)]
    task = {
        "name": job.name, "num_nodes": job.hosts, "resources": resources,
        **({"envs": dict.fromkeys(job.plain())} if job.plain() else {}),
        **({"secrets": dict.fromkeys(secrets)} if secrets else {}),
        **({"file_mounts": {"/runs": {"source": job.folder, "mode": "MOUNT_CACHED"}}} if job.folder else {}),
        "setup": f"pip install {shlex.quote('tpshard[stores]') if job.store else 'tpshard'}\n", "run": text,
    }  # fmt: skip
    return dump(task)


def _line(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _hours(hours: float) -> str:
    minutes = round(hours * 60)
    return f"{minutes // 60}:{minutes % 60:02d}:00"
