"""bench/studies/: every one from its plan to its tables and pictures; then what is its own."""

import argparse
import json
import re
from types import SimpleNamespace

import pytest
from made_up import (
    CPU,
    MACHINE,
    PEAK,
    carry_out,
    cells_of,
    measured_with,
    record_events,
    rows_of_text,
    setup_of,
    shown,
    speeds_of,
    write_journal,
)
from matplotlib import pyplot as plt

from bench import processes
from bench.analysis.rows import rows_of
from bench.audit.gains import gains_of
from bench.catalogue import Scripts
from bench.common import UserError
from bench.measure import lengths
from bench.measure.child import HANG_SECONDS
from bench.measure.plan import SCRATCH, Plan
from bench.report import cards, look, waterfall
from bench.report.pictures import picture_bytes
from bench.report.tables import excerpts_of, found_in, full_table, markdown, picture_name, text_of
from bench.studies import all_studies, search
from bench.studies.variants import pays_from

STUDIES = {name: study for name, study in all_studies().items() if study.runs_scripts}
SCRIPTS = Scripts()
GPUS = MACHINE | dict(gpus=4)
CASES = [(name, line, machine) for name, study in STUDIES.items() for line in study.in_report
         for machine in (CPU, MACHINE, GPUS)]
LONG = "A processor whose name is longer than what a title of a picture has room for @ 2.70GHz"
NO_PICTURE = {"leave-one-out", "profile", "search"}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module", autouse=True)
def defaults():
    """The published settings, without a process that asks the scripts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "configurations", lambda runs, *_: {
            run.name: dict(batch_size=8, learning_rate=5e-4) for run in runs})
        yield


def setup_for(folder, name: str, line: str = "", machine: dict = CPU, options=()):
    """As measure.py makes it of a command line."""
    parser = argparse.ArgumentParser()
    STUDIES[name].options(parser)
    setup = setup_of(folder, machine, options, **vars(parser.parse_args(line.split())))
    setup.scripts = SCRIPTS  # it keeps what it has rebuilt
    return setup


def plan_for(folder, *args, **kwargs) -> Plan:
    """A study's first plan."""
    setup = setup_for(folder, *args, **kwargs)
    return next(STUDIES[args[0]].plans(setup))


def some_fail(plan: Plan) -> list[dict]:
    """speeds_of, but that the last run fails, and that the one before it can't run."""
    if len(plan.runs) > 2 and not plan.runs[-2].after:
        plan.runs[-2] = plan.runs[-2].but(error="needs a thing")
    runs = speeds_of(plan)
    for run in runs:
        if run["name"] == plan.runs[-1].name != plan.runs[0].name:
            run["error"] = "it broke"
    return runs


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(
    [case[0], *case[1].split(), str(case[2]["gpus"])]))
def case(request, tmp_path_factory):
    """A study that has been carried out with made-up runs."""
    name, line, machine = request.param
    study, folder = STUDIES[name], tmp_path_factory.mktemp("results")
    setup = setup_for(folder, name, line, machine)
    if name == "time-to-loss" and machine is GPUS:  # elsewhere there was no search
        list(carry_out(STUDIES["search"], setup))
    plans = [plan for plan, _ in carry_out(study, setup, some_fail)]
    return SimpleNamespace(study=study, line=line, plans=plans, folder=folder,
                           found=found_in(folder, name))


def test_plans(case):
    for plan in case.plans:
        names = [run.name for run in plan.runs]
        assert len(set(names)) == len(names)
        for place, run in enumerate(plan.runs):
            assert {run.compared_to, run.after} <= {None, *names[:place]}
            assert run.label and run.technique
            assert run.loss in (None, "unchanged", "rounding", "changes")
            assert run.error or b"def main(" in SCRIPTS.text(run.script)
        kept = json.loads(json.dumps(plan.as_json()))
        assert json.loads(json.dumps(Plan.from_json(kept).as_json())) == kept


def test_tables(case):
    """Every run stands in them, and why it has no figures."""
    study, plans = case.study, {plan.kind: plan for plan in case.plans}
    assert [measured.kind for measured, _ in case.found] == list(plans)
    for measured, rows in case.found:
        plan, text, others = (plans[measured.kind], text_of(study, measured),
                              excerpts_of(study, measured))
        assert isinstance(study.result(measured, rows), str)
        assert all(name.startswith(study.name) for name in others)
        if study.name == "profile":
            continue  # its tables are of the trace
        assert [row.run.name for row in rows] == [run.name for run in plan.runs]
        for row in rows:
            assert row.label in text and (row.error or "") in text
        for table in (text, *others.values()):
            lines = rows_of_text(table)
            assert len({len(cells) for cells in lines}) == 1 if lines else "Not run here: " in table
        errors = {run.error for run in plan.runs if run.error}
        if len(rows) > 1 and not plan.runs[-1].error:
            errors.add("failed: it broke")
        for error in errors:
            assert error in text
            # Those of the stages and of a search show only what came to its end.
            assert study.name in ("stages", "search") or any(
                error in other for other in others.values())
    assert bool(study.extra(case.folder, case.found)) == (study.name == "stages")


def test_labels_are_for_readers_alone(case, tmp_path):
    """With other labels the figures are the same, and so are a picture's points and colours."""
    study, labels, lines = case.study, {}, []
    for line in (case.folder / f"{study.name}.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "study":
            for run in event["plan"]["runs"]:
                label = labels.setdefault((event["kind"], run["name"]),
                                          (f"«{len(labels)}»", run["label"]))
                run["label"], _ = label
        lines.append(json.dumps(event) + "\n")
    (tmp_path / f"{study.name}.jsonl").write_text("".join(lines))
    renamed = found_in(tmp_path, study.name)

    def texts(measured) -> str:
        text = text_of(study, measured) + str(excerpts_of(study, measured))
        for new, old in labels.values():
            text = text.replace(new, old)
        return text

    for (measured, _), (other, _) in zip(case.found, renamed, strict=True):
        assert texts(other) == texts(measured)

    def points(folder, found) -> str:
        return str([(name, [(line.get_xydata(), line.get_color(), line.get_linestyle())
                            for line in axes.lines],
                     [(patch.get_bbox(), patch.get_facecolor()) for patch in axes.patches])
                    for name, figure in study.pictures(folder, found).items()
                    for axes in figure.axes])

    assert points(tmp_path, renamed) == points(case.folder, case.found)


def test_pictures(case):
    name = case.study.name
    expected = {picture_name(name, measured.kind) for measured, rows in case.found
                if measured.plan.targets or any(row.speeds for row in rows[1:])}
    if name in NO_PICTURE:
        expected = set()
    elif name == "stages":
        expected = {"speed"}
    elif name == "sweep":
        expected &= {"sweep-batch"}
    drawn = case.study.pictures(case.folder, case.found)
    assert drawn.keys() == expected
    for figure in drawn.values():
        assert picture_bytes(figure, "png").startswith(b"\x89PNG")
        beside = [row.label for _, rows in case.found for row in rows]
        beside += [f"{loss:.3f}" for measured, _ in case.found
                   for loss in measured.plan.targets.values()]
        shown(figure, beside)


# ---- What is particular to each ----------------------------------------------------------------


def test_the_ladder_and_its_length(tmp_path):
    plan = plan_for(tmp_path, "ladder", machine=MACHINE)
    names = [run.name for run in plan.runs]
    assert [run.compared_to for run in plan.runs] == [None, *names[:-1]]
    assert (names[0], names[-1]) == ("00_orig", "15-kept-memory")  # 02 needs two GPUs
    assert (plan.tokens, plan.seconds) == (393_216, 0)
    last = plan_for(tmp_path, "ladder", machine=GPUS).runs[-1]
    assert (last.name, last.processes, last.published) == ("02_opt_multi_gpu_ddp", 4, 419_259)
    plan = plan_for(tmp_path, "ladder", "--rungs 0,5-6")
    assert [(run.name, run.compared_to) for run in plan.runs] == [
        ("00_orig", None), ("05-bfloat16", "00_orig"), ("06-native-layers", "05-bfloat16")]
    assert (plan.tokens, plan.seconds) == (16_384, 0)
    setup = setup_for(tmp_path, "ladder")
    setup.args.max_tokens, setup.args.seconds = 99, 3.0
    assert STUDIES["ladder"].length(setup) == dict(
        tokens=99, seconds=3.0, min_steps=1, equal_steps=True)


def test_leave_one_out(tmp_path):
    """The last technique leaves 01 as the stage before it; the first one conflicts."""
    plan = plan_for(tmp_path, "leave-one-out", "--rungs 0,1,15", GPUS)
    whole, first, last = plan.runs
    assert (whole.name, whole.published, whole.processes) == ("01_opt_single_gpu", None, 1)
    assert first.error.startswith("conflict: ")
    assert (last.name, last.label) == ("without-15-kept-memory", "without 15 kept memory")
    assert (last.compared_to, last.expected) == ("01_opt_single_gpu", 142_156)
    assert SCRIPTS.text(last.script) == SCRIPTS.stages["14-chunked-head"]


def test_leave_one_out_of_a_script_of_ones_own(tmp_path):
    """Two variants without one of them; one variant without itself, which is 01."""
    both = "optimizer-muon+compile-blocks"
    plan = plan_for(tmp_path, "leave-one-out", f"--rungs 12,14 --names {both}")
    whole, pages, chunks, muon, blocks = plan.runs
    assert (plan.kind, whole.script, whole.compared_to) == ("variants", both, None)
    assert {run.compared_to for run in plan.runs[1:]} == {whole.name}
    variable, muon_of = b"THP_MEM_ALLOC_ENABLE", b"Muon("
    assert variable in SCRIPTS.text(both) and muon_of in SCRIPTS.text(both)
    assert variable not in SCRIPTS.text(pages.script) and muon_of in SCRIPTS.text(pages.script)
    assert chunks.error.startswith("conflict: ")
    assert (muon.label, SCRIPTS.text(muon.script)) == (
        "without optimizer-muon", SCRIPTS.stages["compile-blocks"])
    assert (blocks.script, blocks.without) == ("optimizer-muon", "compile-blocks")
    with pytest.raises(UserError, match="is more than one script: join variants of one by +"):
        plan_for(tmp_path, "leave-one-out", f"--names {both.replace('+', ',')}")
    alone = plan_for(tmp_path, "leave-one-out", "--rungs 0 --names compile-blocks")
    assert [run.name for run in alone.runs] == ["variant-compile-blocks", "without-compile-blocks"]
    assert alone.runs[1].script == SCRIPTS.stage("01").script
    with pytest.raises(UserError, match="no variant 'nothing' of 01"):
        plan_for(tmp_path, "leave-one-out", "--names nothing")
    with pytest.raises(UserError, match="head-liger: needs the package liger_kernel"):
        plan_for(tmp_path, "leave-one-out", "--names head-liger")
    ladder = plan_for(tmp_path, "ladder", "--rungs 0,12")
    write_journal(tmp_path, "ladder", ladder, speeds_of(ladder))
    write_journal(tmp_path, "leave-one-out", plan, speeds_of(plan))
    ((measured, _),) = found_in(tmp_path, "ladder")
    (table,) = excerpts_of(STUDIES["ladder"], measured).values()
    assert "× in 01" not in table  # which isn't what they were measured in


def test_the_ladder_says_what_a_technique_brings_in_01(tmp_path, monkeypatch):
    """Rung 1 conflicts, 2 is a quarter faster, 3 failed, 4 isn't clear. The table of README.md says
    it only of a 01 with all techniques of the ladder, and among machines of one name of none but
    the one that was measured so."""
    ladder = plan_for(tmp_path, "ladder", "--rungs 0-5")
    without = plan_for(tmp_path, "leave-one-out", "--rungs 1-4")
    speeds = dict(zip([run.name for run in without.runs], (100.0, 0, 80.0, 50.0, 100.0),
                      strict=True))
    runs = [run | dict(speed=speeds[run["name"]] + run["round"] * len(run["name"]) % 3 / 10)
            for run in speeds_of(without)]
    for run in runs:
        run["error"] = "ended by signal 9" if run["speed"] < 60 else None
    (tmp_path / "alone").mkdir()
    for folder in (tmp_path, tmp_path / "alone"):
        write_journal(folder, "ladder", ladder, speeds_of(ladder))
    write_journal(tmp_path, "leave-one-out", without, runs)

    def excerpt(folder) -> list[dict]:
        ((measured, _),) = found_in(folder, "ladder")
        return list(cells_of(excerpts_of(STUDIES["ladder"], measured)["ladder"]).values())

    assert [line["× in 01"] for line in excerpt(tmp_path)] == [
        "", "conflict", "**1.25**", "failed", "1.00", ""]
    assert "× in 01" not in excerpt(tmp_path / "alone")[0]
    monkeypatch.setattr(cards, "REFERENCE", tmp_path)
    assert "within 01" not in cards.cards(tmp_path, "ladder")
    whole = tmp_path / "whole"
    whole.mkdir()
    ladder_of_four = plan_for(whole, "ladder", "--rungs 0-4")
    write_journal(whole, "ladder", ladder_of_four, speeds_of(ladder_of_four))
    write_journal(whole, "leave-one-out", without, runs)
    texts = cards.cards(whole, "ladder").split("\n## ")
    assert [re.findall(r"\(within 01: (.*?)\)", text) for text in texts[:5]] == [
        [], ["1.25×"], [], ["1.00×"], []]
    assert excerpt(tmp_path)[2] == {
        "#": "2", "technique": "TF32 tensor cores",
        "tok/sec (range)": "122 (121–124)", "× before": "1.09", "A100": "2.21",
        "× baseline": "1.20", "× in 01": "**1.25**", "GB": "2.20", "val loss": "8.000",
        "significance": "**faster**"}


@pytest.mark.parametrize(("measured", "told"), [
    (("00_orig", "14-chunked-head"), False), (("13-loss-in-graph", "14-chunked-head"), True)])
def test_a_summary_credits_a_technique_with_its_own_factor_alone(tmp_path, measured, told):
    """Not with that of those between it and the last one that was measured. What has no published
    factor isn't called equal to it."""
    plan = plan_for(tmp_path, "ladder", "--rungs 0-14")
    runs = [run for run in speeds_of(plan) if run["name"] in measured]
    write_journal(tmp_path, "ladder", plan, runs)
    text = "\n".join(look.summary(tmp_path, dict(machine=CPU, matmul_peak=PEAK)))
    assert ("chunked cross-entropy" in text) == told and "published speedup" not in text
    assert ("techniques 1 to 14" in text) != told


@pytest.mark.parametrize(("rungs", "machine", "credits", "published"), [
    ("0,1,3", CPU, [[1], [2, 3]], [12_525, 12_526, 28_399]),
    ("0,3", CPU, [[1, 2, 3]], [12_525, 28_399]),
    ("2-3", CPU, [[3]], [27_648, 28_399]),
    ("5-7", CPU, [[6], [7]], [45_486, 55_256, 91_901]),
    ("11,13", CPU, [[12, 13]], [None, None]),
    ("11,13", MACHINE, [[13]], [None, None])])  # technique 12 is for CPUs alone
def test_whose_factor_it_is(tmp_path, rungs, machine, credits, published):
    """In the title, in the picture with the published figures of the same rows, and in an audit."""
    study = STUDIES["ladder"]
    plan = plan_for(tmp_path, "ladder", f"--rungs {rungs}", machine)
    write_journal(tmp_path, "ladder", plan, speeds_of(plan), machine)
    ((measured, rows),) = found_in(tmp_path, "ladder")
    assert [row.techniques for row in rows[1:]] == credits
    alone = [row for row in rows[1:] if len(row.techniques) == 1]
    assert cards.one_step(rows) == [rows[0], *alone]
    gains, _ = gains_of(machine, machine["device"], tmp_path)
    if alone:
        assert gains == {row.run.script: row.factor for row in alone}
    for table in (full_table(rows), *study.excerpts(measured, rows)["ladder"]):
        for row, cells in zip(rows, rows_of_text(markdown(table)), strict=True):
            assert (row.technique in cells) == (row in (rows[0], *alone))
    texts = shown(study.draw(measured, rows))
    for row in rows[1:]:
        several = f"techniques {row.techniques[0]} to"
        assert any(several in text for text in texts) == (row not in alone)
    steps = waterfall.published_steps([row.run.name for row in rows])
    assert [step.speed for step in steps] == published
    for row, step in zip(rows[1:], steps[1:], strict=True):
        assert step.text == (f"{row.published_factor:.2f}×" if step.speed else "")
    columns = study.draw(measured, rows).axes
    assert len(columns) == (1 if published[0] is None else 2)


def test_a_ladder_that_has_just_begun(tmp_path):
    """It has both ends only with a baseline; DDP has the name that readers know."""
    names = []
    for runs in (["03-fused-adamw"], ["00_orig", "02_opt_multi_gpu_ddp"]):
        folder = tmp_path / runs[0]
        folder.mkdir()
        plan = plan_for(folder, "ladder", machine=GPUS)
        write_journal(folder, "ladder", plan, [dict(name=name) for name in runs], GPUS)
        ((measured, rows),) = found_in(folder, "ladder")
        own = STUDIES["ladder"].draw(measured, rows).axes[0]
        names.append([own.get_title("left"), own.get_yticklabels()[-1].get_text()])
    assert names == [["this machine", "DistributedDataParallel × 4 16"],
                     ["this machine\n100 → 100 tok/sec", "techniques 1 to 16"]]


def test_ladder_picture(tmp_path):
    """Its title says what is faster; a name that is too long; no baseline."""
    study, machine = STUDIES["ladder"], CPU | dict(name=LONG)
    plan = plan_for(tmp_path, "ladder", "--rungs 0-10", machine)
    changes = {"05-bfloat16": dict(loss=8.03), "10-batch-size": dict(loss=9.01),
               "07-flash-attention": dict(error="out of memory: lower --batch-size and so on")}
    write_journal(tmp_path, "ladder", plan, [
        run | changes.get(run["name"], {}) for run in speeds_of(plan)], machine)
    ((measured, rows),) = found_in(tmp_path, "ladder")
    texts = shown(study.draw(measured, rows))
    assert {"baseline \u20070", "larger batch 10", "102 tok/sec", "1.12×",
            "techniques 7 to \u20078", "failed: out of memory: lower --batch-si…"} <= set(texts)
    whole = rows[-1].factor_baseline
    assert (f"{whole:.1f}× faster: cpu-demo on {LONG[:59]}…, 2 cores significant: techniques 7"
            " to 8 1.12×, causal mask made on the fly 1.10×, TF32 tensor cores 1.09× and 6 more"
            ) in [" ".join(text.split()) for text in texts]
    measured = measured_with(plan, {
        run.name: record_events(run.name, 100.0) for run in plan.runs[1:]} | {
        "00_orig": "ended by signal 9"})
    assert study.draw(measured, rows_of(measured)) is None


def test_trainer(tmp_path):
    def options(machine) -> list[tuple]:
        return [run.options for run in plan_for(tmp_path, "variants", "trainer", machine).runs[1:]]

    assert options(CPU)[0] == ("--per_device_train_batch_size", "8")
    assert options(CPU)[-1][-1] == "--huge_pages" and len(options(CPU)) == 5
    assert options(MACHINE)[1][1:] == ("32", "--bf16", "--tf32", "True")
    assert options(MACHINE | dict(capability="7.5"))[1][1:] == ("32", "--bf16")


def test_another_model_stands_apart(tmp_path):
    plan = plan_for(tmp_path, "variants", "--names optimizer-muon,model-mixture")
    base, same, other = (run.name for run in plan.runs)
    events = {name: record_events(name, speed, tokens=plan.tokens, config=dict(parameters=count))
              for name, speed, count in ((base, 100.0, 100), (same, 90.0, 100), (other, 50.0, 200))}
    for event in events[other]:
        if event["event"] == "log":
            event["expert_shares"] = [[0.2, 0.3, 0.25, 0.25], [0.1, 0.4, 0.25, 0.25]]
    study, measured = STUDIES["variants"], measured_with(plan, events)
    table, _, rest = text_of(study, measured).partition("\n\n")
    assert list(cells_of(table)) == ["01", "optimizer-muon"]
    assert "| `model-mixture` | 200 | 50 | 0.50 |" in rest
    excerpts = excerpts_of(study, measured)
    assert list(cells_of(excerpts["variants"])) == ["`01`", "`optimizer-muon`"]
    cells = cells_of(excerpts["variants-model"])["`model-mixture`"]
    assert cells["experts' shares of the tokens"] == "10%–40%"
    texts = shown(study.draw(measured, rows_of(measured)))
    assert "optimizer-muon" in texts and "model-mixture" not in texts


# ---- The compiler's modes


@pytest.mark.parametrize(("cost", "other", "step"), [
    ((25.0, 0.5), (0.0, 1.0), 50), ((25.1, 0.5), (0.0, 1.0), 51), ((0.0, 1.0), (5.0, 2.0), 0),
    ((1.0, 2.0), (0.0, 1.0), float("inf")), ((1.0, 1.0), (2.0, 1.0), 0),
    ((2.0, 1.0), (1.0, 1.0), float("inf"))])
def test_pays_from(cost, other, step):
    assert pays_from(cost, other) == step


def test_the_compilers_modes(tmp_path):
    """One mode pays from step 50 on, one never; the first step of none is as any other."""
    study, plan = STUDIES["variants"], plan_for(tmp_path, "variants", "compile")
    assert plan.kind == "compile"
    (plain,) = (run.name for run in plan.runs if "--no-compile" in run.options)
    (slow,) = (run.name for run in plan.runs if run.options[-1:] == ("max-autotune",))
    events = {}
    for name, first, step in (
            (plain, 1.0, 1.0), (plan.runs[0].name, 25.5, 0.5), (slow, 3.0, 2.0)):
        events[name] = record_events(name, 2048 / step, config=dict(batch_size=8))
        events[name][1]["seconds"] = [first]
    cells = cells_of(text_of(study, measured_with(plan, events)))
    none, default, other = (cells[label] for label in (
        "compile-mode --no-compile", "01", "compile-mode --compile-mode max-autotune"))
    assert (none["compiling, s"], default["compiling, s"]) == ("0.0", "25.0")
    assert (none["s/step"], default["s/step"]) == ("1.000", "0.500")
    assert [row["beats no compiler from step"] for row in (none, default, other)] == [
        "", "50", "never"]
    # 390 windows are 48 steps an epoch.
    assert (none["5 epochs, s"], default["5 epochs, s"]) == ("240", "145")
    assert default["× over no compiler"] == "1.66"


def test_groups_of_variants(tmp_path):
    """02's groups are compared with 02; checkpoints go to a folder of the run's own."""
    for group in ("ddp", "parallel"):
        first, *others = plan_for(tmp_path, "variants", group).runs
        assert first.script == "02" and others
        assert all(run.script.startswith(group) for run in others)
    first, *others = plan_for(tmp_path, "variants", "checkpoint").runs
    assert first.script == "01" and all(SCRATCH in run.options for run in others)
    assert {run.script for run in plan_for(tmp_path, "variants").runs}.isdisjoint(
        {"compile-mode", "checkpoint-resume"})
    with pytest.raises(UserError, match="^--names and a group"):
        plan_for(tmp_path, "variants", "ddp --names optimizer-muon")


def test_a_cold_max_autotune_has_the_time_it_takes(tmp_path):
    """It isn't ended as one that hangs after ten minutes."""
    setup = setup_for(tmp_path, "variants", "compile", machine=MACHINE)
    plan = next(STUDIES["variants"].plans(setup))
    config = dict(batch_size=32, context_length=1024, learning_rate=1e-3, compile=True)
    runs = {run.name: run.label for run in plan.runs if not run.error}
    limits = {runs[name]: HANG_SECONDS + 5 * length.seconds for name, length in lengths.lengths_of(
        plan, setup, dict.fromkeys(runs, config), PEAK).items()}
    tuned = {label for label in limits if "max-autotune" in label}
    assert len(tuned) == 2
    assert all((limits[label] > limits["01"] + 1200) is (label in tuned) for label in limits)


# ---- Variants by their names


@pytest.mark.parametrize(("names", "rows", "doubles"), [
    ("gc-freeze,optimizer-muon", ["gc-freeze", "optimizer-muon"], 0),
    ("gc-freeze, gc-freeze", ["gc-freeze"], 1),
    ("data-workers --workers 2,data-workers --workers=2", ["data-workers --workers 2"], 1),
    ("data-workers,data-workers --workers 4",
     ["data-workers --workers 2", "data-workers --workers 4"], 1),
    ("gc-freeze+optimizer-muon,optimizer-muon+gc-freeze", ["gc-freeze+optimizer-muon"], 1),
    ("optimizer-muon --normuon --polar-express,optimizer-muon --polar-express --normuon",
     ["optimizer-muon --normuon --polar-express"], 1),
])
def test_a_variant_is_measured_once(tmp_path, capsys, names, rows, doubles):
    processes.tell.cache_clear()
    runs = STUDIES["variants"].runs(setup_of(tmp_path, names=names))
    assert [run.label for run in runs[1:]] == rows
    assert capsys.readouterr().out.count("asked for twice, and taken once: ") == doubles


def test_two_variants_of_one_name_are_refused(tmp_path):
    """The journal couldn't tell the one from the other."""
    names = "data-workers --workers 2,data-workers --workers -2"
    with pytest.raises(UserError, match="both be called variant-data-workers-workers-2"):
        STUDIES["variants"].runs(setup_of(tmp_path, names=names))


# ---- Sweeps


def test_sweeps(tmp_path):
    plan = plan_for(tmp_path, "sweep", "batch", MACHINE)
    assert (plan.kind, plan.memory_limit_gb, plan.until_full) == ("batch", None, True)
    assert (plan.tokens, plan.seconds, plan.min_steps) == (393_216, 10, 6)
    assert [run.label for run in plan.runs[:3]] == ["batch 1", "batch 2", "batch 4"]
    assert [run.after for run in plan.runs[1:]] == [run.name for run in plan.runs[:-1]]
    plan = plan_for(tmp_path, "sweep", "context --stage 00", MACHINE)
    ends = plan.runs[0], plan.runs[-1]
    assert plan.kind == "context-00" and ends[0].name.startswith("00_orig-context-256")
    assert [run.label for run in ends] == ["context 256, batch 128", "context 16384, batch 2"]
    assert ends[1].options == ("--context-length", "16384", "--batch-size", "2")


@pytest.mark.parametrize(("kind", "options"), [
    ("batch", ["--batch-size", "4"]), ("context", ["--batch-size=4"])])
def test_options_that_the_sweep_sets(tmp_path, kind, options):
    with pytest.raises(UserError, match=f"^{options[0].split('=')[0]} is set by the sweep itself"):
        plan_for(tmp_path, "sweep", kind, options=options)
    assert plan_for(tmp_path, "sweep", kind, options=["--dropout", "0.1"])


def test_a_sweep_where_no_memory_is_known(tmp_path):
    """Not each system tells it."""
    study, plan = STUDIES["sweep"], plan_for(tmp_path, "sweep", "batch", MACHINE)
    measured = measured_with(plan, {run.name: record_events(run.name, reserved_gb=None)
                                    for run in plan.runs[:3]}, MACHINE)
    figure = study.draw(measured, rows_of(measured))
    (title, *_) = [text for text in shown(figure) if "the speed varies" in text]
    assert "memory" not in title and picture_bytes(figure, "png")


@pytest.mark.parametrize(("memory", "told"), [
    ([1.0, 2.5], [None, None, "not tried: 2 times the 2.5 GB of batch 2 would be more than half of"
                  " the RAM"]),
    ([1.0, None], [None, None, "not tried: the memory of batch 2 isn't known"]),
    ([1.0, "out of memory"], [None, "failed: out of memory"])])
def test_nothing_larger_than_what_does_not_fit(tmp_path, memory, told):
    study, plan = STUDIES["sweep"], plan_for(tmp_path, "sweep", "batch")
    assert plan.memory_limit_gb == 4.0
    measured = measured_with(plan, {
        run.name: gb if isinstance(gb, str) else record_events(run.name, reserved_gb=gb)
        for run, gb in zip(plan.runs, memory, strict=False)})
    errors = [row.error for row in rows_of(measured)]
    assert errors[:len(told)] == told and all(errors[len(told):])
    lines = rows_of_text(text_of(study, measured))
    assert len(lines) == len(told) and lines[-1][1] == told[-1]
