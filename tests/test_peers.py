"""The study `peers`, and peers/clone.py, with tiny stand-ins for the programs of others."""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, call_main, load, read_record, small, write_tokens
from made_up import (
    CPU,
    MACHINE,
    carry_out,
    cells_of,
    rounds_of,
    setup_of,
    shown,
    speeds_of,
    write_journal,
)
from matplotlib import pyplot as plt

from bench.analysis.folders import newest_in
from bench.analysis.limit import limit_of
from bench.measure.launch import as_typed, command_of, compiler_cache, source_of
from bench.measure.measurement import Measurement
from bench.measure.plan import Job
from bench.measure.records import Status
from bench.measure.sizing import Length
from bench.report.notes import WIDE_LEGEND, WIDE_MARK
from bench.report.showable import excerpts_of, text_of
from bench.studies import all_studies, peers
from gpt_speed.common import UserError
from gpt_speed.tables import markdown

STUDY = all_studies()["peers"]
NANOGPT = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=config.bias)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids, targets=None):
        x = self.embedding(ids)
        if targets is None:
            return self.head(x[:, -1:]), None
        logits = self.head(x)
        SEEN.append((logits.dtype, self.training))
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def configure_optimizers(self, decay, rate, betas, device):
        return torch.optim.AdamW(self.parameters(), rate, betas, weight_decay=decay)

SEEN = []
"""
PUBLISHED = """
import matplotlib.pyplot as plt
import requests
import tiktoken
import torch
from torch import nn

def calc_loss_batch(x, y, model, device):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

def create_dataloader_v1(*args, **settings):
    raise NotImplementedError

def train_model_simple_with_timing(**settings):
    raise NotImplementedError

def main(shape, settings):
    text = open("middlemarch.txt").read()
    model = nn.Sequential(
        nn.Embedding(shape["vocab_size"], shape["emb_dim"]),
        nn.Linear(shape["emb_dim"], shape["vocab_size"], bias=False),
    )
    model = torch.compile(model).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
    loader = create_dataloader_v1(text, batch_size=settings["batch_size"])
    losses, _, _ = train_model_simple_with_timing(
        model=model, train_loader=loader, optimizer=optimizer,
        num_epochs=settings["num_epochs"], tokenizer=tiktoken.get_encoding("gpt2"),
    )
    plt.plot(losses)
    return model
"""
TEXTS = {"nanogpt": NANOGPT, "published": PUBLISHED}
TINY = "--device cpu --model cpu-demo --context-length 16 --batch-size 2 --eval-windows 2".split()


@pytest.fixture
def clones(tmp_path):
    """By the peers' names, the folders of their stand-ins."""
    for name, text in TEXTS.items():
        file = tmp_path / name / peers.PEERS[name].file
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return {name: tmp_path / name for name in TEXTS}


@pytest.fixture
def importable(monkeypatch):
    """The clones' files can be imported, without a process that tries."""
    monkeypatch.setattr(peers.processes, "answer_of", lambda *_: (0, "", ""))


@pytest.fixture
def setup_for(tmp_path, clones, importable):
    """A function that returns the study's setup for a command line, with both clones."""
    yield lambda line="", machine=CPU, options=(): setup_of(
        tmp_path / "results", machine, options, **STUDY.arguments(line) | clones
    )
    plt.close("all")


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A function that runs peers/clone.py for a file and options of a small 00."""
    script = load(ROOT / "peers" / "clone.py")
    baseline = tmp_path / "00_orig.py"
    baseline.write_text(small((ROOT / "00_orig.py").read_text()))
    data = write_tokens(tmp_path / "data")
    monkeypatch.setattr(torch, "compile", lambda model: model)
    for name in script.UNUSED:  # it puts others in their place
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))

    def run(*words, train=True):
        results = ["--data", data, "--results-dir", tmp_path / "results"]
        command = [baseline, *TINY, *results, "--max-tokens", "320", "--eval-freq", "9"]
        return call_main(script, *words, *(command if train else []), variables={})

    return run


# ---- peers/clone.py ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "dtype", "autocast", "logits"),
    [
        (["nanogpt"], "float32", "bfloat16", torch.bfloat16),
        (["--float32", "nanogpt"], "float32", None, torch.float32),
        (["published"], "bfloat16", None, None),
    ],
)
def test_their_model_trains_with_our_record(
    clone, clones, tmp_path, words, dtype, autocast, logits
):
    name = words[-1]
    result = clone(*words, clones[name] / peers.PEERS[name].file, train=True)
    assert result.returncode == 0, result.stderr
    start, first, last, epoch, end = read_record(tmp_path / "results")
    config = start["config"]
    assert (config["dtype"], config["autocast"], config["compile"]) == (dtype, autocast, False)
    tables = 1 if name == "nanogpt" else 2  # nanoGPT's head is its embedding
    assert (config["vocab_size"], config["parameters"]) == (50_304, tables * 50_304 * 32)
    assert len(first["seconds"] + last["seconds"]) == 10 and end["status"] == "complete"
    assert last["train_loss"] < first["train_loss"] < 12
    assert epoch["sample"].startswith("Every effort moves you")
    if logits:
        seen = sys.modules["theirs"].SEEN
        assert {dtype for dtype, training in seen if training} == {logits}
        assert {dtype for dtype, training in seen if not training} == {torch.float32}


def test_gradients_of_nanogpt_are_clipped(clone, clones, monkeypatch):
    norms = []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils,
        "clip_grad_norm_",
        lambda parameters, norm: norms.append((len(parameters), norm)) or clip(parameters, norm),
    )
    clone("nanogpt", clones["nanogpt"] / "model.py")
    assert norms == [(1, 1.0)] * 10


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("nanogpt", "import torch\n", "import no_such_package\n", "No module named 'no_such_pack"),
        ("nanogpt", "class GPT(", "class Other(", "has no GPT"),
        ("nanogpt", "import torch\n", "import (\n", "invalid syntax"),
        ("published", "def main", "def other", "has no main"),
    ],
)
def test_a_clone_that_cannot_be_used(clones, forked_children, tmp_path, name, old, new, says):
    file = clones[name] / peers.PEERS[name].file
    file.write_text(file.read_text().replace(old, new))
    setup = setup_of(tmp_path, **STUDY.arguments("") | clones)
    with pytest.raises(UserError, match=re.escape(says)) as error:
        next(STUDY.plans(setup))
    assert error.value.code == 2 and "\n" not in str(error.value)


def test_a_loop_that_is_called_in_another_way(clone, clones):
    """Model and optimizer are taken from that call."""
    file = clones["published"] / peers.PEERS["published"].file
    file.write_text(
        file.read_text().replace("model=model, train_loader", "net=model, train_loader")
    )
    error = clone("published", file).returncode  # what sys.exit() was given
    assert error.startswith(f"error: {file} doesn't call train_model_simple_with_timing once")
    assert "\n" not in error


# ---- The study ---------------------------------------------------------------------------------


def test_bad_input(tmp_path, clones, setup_for):
    (tmp_path / "file").touch()
    for line, options, says in (
        (f"--nanogpt {tmp_path / 'file'}", (), "no model.py there"),
        (f"--published {clones['nanogpt']}", (), "no ch05/10_llm-training-speed/01_opt_single"),
        (f"--nanogpt {tmp_path / 'none'}", (), "no model.py there"),
        ("", (), "git clone https://github.com/karpathy/nanoGPT (commit 3adf61e), git clone "),
        (f"--nanogpt {clones['nanogpt']}", ("--dropout=0.1",), "--dropout is set by the study"),
        (f"--nanogpt {clones['nanogpt']} --largest", ("--batch-size", "4"), "--batch-size is set"),
    ):
        setup = setup_of(tmp_path, CPU, options, **STUDY.arguments(line))
        with pytest.raises(UserError, match=re.escape(says)) as error:
            next(STUDY.plans(setup))
        assert error.value.code == 2


def test_runs_on_a_cpu(setup_for):
    """Each with huge pages and without, compared to nanoGPT with as large pages."""
    (plan,) = STUDY.plans(setup_for("--dropout 0.1"))
    plain, huge = plan.runs[:6], plan.runs[6:]
    assert [run.label for run in plain] == [
        "nanoGPT",
        "nanoGPT, float32",
        "published script",
        "00",
        "01",
        "01, float32 weights, autocast",
    ]
    assert [run.label for run in huge] == [f"{run.label}, huge pages" for run in plain]
    assert [run.compared_to for run in plain] == [None] + 5 * ["nanogpt"]
    assert [run.compared_to for run in huge] == ["nanogpt"] + 5 * ["nanogpt-huge-pages"]
    for runs, value in ((plain, "0"), (huge, "1")):
        assert {run.variables["THP_MEM_ALLOC_ENABLE"] for run in runs} == {value}
    for run in plan.runs:
        batch = () if run.stage == "00" else ("--batch-size", "8")
        assert run.options == ("--dropout", "0.1", *batch)
    assert (plan.kind, plan.min_steps) == ("dropout-0.1", 12)


def test_runs_on_a_gpu(setup_for):
    (plan,) = STUDY.plans(setup_for("", MACHINE))
    assert [run.name for run in plan.runs] == [
        "nanogpt",
        "published",
        "00_orig",
        "01_opt_single_gpu",
        "variant-precision-autocast",
    ]
    assert plan.runs[1].options == ("--dropout", "0", "--batch-size", "32")
    assert (plan.kind, plan.min_steps) == ("dropout-0", 48)
    assert not any(run.variables for run in plan.runs)
    smaller = setup_for("", MACHINE)
    smaller.batches = {8: 4, 32: 16}
    assert next(STUDY.plans(smaller)).runs[1].options[-1] == "16"
    (plan,) = STUDY.plans(setup_for("", MACHINE, ["--batch-size", "4"]))
    assert {run.options for run in plan.runs} == {("--dropout", "0")}


def test_without_bfloat16_units(setup_for):
    (plan,) = STUDY.plans(setup_for("", CPU | dict(dtype="float32")))
    errors = [run.error for run in plan.runs[:6]]
    needs = "needs bfloat16 units"
    assert errors == [needs, None, needs, None, None, needs]
    assert plan.runs[4].compared_to == "nanogpt-float32" and not plan.runs[0].compared_to


def test_the_command_of_a_run(setup_for, tmp_path):
    setup = setup_for()
    (plan,) = STUDY.plans(setup)
    float32 = plan.runs[1]
    job = SimpleNamespace(run=float32, seed=1)
    command = command_of(STUDY, job, setup, Length((), 1.0), tmp_path)
    words = as_typed(command, float32).split()
    assert words[:2] == ["THP_MEM_ALLOC_ENABLE=0", "python"] and words[3:5] == [
        "--float32",
        "nanogpt",
    ]
    assert setup.args.nanogpt / "model.py" in command  # so that results are of this file


def test_nanogpt_in_float32_is_compiled_for_itself(setup_for):
    """Its script, its options and the file in the clone are those of nanoGPT with autocast."""
    setup = setup_for()
    (plan,) = STUDY.plans(setup)
    sources = {run.name: source_of(run, STUDY, setup) for run in plan.runs}
    caches = [
        compiler_cache(Job(run, 9, 1), Measurement(plan, sources=sources)) for run in plan.runs
    ]
    assert caches[0] != caches[1]
    setup.args.nanogpt.joinpath("model.py").write_text("other")
    changed = {run.name for run in plan.runs if source_of(run, STUDY, setup) != sources[run.name]}
    assert changed == {run.name for run in plan.runs if run.name.startswith("nanogpt")}


def grow(setup, fits) -> list[list[str]]:
    """The names of the runs of each plan, where `fits` tells by a run's name and batch size its
    GB, or None where that is too much."""

    def runs_of(plan):
        runs = []
        for run in speeds_of(plan):
            name, _, batch = run["name"].partition("-batch-")
            memory = fits(name, int(batch or 0))
            if memory is None:
                run |= dict(error="out of memory", kind=Status.OUT_OF_MEMORY)
            runs.append(run | dict(reserved_gb=memory))
        return runs

    plans = [plan for plan, _ in carry_out(STUDY, setup, runs_of)]
    assert [plan.rounds for plan in plans[:-1]] == [1] * (len(plans) - 1)
    assert plans[-1].rounds is None and {plan.kind for plan in plans} == {"largest-dropout-0"}
    return [[run.name for run in plan.runs] for plan in plans]


def test_the_largest_batch_on_a_gpu(setup_for):
    """Of nanoGPT 32, since 64 doesn't fit; that is no failure."""
    setup = setup_for("--largest", MACHINE)
    first, second, last = grow(
        setup, lambda name, batch: None if (name, batch) == ("nanogpt", 64) else 10.0
    )
    assert first[:3] == ["nanogpt-batch-32", "published-batch-32", "00_orig"]
    assert second[:3] == ["nanogpt-batch-64", "published-batch-64", "00_orig"]
    assert last == ["nanogpt-batch-32", "published-batch-64", "00_orig"] + [
        "01_opt_single_gpu-batch-64",
        "variant-precision-autocast-batch-64",
    ]
    (rows,) = newest_in(setup.results, "peers")
    assert not STUDY.has_failed(rows.measured) and rows[1].factor


def test_a_program_that_never_fits_keeps_the_first_batch(setup_for):
    """It isn't tried at another one while others grow."""
    setup = setup_for("--largest", MACHINE)
    plans = grow(setup, lambda name, batch: None if name == "nanogpt" else 10.0)
    assert [names[0] for names in plans] == 3 * ["nanogpt-batch-32"]
    assert plans[-1][1] == "published-batch-64"


def test_the_largest_batch_on_a_cpu(setup_for):
    """What by its memory at half the size would need more than half of the RAM isn't tried."""
    setup = setup_for("--largest", CPU)  # 8 GB
    *_, last = grow(setup, lambda name, batch: (0.1 if name.startswith("01") else 0.2) * batch)
    assert last[0] == "nanogpt-batch-16" and last[4] == "01_opt_single_gpu-batch-32"
    assert setup.machine["ram_gb"] == 8


def test_one_that_never_fits_has_failed(setup_for):
    setup = setup_for("--largest", MACHINE)
    *_, last = grow(setup, lambda name, batch: None if name == "published" else 1.0)
    assert last[1] == "published-batch-32"
    (rows,) = newest_in(setup.results, "peers")
    assert STUDY.has_failed(rows.measured) and rows[1].error == "failed: out of memory"


@pytest.mark.parametrize("machine", [CPU, MACHINE])
def test_what_is_shown(setup_for, tmp_path, clones, machine):
    setup = setup_for("", machine)
    (plan,) = STUDY.plans(setup)
    runs = [
        run
        | dict(
            compiled=run["round"] > 1,
            config=dict(autocast="bfloat16" if run["name"].startswith("nano") else None),
        )
        for run in speeds_of(plan)
    ]
    runs[1] |= dict(error="it broke")
    write_journal(setup.results, "peers", plan, runs, machine)
    (rows,) = newest_in(setup.results, "peers")
    text, tables = text_of(STUDY, rows), STUDY.tables(rows)
    assert [row.run for table in tables for row in table.rows] == plan.runs
    assert all(markdown(table) in text for table in tables)
    cells = cells_of(markdown(tables[0]))
    assert [*cells] == [row.label for row in tables[0].rows]
    assert cells["nanoGPT"]["weights"] == "float32, bfloat16 by autocast"
    assert cells["nanoGPT"]["× nanoGPT"] == ""
    assert cells["01"]["× nanoGPT"].strip("*") == f"{rows[[*cells].index('01')].factor:.2f}"
    assert cells["01"]["first loss"] == "10.00" and cells["01"]["parameters"] == "1,000"
    assert cells["01"]["first step, s"] == cells["01"]["again, s"] == "10.0"
    assert cells[plan.runs[1].label]["× nanoGPT"] == "failed: it broke"
    assert STUDY.has_failed(rows.measured) and WIDE_LEGEND not in text
    assert [*excerpts_of(STUDY, rows)] == ["peers-dropout-0"]
    title = peers.finding_of_01(tables[0].rows) or STUDY.title
    assert any(text.startswith(title) for text in shown(STUDY.picture(rows)))
    # The stand-ins are no clones, and not the files that the figures are of.
    own = peers.sha256((clones["nanogpt"] / "model.py").read_bytes())
    assert f"SHA-256 {own[:12]}" in text and text.count("isn't that of commit") == 2


def test_huge_pages_have_a_table_of_their_own(setup_for):
    """Its speedups are over nanoGPT with huge pages, of which those of nanoGPT itself are told
    below; in the picture as well."""
    setup = setup_for()
    (plan,) = STUDY.plans(setup)
    speeds = dict.fromkeys((run.name for run in plan.runs), 1000.0)
    speeds |= {
        "nanogpt-huge-pages": 2222.0,
        "01_opt_single_gpu": 4000.0,
        "01_opt_single_gpu-huge-pages": 5555.0,
    }
    runs = []
    for place, (name, speed) in enumerate(speeds.items()):
        noise = [1 + ((7 * place + 5 * number) % 11 - 5) / 10_000 for number in range(4)]
        runs += rounds_of(name, *(speed * factor for factor in noise))
    write_journal(setup.results, "peers", replace(plan, rounds=4), runs)
    (rows,) = newest_in(setup.results, "peers")
    small, huge = STUDY.tables(rows)
    assert (small.caption, huge.caption) == peers.CAPTIONS
    for table, factor in ((small, "4.00"), (huge, "2.50")):
        cells = cells_of(markdown(table))
        assert [*cells][:2] == ["nanoGPT", "nanoGPT, float32"] and len(cells) == 6
        assert cells["nanoGPT"]["× nanoGPT"] == cells["nanoGPT"]["95%"] == ""
        assert cells["01"]["× nanoGPT"] == f"**{factor}**"
    assert "Huge pages make nanoGPT 2.22 times as fast (95%: " in text_of(STUDY, rows)
    figure = STUDY.picture(rows)
    texts = shown(figure)
    first, last = (text for text in texts if "times as fast as nanoGPT" in text)
    assert first.startswith("01 is 4.00 ") and last.startswith("With huge pages for every program")
    assert "01 is 2.50 times" in last
    (of_nanogpt,) = (text for text in texts if text.startswith("2,22"))
    assert "×" not in of_nanogpt
    speed, _, with_huge, _ = figure.axes
    assert speed.get_xlim() == with_huge.get_xlim()


def test_programs_that_all_have_huge_pages_have_one_table(setup_for):
    setup = setup_for("--largest", CPU)
    plan = next(STUDY.plans(setup))
    write_journal(setup.results, "peers", plan, speeds_of(plan))
    (rows,) = newest_in(setup.results, "peers")
    (table,) = STUDY.tables(rows)
    assert table.caption == "" and [row.run for row in table.rows] == plan.runs


def test_a_clones_commit(setup_for, monkeypatch):
    monkeypatch.setattr(peers.processes, "head_of", lambda folder: "abcdef0" + 33 * "1")
    monkeypatch.setattr(peers, "sha256", lambda data: peers.PEERS["nanogpt"].sha256)
    (plan,) = STUDY.plans(setup_for())
    write_journal(setup_for().results, "peers", plan, speeds_of(plan))
    (rows,) = newest_in(setup_for().results, "peers")
    first, second = peers.provenance_notes(rows)
    assert "commit abcdef0" in first and "isn't that" not in first and "isn't that" in second


def test_a_wide_interval_is_marked(setup_for):
    setup = setup_for("", MACHINE)
    (plan,) = STUDY.plans(setup)
    runs = speeds_of(plan)
    for run in runs:
        if run["name"] == "published":
            run["speed"] *= 9 ** (run["round"] % 2)
    write_journal(setup.results, "peers", plan, runs, MACHINE)
    (rows,) = newest_in(setup.results, "peers")
    marked = [row for row in rows if row.speedup().is_wide]
    assert marked and text_of(STUDY, rows).count(WIDE_MARK) == len(marked) + 1


def test_nothing_measured_has_no_picture(setup_for):
    (plan,) = STUDY.plans(setup_for())
    write_journal(setup_for().results, "peers", plan, [dict(name="nanogpt", error="it broke")])
    (rows,) = newest_in(setup_for().results, "peers")
    assert STUDY.picture(rows) is None


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_the_limit_of_01(setup_for, dtype, size):
    """Of matmuls at 8 TFLOP/s, and of logits and AdamW at 1 GB/s."""
    (plan,) = STUDY.plans(setup_for())
    config = dict(dtype=dtype, matmul_precision="highest", flops_per_token=16e9)
    config |= dict(vocab_size=600_000, parameters=4_571_428)
    runs = [run | dict(speed=50.0, config=config) for run in speeds_of(plan)]
    write_journal(setup_for().results, "peers", plan, runs)
    (rows,) = newest_in(setup_for().results, "peers")
    assert not any(map(limit_of, rows)) and "The limit of" not in text_of(STUDY, rows)
    rows.measured.copy_rate, rows.measured.matmul_peak = 1e9, {dtype: 8e12}
    row = next(row for row in rows if row.run.stage == "01")
    bytes_per_token = size * (5 * 600_000 + 7 * 4_571_428 / row.record.tokens_per_step)
    limit = 1 / (16e9 / 8e12 + bytes_per_token / 1e9)
    assert limit_of(row) == pytest.approx((limit, 8e12, 1e9))
    assert f"allow {limit:,.0f} tok/sec; it reaches {50 / limit:.2f}" in text_of(STUDY, rows)
