"""The entry point: finds the command, calls it, and turns its result into an exit code.

A command is a file `cli/NAME.py` with a function `NAME`, or a Typer `app` for subcommands, and a line in `COMMANDS`. A
command is imported only when called, and imports heavy packages inside its function, so that `--help` is fast.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core
import typer.main
from tpshard.cli.shared import streams
from tpshard.cli.shared.machine_errors import of_machine
from tpshard.diagnostics.diagnostic import Exit, Mistakes, as_text

COMMANDS = {
    "train": "Train a recipe's model on this machine, or as one worker of several.",
    "plan": "Predict a run: shardings, collectives, memory, time.",
    "evaluate": "Measure a stored model's loss and perplexity on any text.",
    "serve": "Serve a model over HTTP with OpenAI's API.",
    "generate": "Continue a text with a stored model, without a server.",
    "chat": "Talk with a stored model, line by line.",
    "quantize": "Quantize a model with GPTQ.",
    "convert": "Write a checkpoint as a Hugging Face folder.",
    "data": "Print the rows of a recipe's data as the model reads them.",
    "recipes": "List, show and copy recipes, translate other trainers' configurations; explain the keys.",
    "check": "Train the same batch on two meshes or policies, and find where they differ.",
    "validate": "Check recipes and report every mistake.",
    "doctor": "Check this machine: versions, devices, links, limits, a collective.",
    "launch": "Start workers on several hosts.",
    "job": "Write the job of a run for SLURM, Kubernetes, torchrun or SkyPilot.",
}
"""The commands, with the line that `--help` shows for each."""
MODULES = {"job": "job_app", "data": "data_app"}
"""The modules of commands whose own name is another file's."""
WORKERS = {"train", "launch", "serve", "quantize", "convert", "recipes cp"}
"""The commands whose result is not what they print: their exit code tells of it, though stdout cannot be written."""
PRINTS = {"--check", "--help", "-h"}
"""The options with which these print their result, too."""


class _AsGiven:
    """A parameter type that leaves text unchanged."""

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value


def _skip_conversion(parameters: list[Any]) -> list[Any]:
    """Skips Typer's conversion of text and flags, for which recent versions import pydantic.

    That import takes longer than all the rest of `validate`. Other versions of Typer ignore the attribute.
    """
    for parameter in parameters:
        kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
        if kind in (str, list[str], bool) and hasattr(parameter, "_runtime_param"):
            parameter._runtime_param = _AsGiven()
    return parameters


class Command(typer.core.TyperCommand):
    """A Typer command without the import of pydantic, whose help groups options by their `rich_help_panel`."""

    def get_params(self, ctx: Any) -> Any:
        return _skip_conversion(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


class Group(typer.core.TyperGroup):
    """A Typer group without the import of pydantic."""

    def get_params(self, ctx: Any) -> Any:
        return _skip_conversion(super().get_params(ctx))


def group(text: str) -> typer.Typer:
    """A command with commands of its own, such as `recipes ls`. text: what `--help` says of it."""
    return typer.Typer(
        cls=Group, rich_markup_mode=None, add_completion=False, no_args_is_help=True, help=text,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


class Commands(Group):
    """The group of all commands, which imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        return command(name) if name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def command(name: str) -> Any:
    """The Typer command of a name."""
    module = importlib.import_module(f"tpshard.cli.{MODULES.get(name, name)}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = {"help_option_names": ["-h", "--help"]}
        app.command(name, cls=Command, context_settings=settings)(getattr(module, name))
    typer_command = typer.main.get_command(app)
    typer_command.name = name
    return typer_command


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)


def _version(requested: bool) -> None:
    if requested:
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
    """Shard transformers over several devices by a recipe: plan, train and serve them.

    A RECIPE is a file, a run's folder or a shipped name (`tpshard recipes ls`); key.path=value after it changes it.
    """


def version() -> str:
    """The installed version, or a note that this is a checkout."""
    from importlib import metadata

    try:
        return metadata.version("tpshard")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and ends the process with its exit code."""
    if "TPSHARD_FOLLOWS" in os.environ:
        from tpshard.parallelism.runtime.workers import follow

        follow()
    streams.prepare()
    line = sys.argv[1:] if arguments is None else list(arguments)
    code = run(line)
    try:
        streams.require_written()
    except Mistakes as mistakes:
        if code == Exit.DONE and (not WORKERS & {line[0], " ".join(line[:2])} or PRINTS.intersection(line)):
            report(mistakes)
            code = mistakes.exit
        else:
            _say(f"warning: {mistakes.diagnostics[0].message}")
    sys.stderr.flush()
    if "triton" not in sys.modules:  # whose bindings tell of each object that is not freed
        gc.freeze()  # the interpreter's last collection would walk over all nodes of a plan for seconds, to free them
    sys.exit(code)


_spare = [bytearray(8 << 20)]
"""Memory that is freed to report an error where there is no more."""


def run(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code; errors are printed to stderr."""
    usage_error, click_error = typer.BadParameter.__mro__[1:3]
    group = typer.main.get_command(app)
    try:
        if "_TPSHARD_COMPLETE" in os.environ:
            group.main(list(arguments), prog_name="tpshard")  # prints the completions and exits
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
    except Exception as error:
        _spare.clear()
        if (diagnostic := of_machine(error)) is not None:
            try:
                report(Mistakes([diagnostic]))
            except MemoryError:
                _say(f"error: {diagnostic.message}")
            return diagnostic.exit
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
            if (option := getattr(error, "option_name", "")) and type(error).__name__ == "NoSuchOption":
                from tpshard.cli.shared.option_keys import option_fix

                if fix := option_fix(arguments, option):
                    _say(f"  fix: {fix}")
            return Exit.USAGE
        _bug(arguments)
        return Exit.BUG


def report(mistakes: Mistakes) -> None:
    """Prints errors to stderr, in colour on a terminal."""
    _say(as_text(mistakes.diagnostics, color=colorful(sys.stderr), width=columns(sys.stderr)).rstrip("\n"))
    errors = sum(d.severity == "error" for d in mistakes.diagnostics)
    if errors > 1:
        _say(f"\n{errors} errors")


def colorful(stream: Any) -> bool:
    """Whether to colour the output to `stream`: on a capable terminal, unless NO_COLOR is set (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(getattr(stream, "isatty", bool)()) and os.environ.get("TERM") != "dumb"


def columns(stream: Any) -> int:
    """The width of `stream` in characters; 0 where unknown."""
    setting = os.environ.get("COLUMNS", "")
    if setting.isdigit():
        return int(setting)
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


def _say(text: str) -> None:
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
    """An argument for a bug report: values of keys that look like secrets are masked."""
    from tpshard.recipes.text.write import MASK, looks_secret

    key, equals, _ = argument.partition("=")
    return f"{key}={MASK}" if equals and looks_secret(key.rpartition(".")[2]) else argument


if __name__ == "__main__":
    main()
