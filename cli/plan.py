"""`tpshard plan`: predicts a run without running it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tpshard.cli.shared.arguments import OptionalRecipe, Overrides, check_change, load, on_device

if TYPE_CHECKING:
    from tpshard.plan.saved_plan import SavedPlan
    from tpshard.recipes.keys.schema import Recipe

STEPS = ("train", "prefill", "decode")
QUESTIONS = {
    "--explain": STEPS, "--stage": STEPS, "--diff": STEPS, "--search": ("train", "serve"), "--passes": ("train",),
    "--fit": ("train",), "--pin": ("train",), "--net": ("train",), "--check": ("train",),
}  # fmt: skip
"""The questions, of which a command asks one, instead of a plan; with what each can be asked for (`--for`)."""
ADDITIONS = dict.fromkeys(
    ("--suggest", "--skew", "--tokens", "--price", "--watts", "--failures", "--restart", "--save"), ("train",)
)
"""What a plan says besides."""
FILES = {"--html": STEPS, "--trace": STEPS, "--svg": (*STEPS, "serve")}
"""Files with a plan."""
LOAD = dict.fromkeys(("--rate", "--prompt", "--answer", "--ttft", "--tpot", "--count", "--seed"), ("serve",))
NEEDS = {"--of": ("--stage",), "--against": ("--stage",), "--for serve": ("--prompt", "--answer")}
"""The options without which others, or a value of `--for`, say nothing."""
EXCLUDES = {"--check": ("RECIPE", "--device")}
"""What an option leaves no room for: a run has its own recipe, and its plan its own device."""
POSITIVE = ("--rate", "--ttft", "--tpot")
OF_SAVED = {"RECIPE", "--diff", "--tokens", "--price", "--watts", "--failures", "--restart", "--save"}
OF_SAVED |= {"--json", "--verbose", "--dry-run"}
"""What can be asked of a saved plan, whose report is read and whose programs are not."""

_what = partial(typer.Option, rich_help_panel="What is planned, on which device")
What = Annotated[
    str,
    _what("--for", metavar="WHAT", help="train; prefill or decode: a server's step; serve: a server under a load."),
]
Device = Annotated[
    str | None, _what("--device", metavar="KIND", show_default=False, help="Short for cluster.device=KIND: cpu, h200.")
]
_question = partial(typer.Option, rich_help_panel="One question instead of a plan", show_default=False)
Explain = Annotated[str | None, _question("--explain", metavar="NAME", help="Why has a tensor its sharding?")]
Stage = Annotated[
    str | None,
    _question("--stage", metavar="STAGE", help="What is a step at a stage? graph, shardings, partition, or a pass."),
]
StageOf = Annotated[
    str | None, _question("--of", metavar="PATTERN", help="Only modules and values of this name: layers.1.mlp.")
]
Against = Annotated[
    list[str] | None,
    _question("--against", metavar="OTHER", help="Compare a stage with another recipe's, as --diff, or a text file."),
]
Diff = Annotated[
    list[str] | None,
    _question(
        "--diff", metavar="OTHER",
        help="How do two plans differ? OTHER is a recipe, a plan.json, or KEY.PATH=VALUE for a change of this one "
        "(repeatable).",
    ),
]  # fmt: skip
Passes = Annotated[bool, _question("--passes", help="How does each pass change collectives, memory and time?")]
Network = Annotated[bool, _question("--net", help="Which links does each mesh axis use, and with other orders?")]
Search = Annotated[bool, _question("--search", help="Which meshes, recomputation and micro-batches are fastest?")]
Fit = Annotated[bool, _question("--fit", help="Which smallest edits make the recipe fit its devices?")]
Pin = Annotated[bool, _question("--pin", help="What does the recipe say with all inferred shardings pinned?")]
Check = Annotated[Path | None, _question("--check", metavar="RUN", help="Did a run go as planned, figure by figure?")]
_more = partial(typer.Option, rich_help_panel="More about a training run")
Suggest = Annotated[bool, _more("--suggest", help="Search what the recipe leaves free for a faster step.")]
Skew = Annotated[
    float | None, _more("--skew", metavar="X", help="Price uneven routing too: X times the mean for one expert.")
]
Tokens = Annotated[str | None, _more("--tokens", metavar="N", help="Its tokens: 15T, 300B. Default: train.steps.")]
Price = Annotated[float | None, _more("--price", min=0, help="Price of a device-hour.")]
Watts = Annotated[float | None, _more("--watts", min=0, help="Power of a device.")]
Failures = Annotated[float | None, _more("--failures", min=0, help="Failures of a device per hour; 0: none.")]
Restart = Annotated[float | None, _more("--restart", min=0, help="Seconds from a failure to the next step.")]
Save = Annotated[float | None, _more("--save", min=0, help="Seconds per checkpoint.")]
_load = partial(typer.Option, rich_help_panel="A server's load, with --for serve")
Rate = Annotated[float | None, _load("--rate", min=0, help="Requests per second, at random times.")]
Prompt = Annotated[int | None, _load("--prompt", min=1, help="Prompt tokens of a request.")]
Answer = Annotated[int | None, _load("--answer", min=1, help="Tokens of an answer.")]
FirstToken = Annotated[
    float | None, _load("--ttft", min=0, help="Limit in seconds to the first token, for 99% of requests.")
]
EachToken = Annotated[
    float | None, _load("--tpot", min=0, help="Limit in seconds per further token, for 99% of requests.")
]
Count = Annotated[int, _load("--count", min=10, help="Requests to simulate.")]
Seed = Annotated[int, _load("--seed", min=0, help="Seed of the requests' times.")]
_output = partial(typer.Option, rich_help_panel="Outputs")
DryRun = Annotated[
    bool, _output("--dry-run", help="Write only the files named here. Questions write nothing but recipes anyway.")
]
Json = Annotated[bool, _output("--json", help="Print only JSON to stdout.")]
Verbose = Annotated[bool, _output("--verbose", "-v", help="Print everything, however long.")]
Html = Annotated[Path | None, _output("--html", metavar="FILE", help="Write one self-contained page.")]
Trace = Annotated[Path | None, _output("--trace", metavar="FILE", help="Write a trace for Perfetto.")]
Svg = Annotated[Path | None, _output("--svg", metavar="FILE", help="Draw timeline and memory.")]
Overwrite = Annotated[bool, _output("--overwrite", help="Replace existing files.")]
NoCache = Annotated[bool, _output("--no-cache", help="Plan anew, and keep nothing for the next time.")]


def plan(
    context: typer.Context,
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    what: What = "train",
    device: Device = None,
    explain: Explain = None,
    stage: Stage = None,
    of: StageOf = None,
    against: Against = None,
    diff: Diff = None,
    passes: Passes = False,
    net: Network = False,
    search: Search = False,
    fit: Fit = False,
    pin: Pin = False,
    check: Check = None,
    suggest: Suggest = False,
    skew: Skew = None,
    tokens: Tokens = None,
    price: Price = None,
    watts: Watts = None,
    failures: Failures = None,
    restart: Restart = None,
    save: Save = None,
    rate: Rate = None,
    prompt: Prompt = None,
    answer: Answer = None,
    ttft: FirstToken = None,
    tpot: EachToken = None,
    count: Count = 1000,
    seed: Seed = 0,
    dry_run: DryRun = False,
    as_json: Json = False,
    verbose: Verbose = False,
    html: Html = None,
    trace: Trace = None,
    svg: Svg = None,
    overwrite: Overwrite = False,
    no_cache: NoCache = False,
) -> int:
    """Predict a run: shardings, collectives, memory, time. Needs no GPU, no network and no other process.

    key.path=value changes only RECIPE, not the OTHER of --diff and --against; --device applies to both.

    A sharded tensor is printed as w_up[E_fsdp, M_tp]: its dim embed (E) is sharded over the mesh axis fsdp, mlp (M)
    over tp; a dim without an axis is replicated; behind it {U_tp} is a sum still to be made over tp.

    RECIPE may be the plan.json of an earlier plan, which is read, not planned.
    """
    given = _given_options(context)
    _require_sense(given, what)
    _require_free([given[name] for name in FILES if name in given], overwrite)
    if check is not None:
        from tpshard.plan.questions import check_run

        return _print(check_run.answered(check, as_json))
    from tpshard.recipes.keys.schema import Recipe

    subject = _saved(recipe, given, overrides) or _recipe(recipe, on_device(overrides, device))
    if what == "serve" and isinstance(subject, Recipe):
        from tpshard.cli.shared.rehearsed import run_rehearsal
        from tpshard.plan.questions.serving_answers import TimeLimits
        from tpshard.plan.server.traffic import Traffic

        traffic = Traffic(prompt or 1, answer or 1, rate, count=count, seed=seed)
        return run_rehearsal(subject, traffic, TimeLimits(ttft, tpot), search=search, as_json=as_json, svg=svg)
    from tpshard.cli.main import columns
    from tpshard.plan import outputs
    from tpshard.plan.step.forecast import Conditions, amount

    text = _text(against or ())
    other = None if text is not None else _other(given, recipe, overrides, device, subject)
    first = " ".join([*([recipe] if recipe else []), *(overrides or ())]) or (
        subject.name if isinstance(subject, Recipe) else ""
    )
    try:
        conditions = Conditions(None if tokens is None else amount(tokens), price, watts, failures, restart, save)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--tokens") from error
    options = outputs.PlanOptions(
        source=recipe if recipe is not None and "=" not in recipe else "", what=what, dry_run=dry_run, as_json=as_json,
        verbose=verbose, html=html, trace=trace, svg=svg, explain=explain, search=search, stage=stage, of=of or "",
        run=None if conditions == Conditions() else conditions, passes=passes, skew=skew, suggest=suggest, fit=fit,
        pin=pin, net=net, against=text, compared=(first, " ".join(diff or against or ())), cached=not no_cache,
        width=columns(sys.stdout) or outputs.screen_words.WIDTH,
    )  # fmt: skip
    note = partial(print, file=sys.stderr)
    if diff is not None and other is not None:
        from tpshard.plan.questions import diff as diffs

        return _print(diffs.answered(subject, other, options))
    if not isinstance(subject, Recipe):
        return _print(outputs.deliver_saved(subject, options))
    entry = outputs.entry(subject, options)
    done = outputs.cached_result(subject, options, entry, note) if entry is not None else None
    if done is None:
        from tpshard.plan import command

        done = command.run(subject, options, other if isinstance(other, Recipe) else None, note, entry)
    return _print(done)


def _recipe(name: str | None, overrides: Sequence[str]) -> Recipe:
    """The recipe that the command line names. A plan reads no weights."""
    return load(name, overrides, weights=False)


def _print(result: Any) -> int:
    sys.stdout.write(result.text)
    return int(result.exit)


def _given_options(context: typer.Context) -> dict[str, Any]:
    """The options and arguments that the command line gives, by their names in `--help`."""
    options = {}
    for parameter in context.command.params:
        key = str(parameter.name)
        if getattr(context.get_parameter_source(key), "name", "DEFAULT") != "DEFAULT":
            options[next((name for name in parameter.opts if name.startswith("--")), "RECIPE")] = context.params[key]
    return options


def _require_sense(options: Mapping[str, Any], what: str) -> None:
    """Raises BadParameter for options that say nothing together, or not for `what`."""

    def refuse(why: str, names: Sequence[str]) -> typer.BadParameter:
        return typer.BadParameter(why, param_hint=", ".join(names))

    if what not in (*STEPS, "serve"):
        raise refuse(f"{what!r} is not train, prefill, decode or serve", ["--for"])
    asked, about = [name for name in QUESTIONS if name in options], QUESTIONS | ADDITIONS | FILES | LOAD
    if len(besides := [*asked, *(name for name in ADDITIONS | FILES if name in options)]) > 1 and asked:
        raise refuse("a question is asked alone", besides)
    if other := [name for name in about if name in options and what not in about[name]]:
        raise refuse(f"it is about --for {' or '.join(about[other[0]])}", [other[0]])
    for name, needed in NEEDS.items():
        if (name in options or name == f"--for {what}") and (missing := [one for one in needed if one not in options]):
            raise refuse(f"{name} needs it", missing)
    for name, excluded in EXCLUDES.items():
        if name in options and (present := [one for one in excluded if one in options]):
            raise refuse(f"{name} has its own", present)
    numbers = {name: value for name, value in options.items() if isinstance(value, float)}
    if endless := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise refuse("the number is not finite", endless)
    if never := [name for name in POSITIVE if options.get(name, 1) == 0]:
        raise refuse("nothing is answered in no time", never)


def _require_free(files: Sequence[Path], overwrite: bool) -> None:
    """Raises Mistakes or BadParameter unless each file may be written, and no two are the same."""
    from tpshard.cli.shared.files import refuse

    for file in files:
        refuse(file, overwrite)
    if len({file.absolute() for file in files}) < len(files):
        raise typer.BadParameter("several of them name the same file", param_hint=", ".join(FILES))


def _text(words: Sequence[str]) -> str | None:
    """The content of a text file that a stage is compared with; None for a recipe or changes of one."""
    path = Path(words[0]) if len(words) == 1 else Path()
    if not path.is_file() or path.suffix in (".yaml", ".yml"):
        return None
    from tpshard.diagnostics.diagnostic import Exit, Mistakes
    from tpshard.files.folder_json import read_regular

    try:
        return read_regular(path).decode()
    except (OSError, ValueError) as error:
        fix = "name a recipe, or a text that `tpshard plan --stage` printed"
        raise Mistakes.one(f"{path} cannot be read as text", exit=Exit.USAGE, why=str(error), fix=fix) from error


def _saved(name: str | None, options: Mapping[str, Any], overrides: Sequence[str] | None = None) -> SavedPlan | None:
    """The saved plan that is named in place of a recipe, if one is. Raises BadParameter for what needs its programs."""
    if name is None or not name.endswith(".json"):
        return None
    from tpshard.plan import saved_plan

    if saved_plan.is_recipe(name):
        return None
    if beyond := [option for option in options if option not in OF_SAVED]:
        raise typer.BadParameter("it is not asked of a saved plan but of its recipe", param_hint=", ".join(beyond))
    if overrides:
        why = "a saved plan cannot be changed; plan its recipe with them"
        raise typer.BadParameter(why, param_hint="KEY.PATH=VALUE")
    return saved_plan.read(name)


def _other(
    options: Mapping[str, Any],
    recipe: str | None,
    overrides: Sequence[str] | None,
    device: str | None,
    subject: Recipe | SavedPlan,
) -> Recipe | SavedPlan | None:
    """What is compared with: another recipe or saved plan, or the first recipe with changes; None for nothing."""
    option = "--diff" if "--diff" in options else "--against"
    words = options.get(option, ())
    names = [word for word in words if "=" not in word or Path(word).exists()]
    if names and len(words) > 1:
        raise typer.BadParameter(
            "give one recipe, or several KEY.PATH=VALUE of this one; changes to another recipe belong in a file that "
            "extends it", param_hint=option,
        )  # fmt: skip
    if names:
        return _saved(names[0], {}) or _recipe(names[0], on_device(None, device))
    if not words:
        return None
    from tpshard.recipes.keys.schema import Recipe

    if not isinstance(subject, Recipe):
        raise typer.BadParameter("a saved plan is compared with a recipe or another saved plan", param_hint=option)
    other = _recipe(recipe, [*on_device(overrides, device), *words])
    check_change(option, words, subject, other)
    return other
