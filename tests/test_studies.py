"""bench/studies/: every one from its plan to its tables and pictures; then what is its own."""

import json
import re
from argparse import ArgumentTypeError
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from made_up import (
    CPU,
    MACHINE,
    carry_out,
    cells_of,
    measured_with,
    plan_of,
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

from bench.analysis.folders import newest_in
from bench.analysis.gains import ladder_sessions
from bench.analysis.rows import Rows
from bench.catalogue import Scripts
from bench.catalogue.variants import at_dropout_of
from bench.common import ROOT
from bench.measure.plan import SCRATCH, EqualSteps, Growth, Plan, WholeScript
from bench.report import scripts
from bench.report.pictures import picture_bytes
from bench.report.showable import excerpts_of, text_of
from bench.report.tables import picture_name
from bench.studies import all_studies, search, stages, versions
from bench.studies.profile import kind_of
from bench.studies.scaling import efficiency_of, numbers
from gpt_speed.common import UserError
from gpt_speed.gains import technique_names
from gpt_speed.tables import markdown
from patches import stack

STUDIES = all_studies()
SCRIPTS = Scripts()
GPUS = MACHINE | dict(gpus=4)
LINES = {"versions": ("--python A --python B",)}  # of studies that need options
CASES = [
    (name, line, machine)
    for name, study in STUDIES.items()
    if name != "peers"  # which needs clones: see test_peers.py
    for line in LINES.get(name) or study.report_options or [""]
    for machine in (CPU, GPUS)
]
LONG = "A processor whose name is longer than what a title of a picture has room for @ 2.70GHz"
H100 = "NVIDIA H100 80GB HBM3"
FIRST, LAST, DDP = "00_orig", "01_opt_single_gpu", "02_opt_multi_gpu_ddp"
PICTURES = {"ladder", "stages", "time-to-loss", "variants", "variants-parallel", "versions"}


@pytest.fixture(scope="module", autouse=True)
def defaults():
    """The published settings, without a process that asks the scripts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            search,
            "configurations",
            lambda runs, *_: {run.name: dict(batch_size=8, learning_rate=5e-4) for run in runs},
        )
        patch.setattr(versions, "environments_of", made_up_environments)
        yield
    plt.close("all")


def made_up_environments(names: list[str], device: str) -> list[versions.Environment]:
    """Environments whose PyTorch is called as they are, without a process that asks them."""
    return [versions.Environment(ROOT / name, name, "3.11", device) for name in names]


def setup_for(folder, name: str, line: str = "", machine: dict = CPU, options=()):
    """As measure.py and a report make it of a command line."""
    setup = setup_of(folder, machine, options, **STUDIES[name].arguments(line))
    setup.scripts = SCRIPTS  # it keeps what it has rebuilt
    return setup


def plan_for(folder, *args, **kwargs) -> Plan:
    """A study's first plan."""
    return next(STUDIES[args[0]].plans(setup_for(folder, *args, **kwargs)))


def measure(folder, *args, runs_of=speeds_of, **kwargs):
    """The rows of a study's first plan with made-up runs."""
    plan = plan_for(folder, *args, **kwargs)
    write_journal(folder, args[0], plan, runs_of(plan), kwargs.get("machine", CPU))
    return newest_in(folder, args[0])[-1]


def some_fail(plan: Plan) -> list[dict]:
    """speeds_of, but that the last run fails, and that the one before it can't run."""
    if len(plan.runs) > 2 and not plan.growth:
        plan.runs[-2] = plan.runs[-2].replace(error="needs a thing")
    runs = speeds_of(plan)
    for run in runs:
        if run["name"] == plan.runs[-1].name != plan.runs[0].name:
            run["error"] = "it broke"
    return runs


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[:2]} {case[2]['gpus']}")
def case(request, tmp_path_factory):
    """A study that has been carried out with made-up runs: its plans, and each measurement with
    its rows."""
    name, line, machine = request.param
    study, folder = STUDIES[name], tmp_path_factory.mktemp("results")
    setup = setup_for(folder, name, line, machine)
    plans = [plan for plan, _ in carry_out(study, setup, some_fail)]
    return SimpleNamespace(study=study, plans=plans, measurements=newest_in(folder, name))


@pytest.fixture(scope="module")
def tables(case) -> list[SimpleNamespace]:
    """What a study shows of each measurement: on a machine's page, and as excerpts by their name.
    Not those of a profile, which are of what a run leaves besides."""
    if case.study.name == "profile":
        pytest.skip("tested in test_a_profile")
    last = {plan.kind: plan for plan in case.plans}
    return [
        SimpleNamespace(
            plan=last[rows.measured.kind],
            kind=rows.measured.kind,
            rows=rows,
            text=text_of(case.study, rows),
            excerpts=excerpts_of(case.study, rows),
        )
        for rows in case.measurements
    ]


def test_plans(case):
    for plan in case.plans:
        names = [run.name for run in plan.runs]
        assert len(set(names)) == len(names)
        for place, run in enumerate(plan.runs):
            assert run.compared_to in (None, *names[:place])
            assert run.label and run.technique
            assert run.error or b"def main(" in SCRIPTS.text(run.script)


def test_each_kind_of_plan_is_read_back_with_its_runs(case, tables):
    assert [part.kind for part in tables] == list(dict.fromkeys(plan.kind for plan in case.plans))
    for part in tables:
        assert [row.run.name for row in part.rows] == [run.name for run in part.plan.runs]


def test_every_run_is_shown_with_its_error(tables):
    for part in tables:
        for row in part.rows:
            assert row.label in part.text
            assert (row.error or "") in part.text


def test_excerpts_are_named_after_their_study(case, tables):
    for part in tables:
        assert all(name.startswith(case.study.name) for name in part.excerpts)


def test_lines_of_a_table_have_as_many_cells(tables):
    for part in tables:
        for text in (part.text, *part.excerpts.values()):
            lines = rows_of_text(text)
            assert len({len(cells) for cells in lines}) == 1 if lines else "Not run here: " in text


def test_excerpts_say_why_a_run_has_no_figures(case, tables):
    for part in tables:
        reasons = {run.error for run in part.plan.runs if run.error}
        if len(part.rows) > 1 and not part.plan.runs[-1].error:
            reasons.add("failed: it broke")  # see some_fail
        for reason in reasons:
            assert reason in part.text
            if case.study.name != "stages":  # which shows only what came to its end
                assert any(reason in excerpt for excerpt in part.excerpts.values())


def test_pictures(case):
    for rows in case.measurements:
        figure = case.study.picture(rows)
        name = picture_name(case.study.name, rows.measured.kind)
        needed = rows if name == "stages" else rows[1:]
        assert bool(figure) == (
            name in PICTURES
            and (bool(rows.measured.plan.targets) or any(row.speeds for row in needed))
        )
        if figure:
            assert picture_bytes(figure).startswith(b"\x89PNG")
            shown(figure)


def test_the_ladder_and_its_length(tmp_path):
    plan = plan_for(tmp_path, "ladder", machine=MACHINE)
    names = [run.name for run in plan.runs]
    assert [run.compared_to for run in plan.runs] == [None, *names[:-1]]
    assert (names[0], names[-1]) == (FIRST, "15-kept-memory")  # 02 needs two GPUs
    assert plan.length.tokens == 393_216
    last = plan_for(tmp_path, "ladder", machine=GPUS).runs[-1]
    assert (last.name, last.processes, last.published) == (DDP, 4, 419_259)
    plan = plan_for(tmp_path, "ladder", "--techniques 0,5-6")
    assert [(run.name, run.compared_to) for run in plan.runs] == [
        (FIRST, None),
        ("05-bfloat16", FIRST),
        ("06-native-layers", "05-bfloat16"),
    ]
    setup = setup_for(tmp_path, "ladder")
    setup.args.max_tokens = 99
    (plan,) = STUDIES["ladder"].plans(setup)
    assert plan.length == EqualSteps(99, 1)


def test_leave_one_out(tmp_path):
    """The last technique leaves 01 as the script before it; the first one conflicts."""
    whole, first, last = plan_for(tmp_path, "leave-one-out", "--techniques 0,1,15", GPUS).runs
    assert (whole.name, whole.published, whole.processes) == (LAST, None, 1)
    assert first.error.startswith("conflict: ")
    assert (last.name, last.compared_to, last.expected) == ("without-15-kept-memory", LAST, 142_156)
    assert SCRIPTS.text(last.script) == SCRIPTS.patched["14-chunked-head"]


@pytest.mark.parametrize(
    ("techniques", "machine", "credits"),
    [
        ("0,1,3", CPU, [[1], [2, 3]]),
        ("0,3", CPU, [[1, 2, 3]]),
        ("2-3", CPU, [[3]]),
        ("11,13", CPU, [[12, 13]]),
        ("11,13", MACHINE, [[13]]),
    ],
)  # technique 12 is for CPUs alone
def test_whose_factor_it_is(tmp_path, techniques, machine, credits):
    """A technique is credited with its own factor alone: in tables, pictures and audits."""
    study = STUDIES["ladder"]
    rows = measure(tmp_path, "ladder", f"--techniques {techniques}", machine=machine)
    assert [row.techniques for row in rows[1:]] == credits
    alone = [row for row in rows[1:] if len(row.techniques) == 1]
    gains = {patch: gain for one in ladder_sessions(tmp_path) for patch, gain in one.gains.items()}
    for row in rows[1:]:
        assert (gains.get(row.run.script) == row.factor) == (row in alone)
    for row, cells in zip(rows, rows_of_text(text_of(study, rows)), strict=True):
        assert (row.technique in cells) == (row in (rows[0], *alone))
    texts = shown(study.picture(rows))
    for row in rows[1:]:
        several = f"techniques {row.techniques[0]} to"
        assert any(several in text for text in texts) == (row not in alone)


def test_02_is_no_technique(tmp_path):
    """Audits name the techniques of other machines' ladders by their numbers."""
    measure(tmp_path, "ladder", machine=GPUS)
    (session,) = ladder_sessions(tmp_path)
    assert session.gains.keys() == technique_names().keys() - {"ddp"}


@pytest.mark.parametrize(
    ("value", "is_off"),
    [("0", True), ("0.0", True), (".0", True), ("0e0", True), ("0.1", False), ("none", False)],
)
def test_a_variant_without_dropout_is_compared_to_01_without(value, is_off):
    """However the number is spelled."""
    base = SCRIPTS.stage("01")
    reference = at_dropout_of(["--dropout", value], base)
    assert (reference.options == ("--dropout", "0")) is is_off
    assert (reference is base) is not is_off


def test_ladder_without_a_common_round(tmp_path):
    """The lines of the baseline's later rounds, and of technique 2's first one, are damaged."""
    lost = {FIRST: (2, 3, 4), "02-tensor-cores": (1,)}
    rows = measure(
        tmp_path,
        "ladder",
        "--techniques 0-2",
        runs_of=lambda plan: [
            run for run in speeds_of(plan) if run["round"] not in lost.get(run["name"], ())
        ],
    )
    assert rows[1].factor_baseline and rows[2].factor and not rows[2].factor_baseline
    assert shown(STUDIES["ladder"].picture(rows))


def test_ladder_picture(tmp_path):
    """Its title says how much faster it is; a name that is too long; no baseline."""
    study, failed = STUDIES["ladder"], dict(error="out of memory: lower --batch-size and so on")
    rows = measure(
        tmp_path,
        "ladder",
        "--techniques 0-10",
        machine=CPU | dict(name=LONG),
        runs_of=lambda plan: [
            run | (failed if run["name"] == "07-flash-attention" else {}) for run in speeds_of(plan)
        ],
    )
    texts = shown(study.picture(rows))
    assert {
        "102 tok/sec",
        "1.12×",
        "techniques 7 to \u20078",
        "failed: out of memory: lower --batch-siz",
    } <= set(texts)
    title = f"{rows[-1].factor_baseline:.1f} times as fast: cpu-demo on {LONG[:59]}…, 2 cores"
    assert any(" ".join(text.split()).startswith(title) for text in texts)
    plan = rows.measured.plan
    measured = measured_with(
        plan,
        {run.name: record_events(run.name, 100.0) for run in plan.runs[1:]}
        | {FIRST: "ended by signal 9"},
    )
    assert study.picture(Rows(measured)) is None


@pytest.mark.parametrize(
    ("speeds", "is_claimed"),
    [((120.0, 150.0), True), ((120.0, 60.0), False), ((80.0, 99.0), False)],
)
def test_a_ladder_that_ends_below_its_baseline_claims_no_speedup(tmp_path, speeds, is_claimed):
    """Though a technique of it is significantly faster than the one before."""

    def ends_at(plan: Plan) -> list[dict]:
        return [
            run
            for row, speed, noise in zip(plan.runs, (100.0, *speeds), (1, 1.01, 0.99), strict=True)
            for run in rounds_of(row.name, speed, noise * speed, speed)
        ]

    rows = measure(tmp_path, "ladder", "--techniques 0,2,3", runs_of=ends_at)
    assert "faster" in {row.significance for row in rows}
    texts = shown(STUDIES["ladder"].picture(rows))
    assert any(" times as fast" in text for text in texts) is is_claimed


def test_groups_of_variants(tmp_path):
    """02's are compared with 02; Trainer has 01's batch, and what the machine has units for."""
    for group, base in (("ddp", "02"), ("parallel", "02"), ("checkpoint", "01")):
        first, *others = plan_for(tmp_path, "variants", group).runs
        assert first.script == base and all(run.script.startswith(group) for run in others)
    assert all(SCRATCH in run.options for run in others)
    for machine, name, options in (
        (CPU, "8", ()),
        (MACHINE, "32", ("--tf32", "True")),
        (MACHINE | dict(capability="7.5"), "32", ()),
    ):
        _, plain, mixed, *_ = plan_for(tmp_path, "variants", "trainer", machine).runs
        assert plain.options[-1] == name and mixed.options[2:] == ("--bf16", *options)
    assert {run.script for run in plan_for(tmp_path, "variants").runs}.isdisjoint(
        {"compile-mode", "checkpoint-resume"}
    )
    with pytest.raises(UserError, match="^--names and a group"):
        plan_for(tmp_path, "variants", "ddp --names optimizer-muon")


@pytest.mark.parametrize(
    ("names", "label"),
    [
        ("data-workers --workers 2, data-workers --workers=2", "data-workers --workers 2"),
        ("gc-freeze+optimizer-muon,optimizer-muon+gc-freeze", "gc-freeze+optimizer-muon"),
    ],
)
def test_a_variant_is_measured_once(tmp_path, capsys, names, label):
    """And two of one name are refused: the journal couldn't tell the one from the other."""
    plan = next(STUDIES["variants"].plans(setup_of(tmp_path, names=names)))
    assert [run.label for run in plan.runs[1:]] == [label]
    assert "asked for twice, and taken once: " in capsys.readouterr().err
    with pytest.raises(UserError, match="both be called variant-data-workers-workers-2"):
        next(
            STUDIES["variants"].plans(
                setup_of(tmp_path, names="data-workers --workers 2,data-workers --workers -2")
            )
        )


def test_sweeps(tmp_path):
    plan = plan_for(tmp_path, "sweep", "batch", MACHINE)
    assert (plan.growth, plan.length.min_steps) == (Growth(2, None), 24)
    assert [run.label for run in plan.runs[:3]] == ["batch 1", "batch 2", "batch 4"]
    plan = plan_for(tmp_path, "sweep", "context", MACHINE)
    assert plan.growth == Growth(1, None)
    assert [run.label for run in plan.runs[::6]] == [
        "context 256, batch 128",
        "context 16384, batch 2",
    ]
    assert plan.runs[-1].options == ("--context-length", "16384", "--batch-size", "2")
    with pytest.raises(UserError, match="^--batch-size is set by the sweep itself"):
        plan_for(tmp_path, "sweep", "context", options=["--batch-size=4"])


@pytest.mark.parametrize(
    ("memory", "errors"),
    [
        *(
            (
                [1.0, gb],
                [
                    None,
                    None,
                    "not tried: by the memory of batch 2 it would take more than half of the RAM",
                ],
            )
            for gb in (2.5, None)
        ),
        ([1.0, "out of memory"], [None, "failed: out of memory"]),
    ],
)
def test_nothing_larger_than_what_does_not_fit(tmp_path, memory, errors):
    study, plan = STUDIES["sweep"], plan_for(tmp_path, "sweep", "batch")
    assert plan.growth == Growth(2, 4.0)
    measured = measured_with(
        plan,
        {
            run.name: gb if isinstance(gb, str) else record_events(run.name, reserved_gb=gb)
            for run, gb in zip(plan.runs, memory, strict=False)
        },
    )
    rows = Rows(measured)
    for row, error in zip(rows, errors, strict=False):
        assert row.error == error or row.error.startswith(error)
    lines = rows_of_text(text_of(study, rows))
    assert len(lines) == len(errors) and lines[-1][1].startswith(errors[-1])


def stages_setup(folder, gpus: int):
    """Without GPUs, of a CPU with two cores."""
    return setup_for(folder, "stages", machine=MACHINE | dict(gpus=gpus) if gpus else CPU)


def test_stages_are_the_three_scripts_as_they_stand(tmp_path):
    plan = next(STUDIES["stages"].plans(stages_setup(tmp_path, gpus=4)))
    scripts = [ROOT / name for name in (stack.FIRST, stack.LAST, stack.DDP)]
    assert [run.script for run in plan.runs] == scripts
    assert [run.compared_to for run in plan.runs] == [None, FIRST, LAST]
    assert plan.length == WholeScript()
    assert {run.options for run in plan.runs} == {()}


def test_stages_have_four_rounds():
    assert STUDIES["stages"].rounds == dict(cuda=4, cpu=4)


@pytest.mark.parametrize(
    ("gpus", "ranks", "published"), [(0, 2, None), (1, 1, None), (4, 4, 419_259)]
)
def test_02_has_a_rank_for_each_gpu_and_the_figure_of_four(tmp_path, gpus, ranks, published):
    """Two ranks on a CPU."""
    plan = next(STUDIES["stages"].plans(stages_setup(tmp_path, gpus)))
    ddp = plan.runs[-1]
    assert (ddp.processes, ddp.torchrun, ddp.published) == (ranks, True, published)
    assert [run.published for run in plan.runs[:2]] == [12_525, 142_156]


@pytest.mark.parametrize(
    ("gpus", "in_report", "args", "epochs"),
    [
        (0, False, {}, None),
        (0, True, {}, None),
        (1, False, {}, None),
        (1, True, {}, 1),
        (1, True, dict(max_tokens=9), None),
        (1, False, dict(epochs=2), 2),
        (0, False, dict(epochs=2), 2),
        (0, True, dict(epochs=2, max_tokens=9), None),
        (1, True, dict(epochs=2, max_tokens=9), None),
    ],
)
def test_how_long_stages_train(tmp_path, gpus, in_report, args, epochs):
    """In a report on a GPU one epoch, unless their length is set."""
    setup = stages_setup(tmp_path, gpus)
    setup.in_report = in_report
    vars(setup.args).update(args)
    plan = next(STUDIES["stages"].plans(setup))
    assert plan.length == WholeScript(epochs, args.get("max_tokens"))


def test_the_notes_of_stages_say_how_many_epochs(tmp_path):
    """Also beside another batch size, as for a small GPU."""
    setup = stages_setup(tmp_path, gpus=0)
    setup.args.epochs = 2
    plan = next(STUDIES["stages"].plans(setup))
    plan.runs = [run.replace(options=(*run.options, "--batch-size", "4")) for run in plan.runs]
    measured = measured_with(plan, {run.name: record_events(run.name) for run in plan.runs})
    notes = STUDIES["stages"].notes(Rows(measured))
    assert "2 epochs per run." in notes[0]


def test_batches_of_composed_scripts(tmp_path, monkeypatch):
    """Where 01 in float32 needs smaller ones, the composed script may not."""
    monkeypatch.setattr(stages, "batches_that_fit", lambda setup, composed: {})
    setup = setup_for(tmp_path, "stages", machine=MACHINE | dict(capability="7.5"))
    setup.batches = {32: 16}
    plan = next(STUDIES["stages"].plans(setup))
    assert plan.runs[1].script == "precision-fp16"
    assert STUDIES["stages"].batches(setup) == {} != setup.batches


@pytest.fixture
def stage_runs(tmp_path):
    """A folder with complete runs of 00, 01 and 02, some in the journal, some started by hand."""
    write_journal(
        tmp_path,
        "stages",
        plan_for(tmp_path, "stages"),
        [
            dict(name=FIRST, speed=1500.0, start=dict(time="20260103T000000Z")),
            dict(name=LAST, speed=4000.0, start=dict(time="20260101T000000Z")),
        ],
    )
    write_record(tmp_path, FIRST, "20260102T000000Z", speed=1000.0)
    write_record(
        tmp_path, LAST, "20260102T000000Z", speed=4500.0, steps=5, config=dict(batch_size=8)
    )
    write_record(
        tmp_path,
        DDP,
        speed=400_000.0,
        gpu=H100,
        reserved_gb=None,
        config=dict(world_size=2, batch_size=32),
    )
    return tmp_path


def latest_in(folder) -> dict[tuple[str, str], list[str]]:
    """The cells of the three scripts' table but the machine, by machine and script."""
    table = markdown(scripts.scripts_table(scripts.latest_runs(scripts.script_runs(folder))))
    return {(line[0], line[2]): line[1:] for line in rows_of_text(table)}


def test_the_latest_run_of_each_script_counts(stage_runs):
    """Wherever its record lies."""
    cells = latest_in(stage_runs)
    assert len(cells) == 3
    assert cells["Some CPU", "00 original, batch 4"] == [
        "cpu-demo / 256",
        "00 original, batch 4",
        "1,500",
        "1.00",
        "1,500–1,500",
        "1.25",
        "n/a",
        "7.000",
    ]
    assert cells["Some CPU", "01 optimized, batch 8"][2:4] == ["4,500", "3.00"]


def test_a_script_without_00_beside_it_has_no_factor(stage_runs):
    """Its MFU is of two GPUs' 989e12 FLOP/s."""
    assert latest_in(stage_runs)[H100, "02 DDP × 2, batch 32"][2:] == [
        "400,000",
        "n/a",
        "400,000–400,000",
        "n/a",
        "20.2%",
        "7.000",
    ]


@pytest.mark.parametrize(
    ("gpu", "environment", "differs"),
    [
        (None, dict(torch="2.14"), ", PyTorch 2.14"),
        (None, dict(threads=1), ", 1 thread"),
        (None, dict(torch="2.14", threads=1), ", PyTorch 2.14, 1 thread"),
        (None, {}, ""),
        (H100, dict(torch="2.14"), ", PyTorch 2.14"),
        (H100, dict(threads=1), ""),  # of the host
    ],
)
def test_runs_of_another_pytorch_or_other_threads_are_not_compared(
    tmp_path, gpu, environment, differs
):
    """But ranks have a share of the threads each."""
    usual = dict(torch="2.13", gpu=gpu, cpu="Some CPU", threads=2)
    write_record(tmp_path, FIRST, speed=1000.0, gpu=gpu, start=dict(environment=usual))
    other = dict(environment=usual | environment)
    write_record(tmp_path, LAST, speed=4000.0, gpu=gpu, start=other)
    ranks = dict(gpu=gpu, config=dict(world_size=2), steps=6)
    start = dict(environment=usual | dict(threads=1))
    write_record(tmp_path, DDP, speed=6000.0, start=start, **ranks)
    factors = {script: cells[3] for (_, script), cells in latest_in(tmp_path).items()}
    assert factors == {
        "00 original, batch 4": "1.00",
        f"01 optimized, batch 4{differs}": "n/a" if differs else "4.00",
        "02 DDP × 2, batch 4": "6.00",
    }


def test_other_scripts_runs_are_left_out(stage_runs):
    """Those of a technique, and older ones of 01 with a variant."""
    before = latest_in(stage_runs)
    write_record(stage_runs, f"{LAST}-precision-fp16", speed=1.0)
    write_record(stage_runs, "03_fused_adamw", "20260109T000000Z")
    assert latest_in(stage_runs) == before


def test_runs_that_did_not_complete_are_counted(stage_runs):
    """Failed, interrupted, too short for a speed, or killed; not where a later one completed."""
    before = latest_in(stage_runs)
    assert scripts.left_out(scripts.script_runs(stage_runs)) == 0
    write_journal(stage_runs, "stages", plan_of(DDP), [dict(name=DDP, error="it broke")], id="2")
    write_record(stage_runs, FIRST, "20260104T000000Z", status="interrupted")
    write_record(stage_runs, LAST, "20260103T000000Z", avg_tok_per_sec=None, steps=4)
    killed = write_record(stage_runs, FIRST, "20260106T000000Z")
    killed.write_text(killed.read_text()[:-30])
    assert latest_in(stage_runs) == before
    assert scripts.left_out(scripts.script_runs(stage_runs)) == 4
    write_record(stage_runs, FIRST, "20260107T000000Z")
    assert scripts.left_out(scripts.script_runs(stage_runs)) == 2


def test_a_round_that_failed_after_another_is_left_out(tmp_path):
    """Though a journal tells only when the measurement began."""
    rounds = [dict(name=FIRST), dict(name=FIRST, round=2, error="it broke")]
    write_journal(tmp_path, "stages", plan_of(FIRST, rounds=2), rounds)
    runs = scripts.script_runs(tmp_path)
    assert [run.is_complete for run in runs] == [True, False] and scripts.left_out(runs) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"val_loss": 7.0', '"val_loss": "seven"'),
        ('"context_length": 256', '"context_length": "many"'),
    ],
)
def test_damaged_records_are_named(stage_runs, capsys, old, new):
    before = latest_in(stage_runs)
    damaged = write_record(stage_runs, FIRST, "20260106T000000Z")
    assert old in damaged.read_text()
    damaged.write_text(damaged.read_text().replace(old, new))
    assert latest_in(stage_runs) == before
    err = capsys.readouterr().err
    assert err.startswith("skipped: ") and f"{damaged.name}, " in err and err.count("\n") == 1


def test_scripts_beside_the_published_ones(tmp_path):
    """Also of another text, of runs that differ in length, and where memory isn't known; the
    published figures stand alone where nothing is measured."""
    assert [line[2:5] for line in rows_of_text(markdown(scripts.scripts_table([])))] == [
        ["00 original", "12,525", "1.00"],
        ["01 optimized", "142,156", "11.35"],
        ["02 DDP × 4", "419,259", "33.47"],
    ]
    for day, (gpu, speed) in enumerate(((None, 1000), (LONG, 100_000)), 1):
        for factor, stage in enumerate((FIRST, LAST, DDP), 1):
            write_record(
                tmp_path,
                stage,
                f"2026020{day}T000000Z",
                speed=speed * factor**4.0,
                gpu=gpu,
                config=dict(world_size=2 if stage == DDP else 1),
            )
    write_record(
        tmp_path,
        LAST,
        "20260108T000000Z",
        start=dict(data=dict(corpus="x" * 99, tokenizer="bytes")),
    )
    write_record(tmp_path, LAST, "20260203T000000Z", speed=16_000.0, steps=40)
    write_record(tmp_path, FIRST, "20260109T000000Z", gpu="$x_1$", reserved_gb=None)
    assert {
        "Some CPU: cpu-demo / 256",
        "16,000  (16.00×)",
        "8,100,000  (81.00×)",
        "1.25",
        "01 optimized, batch 4,\n40,960 tokens",
        "02 DDP × 4",
        "419,259  (33.47×)",
        "26.26",
        "n/a",
        "$x_1$: cpu-demo / 256",
        f"{LONG[:59]}…: cpu-demo / 256",
        f"Some CPU: cpu-demo / 256, {'x' * 59}…, its\ntokens bytes",
    } <= set(shown(scripts.draw_scripts(scripts.latest_runs(scripts.script_runs(tmp_path)))))


def test_scaling(tmp_path):
    """On a CPU each process has as many cores at every size. The interval of an efficiency is that
    of the speedup, divided by the processes."""
    study, plan = STUDIES["scaling"], plan_for(tmp_path, "scaling", "4,1,2")
    assert [(run.label, run.processes, study.cores(run)) for run in plan.runs] == [
        ("01", 1, 1),
        ("02, 1 process", 1, 1),
        ("02, 2 processes", 2, 2),
        ("02, 4 processes", 4, 4),
    ]
    assert [run.error for run in plan.runs] == [None] * 3 + ["needs 4 cores"]
    assert {run.torchrun for run in plan.runs[1:]} == {True}
    on_gpus = plan_for(tmp_path, "scaling", "1,2,4", MACHINE | dict(gpus=2)).runs
    assert on_gpus[-1].error == "needs 4 GPUs" and {study.cores(run) for run in on_gpus} == {None}
    for sizes in ("", "a", "1,,2", "0,1", "1.5"):
        with pytest.raises((ValueError, ArgumentTypeError)):
            numbers(sizes)
    speeds = [2 * [990.0, 1010.0], 4 * [900.0], 2 * [1500.0, 2000 / 1.1]]
    write_journal(
        tmp_path,
        "scaling",
        plan,
        [
            run
            for row, own in zip(plan.runs, speeds, strict=False)
            for run in rounds_of(row.name, *own)
        ],
    )
    (rows,) = newest_in(tmp_path, "scaling")
    cells = cells_of(text_of(STUDIES["scaling"], rows))
    low, high = (factor / 2 for factor in rows[2].interval)
    assert cells["02, 2 processes"]["95%"] == f"{low:.0%}–{high:.0%}" and low < 0.826 < high
    assert "for 4 A100s: 74%" in text_of(STUDIES["scaling"], rows)
    assert cells["02, 2 processes"]["efficiency"] == "82.6%" and cells["01"]["95%"] == ""


def test_no_efficiency_without_01(tmp_path):
    """Where 01 has failed, 02 isn't compared to anything."""
    plan = plan_for(tmp_path, "scaling", "1,2")
    base, *others = plan.runs
    runs = [dict(name=base.name, error="it failed")]
    runs += [run for other in others for run in rounds_of(other.name, 900.0, 900.0)]
    write_journal(tmp_path, "scaling", plan, runs)
    (rows,) = newest_in(tmp_path, "scaling")
    assert [efficiency_of(row) for row in rows] == [None, None, None]


def test_without_01_nothing_tells_the_efficiency_of_02(tmp_path):
    """Of which one process alone would else have 100 %, and two 50 %."""

    def without_01(plan: Plan) -> list[dict]:
        failed, *others = plan.runs
        return [dict(name=failed.name, error="it broke"), *(dict(name=run.name) for run in others)]

    rows = measure(tmp_path, "scaling", "1,2", runs_of=without_01)
    cells = cells_of(text_of(STUDIES["scaling"], rows))
    assert cells["02, 2 processes"]["per process"] == "50"
    assert all("efficiency" not in own for own in cells.values())


def test_kinds_of_operations():
    assert [
        *map(
            kind_of,
            (
                "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8>",
                "triton_red_fused__to_copy_add_amax_arange_exp_gather_log_sub_sum_3",
                "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
                "graph_1_cpp_fused_add_native_layer_norm_view_3",
            ),
        )
    ] == ["loss", "loss", "matrix products", "fused by torch.compile"]


@pytest.mark.parametrize("machine", [CPU, MACHINE])
def test_a_profile(tmp_path, machine):
    """On a GPU kernels count, what the host does and annotations don't; on a CPU operations. What
    none of them took is idle. An evaluation within, or no operation, is refused."""
    study, setup, folder = STUDIES["profile"], setup_of(tmp_path, machine), tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ValueError, match="it left no profile"):
        study.collect(setup, folder)
    keys = "name", "calls", "self_cpu_us", "self_device_us", "device_type", "is_annotation"
    rows = [
        ("ProfilerStep*", 10, 1_000_000.0, 0, "CPU", True),
        ("aten::mm", 400, 6e6, 0, "CPU", False),
        ("aten::copy_", 20, 33e6, 0, "CPU", False),
        ("ProfilerStep*", 10, 0, 40e6, "CUDA", True),
        ("nvjet_hsh", 20, 0, 3e6, "CUDA", False),
        ("void pytorch_flash::flash_bwd", 20, 0, 36e6, "CUDA", False),
    ]
    (folder / "a.trace.json").write_text("a trace")
    for evaluated, own, error in (
        (2, rows, "evaluation"),
        (12, [], "no operation"),
        (12, rows, None),
    ):
        (folder / "a.averages.json").write_text(
            json.dumps([dict(zip(keys, row, strict=True)) for row in own])
        )
        record = write_record(folder, "01-profile", tokens=1024 * evaluated, steps=12, speed=256.0)
        record.rename(folder / "a.jsonl")
        with pytest.raises(ValueError, match=error) if error else nullcontext():
            study.collect(setup, folder)
    assert (tmp_path / "profile.trace.json").read_text() == "a trace"
    plan = next(study.plans(setup))
    write_journal(tmp_path, "profile", plan, speeds_of(plan), machine)
    (rows,) = newest_in(tmp_path, "profile")
    _, kinds, operations = excerpts_of(study, rows)["profile"].split("\n\n")
    assert {kind: row["share"] for kind, row in cells_of(kinds).items()} == (
        {"attention": "90.0%", "matrix products": "7.5%", "idle": "2.5%"}
        if machine is MACHINE
        else {"matrix products": "15.0%", "other": "82.5%", "idle": "2.5%"}
    )
    operation = "| `aten::mm` | matrix products | 40 | 600.00 | 15.0% |"
    assert (operation in operations) is (machine is CPU)
    setup.args.max_tokens = 99
    with pytest.raises(UserError, match="a profile has 12 steps"):
        next(study.plans(setup))


def test_the_study_in_contributing(tmp_path, monkeypatch):
    plt.close("all")
    code = re.findall("```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    exec(code[0], names := {})
    study = names["Contexts"]()
    monkeypatch.setitem(STUDIES, study.name, study)
    rows = measure(tmp_path, "contexts")
    assert [row.factor is None for row in rows] == [True, False, False]
    assert rows[1].label in text_of(study, rows) and shown(study.picture(rows))
