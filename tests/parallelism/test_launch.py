"""The launcher starts workers, ends them as documented, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE, until
from tpshard.parallelism.runtime import crash, messages, stop
from tpshard.parallelism.runtime import place as places
from tpshard.parallelism.runtime.launcher import Nodes
from tpshard.parallelism.runtime.messages import WorkerFault, is_lost_peer

WORKER = Path(__file__).with_name("launched_worker.py")
LAUNCH = (
    "import os, sys; from tpshard.parallelism.runtime.launcher import Nodes, launch;"
    "assert 'torch' not in sys.modules, 'the launcher must start at once';"
    "nodes, world, restarts = Nodes.of(os.environ), *map(int, sys.argv[1:3]);"
    "sys.exit(launch([sys.executable, *sys.argv[3:]], world=world, nodes=nodes, restarts=restarts))"
)


@contextmanager
def launch(
    mode: str, world: int, folder: Path, *, restarts: int = 0, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A launcher in its own session; afterwards no process of it may be left."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(world), str(restarts), str(WORKER), mode, str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    tree: list[psutil.Process] = []
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            tree = psutil.Process(launcher.pid).children(recursive=True)
            launcher.kill()
            launcher.communicate()
        _, alive = psutil.wait_procs(tree, timeout=PATIENCE)
        for process in alive:
            process.kill()
        assert not alive, f"left behind: {alive}"


def workers(launcher: subprocess.Popen[str], folder: Path, world: int) -> list[psutil.Process]:
    """Waits until every worker said it is ready; by rank."""
    until(lambda: launcher.poll() is not None or len(list(folder.glob("ready-*"))) == world, "the workers")
    assert launcher.poll() is None, launcher.communicate()
    return [psutil.Process(int((folder / f"ready-{rank}").read_text())) for rank in range(world)]


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE)[1]


def test_a_request_to_stop_before_a_run_begins_ends_with_75(capfd: pytest.CaptureFixture[str]) -> None:
    if (child := os.fork()) == 0:
        with stop.stoppable():
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
    assert "stopped before the run began" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_workers_find_their_place_in_the_environment(tmp_path: Path) -> None:
    with launch("environment", 3, tmp_path) as launcher:
        out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, err
    seed = os.environ.get("PYTHONHASHSEED", "0")  # one for all ranks, which then trace one program
    assert out == f"0 0 3 3 {seed}\n"  # Rank 0 has the terminal; the others' output is kept aside.


def test_an_exit_without_a_word_is_explained_by_what_the_worker_printed(tmp_path: Path) -> None:
    with launch("silent-exit", 2, tmp_path) as launcher:
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 7
    assert err.index("something only a native library says") < err.index("rank 1 ended with exit code 7")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_polite_signal_reaches_every_worker(number: int, code: int, tmp_path: Path) -> None:
    with launch("until-signal", 2, tmp_path) as launcher:
        children = workers(launcher, tmp_path, 2)
        launcher.send_signal(number)
        launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == code
        assert gone(children)


def test_a_signal_during_start_up_is_held_until_the_worker_listens(tmp_path: Path) -> None:
    with launch("until-signal", 1, tmp_path) as launcher:
        until(lambda: psutil.Process(launcher.pid).children(), "a worker")
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 75


def test_the_second_ctrl_c_waits_for_nothing(tmp_path: Path) -> None:
    with launch("deaf", 2, tmp_path) as launcher:
        children = workers(launcher, tmp_path, 2)
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=PATIENCE)  # the workers themselves would go on for longer
        assert launcher.returncode == 130
        assert gone(children)


def test_workers_die_with_the_launcher(tmp_path: Path) -> None:
    with launch("deaf", 2, tmp_path) as launcher:
        children = workers(launcher, tmp_path, 2)
        launcher.kill()
        assert gone(children)


def test_the_failing_ranks_own_error_is_the_last_thing_printed(tmp_path: Path) -> None:
    with launch("raise", 2, tmp_path) as launcher:
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1
    assert err.rstrip().splitlines()[-1] == "error: planted before the first collective", err
    assert "rank 1 of 2 failed" in err


def test_a_killed_worker_ends_the_rest_and_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with launch("run", 2, tmp_path) as launcher:
        children = workers(launcher, tmp_path, 2)
        tree = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
        sockets = [c for p in tree for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert sockets and {c.laddr.ip for c in sockets} <= {"127.0.0.1", "::1"}
        children[1].kill()
        _, err = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 9
        assert "rank 1 was lost: killed by SIGKILL" in err
        assert "rank 0" not in err, "the other ranks' broken connections are consequences"
        assert gone(children)
    assert set(os.listdir("/dev/shm")) <= before
    mine = {c.laddr.port for c in sockets}
    still = {c.laddr.port for c in psutil.net_connections() if c.status == psutil.CONN_LISTEN}
    assert not mine & still


# ---- crashes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "rank", "fatal"),
    [("SIGSEGV", 0, "Segmentation fault"), ("SIGABRT", 1, "Aborted"), ("SIGBUS", 1, "Bus error")],
)
def test_a_run_whose_worker_crashes_is_started_again(name: str, rank: int, fatal: str, tmp_path: Path) -> None:
    with launch(f"crash {name} {rank} 7", 2, tmp_path, restarts=1) as launcher:
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, err
    stacks, lost, again = (
        err.index(text)
        for text in (
            f"Fatal Python error: {fatal}", f"error: rank {rank} was lost: killed by {name} after step 7",
            "warning: the run is started again from its last checkpoint (restart 1 of 1, see launch.restarts)",
        )
    )  # fmt: skip
    assert stacks < lost < again and "in crashing" in err[stacks:lost] and err.count("a library says why") == 1
    assert "run the same command again" not in err


@pytest.mark.parametrize(
    ("steps", "restarts", "started", "why"),
    [
        ("7", 0, 0, ""),
        ("7 300", 1, 1, "launch.restarts is 1"),
        ("7 106", 5, 1, "the previous crash was after step 7; two crashes must be 100 steps apart"),
        ("7 107 207", 2, 2, "launch.restarts is 2"),
    ],
)
def test_a_run_is_not_started_again_for_ever(steps: str, restarts: int, started: int, why: str, tmp_path: Path) -> None:
    with launch(f"crash SIGSEGV 1 {steps}", 2, tmp_path, restarts=restarts) as launcher:
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 9
    assert err.count("is started again") == started and ("why no restart:" in err) == bool(why) and why in err
    assert err.splitlines()[-1].startswith("  fix: run the same command again")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGFPE"])
def test_other_deaths_are_no_crashes(name: str, tmp_path: Path) -> None:
    with launch(f"crash {name} 1 7", 2, tmp_path, restarts=1) as launcher:
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 9 and f"killed by {name}" in err and "started again" not in err


def test_a_run_that_was_asked_to_stop_is_not_started_again(tmp_path: Path) -> None:
    with launch("deaf", 2, tmp_path, restarts=1) as launcher:
        children = workers(launcher, tmp_path, 2)
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        children[1].send_signal(signal.SIGSEGV)
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 9 and "killed by SIGSEGV" in err and "started again" not in err


def test_one_of_several_hosts_does_not_go_on_alone(tmp_path: Path) -> None:
    hosts = Nodes(2, 0, "127.0.0.1:9").environment()
    with launch("crash SIGSEGV 0 7", 2, tmp_path, restarts=1, **hosts) as launcher:
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 9 and "killed by SIGSEGV" in err and "started again" not in err


def test_the_stack_of_a_crash_is_found_in_what_was_printed() -> None:
    many = b"".join(b"Thread %d:\n" % i for i in range(99))
    printed = b"older\nmalloc(): bad\nFatal Python error: Aborted\n\n" + many + b"Extension modules: a, b\n"
    lines = crash.stack(printed).splitlines()
    assert lines[:3] == ["malloc(): bad", "Fatal Python error: Aborted", "Thread 0:"] and lines[-1] == "..."
    assert crash.stack(printed, explained=True).splitlines() == lines[1:-1] + ["Thread 38:", "..."]
    assert crash.stack(b"nothing of it") == ""


def test_a_report_that_may_be_dropped_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(messages.REPORT_FD, str(writer))
    sent = 0
    while messages.send("step", progress=sent, droppable=True):
        sent += 1
    received = os.read(reader, 1 << 20).splitlines()
    os.close(reader)
    os.close(writer)
    assert [message.progress for message in map(messages.parse, received) if message] == list(
        range(sent)
    ) and sent > 100


def test_a_hanging_worker_is_named_with_what_the_others_wait_for(tmp_path: Path) -> None:
    with launch("hang", 2, tmp_path) as launcher:
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 9
    assert "rank 0 made no progress for 1.5 s in step 5, in all_reduce over tp of layers.0.mlp" in err
    blamed = err.index("error: rank 1 made no progress for 1.5 s in step 5, in reading data")
    assert "time.sleep" in err[blamed:] or "launched_worker.py" in err[blamed:], "the stacks follow"


def test_a_frozen_worker_is_named_though_it_cannot_answer(tmp_path: Path) -> None:
    with launch("frozen", 2, tmp_path) as launcher:
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 9
    assert err.splitlines()[-1].startswith("error: rank 1 does not answer; rank 0 made no progress"), err


def test_two_hosts_meet_at_the_given_address(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{probe.getsockname()[1]}"
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCH, "2", "0", str(WORKER), "two-hosts", str(tmp_path)], stderr=subprocess.PIPE,
            env={**os.environ, **Nodes(2, rank, meet).environment(), "OMP_NUM_THREADS": "1"}, text=True,
        )
        for rank in (1, 0)
    ]  # fmt: skip
    assert [(host.communicate(timeout=PATIENCE)[1], host.returncode) for host in hosts] == [("", 0), ("", 0)]


SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}


def test_launchers_are_told_apart() -> None:
    assert places.find({}) is None
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
                "MASTER_PORT": "1"}  # fmt: skip
    located = places.find(torchrun)
    assert located is not None and located.rendezvous == "env:" and not located.all_local
    one_host = places.find(SRUN | {"SLURM_LOCALID": "3"})
    assert one_host is not None and (one_host.rank, one_host.launcher) == (3, "slurm") and one_host.all_local
    batch = {**SRUN, "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}
    del batch["SLURM_STEP_ID"]
    assert places.find(batch) is None, "a batch script is no step: it starts its own workers"
    many = SRUN | {
        "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
    }  # fmt: skip
    located = places.find(many)
    assert located is not None and located.rendezvous.startswith("tcp:gpu03:") and located.local_world == 2
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        places.find({**torchrun, "WORLD_SIZE": "four"})
    with pytest.raises(ValueError, match="MASTER_PORT"):
        places.find({name: value for name, value in torchrun.items() if name != "MASTER_PORT"})
    by_hand = places.find({name: value for name, value in torchrun.items() if not name.startswith("LOCAL_")})
    assert by_hand is not None and (by_hand.rank, by_hand.local_rank) == (1, -1), "the workers find out"
    own = places.WorkerPlace(2, 4, 2, 4, "file:/x", "tpshard")
    assert places.find(own.environment()) == own


def test_a_worker_takes_the_only_gpu_that_another_launcher_lets_it_see() -> None:
    task = places.find(SRUN | {"SLURM_LOCALID": "3"})
    assert task is not None and (task.gpu(1), task.gpu(4)) == (0, 3)
    assert places.WorkerPlace(3, 4, 3, 4, "file:/x", "tpshard").gpu(1) == 3, "which is refused: there is one"


@pytest.mark.parametrize(
    ("nodelist", "host"), [("gpu[03-05,9],head", "gpu03"), ("a,b", "a"), ("node7", "node7"), ("r[1-2]-ib", "r1-ib")]
)
def test_first_host(nodelist: str, host: str) -> None:
    assert places.first_host(nodelist) == host


def test_tasks_per_node() -> None:
    assert places.tasks_per_node("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("connection closed by peer"), False),
        (WorkerFault("rank 0 could not join: Connection closed by peer", exit=9), False),
    ],
)
def test_consequences_are_told_from_causes(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost
