"""`tpshard plan`: predicts a run without running it."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from tpshard.cli.shared.arguments import Device, Json, OptionalRecipe, Overrides, Overwrite, load, on_device

DryRun = Annotated[bool, typer.Option("--dry-run", help="Write only the files named here, and the cache of plans.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print everything, however long.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")]
Trace = Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace for Perfetto.")]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw timeline and memory.")]
Explain = Annotated[str | None, typer.Option("--explain", metavar="NAME", help="Say why a tensor has its sharding.")]
Diff = Annotated[
    list[str] | None,
    typer.Option(
        "--diff", metavar="OTHER", show_default=False,
        help="Compare with another recipe, or with this one changed by KEY.PATH=VALUE, which can be repeated.",
    ),
]  # fmt: skip
Search = Annotated[
    bool,
    typer.Option("--search", help="Try meshes, recomputation and micro-batches; for a server, meshes and requests."),
]
Suggest = Annotated[bool, typer.Option("--suggest", help="Search what the recipe leaves free for a faster step.")]
Fit = Annotated[bool, typer.Option("--fit", help="Print the recipe with the smallest edits that fit its devices.")]
Pin = Annotated[bool, typer.Option("--pin", help="Print the recipe with all inferred shardings pinned.")]
Check = Annotated[
    Path | None,
    typer.Option("--check", metavar="RUN", help="Compare a run with its plan, figure by figure."),
]
Passes = Annotated[bool, typer.Option("--passes", help="Show how each pass changes collectives, memory and time.")]
Skew = Annotated[
    float | None,
    typer.Option("--skew", metavar="X", help="Price an uneven routing too: the busiest expert gets X times the mean."),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Plan anew, and keep nothing for the next time.")]
Network = Annotated[bool, typer.Option("--net", help="Show the network each mesh axis uses, and other axis orders.")]
_about_run = partial(typer.Option, min=0, rich_help_panel="The whole run")
Tokens = Annotated[
    str | None, _about_run("--tokens", min=None, metavar="N", help="Training tokens: 15T, 300B. Default: train.steps.")
]
Price = Annotated[float | None, _about_run("--price", help="Price of a device-hour.")]
Watts = Annotated[float | None, _about_run("--watts", help="Power of a device.")]
Failures = Annotated[float | None, _about_run("--failures", help="Failures of a device per hour; 0: none.")]
Restart = Annotated[float | None, _about_run("--restart", help="Seconds from a failure to the next step.")]
Save = Annotated[float | None, _about_run("--save", help="Seconds per checkpoint.")]
What = Annotated[
    str,
    typer.Option(
        "--for", metavar="WHAT", help="train; prefill or decode: a server's step; serve: a server under a load."
    ),
]
_about_load = partial(typer.Option, rich_help_panel="A server's load, with --for serve")
Rate = Annotated[float | None, _about_load("--rate", min=0, help="Requests per second, at random times.")]
Prompt = Annotated[int | None, _about_load("--prompt", min=1, help="Prompt tokens of a request.")]
Answer = Annotated[int | None, _about_load("--answer", min=1, help="Tokens of an answer.")]
FirstToken = Annotated[
    float | None, _about_load("--ttft", min=0, help="Limit in seconds to the first token, for 99% of requests.")
]
EachToken = Annotated[
    float | None, _about_load("--tpot", min=0, help="Limit in seconds per further token, for 99% of requests.")
]
Count = Annotated[int | None, _about_load("--count", min=10, help="Requests to simulate; default 1000.")]
Seed = Annotated[int | None, _about_load("--seed", min=0, help="Seed of the requests' times; default 0.")]


def plan(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    verbose: Verbose = False,
    html: Html = None,
    trace: Trace = None,
    svg: Svg = None,
    explain: Explain = None,
    diff: Diff = None,
    search: Search = False,
    passes: Passes = False,
    skew: Skew = None,
    suggest: Suggest = False,
    fit: Fit = False,
    pin: Pin = False,
    check: Check = None,
    net: Network = False,
    what: What = "train",
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
    count: Count = None,
    seed: Seed = None,
    no_cache: NoCache = False,
    overwrite: Overwrite = False,
    device: Device = None,
) -> int:
    """Predict a run: shardings, collectives, memory, time. Needs no GPU, no network and no other process.

    key.path=value changes only RECIPE, not the OTHER of --diff; --device applies to both.

    A sharded tensor is printed as w_up[E_fsdp, M_tp]: its dim embed (E) is sharded over the mesh axis fsdp, mlp (M)
    over tp; a dim without an axis is replicated; behind it {U_tp} is a sum still to be made over tp.
    """
    from tpshard.cli.shared.files import refuse

    files = {"--html": html, "--trace": trace, "--svg": svg}
    named = [file for file in files.values() if file is not None]
    for file in named:
        refuse(file, overwrite)
    if len({file.absolute() for file in named}) < len(named):
        raise typer.BadParameter("several of them name the same file", param_hint=", ".join(files))
    modes = (("--explain", explain), ("--diff", diff), ("--search", search), ("--passes", passes), ("--fit", fit),
             ("--pin", pin), ("--check", check), ("--net", net))  # fmt: skip
    asked_for = [name for name, on in modes if on]
    unwritten = [name for name, file in files.items() if file is not None]
    if len(asked_for) > 1 or (asked_for and unwritten):
        raise typer.BadParameter("these cannot be combined", param_hint=", ".join([*asked_for, *unwritten]))
    if what not in ("train", "prefill", "decode", "serve"):
        raise typer.BadParameter(f"{what!r} is not train, prefill, decode or serve", param_hint="--for")
    load_told = {"--rate": rate, "--prompt": prompt, "--answer": answer, "--ttft": ttft, "--tpot": tpot,
                 "--count": count, "--seed": seed}  # fmt: skip
    load_options = [name for name, value in load_told.items() if value is not None]
    numbers = load_told | {"--price": price, "--watts": watts, "--failures": failures, "--restart": restart,
                           "--save": save, "--skew": skew}  # fmt: skip
    endless = [name for name, value in numbers.items() if value is not None and not math.isfinite(value)]
    if endless:
        raise typer.BadParameter("the number is not finite", param_hint=", ".join(endless))
    if load_options and what != "serve":
        raise typer.BadParameter("these options need --for serve", param_hint=", ".join(load_options))
    if passes and what != "train":
        raise typer.BadParameter("the passes shown are those of a training step", param_hint="--passes, --for")
    if net and what != "train":
        raise typer.BadParameter("the axes placed are those of a training mesh", param_hint="--net, --for")
    if search and what not in ("train", "serve"):
        raise typer.BadParameter("the search is over training runs and servers", param_hint="--search, --for")
    for name, on in (("--fit", fit), ("--pin", pin), ("--suggest", suggest), ("--check", check)):
        if on and (what != "train" or (suggest and asked_for)):
            raise typer.BadParameter("it is about training runs", param_hint=f"{name}, --for")
    about = (tokens, price, watts, failures, restart, save)
    whole = any(option is not None for option in about)
    if whole and (what != "train" or asked_for):
        raise typer.BadParameter(
            "the cost of a run needs a training plan", param_hint="--tokens, --price, --watts, ..."
        )
    if skew is not None and (what != "train" or asked_for):
        raise typer.BadParameter("a routing is skewed in a training plan", param_hint="--skew")
    if check is not None:
        from tpshard.plan import command

        if recipe is not None:
            raise typer.BadParameter("a run has its own recipe: name none", param_hint="--check")
        if device is not None:
            raise typer.BadParameter("a run's plan has its own device: name none", param_hint="--device, --check")
        held = command.check(check, as_json)
        sys.stdout.write(held.text)
        return held.exit
    changes = on_device(overrides, device)
    if what == "serve":
        if (unwritten and unwritten != ["--svg"]) or [name for name in asked_for if name != "--search"]:
            raise typer.BadParameter("a server's load has a table, --json and --svg", param_hint="--for")
        if prompt is None or answer is None:
            raise typer.BadParameter("give the tokens of a request and of its answer", param_hint="--prompt, --answer")
        if not all(value is None or value > 0 for value in (rate, ttft, tpot)):
            raise typer.BadParameter("nothing is answered in no time", param_hint="--rate, --ttft, --tpot")
        server = load(recipe, changes)
        from tpshard.cli.shared.rehearsed import run_rehearsal
        from tpshard.plan.questions.serving_answers import TimeLimits
        from tpshard.plan.server.traffic import Traffic

        traffic = Traffic(prompt, answer, rate, count=count or 1000, seed=seed or 0)
        return run_rehearsal(server, traffic, TimeLimits(ttft, tpot), search=search, as_json=as_json, svg=svg)
    loaded = load(recipe, changes)
    other = None
    if diff:
        recipes = [word for word in diff if "=" not in word or Path(word).exists()]
        if recipes and len(diff) > 1:
            raise typer.BadParameter(
                "give one recipe, or several KEY.PATH=VALUE of this one; changes to another recipe belong in a file "
                "that extends it", param_hint="--diff",
            )  # fmt: skip
        other = load(recipes[0], on_device(None, device)) if recipes else load(recipe, [*changes, *diff])
    from tpshard.plan import outputs
    from tpshard.plan.step.forecast import Conditions, amount

    try:
        conditions = Conditions(None if tokens is None else amount(tokens), price, watts, failures, restart, save)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--tokens") from error
    options = outputs.PlanOptions(
        source=recipe if recipe is not None and "=" not in recipe else "", what=what, dry_run=dry_run, as_json=as_json,
        verbose=verbose, html=html, trace=trace, svg=svg, explain=explain, search=search,
        run=conditions if whole else None, passes=passes, skew=skew, suggest=suggest, fit=fit, pin=pin, net=net,
        compared=(" ".join([*([recipe] if recipe else []), *(overrides or ())]) or loaded.name, " ".join(diff or ())),
    )  # fmt: skip
    note = partial(print, file=sys.stderr)
    entry = None if no_cache or other is not None else outputs.entry(loaded, options)
    done = outputs.cached_result(loaded, options, entry, note) if entry is not None else None
    if done is None:
        from tpshard.plan import command

        done = command.run(loaded, options, other, note, entry)
    sys.stdout.write(done.text)
    return done.exit
