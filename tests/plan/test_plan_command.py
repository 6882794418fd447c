"""`tpshard plan` refuses bad options before it plans, and writes the files that are asked for."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import operator
import zlib
from random import Random

import pytest
from small_recipe import RECIPE
from tpshard.cli.main import run as tpshard
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.plan import command, outputs, plan_cache, planner, saved_plan
from tpshard.plan.questions import plan_error
from tpshard.plan.search import suggest
from tpshard.programs.step import saved_step
from tpshard.recipes.reading.load import loads


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["mesh.tp=4"], 5, "does not fit 4 devices"),  # row 8: the product is not the devices
        (["mesh.tp=3", "cluster.devices_per_node=6"], 4, "3"),  # row 9: heads that tp does not divide
        (["sharding.rules.heads=tpp"], 3, "tpp"),  # row 10: an axis that is not there
        (["sharding.pin.layers.9.mlp.up.weight=[tp, null]"], 3, ""),  # row 10: a pattern that matches nothing
        (["batch.global_sequences=7"], 4, "7"),  # row 12
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_built(small, capsys, overrides, code, words):
    assert tpshard(["plan", "small.yaml", "--dry-run", *overrides]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err


def test_a_saved_plan_is_refused_for_another_program(report, planned, tmp_path, monkeypatch):
    recipe = loads(RECIPE)
    devices = report.devices
    file = tmp_path / "plan.json"
    saved_plan.write(file, saved_plan.dumps(planned, recipe))
    saved_plan.check(saved_plan.read(str(file)), recipe, devices)
    saved_plan.check(saved_plan.read(str(file)), loads(RECIPE, ["run.dir=elsewhere", "logging.every_steps=3"]), devices)

    def refusal(changes=(), devices=devices):
        with pytest.raises(Mistakes, match=r"plan\.json is for another program") as caught:
            saved_plan.check(saved_plan.read(str(file)), loads(RECIPE, changes), devices)
        assert caught.value.exit == Exit.FIT
        return str(caught.value)

    output = refusal(["batch.global_sequences=16", "optimizer.betas=[0.9, 0.99]", "remat=full"])
    assert "`batch.global_sequences: 16`, planned with 8" in output and "<override 1>:1:24" in output
    assert "`optimizer.betas: [0.9, 0.99]`, planned with [0.9, 0.95]" in output and "planned with selective" in output
    monkeypatch.setattr(saved_plan.metadata, "version", {"torch": "2.99.0", "tpshard": "0.1.0"}.__getitem__)
    assert "torch 2.99.0, planned with 2." in refusal() and "the code" not in refusal()
    monkeypatch.undo()
    held = json.loads(file.read_text())
    file.write_text(json.dumps(held | {"versions": held["versions"] | {"the code of tpshard": "another"}}))
    assert "the code of tpshard has changed since" in refusal()
    file.write_text(json.dumps(held | {"step": None}))
    assert "it holds no programs" in refusal()
    for text in ("{}", "[]", json.dumps(report.to_json())):
        file.write_text(text)
        with pytest.raises(Mistakes, match="not a saved plan"):
            saved_plan.read(str(file))


def test_a_saved_plan_holds_the_programs_that_it_tells_of(report, planned, tmp_path):
    file = tmp_path / "plan.json"
    saved_plan.write(file, saved_plan.dumps(planned, loads(RECIPE)))
    actual = planner.read_programs(saved_plan.read(str(file)), planned.step.setting)
    assert planner.planned_training(actual, "small.yaml").report.to_json() == report.to_json()
    held = json.loads(file.read_text())
    other_evaluation = dataclasses.replace(actual)
    other_evaluation.__dict__["evaluation"] = (dataclasses.replace(actual.stages[0]),)
    packed = [saved_step.pack(programs) for programs in (dataclasses.replace(actual, micro=actual.update),
                                                         other_evaluation)]  # fmt: skip
    for step in (held["step"][:-40], "AAAA", *packed):
        file.write_text(json.dumps(held | {"step": step}))
        with pytest.raises(
            Mistakes, match=r"the programs in \S+ (cannot be read|differ from those that its plan describes)"
        ):
            planner.read_programs(saved_plan.read(str(file)), planned.step.setting)


ODD = (-1, 0, 1 << 70, 0.5, True, None, "", "x", "fsdp", "mlp.up", [], ["tuple"], ["tuple", 1 << 40], ["float", "nan"],
       ["torch", "float16"], ["node", "x"], ["pool", 0], ["pool", -1], ["map"], {})  # fmt: skip
"""JSON that stands for something else, or for nothing."""


def places(value, inside=()):
    """The keys that lead to each value in JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*inside, key)
        yield from places(item, (*inside, key))


def test_the_plan_of_somebody_else_runs_what_its_recipe_gives_or_nothing(planned, tmp_path, monkeypatch):
    """Every other value at any place of its programs is refused, or has no effect."""
    plan = saved_plan.dumps(planned, loads(RECIPE))
    saved, setting, built = save_and_read(tmp_path, plan), planned.step.setting, planned.step
    assert planner.read_programs(saved, setting).fingerprints == built.fingerprints
    plan_cache.remember(plan)
    assert plan_cache.is_own(plan) and not plan_cache.is_own(plan + " ")
    monkeypatch.setattr(planner, "build_programs", lambda setting: built)
    changed = dataclasses.replace(saved, text="")
    assert planner.read_programs(changed, setting) is built and planner.read_programs(saved, setting) is not built
    step = json.loads(zlib.decompress(base64.b64decode(saved.step)))
    every, random, refused = list(places(step)), Random(0), 0
    for odd in ODD:
        *above, last = random.choice(every)
        holder = functools.reduce(operator.getitem, above, step)
        before, holder[last] = holder[last], odd
        text = base64.b64encode(zlib.compress(json.dumps(step).encode(), 1)).decode()
        holder[last] = before
        try:
            assert planner.read_programs(dataclasses.replace(changed, step=text), setting) is built
        except Mistakes as mistakes:
            assert mistakes.exit == Exit.RECIPE
            refused += 1
    assert refused > len(ODD) // 3
    forged = dataclasses.replace(built, micro=built.update)
    with pytest.raises(Mistakes, match="differ from those that its recipe gives"):
        told = {"step": saved_step.pack(forged), "fingerprints": forged.fingerprints}
        planner.read_programs(dataclasses.replace(changed, **told), setting)


def save_and_read(folder, plan):
    file = folder / "plan.json"
    saved_plan.write(file, plan)
    return saved_plan.read(str(file))


@pytest.mark.parametrize(
    "options",
    [
        ["--html", "same", "--svg", "same"],
        ["--explain", "norm.weight", "--html", "page.html"],
        ["--search", "--for", "decode"],
        ["--html", "."],
        ["--price", "inf"],
        ["--for", "serve", "--prompt", "8", "--answer", "8", "--rate", "inf"],
    ],
)
def test_options_that_do_not_go_together_are_refused_before_planning(small, capsys, options):
    assert tpshard(["plan", "small.yaml", "--dry-run", *options]) == Exit.USAGE
    assert "exists" not in capsys.readouterr().err
    assert [p.name for p in small.parent.iterdir()] == ["small.yaml"]


@pytest.mark.parametrize(
    "options",
    [
        ["--dry-run", "--html", "file/page.html"],
        ["--dry-run", "--trace", "file/deeper/trace.json"],
        ["--dry-run", "--svg", "locked/new/drawn.svg"],
        ["run.dir=file"],
        ["run.dir=taken"],
    ],
)
def test_files_that_cannot_be_written_are_found_before_planning(small, capsys, monkeypatch, options):
    base = small.parent
    (base / "file").write_text("")
    (base / "locked").mkdir()
    (base / "taken" / "plan.html").mkdir(parents=True)
    access = saved_plan.os.access  # root may write everywhere
    monkeypatch.setattr(saved_plan.os, "access", lambda path, mode: "locked" not in str(path) and access(path, mode))
    monkeypatch.setattr(planner, "planned", lambda *_: pytest.fail("it was planned"))
    assert tpshard(["plan", "small.yaml", *options]) == Exit.MACHINE
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(p.name for p in base.iterdir()) == ["file", "locked", "small.yaml", "taken"]


def test_without_dry_run_the_plan_is_saved_in_the_runs_folder(small, planned, monkeypatch):
    monkeypatch.setattr(planner, "planned", lambda *_: planned)
    monkeypatch.setattr(suggest, "promising", lambda *_, **__: [])
    done = command.run(loads(RECIPE), command.PlanOptions(source="small.yaml"))
    assert done.exit == Exit.DONE
    folder = small.parent / "runs" / "small"
    assert sorted(p.name for p in folder.iterdir()) == ["plan.html", "plan.json", "plan.trace.json"]


def test_a_run_is_compared_with_its_plan(report, planned, tmp_path, monkeypatch):
    assert plan_error.record(tmp_path) == ""
    saved_plan.write(tmp_path / "plan.json", saved_plan.dumps(planned, loads(RECIPE)))
    step_s = report.pricing.step_s
    rows = [{"step": i, "loss": 1.0, "step_s": step_s * (9 if i < 2 else 2), "run": 1} for i in range(8)]
    rows.append({"step": 8, "eval_loss": 1.0, "run": 1})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 9, "lo')
    compared = plan_error.compare(tmp_path)
    assert compared is not None and compared["step_s"]["error"] == pytest.approx(-0.5)
    assert "step_s" not in plan_error.record(tmp_path), "the shipped CPU's times are those of another machine"
    monkeypatch.setattr(plan_error, "SHIPPED_CPU", "another")
    assert "step_s" in plan_error.record(tmp_path) and "(-50%)" in plan_error.record(tmp_path)
    assert json.loads((tmp_path / "plan_measured.json").read_text())["step_s"]["measured"] == pytest.approx(2 * step_s)


def test_two_logged_rows_are_compared_by_their_middle(planned, tmp_path):
    saved_plan.write(tmp_path / "plan.json", saved_plan.dumps(planned, loads(RECIPE)))
    rows = [{"step": i, "loss": 1.0, "step_s": s, "tokens_per_s": 6 / s} for i, s in enumerate((9.0, 2.0, 3.0))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    compared = plan_error.compare(tmp_path)
    assert compared is not None
    assert (compared["step_s"]["measured"], compared["tokens_per_s"]["measured"]) == (2.5, 2.5)


FLAT = "mesh={tp: 1, fsdp: 4}"


@pytest.mark.parametrize(
    ("options", "tp", "names"),
    [
        (["seed=9", FLAT, "--diff", "other.yaml"], (1, 4), (f"small.yaml seed=9 {FLAT}", "other.yaml")),
        (["seed=9", "--diff", FLAT], (2, 1), ("small.yaml seed=9", FLAT)),
        (
            ["seed=9", "--diff", "mesh.tp=1", "--diff", "mesh.fsdp=4"],
            (2, 1),
            ("small.yaml seed=9", "mesh.tp=1 mesh.fsdp=4"),
        ),
    ],
)
def test_changes_are_to_the_first_of_two_recipes(small, planned, capsys, monkeypatch, options, tp, names):
    (small.parent / "other.yaml").write_text(RECIPE.replace("{fsdp: 2, tp: 2}", "{fsdp: 1, tp: 4}"))
    recipes = []
    monkeypatch.setattr(planner, "planned", lambda recipe, *_: recipes.append(recipe) or planned)
    assert tpshard(["plan", "small.yaml", "--json", *options, "--device", "a100-40g"]) == Exit.DONE
    parsed = json.loads(capsys.readouterr().out)
    assert tuple(recipe.mesh["tp"] for recipe in recipes) == tp
    assert (parsed["before"], parsed["after"]) == names
    assert [recipe.cluster.device for recipe in recipes] == ["a100-40g"] * 2
    assert [recipe.seed == 9 for recipe in recipes] == [True, "other.yaml" not in options]


def test_two_other_recipes_are_refused(small, capsys):
    assert tpshard(["plan", "small.yaml", "--diff", "small.yaml", "--diff", "mesh.tp=1"]) == Exit.USAGE
    assert "--diff: give one recipe, or several KEY.PATH=VALUE" in capsys.readouterr().err


def test_passes_are_shown_one_by_one(small, capsys):
    assert tpshard(["plan", "small.yaml", "--passes", "--json"]) == Exit.DONE
    rows = json.loads(capsys.readouterr().out)["passes"]
    assert [row["name"] for row in rows] == [
        "", "recompute", "simplify", "accumulate", "bucket", "hoist_gradients", "overlap_exchanges", "wait_late",
        "gather_late", "prefetch", "reduce_early", "sink_waits",
    ]  # fmt: skip
    assert tpshard(["plan", "small.yaml", "--dry-run", "--json"]) == Exit.DONE
    plan = json.loads(capsys.readouterr().out)
    last = rows[-1]
    assert last["step_s"] == plan["time"]["step_s"] and last["peak_bytes"] == plan["memory"]["peak_bytes"]
    assert last["collectives"] == sum(row["count"] for row in plan["collectives"])
    assert last["collective_bytes"] == sum(row["bytes"] for row in plan["collectives"])
    counts = [row["collectives"] for row in rows]
    assert len({*counts[1:4]}) == 1 and counts[4] < counts[3] and len({*counts[4:]}) == 1  # only buckets merge them
    assert tpshard(["plan", "small.yaml", "--passes"]) == Exit.DONE
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(rows) + 1 and shown[1].startswith("as partitioned") and shown[10].startswith("prefetch")
    assert [p.name for p in small.parent.iterdir()] == ["small.yaml"]
    assert tpshard(["plan", "small.yaml", "--passes", "--for", "decode"]) == Exit.USAGE


@pytest.mark.parametrize("begun", ["lock.json", "metrics.jsonl", "checkpoints/step-000001"])
def test_a_run_keeps_its_own_plan_from_its_start_on(begun, tmp_path):
    assert outputs.saved_in(command.PlanOptions(), tmp_path) == tmp_path
    (tmp_path / begun).mkdir(parents=True)
    assert outputs.saved_in(command.PlanOptions(), tmp_path) == tmp_path / "plans" / "train"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--explain x --html page.html", "--explain, --html: a question is asked alone"),
        ("--fit --suggest", "--fit, --suggest: a question is asked alone"),
        ("--search --diff mesh.tp=1", "--diff, --search: a question is asked alone"),
        ("--for decode --passes", "--passes: it is about --for train"),
        ("--for decode --skew 2", "--skew: it is about --for train"),
        ("--for serve --prompt 8 --answer 8 --trace t.json", "--trace: it is about --for train or prefill or decode"),
        ("--count 1000", "--count: it is about --for serve"),
        ("--of layers", "--stage: --of needs it"),
        ("--for serve --prompt 8", "--answer: --for serve needs it"),
        ("--check run --device h200", "RECIPE, --device: --check has its own"),
        ("--for serve --prompt 8 --answer 8 --ttft 0", "--ttft: nothing is answered in no time"),
        ("--skew nan", "--skew: the number is not finite"),
        ("--html one --svg one", "several of them name the same file"),
    ],
)
def test_options_that_say_nothing_together_are_refused(small, capsys, line, words):
    assert tpshard(["plan", "small.yaml", *line.split()]) == Exit.USAGE
    assert words in capsys.readouterr().err
    assert [path.name for path in small.parent.iterdir()] == ["small.yaml"]


def test_the_help_is_in_groups_and_every_option_has_one(capsys):
    assert tpshard(["plan", "--help"]) == 0
    groups = [line for line in capsys.readouterr().out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert [group.partition(",")[0].strip(":") for group in groups] == [
        "Arguments", "What is planned", "One question instead of a plan", "More about a training run",
        "A server's load", "Outputs", "Options",
    ]  # fmt: skip


@pytest.mark.parametrize("question", ["--explain norm", "--diff remat=none", "--passes", "--net", "--stage graph"])
def test_a_question_writes_nothing_without_being_told(small, capsys, question):
    assert tpshard(["plan", "small.yaml", *question.split()]) == 0 and capsys.readouterr().out
    assert [path.name for path in small.parent.iterdir()] == ["small.yaml"]
