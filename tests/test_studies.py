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
    rounds_of,
    rows_of_text,
    setup_of,
    shown,
    speeds_of,
    write_journal,
    write_record,
)
from matplotlib import pyplot as plt

from bench.analysis.rows import rows_of
from bench.audit.price import gains_of
from bench.catalogue import Scripts
from bench.common import ROOT, UserError
from bench.measure.plan import SCRATCH, Plan
from bench.report import machine_section, technique_pages
from bench.report.pictures import picture_bytes
from bench.report.tables import excerpts_of, found_in, full_table, markdown, picture_name, text_of
from bench.studies import all_studies, search
from bench.studies.profile import kind_of
from bench.studies.scaling import numbers
from bench.studies.stages import bars_table, draw_speed, published_bars, read_bars
from bench.studies.variants import pays_from
from patches import stack

STUDIES = {name: study for name, study in all_studies().items()}
SCRIPTS = Scripts()
GPUS = MACHINE | dict(gpus=4)
CASES = [(name, line, machine) for name, study in STUDIES.items() for line in study.in_report
         for machine in (CPU, GPUS)]
LONG = "A processor whose name is longer than what a title of a picture has room for @ 2.70GHz"
H100 = "NVIDIA H100 80GB HBM3"
FIRST, LAST, DDP = "00_orig", "01_opt_single_gpu", "02_opt_multi_gpu_ddp"
NO_PICTURE = {"leave-one-out", "profile", "scaling", "search", "sweep"}


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


def setup_for(folder, name: str, line: str | dict = "", machine: dict = CPU, options=()):
    """As measure.py makes it of a command line, or a report of options."""
    parser = argparse.ArgumentParser()
    STUDIES[name].options(parser)
    own = STUDIES[name].defaults | line if isinstance(line, dict) else vars(
        parser.parse_args(line.split()))
    setup = setup_of(folder, machine, options, **dict(techniques=None) | own)
    setup.scripts = SCRIPTS  # it keeps what it has rebuilt
    return setup


def plan_for(folder, *args, **kwargs) -> Plan:
    """A study's first plan."""
    return next(STUDIES[args[0]].plans(setup_for(folder, *args, **kwargs)))


def measure(folder, *args, runs_of=speeds_of, **kwargs):
    """(measurement, rows) of a study's first plan with made-up runs."""
    plan = plan_for(folder, *args, **kwargs)
    write_journal(folder, args[0], plan, runs_of(plan), kwargs.get("machine", CPU))
    return found_in(folder, args[0])[-1]


def some_fail(plan: Plan) -> list[dict]:
    """speeds_of, but that the last run fails, and that the one before it can't run."""
    if len(plan.runs) > 2 and not plan.runs[-2].requires:
        plan.runs[-2] = plan.runs[-2].replace(error="needs a thing")
    runs = speeds_of(plan)
    for run in runs:
        if run["name"] == plan.runs[-1].name != plan.runs[0].name:
            run["error"] = "it broke"
    return runs


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(
    [case[0], *case[1].values(), str(case[2]["gpus"])]))
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
            assert {run.compared_to, run.requires} <= {None, *names[:place]}
            assert run.label and run.technique
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


def test_pictures(case):
    name = case.study.name
    expected = {picture_name(name, measured.kind) for measured, rows in case.found
                if measured.plan.targets or any(row.speeds for row in rows[1:])}
    if name in NO_PICTURE:
        expected = set()
    elif name == "variants":
        expected &= {"variants", "variants-parallel"}
    elif name == "stages":
        expected = {"speed"}
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
    assert (names[0], names[-1]) == (FIRST, "15-kept-memory")  # 02 needs two GPUs
    assert (plan.tokens, plan.seconds) == (393_216, 0)
    last = plan_for(tmp_path, "ladder", machine=GPUS).runs[-1]
    assert (last.name, last.processes, last.published) == (DDP, 4, 419_259)
    plan = plan_for(tmp_path, "ladder", "--techniques 0,5-6")
    assert [(run.name, run.compared_to) for run in plan.runs] == [
        (FIRST, None), ("05-bfloat16", FIRST), ("06-native-layers", "05-bfloat16")]
    setup = setup_for(tmp_path, "ladder")
    setup.args.max_tokens, setup.args.seconds = 99, 3.0
    (plan,) = STUDIES["ladder"].plans(setup)
    assert (plan.tokens, plan.seconds, plan.min_steps, plan.equal_steps) == (99, 3.0, 1, True)


def test_leave_one_out(tmp_path):
    """The last technique leaves 01 as the script before it; the first one conflicts."""
    whole, first, last = plan_for(tmp_path, "leave-one-out", "--techniques 0,1,15", GPUS).runs
    assert (whole.name, whole.published, whole.processes) == (LAST, None, 1)
    assert first.error.startswith("conflict: ")
    assert (last.name, last.compared_to, last.expected) == ("without-15-kept-memory", LAST, 142_156)
    assert SCRIPTS.text(last.script) == SCRIPTS.patched["14-chunked-head"]
    both = "optimizer-muon+compile-blocks"  # of a script of one's own also a variant is left out
    whole, pages, muon, blocks = plan_for(
        tmp_path, "leave-one-out", f"--techniques 12 --names {both}").runs
    assert {run.compared_to for run in (pages, muon, blocks)} == {whole.name}
    variable = b"THP_MEM_ALLOC_ENABLE"
    assert variable in SCRIPTS.text(both) and variable not in SCRIPTS.text(pages.script)
    assert SCRIPTS.text(muon.script) == SCRIPTS.patched["compile-blocks"]
    assert (blocks.script, blocks.ablated) == ("optimizer-muon", "compile-blocks")
    with pytest.raises(UserError, match="head-liger: needs"):
        plan_for(tmp_path, "leave-one-out", "--names head-liger")


def test_the_ladder_says_what_a_technique_brings_in_01(tmp_path):
    """Rung 1 conflicts, 2 is a quarter faster, 3 failed, 4 isn't clear. It says nothing without
    that measurement."""
    def runs_of(plan) -> list[dict]:
        speeds = dict(zip([run.name for run in plan.runs], (100.0, 0, 80.0, 50.0, 100.0),
                          strict=True))
        return [run | dict(speed=speeds[run["name"]] + run["round"] * len(run["name"]) % 3 / 10,
                           error="ended by signal 9" if speeds[run["name"]] < 60 else None)
                for run in speeds_of(plan)]

    measured, _ = measure(tmp_path, "ladder", "--techniques 0-5")

    def excerpt() -> list[dict]:
        return list(cells_of(excerpts_of(STUDIES["ladder"], measured)["ladder"]).values())

    assert "× in 01" not in excerpt()[0]
    measure(tmp_path, "leave-one-out", "--techniques 1-4", runs_of=runs_of)
    assert [line["× in 01"] for line in excerpt()] == [
        "", "conflict", "**1.25**", "failed", "1.00", ""]
    assert excerpt()[2].items() >= {
        "tok/sec (range)": "122 (121–124)", "× before": "1.09", "A100": "2.21",
        "× baseline": "1.20", "GB": "2.20", "val loss": "8.000", "significance": "**faster**",
    }.items()


@pytest.mark.parametrize(("rungs", "machine", "credits"), [
    ("0,1,3", CPU, [[1], [2, 3]]), ("0,3", CPU, [[1, 2, 3]]), ("2-3", CPU, [[3]]),
    ("11,13", CPU, [[12, 13]]), ("11,13", MACHINE, [[13]])])  # technique 12 is for CPUs alone
def test_whose_factor_it_is(tmp_path, rungs, machine, credits):
    """A technique is credited with its own factor alone: in tables and pictures, on a page, and in
    an audit. What has no published factor isn't called equal to it."""
    study = STUDIES["ladder"]
    measured, rows = measure(tmp_path, "ladder", f"--techniques {rungs}", machine=machine)
    assert [row.techniques for row in rows[1:]] == credits
    alone = [row for row in rows[1:] if len(row.techniques) == 1]
    assert technique_pages.one_step(rows) == [rows[0], *alone]
    gains, _ = gains_of(machine, machine["device"], tmp_path)
    if alone:
        assert gains == {row.run.script: row.factor for row in alone}
    for table in (full_table(rows), *study.excerpts(measured, rows)["ladder"]):
        for row, cells in zip(rows, rows_of_text(markdown(table)), strict=True):
            assert (row.technique in cells) == (row in (rows[0], *alone))
    texts = shown(study.draw(measured, rows))
    summary = "\n".join(machine_section.summary(tmp_path, dict(machine=machine, matmul_peak=PEAK)))
    for row in rows[1:]:
        several = f"techniques {row.techniques[0]} to"
        assert any(several in text for text in texts) == (several in summary) == (row not in alone)


def test_ladder_picture(tmp_path):
    """Its title says how much faster it is; a name that is too long; no baseline; DDP and a ladder
    that has just begun."""
    study, failed = STUDIES["ladder"], dict(error="out of memory: lower --batch-size and so on")
    measured, rows = measure(tmp_path, "ladder", "--techniques 0-10", machine=CPU | dict(name=LONG),
                             runs_of=lambda plan: [
                                 run | (failed if run["name"] == "07-flash-attention" else {})
                                 for run in speeds_of(plan)])
    texts = shown(study.draw(measured, rows))
    assert {"102 tok/sec", "1.12×", "techniques 7 to \u20078",
            "failed: out of memory: lower --batch-si…"} <= set(texts)
    title = f"{rows[-1].factor_baseline:.1f}× faster: cpu-demo on {LONG[:59]}…, 2 cores"
    assert any(" ".join(text.split()).startswith(title) for text in texts)
    measured = measured_with(measured.plan, {
        run.name: record_events(run.name, 100.0) for run in measured.plan.runs[1:]} | {
        FIRST: "ended by signal 9"})
    assert study.draw(measured, rows_of(measured)) is None
    measured, rows = measure(tmp_path, "ladder", machine=GPUS, runs_of=lambda _: [
        dict(name=name) for name in (FIRST, "15-kept-memory", DDP)])
    axes = study.draw(measured, rows).axes[0]
    assert axes.get_yticklabels()[-1].get_text() == "DistributedDataParallel × 4 16"


def test_another_model_stands_apart(tmp_path):
    plan = plan_for(tmp_path, "variants", "--names optimizer-muon,model-mixture")
    base, same, other = (run.name for run in plan.runs)
    events = {name: record_events(name, speed, tokens=plan.tokens, config=dict(parameters=count))
              for name, speed, count in ((base, 100.0, 100), (same, 90.0, 100), (other, 50.0, 200))}
    for event in events[other]:
        if event["event"] == "log":
            event["expert_shares"] = [[0.2, 0.3, 0.25, 0.25], [0.1, 0.4, 0.25, 0.25]]
    study, measured = STUDIES["variants"], measured_with(plan, events)
    excerpts = excerpts_of(study, measured)
    assert list(cells_of(excerpts["variants"])) == ["`01`", "`optimizer-muon`"]
    cells = cells_of(excerpts["variants-model"])["`model-mixture`"]
    assert (cells["× speed"], cells["experts' shares of the tokens"]) == ("0.50", "10%–40%")
    assert "| `model-mixture` | 200 | 50 | 0.50 |" in text_of(study, measured)
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
    # 390 windows are 48 steps an epoch.
    assert {label: [row["compiling, s"], row["s/step"], row["5 epochs, s"],
                    row["beats no compiler from step"]] for label, row in cells.items()
            if row["s/step"]} == {
        "compile-mode --no-compile": ["0.0", "1.000", "240", ""],
        "01": ["25.0", "0.500", "145", "50"],
        "compile-mode --compile-mode max-autotune": ["1.0", "2.000", "481", "never"]}


def test_groups_of_variants(tmp_path):
    """02's groups are compared with 02; checkpoints go to a folder of the run's own; Trainer has
    01's batch, and what the machine has units for."""
    for group in ("ddp", "parallel"):
        first, *others = plan_for(tmp_path, "variants", group).runs
        assert first.script == "02" and others
        assert all(run.script.startswith(group) for run in others)
    first, *others = plan_for(tmp_path, "variants", "checkpoint").runs
    assert first.script == "01" and all(SCRATCH in run.options for run in others)
    for machine, name, options in ((CPU, "8", []), (MACHINE, "32", ["--bf16", "--tf32", "True"]),
                                   (MACHINE | dict(capability="7.5"), "32", ["--bf16"])):
        _, plain, mixed, *_ = plan_for(tmp_path, "variants", "trainer", machine).runs
        assert plain.options[-1] == name and [*mixed.options[2:]] == (options or ["--bf16"])
    assert {run.script for run in plan_for(tmp_path, "variants").runs}.isdisjoint(
        {"compile-mode", "checkpoint-resume"})
    with pytest.raises(UserError, match="^--names and a group"):
        plan_for(tmp_path, "variants", "ddp --names optimizer-muon")


# ---- Variants by their names


def test_a_variant_is_measured_once(tmp_path):
    """And two of one name are refused: the journal couldn't tell the one from the other."""
    runs = STUDIES["variants"].runs(setup_of(tmp_path, names="gc-freeze, gc-freeze"))
    assert [run.label for run in runs[1:]] == ["gc-freeze"]
    with pytest.raises(UserError, match="both be called variant-data-workers-workers-2"):
        STUDIES["variants"].runs(setup_of(
            tmp_path, names="data-workers --workers 2,data-workers --workers -2"))


# ---- Sweeps


def test_sweeps(tmp_path):
    plan = plan_for(tmp_path, "sweep", "batch", MACHINE)
    assert (plan.kind, plan.memory_limit_gb, plan.stop_at_oom) == ("batch", None, True)
    assert (plan.tokens, plan.seconds, plan.min_steps) == (393_216, 10, 6)
    assert [run.label for run in plan.runs[:3]] == ["batch 1", "batch 2", "batch 4"]
    assert [run.requires for run in plan.runs[1:]] == [run.name for run in plan.runs[:-1]]
    plan = plan_for(tmp_path, "sweep", "context", MACHINE)
    ends = plan.runs[0], plan.runs[-1]
    assert plan.kind == "context" and ends[0].name.startswith("01_opt_single_gpu-context-256")
    assert [run.label for run in ends] == ["context 256, batch 128", "context 16384, batch 2"]
    assert ends[1].options == ("--context-length", "16384", "--batch-size", "2")
    with pytest.raises(UserError, match="^--batch-size is set by the sweep itself"):
        plan_for(tmp_path, "sweep", "context", options=["--batch-size=4"])


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


# ---- Stages


@pytest.mark.parametrize(("gpus", "ranks", "published"), [
    (0, 2, None), (1, 1, None), (4, 4, 419_259)])
def test_stages(tmp_path, gpus, ranks, published):
    """The scripts as they stand; in a report on a GPU three epochs, unless their length is set.
    """
    setup = setup_for(tmp_path, "stages", machine=MACHINE | dict(gpus=gpus) if gpus else CPU)
    plan = next(STUDIES["stages"].plans(setup))
    assert [run.script for run in plan.runs] == [
        ROOT / name for name in (stack.FIRST, stack.LAST, stack.DDP)]
    assert [run.compared_to for run in plan.runs] == [None, FIRST, LAST]
    assert [run.published for run in plan.runs] == [12_525, 142_156, published]
    assert (plan.runs[2].processes, plan.runs[2].torchrun) == (ranks, True)
    assert (plan.full_length, plan.tokens, plan.epochs) == (True, None, None)
    setup.in_report = True
    assert next(STUDIES["stages"].plans(setup)).epochs == (3 if gpus else None)
    setup.args.max_tokens = 9
    plan = next(STUDIES["stages"].plans(setup))
    assert (plan.tokens, plan.epochs) == (9, None)


def test_newest_complete_run_of_each_stage_and_group(tmp_path, capsys):
    """By hand or in the journal; runs that did not complete are counted, damaged ones named."""
    plan = plan_for(tmp_path, "stages")
    write_journal(tmp_path, "stages", plan, [
        dict(name=FIRST, speed=1500.0, start=dict(time="20260103T000000Z")),
        dict(name=LAST, speed=4000.0, start=dict(time="20260101T000000Z")),
        dict(name=DDP, error="it broke")])
    write_record(tmp_path, FIRST, "20260102T000000Z", speed=1000.0)
    write_record(tmp_path, FIRST, "20260104T000000Z", speed=9999.0, status="interrupted")
    write_record(tmp_path / "reference" / "a", FIRST, "20260105T000000Z", speed=1200.0)  # not ours
    write_record(tmp_path, LAST, "20260102T000000Z", speed=4500.0, steps=5,
                 config=dict(batch_size=8))
    write_record(tmp_path, LAST, "20260103T000000Z", avg_tok_per_sec=None, steps=4)
    write_record(tmp_path, DDP, speed=400_000.0, gpu=H100, reserved_gb=None,
                 config=dict(world_size=2, batch_size=32))
    write_record(tmp_path, DDP, "20260102T000000Z", gpu="Fast | $x_1$ GPU")
    write_record(tmp_path, "03_fused_adamw", "20260109T000000Z")  # none of the stages
    killed = write_record(tmp_path, FIRST, "20260106T000000Z", speed=7777.0)
    killed.write_text("".join(killed.read_text().splitlines(keepends=True)[:-1]))
    torn = write_record(tmp_path, FIRST, "20260107T000000Z", speed=7777.0)
    torn.write_text(torn.read_text()[:-30])
    good = write_record(tmp_path, FIRST, "20260108T000000Z", speed=7777.0)
    text = good.read_text()
    for old, new in (('"val_loss": 7.0', '"val_loss": "seven"'), ('_gb": 1.25', '_gb": NaN'),
                     ('"context_length": 256', '"context_length": "many"')):
        (tmp_path / f"damaged-{len(old)}.jsonl").write_text(text.replace(old, new))
    good.unlink()
    summary = STUDIES["stages"].summary(tmp_path)
    out, err = capsys.readouterr()
    assert out == "5 runs that did not complete are left out\n"
    assert len(re.findall(r"^skipped: .*damaged-\d+\.jsonl, ", err, re.MULTILINE)) == 3
    cells = {(line[0], line[2]): line[1:] for line in rows_of_text(summary)}
    assert len(cells) == 4
    assert cells["Some CPU", "00 original, batch 4"] == [
        "cpu-demo / 256", "00 original, batch 4", "1,500", "1.00", "1,500–1,500", "1.25", "",
        "7.000"]
    assert cells["Some CPU", "01 optimized, batch 8"][2:4] == ["4,500", "3.00"]
    # No 00 in this group: no factor. MFU: of two GPUs' 989e12 FLOP/s.
    assert cells[H100, "02 DDP × 2, batch 32"][2:] == [
        "400,000", "n/a", "400,000–400,000", "n/a", "20.2%", "7.000"]
    assert (r"Fast \| $x_1$ GPU", "02 DDP × 1, batch 4") in cells  # not the published one


def test_stages_beside_the_published_ones(tmp_path):
    """In pictures speed and memory, also where that isn't known, of another text,
    and of runs that differ in length; the published figures stand alone where nothing is measured.
    """
    theirs = published_bars()
    assert [line[2:6] for line in rows_of_text(markdown(bars_table([], theirs)))] == [
        ["00 original", "12,525", "1.00", "n/a"], ["01 optimized", "142,156", "11.35", "n/a"],
        ["02 DDP × 4", "419,259", "33.47", "n/a"]]
    for day, (gpu, speed) in enumerate(((None, 1000), (LONG, 100_000)), 1):
        for factor, stage in enumerate((FIRST, LAST, DDP), 1):
            write_record(tmp_path, stage, f"2026020{day}T000000Z", speed=speed * factor**4.0,
                         gpu=gpu, config=dict(world_size=2 if stage == DDP else 1))
    write_record(tmp_path, LAST, "20260108T000000Z", start=dict(data=dict(
        corpus="x" * 99, tokenizer="bytes")))
    write_record(tmp_path, LAST, "20260203T000000Z", speed=16_000.0, steps=40)
    write_record(tmp_path, FIRST, "20260109T000000Z", gpu="$x_1$", reserved_gb=None)
    factors = "01 16.0× and 02 81.0× as fast as 00 (one run of each)\n"
    assert {f"{factors}Some CPU: cpu-demo, context 256", "16,000  (16.00×)",
            "8,100,000  (81.00×)", "1.25", "01 optimized, batch 4,\n40,960 tokens", "02 DDP × 4",
            "419,259  (33.47×)", "26.26", "n/a", "$x_1$: cpu-demo, context 256",
            f"{factors}{LONG[:59]}…: cpu-demo, context 256",
            f"Some CPU: cpu-demo, context 256\ntext: {'x' * 59}…, its tokens bytes",
            } <= set(shown(draw_speed([*read_bars(tmp_path), *theirs])))


# ---- Scaling


def test_scaling(tmp_path):
    """On a CPU each process has as many cores at every size. The interval of an efficiency is that
    of the speedup, divided by the processes."""
    plan = plan_for(tmp_path, "scaling", "4,1,2")
    assert [(run.label, run.processes, run.cores) for run in plan.runs] == [
        ("01", 1, 1), ("02, 1 process", 1, 1), ("02, 2 processes", 2, 2), ("02, 4 processes", 4, 4)]
    assert [run.error for run in plan.runs] == [None] * 3 + ["needs 4 cores"]
    assert {run.torchrun for run in plan.runs[1:]} == {True}
    on_gpus = plan_for(tmp_path, "scaling", "1,2,4", MACHINE | dict(gpus=2)).runs
    assert on_gpus[-1].error == "needs 4 GPUs" and {run.cores for run in on_gpus} == {None}
    for sizes in ("", "a", "1,,2", "0,1", "1.5"):
        with pytest.raises(UserError):
            numbers(sizes)
    speeds = [2 * [990.0, 1010.0], 4 * [900.0], 2 * [1500.0, 2000 / 1.1]]
    write_journal(tmp_path, "scaling", plan, [run for row, own in zip(
        plan.runs, speeds, strict=False) for run in rounds_of(row.name, *own)])
    ((measured, rows),) = found_in(tmp_path, "scaling")
    cells = cells_of(text_of(STUDIES["scaling"], measured))
    low, high = (factor / 2 for factor in rows[2].interval())
    assert cells["02, 2 processes"]["95 %"] == f"{low:.0%}–{high:.0%}" and low < 0.826 < high
    assert "for 4 A100s: 74%" in text_of(STUDIES["scaling"], measured)
    assert cells["02, 2 processes"]["efficiency"] == "82.6%" and cells["01"]["95 %"] == ""


# ---- A profile


@pytest.mark.parametrize(("name", "kind"), [
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8>", "loss"),
    ("triton_red_fused__to_copy_add_amax_arange_exp_gather_log_sub_sum_3", "loss"),
    ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
    ("triton_poi_fused_gelu_2", "fused by torch.compile"), ("aten::copy_", "other"),
    ("graph_1_cpp_fused_add_native_layer_norm_view_3", "fused by torch.compile")])
def test_kinds_of_operations(name, kind):
    assert kind_of(name) == kind


def averages(folder, *rows: tuple) -> None:
    """What the variant leaves: rows of (name, calls, microseconds on the CPU, and on a device)."""
    keys = "name", "calls", "self_cpu_us", "self_device_us", "device_type", "is_annotation"
    (folder / "a.averages.json").write_text(json.dumps([
        dict(zip(keys, row, strict=True)) for row in rows]))


@pytest.mark.parametrize("machine", [CPU, MACHINE])
def test_a_profile(tmp_path, machine):
    """On a GPU kernels count, what the host does and annotations don't; on a CPU operations. What
    none of them took is idle. An evaluation within, or no operation, is refused."""
    study, setup, folder = STUDIES["profile"], setup_of(tmp_path, machine), tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ValueError, match="it left no profile"):
        study.collect(setup, folder)
    rows = [("ProfilerStep*", 10, 1_000_000.0, 0, "CPU", True), ("aten::mm", 400, 6e6, 0, "CPU",
            False), ("aten::copy_", 20, 33e6, 0, "CPU", False),
            ("ProfilerStep*", 10, 0, 40e6, "CUDA", True), ("nvjet_hsh", 20, 0, 3e6, "CUDA", False),
            ("void pytorch_flash::flash_bwd", 20, 0, 36e6, "CUDA", False)]
    (folder / "a.trace.json").write_text("a trace")
    for evaluated, own in ((2, rows), (12, rows[3:]), (12, [])):
        averages(folder, *own)
        record = write_record(folder, "01-profile", tokens=1024 * evaluated, steps=12, speed=256.0)
        record.rename(folder / "a.jsonl")
        with pytest.raises(ValueError, match="evaluation" if own == rows else "no profile of"):
            study.collect(setup, folder)
    assert not list(tmp_path.glob("*.json")) and study.extra(tmp_path, []) == ""
    averages(folder, *rows)
    study.collect(setup, folder)
    assert (tmp_path / "profile.trace.json").read_text() == "a trace"
    text = study.extra(tmp_path, [])
    cells = cells_of(text[:text.index("share |", text.index("share |") + 1)].rpartition("\n")[0])
    assert {kind: row["share"] for kind, row in cells.items()} == (
        {"attention": "90.0%", "matrix products": "7.5%", "idle": "2.5%"} if machine is MACHINE else
        {"matrix products": "15.0%", "other": "82.5%", "idle": "2.5%"})
    operation = "| `aten::mm` | matrix products | 40 | 600.00 | 15.0% |"
    assert (operation in text) is (machine is CPU)
