"""Jobs start the recipe's hosts and devices, retry what can continue, and hold no secret's value."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit
from tpshard.recipes.reading.load import loads

NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", "maxLength": 63}
EXIT_CODES = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "uniqueItems": True}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def array(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


ANY, TEXT, COUNT = {}, {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
ENV = {"oneOf": [
    closed(["name", "value"], name=TEXT, value={"type": "string"}),
    closed(["name", "valueFrom"], name=TEXT, valueFrom=closed(["secretKeyRef"], secretKeyRef=closed(
        ["name", "key"], name=NAME, key=TEXT, optional={"type": "boolean"}))),
]}  # fmt: skip
CONTAINER = closed(
    ["name", "image"], name=NAME, image=TEXT, command=array(TEXT), env=array(ENV),
    volumeMounts=array(closed(["name", "mountPath"], name=NAME, mountPath=TEXT)),
    ports=array(closed(["containerPort"], containerPort={"type": "integer", "minimum": 1, "maximum": 65535})),
    resources=closed([], limits={"type": "object", "additionalProperties": COUNT}),
)  # fmt: skip
POD = closed(
    ["containers", "restartPolicy"], restartPolicy={"const": "Never"}, terminationGracePeriodSeconds=COUNT,
    containers=array(CONTAINER), volumes=array(closed(
        ["name"], name=NAME, configMap=closed(["name"], name=NAME), emptyDir=closed([], medium={"const": "Memory"}),
        persistentVolumeClaim=closed(["claimName"], claimName=NAME))),
)  # fmt: skip
BATCH = closed(
    ["template"], parallelism=COUNT, completions=COUNT, completionMode={"enum": ["NonIndexed", "Indexed"]},
    backoffLimit=COUNT, activeDeadlineSeconds=COUNT, template=closed(["spec"], spec=POD),
    podFailurePolicy=closed(["rules"], rules=array(closed(
        ["action"], action={"enum": ["FailJob", "Ignore", "Count", "FailIndex"]}, onExitCodes=closed(
            ["operator", "values"], containerName=NAME, operator={"enum": ["In", "NotIn"]}, values=EXIT_CODES)))),
)  # fmt: skip
JOBSET = closed(
    ["apiVersion", "kind", "metadata", "spec"], apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"}, metadata=closed(["name"], name=NAME), spec=closed(
        ["replicatedJobs"], network=closed([], enableDNSHostnames={"type": "boolean"}, subdomain=NAME),
        failurePolicy=closed([], maxRestarts=COUNT, rules=array(closed(
            ["action", "name"], name={"type": "string", "pattern": r"^[A-Za-z]([A-Za-z0-9_,:-]*[A-Za-z0-9_])?$"},
            action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
            onJobFailureReasons=array({"enum": ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes",
                                                "MaxFailedIndexesExceeded", "PodFailurePolicy"]})))),
        replicatedJobs=array(closed(["name", "template"], name=NAME, replicas=COUNT,
                                    template=closed(["spec"], spec=BATCH)))),
)  # fmt: skip
"""The published schemas of jobset.x-k8s.io/v1alpha2 and batch/v1, as far as they are used here."""
SKY = closed(
    ["run"], name=NAME, num_nodes=COUNT, setup=TEXT, run=TEXT,
    resources=closed([], accelerators={"type": "string", "pattern": r"^[A-Z0-9-]+:\d+$"}, image_id=TEXT,
                     job_recovery=closed([], max_restarts_on_errors=COUNT, recover_on_exit_codes=EXIT_CODES)),
    envs={"type": "object"}, secrets={"type": "object"},
    file_mounts={"type": "object", "additionalProperties": closed(
        ["source"], source={"pattern": "^(s3|gs)://"}, mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]})},
)  # fmt: skip


def job(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["job", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZER_DIR", "/shared/tokenizer")
    monkeypatch.setenv("WANDB_API_KEY", "do-not-write-me")


@pytest.mark.parametrize("recipe", ["llama3-8b", "llama3-1b", "quickstart"])
def test_a_jobset_is_valid_and_starts_the_recipes_devices(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = job(capsys, "k8s", recipe, "logging.wandb.mode=online", "--image", "registry/tpshard:1", "--hours", "2")
    assert "do-not-write-me" not in text
    config, jobset = yaml.safe_load_all(text)
    jsonschema.validate(jobset, JOBSET)
    held = loads(config["data"]["recipe.yaml"])
    assert held.name == recipe and held.cluster is not None
    batch = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = batch["template"]["spec"]["containers"]
    assert batch["parallelism"] == batch["completions"] == held.cluster.nodes
    assert batch["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [9, 75]
    gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")
    assert gpus == (None if recipe == "quickstart" else held.cluster.devices_per_node)
    line = " ".join(container["command"])
    assert ("--node-rank $(JOB_COMPLETION_INDEX)" in line) == (held.cluster.nodes > 1)
    if held.cluster.nodes > 1:
        name = jobset["metadata"]["name"]
        assert f"--rendezvous {name}-workers-0-0.{jobset['spec']['network']['subdomain']}:29500" in line
    keys = [e["valueFrom"]["secretKeyRef"]["key"] for e in container["env"] if "valueFrom" in e]
    assert keys == ["WANDB_API_KEY"]


@pytest.mark.parametrize("code", [0, 1, 3, 9, 75, 137])
def test_sbatch_requeues_what_can_continue(code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = job(capsys, "slurm", "llama3-8b", "optimizer.lr=1e-4", "--folder", "/shared/my runs", "--retries", "2",
               "--hours", "1.5", "--partition", "gpu")  # fmt: skip
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.M))
    assert options["nodes"] == "4" and options["ntasks-per-node"] == options["gpus-per-node"] == "8"
    assert options["time"] == "1:30:00" and options["signal"] == "TERM@120" and options["partition"] == "gpu"
    tools = {"srun": f'echo "$@" > {tmp_path}/started; exit {code}', "scontrol": f'echo "$@" > {tmp_path}/again'}
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for restarts, requeued in (("1", code in (9, 75, 137)), ("2", False)):
        (tmp_path / "again").unlink(missing_ok=True)
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts,
               "TOKENIZER_DIR": "x"}  # fmt: skip
        done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert (tmp_path / "again").exists() == requeued
        assert not requeued or (tmp_path / "again").read_text() == "requeue 7\n"
    started = (tmp_path / "started").read_text()
    assert "tpshard train llama3-8b optimizer.lr=1e-4 run.dir=/shared/my runs/llama3-8b" in started
    missing = subprocess.run(
        ["bash", "-c", text], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert missing.returncode and "TOKENIZER_DIR: is not set" in missing.stderr


def test_a_sky_task_is_valid_and_its_script_writes_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = yaml.safe_load(job(capsys, "sky", "llama3-8b", "train.steps=7", "--bucket", "s3://runs"))
    jsonschema.validate(task, SKY)
    assert task["resources"]["accelerators"] == "H100:8" and task["num_nodes"] == 4
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [9, 75] and task["envs"] == {
        "TOKENIZER_DIR": None
    }
    (tmp_path / "tpshard").write_text('#!/bin/bash\necho "$@" > started\n')
    (tmp_path / "tpshard").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SKYPILOT_NODE_RANK": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=env, check=True)
    assert loads((tmp_path / "recipe.yaml").read_text()).train.steps == 7
    expected = (
        "launch --nodes 4 --node-rank 2 --rendezvous 10.0.0.1:29500 -- train recipe.yaml run.dir=/runs/llama3-8b\n"
    )
    assert (tmp_path / "started").read_text() == expected


def test_a_torchrun_line_starts_all_workers(capsys: pytest.CaptureFixture[str]) -> None:
    several = job(capsys, "torchrun", "llama3-8b", "--retries", "1")
    assert "--nnodes=4" in several and "--nproc-per-node=8" in several and "--rdzv-endpoint=$HEAD:29500" in several
    assert several.endswith("--max-restarts=1 --no-python tpshard train llama3-8b\n")
    assert "--standalone --nproc-per-node=4" in job(capsys, "torchrun", "quickstart")


def test_what_an_engine_needs_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["job", "k8s", "quickstart"]) == Exit.USAGE and "--image" in capsys.readouterr().err
    assert run(["job", "sky", "quickstart", "--bucket", "runs"]) == Exit.USAGE
    assert run(["job", "slurm", "tiny"]) == Exit.FIT
    assert "how many devices" in capsys.readouterr().err


def test_a_run_in_an_object_store_stays_there_with_its_secrets_by_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No claim is mounted over `run.dir`, which the recipe in the job keeps."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-nobody")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    place = "s3://bucket/runs/mine"
    assert run(["job", "k8s", "quickstart", f"run.dir={place}", "--image", "image"]) == 0
    printed = capsys.readouterr().out
    recipe, jobset = yaml.safe_load_all(printed)
    jsonschema.validate(jobset, JOBSET)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert yaml.safe_load(recipe["data"]["recipe.yaml"])["run"]["dir"] == place
    assert not any("run.dir" in word for word in container["command"])
    assert "runs" not in {volume["name"] for volume in (*pod["volumes"], *container["volumeMounts"])}
    references = {one["name"]: one.get("valueFrom", {}).get("secretKeyRef", {}) for one in container["env"]}
    assert references["AWS_SECRET_ACCESS_KEY"]["optional"] and references["AWS_ENDPOINT_URL"] == {}
    assert run(["job", "sky", "quickstart", f"run.dir={place}"]) == 0
    sky = capsys.readouterr().out
    task = yaml.safe_load(sky)
    assert task["secrets"]["AWS_SECRET_ACCESS_KEY"] is None and "tpshard[stores]" in task["setup"]
    assert place in task["run"] and "of-nobody" not in printed + sky


@pytest.mark.parametrize("engine", [["slurm"], ["torchrun"], ["sky"], ["k8s", "--image", "image"]])
def test_no_secret_is_written_into_a_job(engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["job", *engine, "quickstart", "serve.api_key=hunter2"]) == Exit.USAGE
    refused = capsys.readouterr()
    assert "hunter2" not in refused.out + refused.err and "serve.api_key='${oc.env:NAME}'" in refused.err
    assert run(["job", *engine, "quickstart", "serve.api_key=${oc.env:HUNTER}"]) == Exit.DONE
    assert "HUNTER" in capsys.readouterr().out
    assert run(["job", *engine, "quickstart", "serve={api_key: hunter2}"]) == Exit.USAGE
    (tmp_path / "r.yaml").write_text("extends: quickstart\nserve: {api_key: hunter2}\n")
    names_it = engine[0] in ("slurm", "torchrun")  # the recipe stays where it is
    assert run(["job", *engine, str(tmp_path / "r.yaml")]) == (Exit.DONE if names_it else Exit.USAGE)
    assert "hunter2" not in capsys.readouterr().out
