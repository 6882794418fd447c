"""All mistakes of a recipe are reported at once, each with its place and the legal values."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, as_text, dumps
from tpshard.recipes.reading.checker import homes
from tpshard.recipes.reading.extends import builtins
from tpshard.recipes.reading.load import examine, load, loads
from tpshard.recipes.text import other_tools


def wrong(text: str, *overrides: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(Mistakes) as caught:
        loads(text, overrides, file="a.yaml")
    return caught.value.diagnostics


def place(d: Diagnostic) -> tuple[int, int]:
    assert d.where is not None
    return d.where.line, d.where.col


def pointed_text(d: Diagnostic) -> str:
    """The characters that the caret underlines."""
    assert d.where is not None
    return d.where.text[d.where.col - 1 :][: d.where.width]


def of_file(tmp_path: Path, data: bytes) -> tuple[Diagnostic, ...]:
    path = tmp_path / "a.yaml"
    path.write_bytes(data)
    with pytest.raises(Mistakes) as caught:
        load(path)
    assert caught.value.exit == Exit.RECIPE
    return caught.value.diagnostics


def test_typos_at_any_depth_are_all_told_with_a_suggestion() -> None:
    mistakes = wrong(
        "modle: {preset: tiny}\n"
        "model:\n  presett: tiny\n"
        "fsdp: {accumulate: {gathr: step}}\n"
        "logging: {wandb: {prject: a}}\n"
    )
    typos = {d.message: d for d in mistakes if d.message.startswith("unknown key")}
    assert [(place(d), d.fix) for d in typos.values()] == [
        ((1, 1), "did you mean `model`?"),
        ((3, 3), "did you mean `preset`?"),
        ((4, 21), "did you mean `gather`?"),
        ((5, 19), "did you mean `project`?"),
    ]
    assert list(typos) == [f"unknown key `{k}`" for k in ("modle", "model.presett", "fsdp.accumulate.gathr",
                                                          "logging.wandb.prject")]  # fmt: skip


def test_a_key_in_the_wrong_section_is_sent_home() -> None:
    (actual,) = wrong("model: {preset: tiny}\nlr: 0.1\n")
    assert actual.fix == "it belongs to `optimizer.lr`"
    (actual,) = wrong("model: {preset: tiny}\ntrain: {step: 3}\n")
    assert actual.fix == "did you mean `steps`?"


@pytest.mark.parametrize(
    ("line", "mark", "legal"),
    [
        ("optimizer: {lr: -1}", "-1", "at least 0"),
        ("optimizer: {lr: .nan}", ".nan", "a number"),
        ("optimizer: {eps: .inf}", ".inf", "above 0"),
        ("optimizer: {lr: fast}", "fast", "a number"),
        (f"optimizer: {{lr: {10**350}}}", str(10**350), "a number"),
        ('train: {steps: "100"}', '"100"', "a whole number"),
        ("train: {steps: 1e99}", "1e99", "at most"),
        ("train: {steps: 1.5}", "1.5", "a whole number"),
        ("train: {steps: true}", "true", "a whole number"),
        ("checkpoint: {keep_last: null}", "null", "a whole number"),
        ("train: {steps: [1]}", "[", "a whole number"),
        ("mesh: {tp: 0}", "0", "at least 1"),
        ("mesh: {tp: -2}", "-2", "-1 for the rest"),
        ("mesh: 4", "4", "a map"),
        ("compile: jit", "jit", "auto, inductor, blocks or eager"),
        ("compile: {a: 1}", "{", "auto, inductor, blocks or eager"),
        ("remat: some", "some", "none, full or selective"),
        ("fsdp: {bucket: {mb: 0}}", "0", "above 0"),
        ("fsdp: {memory_limit: lots}", "lots", "70GiB"),
        ("fsdp: {reshard_after_forward: maybe}", "maybe", "true or false or auto"),
        ("model: 3", "3", "a map of preset"),
        ("quantize: {bits: 5}", "5", "2, 3, 4 or 8"),
        ("quantize: {group_size: 12}", "12", "multiple of 8"),
        ("serve: {port: 70000}", "70000", "at most 65,535"),
        ("cluster: {device: h100}", "h100", "h100-sxm-80g"),
        ("optimizer: {betas: [0.9, 1]}", "1", "below 1"),
        ("optimizer: {betas: [0.9]}", "[", ""),
        ("name: a/b", "a/b", "without slashes"),
        ("name: ..", "..", "without slashes"),
        ('name: "a\\x7fb"', '"a\\x7fb"', "control characters"),
        (f"name: {'n' * 201}", "n" * 201, "at most 200 bytes"),
        ("name: 12", "12", "text"),
    ],
)
def test_a_wrong_value_says_where_and_what_would_be_legal(line: str, mark: str, legal: str) -> None:
    text = f"{line}\n" if line.startswith("model") else f"model: {{preset: tiny}}\n{line}\n"
    mistakes = wrong(text)
    assert mistakes[0].exit == Exit.RECIPE
    assert mistakes[0].where is not None and mistakes[0].where.line == text.count("\n")
    assert pointed_text(mistakes[0]) == mark
    assert legal in mistakes[0].why


def test_a_misspelt_choice_is_suggested() -> None:
    assert wrong("model: {preset: llama3-8B}")[0].fix == "did you mean `llama3-8b`?"
    assert wrong("model: {preset: tiny}\ncluster: {device: h100-sxm-80}")[0].fix == "did you mean `h100-sxm-80g`?"


def test_numbers_are_read_as_people_write_them() -> None:
    recipe = loads(
        "model: {preset: tiny}\noptimizer: {lr: 3e-4}\ntrain: {steps: 1e3}\nbatch: {global_sequences: 1_024}"
    )
    assert (recipe.optimizer.lr, recipe.train.steps, recipe.batch.global_sequences) == (3e-4, 1000, 1024)
    assert isinstance(recipe.train.steps, int)


@pytest.mark.parametrize(
    ("line", "mark", "read_as"),
    [
        ("mesh: {tp: 4096:1}", "4096:1", "read as 245761 by YAML 1.1"),
        ("train: {steps: 010}", "010", "read as 8 by YAML 1.1"),
        ("quantize: {sym: on}", "on", "read as true by YAML 1.1"),
        ("name: no", "no", "read as false by YAML 1.1"),
        ("name: 2024-01-02", "2024-01-02", "read as a date by YAML 1.1"),
        ("on: 1", "on", "read as true by YAML 1.1"),
        ("model.args: {no: 1}", "no", "read as false by YAML 1.1"),
    ],
)
def test_what_yaml_1_1_reads_otherwise_is_refused(line: str, mark: str, read_as: str) -> None:
    actual = [d for d in wrong(f"model: {{preset: tiny}}\n{line}\n") if "YAML 1.1" in d.message]
    assert len(actual) == 1
    assert f"`{mark}` is {read_as}" in actual[0].message
    assert pointed_text(actual[0]) == mark
    assert actual[0].fix


def test_quoted_traps_are_text() -> None:
    recipe = loads('name: "on"\nmodel: {module: "a:B", args: {date: "2024-01-02", size: "010"}}')
    assert recipe.name == "on"
    assert recipe.model.args == {"date": "2024-01-02", "size": "010"}


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"", 1, "empty"),
        (b"# nothing\n", 1, "empty"),
        (b"- a\n- b\n", 1, "this is a list"),
        (b"text\n", 1, "this is text"),
        (b"!!str text\n", 1, "the tag `!!str`"),
        (b"model: {preset: tiny}\n---\nmodel: {preset: tiny}\n", 2, "second document"),
        (b"model:\n\tpreset: tiny\n", 2, "a tab"),
        (b"model: {preset: tiny\n", 2, "not YAML"),
        (b"model: {preset: tiny}}\n", 1, "not YAML"),
        (b"model: [a, b\nmesh: 3\n", 2, "not YAML"),
        (b"\xef\xbb\xbfmodel: {preset: tiny}\n", 1, "byte order mark"),
        ("model: {preset: tiny}\n".encode("utf-16"), 1, "UTF-16"),
        (b"model: {preset: tiny}\nname: caf\xe9\n", 2, "0xe9 is not UTF-8"),
        (b"model: {preset: tiny}\nname: a\x00b\n", 2, "U+0000"),
        (b"model: !!python/object/apply:os.system ['touch owned']\n", 1, "python/object/apply:os.system"),
        (b"model: !!python/name:os.system\n", 1, "!!python/name:os.system"),
        (b"model: &a {preset: tiny}\nmesh: *b\n", 2, "names no anchor"),
        (b"model: &a {args: *a}\n", 1, "contains itself"),
        (b"base: &b {preset: tiny}\nmodel:\n  <<: *b\n", 3, "merge keys"),
        (b"model: {? [a]: 1}\n", 1, "a key must be text"),
        (b"a: " + b"[" * 100 + b"]" * 100, 1, "nested deeper"),
        (b"#" * 2_000_000, 1, "at most"),
    ],
)
def test_what_is_no_recipe_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, line: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    actual = of_file(tmp_path, data)
    matching = [d for d in actual if words in d.message]
    assert matching and matching[0].where is not None
    assert matching[0].where.line == line
    assert [p.name for p in tmp_path.iterdir()] == ["a.yaml"]


def test_a_hugging_face_folder_in_place_of_a_recipe_is_told_where_it_goes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Mistakes) as error:
        load(tmp_path)
    (told,) = error.value.diagnostics
    assert "which is a model" in told.why and f"serve.checkpoint={tmp_path}" in told.fix
    (tmp_path / "config.json").write_text('{"tpshard_module": "mine:Own", "args": {}}')
    with pytest.raises(Mistakes, match="name the recipe that it was made from"):
        load(tmp_path)


def test_an_alias_bomb_is_refused_before_it_is_written_out(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (actual,) = of_file(tmp_path, "\n".join(lines).encode())
    assert "aliases" in actual.message


def test_duplicate_keys_show_both_places_and_hide_nothing() -> None:
    mistakes = wrong("model: {preset: tiny}\ntrain: {steps: 5}\ncompile: jit\ntrain: {steps: 6}\n")
    twice = next(d for d in mistakes if "twice" in d.message)
    assert place(twice) == (4, 1)
    assert [(s.line, s.col) for s, _ in twice.also] == [(2, 1)]
    assert any("compile" in d.message for d in mistakes)


def test_all_mistakes_are_told_at_once_from_top_to_bottom() -> None:
    mistakes = wrong("compile: jit\nmesh: {tp: 0}\ntrian: {}\noptimizer: {lr: -1}\nschema: 1\n")
    assert [place(d)[0] for d in mistakes] == [1, 1, 2, 3, 4]
    assert "`model` is missing" in " ".join(d.message for d in mistakes)


@pytest.mark.parametrize("version", ["99", "0", "-1", "two", "1.5", "[1]", "true"])
def test_another_schema_names_the_supported_one(version: str) -> None:
    (actual,) = wrong(f"schema: {version}\nmodel: {{preset: tiny}}\nfuture: 1\n")
    assert "supported: 1" in actual.why
    assert place(actual) == (1, 9)


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("recompute", "here it is `remat`"),
        ("fsdp.recompute", "here it is `remat`"),
        ("dtype", "here it is `model.dtype`"),
        ("optimizer.dtype", "here it is `optimizer.state_dtype`"),
        ("tp", "here it is `mesh.tp`"),
        ("tensor_parallel_size", "here it is `mesh.tp`"),
        ("serve.tensor_parallel_size", "here it is `serve.mesh.tp`"),
        ("serve.batch_size", "here it is `serve.requests`"),
        ("optimizer.learning_rate", "here it is `optimizer.lr`"),
        ("grad_accum", "here it follows from `batch.global_sequences` and `batch.per_device`"),
        ("train.stepz", "did you mean `steps`?"),
    ],
)
def test_a_key_of_another_tool_is_answered_with_what_says_it_here(key: str, fix: str) -> None:
    with pytest.raises(Mistakes) as caught:
        loads("model: {preset: tiny}", [f"{key}=2"], file="a.yaml")
    (mistake,) = caught.value.diagnostics
    assert (mistake.message, mistake.fix) == (f"unknown key `{key}`", fix)


def test_other_tools_keys_are_answered_with_keys_that_exist() -> None:
    known = {path for places in homes().values() for path in places}
    axes = {f"{mesh}.{axis}" for mesh in ("mesh", "serve.mesh") for axis in other_tools.AXES}
    for theirs, ours in other_tools.KEYS.items():
        assert set(ours) <= known | axes, theirs


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("mesh.tp", Exit.USAGE, "no `=`"),
        ("=3", Exit.USAGE, "no key"),
        ("a..b=1", Exit.USAGE, "empty part"),
        (".a=1", Exit.USAGE, "empty part"),
        ("a.=1", Exit.USAGE, "empty part"),
        ("train steps=1", Exit.USAGE, "space"),
        ("train.stepz=1", Exit.RECIPE, "unknown key"),
        ("train.steps.x=1", Exit.RECIPE, "there are no keys below"),
        ("train.steps=x", Exit.RECIPE, "`train.steps: x`"),
        ("train.steps=[1", Exit.RECIPE, "not YAML"),
        ("train.steps=010", Exit.RECIPE, "read as 8"),
        ("compile=!!python/name:os.system", Exit.RECIPE, "tag"),
    ],
)
def test_overrides_are_checked_like_the_file(override: str, code: Exit, words: str) -> None:
    with pytest.raises(Mistakes) as caught:
        loads("model: {preset: tiny}", ["seed=1", override], file="a.yaml")
    (actual,) = caught.value.diagnostics
    assert words in actual.message + actual.why
    assert caught.value.exit == code
    assert actual.where is not None and actual.where.file == "<override 2>"
    assert actual.where.text == override
    assert str(actual.where).startswith("<override 2>:1:")


def test_usage_wins_over_the_recipe_and_that_over_fit() -> None:
    def one(code: Exit) -> Diagnostic:
        return Diagnostic("x", code)

    assert Mistakes([one(Exit.FIT), one(Exit.RECIPE), one(Exit.MACHINE)]).exit == Exit.RECIPE
    assert Mistakes([one(Exit.DATA), one(Exit.MACHINE)]).exit == Exit.MACHINE
    assert Mistakes([one(Exit.CHECKPOINT)]).exit == Exit.CHECKPOINT
    assert Mistakes([Diagnostic("x", Exit.USAGE, severity="warning"), one(Exit.FIT)]).exit == Exit.FIT


SHIPPED = [path.read_text() for path in builtins().values()]
JUNK = [
    "${mesh.tp}",
    "${.fsdp}",
    "'${mesh}'",
    "${name}",
    "'???'",
    "${oc.decode:'[1]'}",
    "${",
    *"{}[]:,\n\t*&'\"#-?|>%@`~<$\\\x00\u00e9",
    "null",
    "on",
    "010",
    "1:2",
    "${oc.env:A}",
    "!!x",
    "1e999",
    ".nan",
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(SHIPPED),
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(JUNK), st.integers(0, 6)), max_size=5),
    st.lists(st.text("abc.=[]{}:$ \n\x00-1", max_size=12), max_size=2),
)
def test_whatever_is_written_there_is_an_answer(
    text: str, edits: list[tuple[float, str, int]], overrides: list[str]
) -> None:
    for place_, junk, gone in edits:
        at = int(place_ * len(text))
        text = text[:at] + junk + text[at + gone :]
    try:
        recipe = loads(text, overrides)
    except Mistakes as mistakes:
        assert any(d.severity == "error" for d in mistakes.diagnostics)
        assert Exit.USAGE <= mistakes.exit <= Exit.MACHINE
        as_text(mistakes.diagnostics, color=True, width=40)
        dumps(mistakes.diagnostics)
        for d in mistakes.diagnostics:
            assert d.where is not None and (d.where.line == 0 or d.where.col <= len(d.where.text) + 1)
    else:
        assert loads(recipe.to_yaml()) == recipe


@pytest.mark.parametrize(
    ("override", "message"), [("schema=2", "schema 2"), ("name=", "name"), ("schema=x", "`schema`")]
)
def test_an_override_is_refused_as_a_file_is(override: str, message: str) -> None:
    with pytest.raises(Mistakes, match=message) as caught:
        loads("model: {preset: tiny}", [override])
    assert caught.value.exit == Exit.RECIPE and "<override 1>" in str(caught.value)


@pytest.mark.parametrize("opening", ["[", "{a: "])
def test_of_brackets_without_end_only_the_first_are_read(opening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser's time grows with the square of the depth."""
    read = 0
    get_event = yaml.SafeLoader.get_event

    def count(loader: yaml.SafeLoader) -> yaml.Event:
        nonlocal read
        read += 1
        return get_event(loader)

    monkeypatch.setattr(yaml.SafeLoader, "get_event", count)
    with pytest.raises(Mistakes, match="nested deeper than 40 levels"):
        loads("model: " + opening * 5000)
    assert 40 < read < 200
    read = 0
    with pytest.raises(Mistakes, match="nested deeper than 40 levels"):
        loads("model: {preset: tiny}", ["mesh=" + opening * 5000])
    assert 40 < read < 200


def test_the_name_of_a_family_is_completed() -> None:
    (actual,) = wrong("model: {preset: tiny}\ncluster: {device: h100}\n")
    assert actual.fix == "did you mean `h100-sxm-80g`?"


FRAMES = ["model={module: 'tpshard.models.conformer:Conformer'}", "task=frames"]


@pytest.mark.parametrize(("mesh", "axes"), [("dp: 2", ["dp"]), ("tp: 2, x: 2, dp: 1", ["x"]), ("tp: 2, ep: 2", [])])
def test_an_axis_of_a_server_that_shards_nothing_is_warned_of(mesh: str, axes: list[str]) -> None:
    """By the recipe's checks, before `serve` starts anything; the batch is not sharded in a server."""
    path = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
    warned = [d for d in examine(path, [f"serve.mesh={{{mesh}}}"]).diagnostics if "of a server" in d.message]
    assert [(d.message, d.severity) for d in warned] == [
        (f"nothing of a server is sharded over `{axis}`", "warning") for axis in axes
    ]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["schedule.name=constant", "schedule.min_lr_ratio=0.2"], "schedule.min_lr_ratio"),
        (["checkpoint.every_steps=0", "checkpoint.keep_last=2"], "checkpoint.keep_last"),
        (["checkpoint.every_steps=0", "checkpoint.on_error=stop"], "checkpoint.on_error"),
        (["data.source=a.txt", "data.column=body"], "data.column"),
        (["data.column=body"], "data.column"),
        (["data.sources=[{source: a.txt}, {source: b.jsonl, column: t}]", "data.column=body"], "data.column"),
        ([*FRAMES, "data.source=c4"], "data.source"),
        (["fsdp.bucket=none", "fsdp.memory_limit=1GiB"], "fsdp.memory_limit"),
        (["optimizer.momentum=0.5"], "optimizer.momentum"),
        (["adapters={lora: {rank: 4}}", "train.freeze=[norm]"], "train.freeze"),
        (["optimizer.name=lion", "optimizer.eps=1.0e-6"], "optimizer.eps"),
        (["logging.wandb.mode=disabled", "logging.wandb.project=mine"], "logging.wandb.project"),
        (["schedule.name=constant", "schedule.decay_steps=20"], "schedule.decay_steps"),
        (["schedule.stages=[{steps: 2}]", "schedule.decay_steps=20"], "schedule.decay_steps"),
        (["model.rope_scaling.factor=1", "model.rope_scaling.low_freq_factor=2"], "model.rope_scaling.low_freq_factor"),
        (
            ["model.rope_scaling.factor=1", "model.rope_scaling.original_max_seq=9"],
            "model.rope_scaling.original_max_seq",
        ),
        (["sharding.rules.stage=tp"], "sharding.rules.stage"),
        (["mesh={pp: 2, fsdp: 1}", "pipeline={schedule: 1f1b}", "sharding.rules.stage=pp"], "sharding.rules.stage"),
        (["serve.layout=naive"], "serve.layout"),
        (["resume=never", "checkpoint.resume=force"], "checkpoint.resume"),
    ],
)
def test_a_setting_that_another_makes_meaningless_is_named(overrides: list[str], key: str) -> None:
    path = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
    (warning,) = [d for d in examine(path, overrides).diagnostics if "has no effect" in d.message]
    assert (warning.message, warning.severity) == (f"`{key}` has no effect", "warning")
    assert warning.where is not None and warning.where.text.startswith(key)
    without = [d for d in examine(path, overrides[:-1]).diagnostics if "has no effect" in d.message]
    assert without == [], "a default is nobody's wish"


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule.name=constant", "train.steps=20", "schedule.decay_steps=20"],
        ["serve.checkpoint=a_gptq_folder", "serve.layout=naive"],
        ["mesh={pp: 2, fsdp: 1}", "pipeline={schedule: gpipe, form: vectorized}", "sharding.rules.stage=pp"],
        ["model.rope_scaling.factor=2", "model.rope_scaling.low_freq_factor=2"],
        ["evaluate.every_steps=0", "evaluate.sequences=8"],
        ["data.sources=[{source: a.jsonl, column: t}, {source: b.jsonl}]", "data.column=body"],
        ["train.steps=20", "schedule={name: wsd, warmup_steps: 2, decay_over: 18}"],
        ["train.steps=20", "schedule={warmup_steps: 2, stages: [{steps: 10, to: 0.5}, {steps: 8, to: 0}]}"],
        ["train.steps=20", "schedule={warmup_steps: 2, stages: [{steps: 10, to: 0.5}]}"],
        ["data.epochs=2", "schedule={warmup_steps: 2, decay_steps: 900000}"],
        ["serve.checkpoint=${oc.env:NOT_SET_HERE}", "serve.layout=naive"],
    ],
)
def test_a_setting_that_something_reads_draws_no_word(overrides: list[str]) -> None:
    """Such as those of a saved recipe, and those of another command."""
    path = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
    assert examine(path, overrides).diagnostics == ()


def test_resume_for_one_command_is_stronger_without_a_word(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("model: {preset: tiny}\ncheckpoint: {resume: never}\n")
    assert examine(recipe, ["resume=force"]).diagnostics == ()
    recipe.write_text("model: {preset: tiny}\nresume: never\n")
    (warning,) = examine(recipe, ["checkpoint.resume=force"]).diagnostics
    assert "`checkpoint.resume`" in warning.message


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("{transformers: a, window: 3}", "`model.window` changes a dimension"),
        ("{preset: tiny, rope_scaling: {factor: 2, low_freq_factor: 4}}", "must be below `high_freq_factor: 4`"),
        ("{preset: tiny, rope_scaling: {factor: 2, high_freq_factor: 1}}", "`low_freq_factor: 1` must be below"),
        ("{preset: tiny}\ntask: frames", "`task: frames` has no tokens, which `model.preset` reads"),
        ("{hf: a}\ntask: volumes", "`task: volumes` has no tokens, which `model.hf` reads"),
    ],
)
def test_keys_of_a_model_that_contradict_its_others_are_refused(model: str, words: str) -> None:
    (mistake,) = wrong(f"model: {model}\n")
    assert words in mistake.message


def test_a_mistake_of_a_map_stands_where_it_was_written_with_all_that_changed_it() -> None:
    """Not on whichever override comes last."""
    text = "mesh: {fsdp: 2, tp: 2}\nmodel: {preset: tiny}\ncluster: {device: cpu, devices_per_node: 4}\n"
    for overrides in (["mesh.tp=8", "mesh.dp=1", "model.seq_len=8"], ["mesh.dp=1", "mesh.tp=8", "batch.per_device=1"]):
        with pytest.raises(Mistakes) as refused:
            loads(text, overrides)
        (mistake,) = refused.value.diagnostics
        assert mistake.where is not None and (mistake.where.file, mistake.where.line) == ("<text>", 1)
        changed = sorted((place.text, words) for place, words in mistake.also if "override" in place.file)
        assert changed == [("mesh.dp=1", "dp: 1"), ("mesh.tp=8", "tp: 8")]
    recipe = loads("model: {preset: tiny}", ["mesh.tp=2", "mesh.fsdp=2", "seed=3"])
    assert recipe.where("mesh").text == "mesh.tp=2"
    assert loads(text, ["mesh={tp: 2, fsdp: 1, dp: 2}"]).where("mesh").text.startswith("mesh={tp")


@pytest.mark.parametrize(
    ("schedule", "key", "message"),
    [
        ("{warmup_steps: 30}", "warmup_steps", "30 steps of warm-up in a run of 20"),
        ("{decay_steps: 50}", "decay_steps", "the rate is at its lowest at step 50"),
        (
            "{warmup_steps: 5, decay_steps: 4}",
            "decay_steps",
            "the rate is to be at its lowest at step 4, and rises until",
        ),
        ("{decay_steps: 10, min_lr_ratio: 0}", "decay_steps", "the rate is 0 from step 10 of 20 on"),
        (
            "{name: wsd, decay_over: 19}",
            "decay_over",
            "a fall of 19 steps that ends at step 20, of which 2 are warm-up",
        ),
        ("{stages: [{steps: 19, to: 0.5}]}", "stages.0", "the stage ends at step 21"),
        ("{stages: [{steps: 18}, {tokens: 1, to: 0.5}]}", "stages.1", "the stage begins after step 20"),
        ("{stages: [{steps: 10, to: 0}]}", "stages.0", "the rate is 0 from step 12 of 20 on"),
    ],
)
def test_what_a_schedule_says_of_steps_that_the_run_lacks_is_warned_of(schedule: str, key: str, message: str) -> None:
    path = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
    examined = examine(path, ["train.steps=20", f"schedule={schedule}"])
    (warning,) = examined.diagnostics
    assert warning.message.startswith(message) and warning.severity == "warning"
    assert warning.where == examined.recipe.where(f"schedule.{key}")


@pytest.mark.parametrize(
    ("source", "key"),
    [("a.txt, column: body", "column"), ("a.txt, filter: {a: 1}", "filter"), ("sample, split: train", "split")],
)
def test_columns_of_a_source_without_any_are_refused(source: str, key: str) -> None:
    path = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
    examined = examine(path, [f"data.sources=[{{source: {source}}}]"])
    (mistake,) = examined.diagnostics
    assert mistake.severity == "error" and mistake.where == examined.recipe.where(f"data.sources.0.{key}")
