"""The door: finds the command, calls it, and turns what comes out into an exit code.

A command is a file `cli/NAME.py` with a function `NAME`, or a Typer `app` for one with subcommands, and a line in
`COMMANDS`. Nothing of a command is imported before it is called, and a command imports what is heavy inside its
function, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core
import typer.main
from tpshard.recipes.diagnostic import Exit, Mistakes, as_text

COMMANDS = {
    "train": "Train a recipe's model on this machine, or as one worker of several.",
    "plan": "Say what a recipe would do: shardings, collectives, memory, time.",
    "serve": "Serve a model over HTTP, as OpenAI's API.",
    "quantize": "Quantize a model with GPTQ.",
    "convert": "Write a checkpoint as a Hugging Face folder.",
    "recipes": "List, show and copy the shipped recipes; explain the keys; print the schema.",
    "check": "Train the same batch on two meshes or policies, and say where they differ.",
    "validate": "Check recipes and report every mistake.",
    "doctor": "Look at this machine: versions, devices, links, limits, a collective.",
    "launch": "Start workers on several hosts.",
}
"""Command to the one line that `--help` shows."""


class _AsGiven:
    """Leaves text as it was typed."""

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value


def _as_given(parameters: list[Any]) -> list[Any]:
    """Spare the conversion of text and flags: recent versions of Typer import pydantic for it, which takes longer than
    all the rest of `validate`. Versions that convert otherwise do not look at the attribute."""
    for parameter in parameters:
        kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
        if kind in (str, list[str], bool) and hasattr(parameter, "_runtime_param"):
            parameter._runtime_param = _AsGiven()
    return parameters


class Command(typer.core.TyperCommand):
    """A command that starts quickly."""

    def get_params(self, ctx: Any) -> Any:
        return _as_given(super().get_params(ctx))


class Group(typer.core.TyperGroup):
    """A group that starts quickly."""

    def get_params(self, ctx: Any) -> Any:
        return _as_given(super().get_params(ctx))


class Commands(Group):
    """Knows the names of all commands, and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        return command(name) if name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def command(name: str) -> Any:
    """The command of this name, ready to be called by the command line."""
    module = importlib.import_module(f"tpshard.cli.{name}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = {"help_option_names": ["-h", "--help"]}
        app.command(name, cls=Command, context_settings=settings)(getattr(module, name))
    found = typer.main.get_command(app)
    found.name = name
    return found


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)


def _version(asked: bool) -> None:
    if asked:
        import platform
        from importlib import metadata

        typer.echo(f"tpshard {version()}, torch {metadata.version('torch')}, Python {platform.python_version()}")
        raise typer.Exit()


@app.callback()
def tpshard(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declarative sharding for training and serving transformers on more than one device.

    A RECIPE is a file, a run's folder or a shipped name (`tpshard recipes ls`); key.path=value after it changes it.
    """


def version() -> str:
    """The installed version, or where there is none, that it is a checkout."""
    from importlib import metadata

    try:
        return metadata.version("tpshard")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit code."""
    if "TPSHARD_FOLLOWS" in os.environ:
        from tpshard.parallelism.runtime.workers import follow

        follow()
    _prepare_streams()
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        code = _hang_up(Exit.DONE)
    except OSError as error:
        _say(f"error: stdout cannot be written: {error.strerror}")
        code = _hang_up(Exit.MACHINE)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command line; what is wrong with it is on stderr."""
    usage_error, click_error = typer.BadParameter.__mro__[1:3]
    group = typer.main.get_command(app)
    try:
        if "_TPSHARD_COMPLETE" in os.environ:
            group.main(list(arguments), prog_name="tpshard")  # writes the completions and exits
        with group.make_context("tpshard", list(arguments)) as context:
            result = group.invoke(context)
            return result if isinstance(result, int) and not isinstance(result, bool) else Exit.DONE
    except typer.Exit as ended:
        return ended.exit_code
    except Mistakes as mistakes:
        report(mistakes)
        return mistakes.exit
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            _say(f"error: {error}")
            return Exit.MACHINE
        if isinstance(error, click_error):
            shown: Any = error
            if type(error).__name__ == "NoArgsIsHelpError":
                _say(shown.format_message())
                return Exit.USAGE
            if isinstance(error, usage_error) and getattr(error, "ctx", None) is not None:
                _say(shown.ctx.get_usage())
            words = shown.format_message()
            if words:
                _say(f"error: {words}")
            return Exit.USAGE
        _bug(arguments)
        return Exit.BUG


def report(mistakes: Mistakes) -> None:
    """Show mistakes on stderr, in colour where someone looks."""
    _say(as_text(mistakes.diagnostics, color=colorful(sys.stderr), width=columns(sys.stderr)).rstrip("\n"))
    errors = sum(d.severity == "error" for d in mistakes.diagnostics)
    if errors > 1:
        _say(f"\n{errors} errors")


def colorful(stream: Any) -> bool:
    """Whether to colour what goes to `stream`: a terminal that can, and nobody who asked not to (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(getattr(stream, "isatty", bool)()) and os.environ.get("TERM") != "dumb"


def columns(stream: Any) -> int:
    """Characters that fit into a line of `stream`; 0 when it is no terminal and nobody said."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit():
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens
        print(text, file=sys.stderr, flush=True)


def _bug(arguments: Sequence[str]) -> None:
    traceback.print_exc()
    line = " ".join(["tpshard", *map(_public, arguments)])
    python = ".".join(map(str, sys.version_info[:3]))
    _say(
        f"\nThis is a bug in tpshard {version()}, not in your recipe. Please report it with the lines above, the "
        f"recipe, and:\n  command: {line}\n  python {python} on {sys.platform}; `tpshard doctor` prints the rest"
    )


def _public(argument: str) -> str:
    """An argument as it may stand in a report: the values of keys that look like secrets are masked."""
    from tpshard.recipes.write import MASK, looks_secret

    key, equals, _ = argument.partition("=")
    return f"{key}={MASK}" if equals and looks_secret(key.rpartition(".")[2]) else argument


def _prepare_streams() -> None:
    """Closed streams swallow, and a character that the locale lacks becomes an escape instead of a crash."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _hang_up(code: int) -> int:
    """Nobody reads stdout any more (`| head` has seen enough): keep the interpreter from flushing it once again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    main()
