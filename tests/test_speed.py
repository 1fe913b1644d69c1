"""bench/predict: what is predicted of the time: the work of kernels, cards, check tables, and
the command."""

import json
import re
import statistics
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from made_up import CPU, MACHINE, cells_of, setup_of, write_journal
from torch.nn import functional

from bench.catalogue import Scripts
from bench.common import UserError
from bench.predict import speed, trace
from bench.predict import store as predictions
from bench.predict.allocator import Need
from bench.predict.counting import is_aligned
from bench.predict.speed import CARDS, Card, Work, named, read_cards, seconds, work_at
from bench.predict.store import Prediction
from bench.predict.tracing import ask
from bench.report import check, gpus
from bench.report.tables import markdown
from bench.studies import all_studies

SCRIPTS = Scripts()
CARD = speed.Card(24_000, 8.0, 1_000, 20, 100, 200, 200, 150, 50, ("X",))


# ---- The time of kernels


def test_three_times_of_a_kernel():
    times = seconds([Work("products", "bfloat16", True, 2, 3e12, 8.5e9),
                     Work("rest", "", True, 10, 0, 1.7e9)], CARD)
    assert times["products"] == pytest.approx(2 * 3e-6 + 0.010 + 3 / 150)
    assert times["rest"] == pytest.approx(10 * 3e-6 + 0.002) and times["host"] == 0


def products(precision: str, kind: str = "products", aligned: bool = True) -> list[Work]:
    """10¹² operations of one kind."""
    return [Work(kind, precision, aligned, 0, 1e12, 0)]


@pytest.mark.parametrize(("precision", "kind", "aligned", "rate"), [
    ("float32", "products", True, 20), ("TF32", "products", True, 75),
    ("float16", "head", True, 150), ("bfloat16", "head", False, 75), ("float32", "head", False, 20),
    ("bfloat16", "attention", True, 50),
    ("TF32", "attention", True, 75),  # by products of its own, not a fused kernel
])
def test_rates(precision, kind, aligned, rate):
    work = products(precision, kind, aligned)
    assert sum(seconds(work, CARD).values()) == pytest.approx(1 / rate)


def test_cards_without():
    """A T4 has neither bfloat16 nor TF32; of some the speed of attention isn't known."""
    assert seconds(products("bfloat16"), CARDS["T4"]) is None
    assert speed.lacking(products("bfloat16"), CARDS["T4"]) == "bfloat16"
    assert seconds(products("TF32"), CARDS["T4"]) == seconds(products("float32"), CARDS["T4"])
    work = products("bfloat16", "attention")
    assert seconds(work, CARD._replace(attention=None))["attention"] == pytest.approx(1 / 66)


def test_attention_without_a_flash_kernel():
    """The memory-efficient one, at half the share of the rate; and a wider range."""
    (old, native) = (seconds(products("float16", "attention"), CARD._replace(
        attention=None, bfloat16=bfloat16, float16=200))["attention"] for bfloat16 in (None, 200))
    assert old == pytest.approx(2 * native) == pytest.approx(1 / (0.22 * 150))
    assert CARDS["T4"].range > 2 * CARDS["A10"].range == 2 * speed.RANGE


def test_the_host_may_be_slower():
    times = seconds([Work("rest", "", True, 1_000, 0, 0)], CARD)
    assert (times["rest"], times["host"]) == pytest.approx((0.003, 0.027))


def test_cards():
    """Which units each has follows from its capability; what is reached is near the datasheet's.
    Each number has a source, and the ranges say where nobody measured."""
    text = json.loads(speed.FILE.read_text())
    for name, entry in text["gpus"].items():
        for field, value in entry.items():
            assert field in Card._fields, name
            assert field == "names" or value[1] in text["sources"], (name, field)
    for name, card in CARDS.items():
        assert card.names and 6 <= card.capability <= 12, name
        assert (card.bfloat16 is None) == (card.tf32 is None) == (card.capability < 8), name
        assert 0.4 < card.reached / (card.bfloat16 or card.float16) < 1.2, name
        wide = speed.RANGE if card.is_measured else speed.RANGE_SCALED
        assert card.range == (speed.RANGE_BEFORE_8 if card.capability < 8 else wide), name
    assert len(CARDS) >= 48 and CARDS["A100 80 GB"].is_measured and not CARDS["A40"].is_measured
    assert speed.PEAK_FLOPS["NVIDIA H100 80GB HBM3"] == 989e12 == 1e12 * CARDS["H100"].bfloat16


def test_work_at_a_batch_size():
    rest, loss = ("rest", "", True), ("loss", "", True)
    works = {8: [Work(*rest, 2, 80, 100)], 16: [Work(*rest, 2, 160, 150), Work(*loss, 1, 0, 8)]}
    assert work_at(32, works) == [Work(*rest, 2, 320, 250), Work(*loss, 3, 0, 24)]
    assert work_at(8, works)[1] == Work(*loss, 0, 0, 0)
    assert work_at(1, works)[0] == Work(*rest, 2, 10, 56.25)


@pytest.mark.parametrize(("text", "cards"), [
    ("4090", ["RTX 4090"]), ("rtx-4090", ["RTX 4090"]), ("RTX 4070", ["RTX 4070"]),
    ("H100 SXM", ["H100"]), ("h100 nvl", ["H100 NVL"]), ("P100", ["P100"]),
    ("A4000", ["RTX A4000"]),
    ("NVIDIA GeForce RTX 3070 Laptop GPU", ["RTX 3070 Mobile"]), ("mi300x", ["MI300X"]),
    ("A100 80 GB", ["A100 80 GB"]), ("A100-80GB", ["A100 80 GB"]), ("H1000", []), ("", []),
    ("3080", ["RTX 3080"]), ("3080 t", ["RTX 3080 Ti"])])
def test_names_as_people_write_them(text, cards):
    assert named(text, CARDS) == cards


def test_a_file_of_cards(tmp_path):
    """What isn't told follows, or isn't known; a damaged one is told in a line."""
    file = tmp_path / "my.json"
    entry = dict(mib=50_000, bandwidth=500, bfloat16=100)
    file.write_text(json.dumps({"X": entry}))
    assert read_cards(file) == {"X": Card(
        50_000, 8.0, 500, None, None, 100, 100, 80, None, is_measured=False)}
    file.write_text(json.dumps({"gpus": {"X": entry | dict(reached=70, names=["Y"])}}))
    (card,) = read_cards(file).values()
    assert card.is_measured and card.reached == 70 and named("y", {"X": card}) == ["X"]
    for wrong in ({"X": {}}, {"X": entry | dict(bandwidth=0)}, {"X": entry | dict(other=1)},
                  {"X": entry | dict(mib="many")}, [], {"X": 3}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(UserError, match="isn't a file of GPUs"):
            read_cards(file)
    with pytest.raises(UserError, match="isn't a file of GPUs"):
        read_cards(tmp_path / "none.json")


# ---- What is traced


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [
    ("0", []), ("05-bfloat16", []), ("01_opt_single_gpu", ["--no-compile"]),
    ("01_opt_single_gpu", [])])
def test_as_many_operations_as_the_formula_counts(name, options):
    """Six for each weight and token, and those of attention: the flash kernel leaves half of them
    out, but computes those of the forward pass again."""
    (found,) = ask(SCRIPTS.text(name), ["--model", "cpu-demo", *options], [4]).values()
    by_kind = {}
    for kind, _, _, kernels, flops, size in found["step"]:
        by_kind[kind] = by_kind.get(kind, 0) + flops
        assert kernels > 0 and size > 0, kind
    tokens, flash = found["tokens"], name == "01_opt_single_gpu"
    attention = tokens * 12 * 4 * 256 * 256  # layers, context length, width
    assert by_kind["attention"] == attention * (7 / 12 if flash else 1)
    products = tokens * found["flops_per_token"] - attention
    assert by_kind["products"] + by_kind["head"] == products
    assert sum(by_kind.values()) == by_kind["attention"] + products
    assert tokens == 4 * 256


@pytest.mark.slow
def test_what_a_kernel_is():
    """Precision by the script's own settings; 50,257 ids don't fill blocks of 16 bytes."""
    small = ["--model", "cpu-demo", "--context-length", "64"]

    def groups(rung: str, *options) -> set[tuple]:
        (found,) = ask(SCRIPTS.text(rung), [*small, *options], [2]).values()
        return {tuple(each[:3]) for each in found["step"]}

    def products_in(precision: str, *kinds: str) -> set[tuple]:
        return {(kind, precision, True) for kind in kinds}

    others = products_in("", "attention", "optimizer", "loss", "rest")
    assert groups("0") == others | products_in("float32", "products", "attention") | {
        ("head", "float32", False)}
    assert products_in("TF32", "products") | {("head", "TF32", False)} < groups("02-tensor-cores")
    assert products_in("bfloat16", "head", "products", "attention") < groups(
        "13-loss-in-graph", "--no-compile")
    half = groups("precision-fp16")  # whose scaler and float32 weights are traced, too
    assert products_in("float16", "head", "products", "attention") < half
    assert not any(precision in ("float32", "bfloat16") for _, precision, _ in half)


ROW = 4 * 64  # bytes of a row of the matrices below


@pytest.mark.parametrize(("kernel", "rows"), [
    (lambda a, b, i: a + b, 3 * 32), (lambda a, b, i: a.add_(b), 3 * 32),
    (lambda a, b, i: torch._foreach_add_([a, b], [b, a]), 6 * 32),
    (lambda a, b, i: torch._foreach_mul_([a], 2), 2 * 32),
    (lambda a, b, i: a.copy_(b), 2 * 32), (lambda a, b, i: a.zero_(), 32),
    (lambda a, b, i: torch.zeros_like(a), 32), (lambda a, b, i: a.t()[3:], 0),
    (lambda a, b, i: torch.empty_like(a), 0),
    (lambda a, b, i: a + b[:1].expand(32, 64), 2 * 32 + 1),
    (lambda a, b, i: a @ b.t(), 2 * 32 + 16),
    (lambda a, b, i: torch.mm(a, b.t(), out=torch.empty(32, 32, device="meta")), 2 * 32 + 16),
    (lambda a, b, i: functional.embedding(i, a), 2 * 8),
    (lambda a, b, i: functional.nll_loss(a, i.repeat(4)), 1),
])
def test_bytes_of_a_kernel(kernel, rows):
    """What is read and written, in rows; indices and single numbers don't count."""
    a, b = (torch.empty(32, 64, device="meta") for _ in range(2))
    indices = torch.empty(8, dtype=torch.int64, device="meta")
    config = SimpleNamespace(context_length=1, vocab_size=1)
    with trace.Notes(config) as notes:
        kernel(a, b, indices)
    moved = sum(each.size for each in notes.work[-1].values())
    assert rows <= moved / ROW <= rows + 1.2


@pytest.mark.parametrize(("rows", "columns", "aligned"), [
    (64, 64, True), (63, 64, True), (64, 63, False), (64, 52, True)])
def test_aligned(rows, columns, aligned):
    """Blocks of 16 bytes along the rows, or along the columns of a transposed matrix."""
    matrix = torch.empty(rows, columns, device="meta")
    assert is_aligned(matrix) is is_aligned(matrix.t()) is aligned


@pytest.mark.slow
def test_fewer_bytes():
    """What the techniques save, by the trace: native layers, fused kernels."""
    def moved(name: str, *options) -> float:
        (found,) = ask(SCRIPTS.text(name), ["--model", "cpu-demo", *options], [4]).values()
        return sum(each[-1] for each in found["step"])

    assert moved("06-native-layers") < 0.9 * moved("05-bfloat16")
    assert moved("01_opt_single_gpu") < 0.8 * moved("01_opt_single_gpu", "--no-compile")


# ---- Beside what was measured


def test_the_published_ladder():
    """As docs/predictions.md says: rungs 0 to 7 within 8 %, 10 and DDP within 10 %; 8 and 9 aren't
    explained."""
    rows = check.clock_table().rows
    assert len(rows) == 12
    for number, row in enumerate(rows):
        limit = 0.08 if number < 8 else 0.3 if number < 10 else 0.1
        assert abs(row["error"]) < limit, row["label"]


def test_others():
    """One program on eight cards is within the range that is printed, by which it was chosen; of
    the other programs most. Their memory is right where ours isn't set by its evaluation."""
    rows = check.others()
    first, rest = ([row["error"] for row in rows if (row["source"] == check.ONE_PROGRAM) is one]
                   for one in (True, False))
    assert len(first) == 16 and max(map(abs, first)) < speed.RANGE
    assert statistics.median(map(abs, first)) < 0.08 and statistics.median(map(abs, rest)) < 0.2
    table = check.others_memory_table()
    assert len(table.rows) == 4
    for row in table.rows:
        error = float(table.columns[-1].cell(row).rstrip("%"))
        assert abs(error) < 2, row


def test_cpus():
    """Up to three times too fast, as docs/predictions.md says and explains; but 00 isn't taken for
    faster than what gained much."""
    tables = check.cpu_tables()
    assert tables
    for table in tables:
        predicted = {row["label"]: row["predicted"] for row in table.rows}
        for row in table.rows:
            assert -0.2 < row["error"] < 2.1, row["label"]
        assert predicted["0 baseline"] < 0.5 * predicted["5 bfloat16"] < predicted[
            "13 loss in graph"]


def test_expected():
    """Every rung, and every variant of 01 that can be traced."""
    rows = {row.label: row for row in check.expected()}
    assert len(rows) > 20
    assert {"0 baseline", "14 chunked head", "`optimizer-muon`"} < set(rows)
    flash = rows["7 flash attention"]
    assert flash.tok_per_sec > 1.5 * flash.versus.tok_per_sec


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(check, "kept", lambda *_: None)
    for table in (check.clock_table, check.others_table, check.where_table, gpus.cards_table):
        with pytest.raises(UserError, match="lacks"):
            markdown(table())


def test_every_card_has_a_row():
    """With batch sizes, speeds, minutes, and the command to begin with."""
    rows = cells_of(markdown(gpus.cards_table()))
    assert set(rows) == {name + " °" * (not card.is_checked) for name, card in CARDS.items()
                         if card.capability >= 7}
    assert "RTX PRO 6000 Server °" in rows and "A100 80 GB" in rows
    for name, row in ((name.removesuffix(" °"), row) for name, row in rows.items()):
        for stage in ("00", "01"):
            assert int(row[f"largest batch of {stage}, gpt2"]) >= 1, name
            assert re.fullmatch(r"[\d.,]+–[\d.,]+", row[f"thousand tok/sec of {stage}"]), name
        plain, fast = row["minutes of 15 epochs, 00 / 01"].split(" / ")
        assert float(plain.replace(",", "")) > 2 * float(fast) > 0, name
        old = CARDS[name].capability < 8
        assert ("`python patches/stack.py compose precision-fp16 --out" in row["begin with"]) is old
        assert row["begin with"].startswith("`make bench`"), name


# ---- The command


def made_up(batches: dict[int, tuple]) -> Prediction:
    works = {batch: dict(step=[
        Work("products", "bfloat16", True, 1, batch * 1e12, batch * 1e9),
        Work("optimizer", "", True, 1, 0, 1e9)], evaluation=[]) for batch in (8, 16)}
    return Prediction({batch: Need(*need) for batch, need in batches.items()}, works, 1024, 10**9)


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    """A column for each script; a card of one's own; what was measured; what is refused."""
    study = all_studies()["predict"]
    asked = []

    def predict(scripts, script, options, results, smallest, batch, anew):
        asked.append((options, smallest, batch))
        assert not anew
        return made_up({8: (1024, 900), 16: (2048, 1500), 32: (3072, 3000), 5: (700, 600)})

    monkeypatch.setattr("bench.studies.predict.predict", predict)
    setup = setup_of(tmp_path)
    args = dict(gpu="all", gpu_file=None, memory=None, bandwidth=None, tflops=None, batch_size=5,
                model="gpt2", rungs=None, variants=None, all=False, anew=False)

    def answer(**changes) -> str:
        setup.args = Namespace(**args | changes)
        return study.answer(setup)

    text = answer()
    known = predict(None, None, [], None, None, None, False)
    cell = f"32 (3.0 GB): {known.speed_range(32, CARDS['RTX 4060 Ti'])}"
    assert f"| RTX 4060 Ti | 8 | {cell} | {cell} | {cell} |" in text
    assert "| T4 | 15 | 32 (3.0 GB): not in bfloat16 |" in text
    assert asked[0] == (["--model", "gpt2"], 8188 - predictions.OTHERS, 5)
    assert "| 00 | 5 |" not in text
    text = answer(gpu="H100", batch_size=None)
    whole = known.seconds(32, CARDS["H100"])
    assert f"| {known.mfu(32, CARDS['H100']):.0%} |" in text and "and where the time" in text
    assert f"| {whole['products'] / sum(whole.values()):.0%} |" in text
    minutes = 15 * 414_009 / (32 * 1024) * sum(whole.values()) / 60
    assert f"| {minutes:,.1f} |" in text and f"| {minutes / 4:,.1f} |" in text  # 02 on four GPUs
    assert "| 00 | 5 |" in answer(gpu="RTX 4060 Ti")
    assert answer(gpu="h100", batch_size=None) == text  # any case
    for name in ("4090", "rtx4090", "RTX-4090"):  # a part of one name, however it is written
        assert "of this kind, RTX 4090" in answer(gpu=name)
    text = answer(gpu="a100")  # of two
    assert "| A100 40 GB | 40 |" in text and "| A100 80 GB | 80 |" in text
    assert "| H100 |" not in text and "of this kind" not in text
    text = answer(gpu="8xH100", batch_size=None)
    low, high = known.speed_range(32, CARDS["H100"]).split("–")
    whole_range = known.speed_range(32, CARDS["H100"], 8)
    assert f"| {low}–{high} | {whole_range} |" in text and "| 02, 8 ranks |" in text
    assert "On 8 GPUs a step takes at least as long as on one" in text
    assert "scaled from the datasheet, so that the range is 25%: A40." in answer(gpu="a40")
    text = answer(gpu="p100", batch_size=None)  # no tensor cores, no kernels of the compiler
    assert "(on P100 in float32, not compiled)" in text
    assert ["--model", "gpt2", "--dtype", "float32", "--no-compile"] in [each for each, *_ in asked]
    mine = tmp_path / "my.json"
    mine.write_text('{"Mine": {"mib": 50000, "bandwidth": 500, "bfloat16": [100, "a guess"]}}')
    text = answer(gpu_file=mine, batch_size=None)
    assert "| Mine | 49 | 32 (3.0 GB): " in text and "00 has no speed" in text
    mine.write_text('{"Mine": {"mib": 50000, "bandwidth": 500, "bfloat": 100}}')
    with pytest.raises(UserError, match="isn't a file of GPUs"):
        answer(gpu_file=mine)
    text = answer(memory=48.0, bandwidth=500.0, tflops=100.0, batch_size=None)
    assert "| 48 GB | 48 | 32 (3.0 GB): " in text
    assert "of this kind, A10:" in answer(gpu="A10")  # which is a part of other names, too
    text = answer(gpu="tesla t4", batch_size=None)  # by PyTorch's name
    assert "| T4 | 15 |" in text and "(on T4 with precision-fp16)" in text
    assert "| 01 with precision-fp16 | 1.00 | 3.00 |" in text and "| 00 | 1.00 |" in text
    assert "precision-fp16" not in answer(gpu="H100")
    text = answer(memory=2.0, variants="step-accumulation,parallel-zero1")
    assert "| 00 | 1.00 | 3.00 | 0.68 |\n" in text and "| 2 GB | 2 | 8 (1.0 GB) |" in text
    assert "| step-accumulation --micro-batches 4 |" in text and "| parallel-zero1 |" in text
    text = answer(variants="parallel-sharded --no-compile --zero 2, optimizer-muon")
    assert "| parallel-sharded --no-compile --zero 2 | 1.00 |" in text
    assert "| optimizer-muon |" in text
    assert ["--model", "gpt2", "--no-compile", "--zero", "2"] in [each for each, *_ in asked]
    assert (tmp_path / "predict.png").read_bytes()[1:4] == b"PNG"
    ladder = setup_of(tmp_path, MACHINE)
    plan = next(all_studies()["ladder"].plans(ladder))
    write_journal(tmp_path, "ladder", plan, [
        dict(name="05-bfloat16", config=dict(model="gpt2"), reserved_gb=13.5)], MACHINE)
    assert "| 5 bfloat16 | 1.00 | 3.00 | 0.68 | 13.50 |" in answer(rungs="5")
    for changes, says in (
            (dict(gpu="H1000"), "'H1000' is none of P100, T4, V100"),
            (dict(gpu=""), "'' is none of"),
            (dict(batch_size=0), "out of range"),
            (dict(memory=0.0), "out of range"), (dict(rungs="99"), "99"),
            (dict(tflops=3.0), "together"), (dict(gpu="0xH100"), "is none of"),
            (dict(variants="no-such"), "no variant 'no-such' of 01")):
        with pytest.raises(UserError, match=says):
            answer(**changes)
    for setup.options in (["--batch-size", "4"], ["--model=gpt2-medium"]):
        with pytest.raises(UserError, match="go before --"):
            answer()
    assert setup.machine == CPU
