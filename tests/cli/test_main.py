"""The command line starts fast without torch, and shows a traceback only for a bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from tpshard.cli import main
from tpshard.diagnostics.diagnostic import Exit

TPSHARD = [sys.executable, "-m", "tpshard.cli.main"]
HEAVY = ("torch", "numpy", "omegaconf", "rich", "pydantic", "transformers", "datasets", "wandb", "tpshard.train",
         "tpshard.parallelism", "tpshard.plan", "tpshard.serve", "tpshard.kernels")  # fmt: skip


def tpshard(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")} | environment
    called = {"capture_output": True, "text": True, "errors": "replace", "timeout": PATIENCE}
    return subprocess.run([*TPSHARD, *arguments], env=env, **called)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["validate", "--help"], ["plan", "--help"], ["train", "--help"], ["validate", "quickstart"],
     ["validate", "llama3-405b"], ["recipes", "ls"], ["recipes", "schema"], ["doctor", "--help"], ["--version"]],
)  # fmt: skip
def test_what_should_start_at_once_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom tpshard.cli.main import run\n"
        f"code = run({arguments!r})\n"
        "loaded = sorted(m for m in sys.modules if m.partition('.')[0] in HEAVY or m in HEAVY)\n"
        "print('ended', code, loaded)\n"
    ).replace("HEAVY", repr(HEAVY))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    code_word, loaded = done.stdout.splitlines()[-1].removeprefix("ended ").split(" ", 1)
    assert (code_word, done.returncode) == ("0", 0), done.stderr
    allowed = {
        "tpshard.train",
        "tpshard.train.data.sample",
        "tpshard.kernels",
    }  # sizes of the sample and of fp8's blocks
    heavy = {name for name in eval(loaded) if not (name.startswith("pydantic") and "schema" in arguments)}
    if arguments[-1] in ("quickstart", "llama3-405b", "ls"):  # what reads a recipe
        heavy = {name for name in heavy if name.partition(".")[0] != "omegaconf"}
    assert heavy - allowed == set()


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_command_exists_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([name, "--help"]) == 0
    assert "Usage: tpshard " + name in capsys.readouterr().out


def test_usage_mistakes_are_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bogus"], ["validate"], ["validate", "--bogus"], ["plan", "no-such-recipe"], [], ["recipes"]):
        assert main.run(arguments) == Exit.USAGE
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err


def test_a_bug_is_1_and_asks_for_a_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr("tpshard.cli.preflight.preflight.load_checked", break_down)
    assert main.run(["validate", "tiny", "serve.api_key=hunter2"]) == Exit.BUG
    printed = capsys.readouterr().err
    assert "RuntimeError: oh" in printed and "a bug in tpshard" in printed
    assert "tpshard validate tiny serve.api_key=***" in printed and "hunter2" not in printed


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tpshard.cli.preflight.preflight.load_checked", interrupt)
    assert main.run(["validate", "tiny"]) == Exit.INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_hangs_up_is_no_crash() -> None:
    shell = " ".join(f"'{part}'" for part in TPSHARD)
    for line in (f"{shell} recipes schema | head -1", f"{shell} recipes ls >&-", f"{shell} validate nothing 2>&-",
                 f"{shell} --help >&- 2>&-", f"{shell} recipes ls > /dev/full || (($? == 5))"):  # fmt: skip
        command = ["bash", "-c", f"set -o pipefail; {line}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr
        assert done.returncode == (2 if "nothing" in line else 0)


def test_color_is_for_terminals_that_want_it(tmp_path: Path) -> None:
    bad = tmp_path / "a.yaml"
    bad.write_text("modle: 1\n")
    assert "\x1b" not in tpshard("validate", str(bad)).stderr
    assert "\x1b" in tpshard("validate", str(bad), FORCE_COLOR="1").stderr
    assert "\x1b" not in tpshard("validate", str(bad), FORCE_COLOR="1", NO_COLOR="1").stderr


def test_a_narrow_terminal_and_a_locale_without_unicode_are_no_crash(tmp_path: Path) -> None:
    bad = tmp_path / "a.yaml"
    bad.write_text("name: naïve—ü\nmodle: {" + "ä" * 200 + ": 1}\n", encoding="utf-8")
    narrow = tpshard("validate", str(bad), COLUMNS="40", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0",
                     PYTHONIOENCODING="ascii")  # fmt: skip
    assert narrow.returncode == 3 and "Traceback" not in narrow.stderr
    assert narrow.stderr.isascii()
    shown = tpshard("validate", str(bad), COLUMNS="40", PYTHONIOENCODING="utf-8").stderr.splitlines()
    assert max(len(line) for line in shown if "|" in line) <= 40
    assert "Traceback" not in tpshard("recipes", "ls", COLUMNS="40").stderr
    assert max(map(len, tpshard("recipes", "ls", COLUMNS="40").stdout.splitlines())) <= 40
    narrow = tpshard("recipes", "ls", COLUMNS="80").stdout.splitlines()
    about = "  Llama 3.1 8B from scratch on 4 nodes of 8 H100"
    assert max(map(len, narrow)) <= 80 and about in narrow, "it is not cut"


def test_shells_complete_commands_recipes_and_keys() -> None:
    def complete(line: str) -> list[str]:
        done = tpshard(_TPSHARD_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(line.split(" ")) - 1))
        return done.stdout.splitlines()

    assert "validate" in complete("tpshard va")
    assert "llama3-70b" in complete("tpshard plan llama3")
    assert complete("tpshard plan tiny train.st") == ["train.steps="]
    assert complete("tpshard recipes cp quick") == ["quickstart"]
