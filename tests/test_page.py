"""bench/report: a machine's page, how it goes on after an end at any place, and the tables inside
the pages."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_python
from made_up import (
    CPU,
    MACHINE,
    PEAK,
    Children,
    plan_of,
    rows_of_text,
    write_journal,
    write_record,
)

from bench import commands, processes
from bench.common import UserError, listed, relative, short_name
from bench.report import cards, check, look, page, readme
from bench.report.names import ADVICE
from bench.report.tables import found_in, markdown
from bench.studies import all_studies, ladder
from bench.studies.stages import bars_table, published_bars, read_bars
from patches import stack

LOOK = dict(
    memory_gb=24.0, matmul_peak=PEAK, bandwidth=3e10, compile_error=None,
    missing=["a thing: how to get it"],
    attention=[dict(dropout=0.1, backend="flash_attention", runs=True, chosen=True,
                    milliseconds=1.5, real_dropout=0.0998)],
)
SPEEDS = {"00_orig": 100.0, "01_opt_single_gpu": 900.0, "03-fused-adamw": 120.0}
MEASURED = [study for study in all_studies().values() if any(
    rounds != 0 for rounds in study.schedule.values())]


class Reports:
    """Makes reports of made-up runs, all in one folder unless told otherwise."""

    def __init__(self, folder: Path, monkeypatch):
        self.children = Children(monkeypatch, folder / "build", MACHINE)
        self.children.answers |= dict(look=dict(machine=MACHINE) | LOOK, large_loss="right")
        self.children.does |= {name: dict(speed=speed, gpu=MACHINE["name"])
                               for name, speed in SPEEDS.items()}
        self.children.does["01-profile"] = self.profile
        self.data, self.results = folder / "data", folder / "results"
        self.data.mkdir()
        (self.data / "meta.json").write_text('{"tokens": {"train": 414009}}')

    def profile(self, command, environment):
        """A record beside which a trace lies: of two steps, with a kernel of 0.9 ms in all."""
        folder = Path(command[command.index("--results-dir") + 1])
        write_record(folder, "01-profile", tokens=12 * 1024, steps=12)
        events = [dict(ph="X", cat="user_annotation", name=f"ProfilerStep#{k}", ts=1000 * k,
                       dur=1000, tid=1) for k in (2, 3)]
        events.append(dict(ph="X", cat="kernel", name="some_gemm", ts=2000, dur=900, tid=7))
        (folder / "1.trace.json").write_text(json.dumps(dict(traceEvents=events)))
        return 0, "", ""

    def make(self, *options, pieces="", results=None) -> int:
        """measure.py report; returns its exit code. `ran` has what it ran."""
        studies, before = all_studies(), len(self.children.ran)
        args = commands.make_parser(studies).parse_args(
            ["report", "--data", str(self.data), "--results-dir", str(results or self.results),
             "--minutes", "600", "--max-tokens", "4096", "--rungs", "0,1,3", "--pieces", pieces,
             *options])
        try:
            return commands.report(args, [], studies)
        finally:
            self.ran = self.children.ran[before:]
            if "matplotlib.pyplot" in sys.modules:
                sys.modules["matplotlib.pyplot"].close("all")

    @property
    def text(self) -> str:
        return (self.results / "report.md").read_text(encoding="utf-8")


@pytest.fixture
def reports(tmp_path, monkeypatch):
    return Reports(tmp_path, monkeypatch)


def section_of(text: str, title: str) -> str:
    (section,) = (part for part in text.split("\n## ") if part.startswith(title))
    return section


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(page, "draw_all", lambda *_: {})


# ---- The report


def test_page(reports, tmp_path):
    pytest.importorskip("matplotlib")
    assert reports.make() == 0
    head, *sections = reports.text.split("\n## ")
    shown = [study for study in all_studies().values() if study.schedule]
    assert [section.partition("\n")[0] for section in sections] == [
        "This machine", *(study.title for study in shown)]
    for study, section in zip(shown, sections[1:], strict=True):
        assert f"Alone: `python measure.py {study.name}" in section
        assert "Not measured yet" not in section
    assert head.startswith("# GPT training on Some | GPU $x_1$\n\n1. **Some | GPU $x_1$**, ")
    assert ("4.00 TFLOP/s in bfloat16 matmuls, the type that the optimized scripts train in"
            " here (compute capability 8.0).\n") in head
    assert ("01 trains **900 tok/sec, 9.00 times** 00's 100 (published, on an A100: 142,156, 11.35"
            " times), with 1.25 GB instead of 1.25; 1 run(s) each.") in head
    assert "in the ladder (4 rounds): techniques 2 to 3 1.20×." in head
    assert "off the published speedup: techniques 2 to 3 1.20× (2.27×)." in head
    assert "fused AdamW" not in head
    assert "--max-tokens 4096 --rungs 0,1,3`" in head and "Not finished" not in head
    assert "Missing: a thing: how to get it." in sections[0]
    assert "| 0.1 | flash attention | yes | ← | 1.50 | 0.100 |" in sections[0]
    assert "| matrix products | 0.45 | 100.0% |" in reports.text
    assert "| 00, published | 9.535, 9.609 | 0.150, 6.914 |" in reports.text
    for picture in ("speed.png", "ladder.png", "sweep-batch.png", "scaling.png"):
        assert f"]({picture})" in reports.text
        assert (reports.results / picture).stat().st_size > 10_000
    # Carried to another place, it goes on there.
    elsewhere = tmp_path / "elsewhere"
    (reports.results / "reference").mkdir()  # of other machines, which isn't packed
    assert reports.make() == 0 and reports.ran == []
    shutil.unpack_archive(reports.results / "report.tar.gz", elsewhere)
    names = {path.name for path in elsewhere.iterdir()}
    assert names == {path.name for path in reports.results.iterdir()} - {
        ".lock", "reference", "report.tar.gz"}
    assert {"report.md", "machine.json", "profile.trace.json", "sweep.jsonl"} <= names
    assert reports.make(results=elsewhere) == 0 and reports.ran == []
    assert (elsewhere / "report.md").read_text(encoding="utf-8") == reports.text
    assert reports.children.asked.count("look") == 1


def figures(folder: Path) -> list:
    return [(row.label, row.rounds, row.tok_per_sec, row.val_loss, row.error)
            for study in all_studies() for _, rows in found_in(folder, study) for row in rows]


@pytest.mark.slow
def test_stopped_anywhere_it_ends_with_the_same_figures(reports, tmp_path, no_pictures):
    short = dict(pieces="stages,ladder,profile")
    assert reports.make("--rungs", "0,3", **short) == 0
    whole, wanted = reports.ran, figures(reports.results)
    names = [name for name, _ in whole]
    assert names.index("01-profile") == 3 + 3  # after the stages and a round of the ladder
    assert names.count("03-fused-adamw") == 3
    for number in range(1, len(whole) + 1):
        reports.children.calls.clear()
        reports.children.stop_at, folder = number, tmp_path / str(number)
        with pytest.raises(processes.Interrupted):
            reports.make("--rungs", "0,3", results=folder, **short)
        before = reports.ran
        assert "Not finished: " in (folder / "report.md").read_text(encoding="utf-8")
        assert reports.make("--rungs", "0,3", results=folder, **short) == 0
        assert before + reports.ran == whole  # none of them twice
        assert figures(folder) == wanted


@pytest.mark.slow
def test_this_machine():
    """What bench.measure.machine really tells of it, on the page."""
    code = ("import json; from bench.measure.rates import *\n"
            "print(json.dumps([look(), matmul_rate(), large_loss()]))")
    out = run_python("-c", code, cwd=ROOT).stdout
    found, rate, found["large_loss"] = json.loads(out.splitlines()[-1])
    assert found.keys() == {"machine", "large_loss"} | LOOK.keys()
    assert found["machine"].keys() == MACHINE.keys() | {"gpu_needs", "multiprocessors"}
    machine, peak = found["machine"], found["matmul_peak"]
    assert (machine["device"], machine["gpus"], found["large_loss"]) == ("cpu", 0, "not tried")
    assert peak.keys() == {"float32", machine["dtype"]}
    assert all(figure > 1e8 for figure in (rate, found["bandwidth"], *peak.values()))
    dropouts = {(row["dropout"], row["backend"]): row["real_dropout"] for row in found["attention"]
                if row["runs"]}
    assert dropouts[0.0, "math"] == 0 and dropouts[0.1, "math"] == pytest.approx(0.1, abs=0.02)
    text = look.machine_section(found)
    assert text.startswith(f"No GPU; {machine['cpu']}. PyTorch {machine['torch']}, Python ")
    assert "| 0.1 | math | yes |" in text and "Missing: an NVIDIA GPU: without one" in text


def test_time_is_over(reports, no_pictures, capsys):
    assert reports.make("--minutes", "0.1") == 0 and not reports.ran
    names = re.search("Not finished: (.+); run it again to", reports.text)[1].split(", ")
    assert set(names) == {study.name for study in MEASURED} and len(names) == len(MEASURED)
    assert reports.text.count("Not measured yet.") == len(MEASURED) + 1  # and time-to-loss
    out = capsys.readouterr().out
    assert "after 0.0 minutes; report.tar.gz beside it" in out
    assert f"\nThe time, 0.1 minutes, is over. Not finished: {listed(names)}; run it again" in out
    assert reports.make("--minutes", "0.1", pieces="stages,sweep") == 0
    assert "Not finished: stages, sweep;" in reports.text


def test_the_page_is_written_whatever_happens(reports, no_pictures, capsys, monkeypatch):
    """A study that can't be measured is told, and the others are measured."""
    def plans(self, setup):
        raise OSError("no git")
        yield

    monkeypatch.setattr(type(all_studies()["ladder"]), "plans", plans)
    assert reports.make(pieces="stages,ladder,leave-one-out") == 1
    out, err = capsys.readouterr()
    assert "error: ladder: no git\n" in err and "is over" not in out
    assert "\nNot finished: ladder: no git\n" in reports.text
    assert "run it again" not in reports.text
    assert figures(reports.results)[-1][0] == "without 3 fused adamw"


def test_failures(reports, no_pictures, capsys):
    """A run that fails is a row, and the exit code tells; a new start tries it again."""
    works = reports.children.does.pop("01_opt_single_gpu")
    reports.children.does["01_opt_single_gpu"] = dict(status="failed", error="it broke")
    assert reports.make(pieces="stages") == 1
    assert "failed: it broke" in reports.text and "01 trains" not in reports.text
    assert reports.make("--max-tokens", "8192", pieces="stages") == 1
    told = ("was measured with other --max-tokens; for a new report, name another folder: make"
            " report RESULTS=FOLDER, or --results-dir FOLDER\n")
    assert told in capsys.readouterr().err and told in reports.text
    reports.children.does["01_opt_single_gpu"] = works
    assert reports.make(pieces="stages") == 0
    assert [name for name, _ in reports.ran] == ["01_opt_single_gpu"]


def test_another_machine(reports, no_pictures):
    assert reports.make(pieces="stages") == 0
    before = reports.text
    reports.children.answers["this_machine"] = MACHINE | dict(cpu="another host's", threads=64)
    assert reports.make(pieces="stages") == 0 and not reports.ran
    reports.children.answers["this_machine"] = CPU
    with pytest.raises(UserError, match="holds the report of another machine or PyTorch; for a"):
        reports.make(pieces="stages")
    assert reports.text == before


def test_another_text(reports, no_pictures):
    """Refused once, before anything is measured beside the first one, with what make has for it."""
    assert reports.make(pieces="stages") == 0
    before = reports.text
    meta = reports.data / "meta.json"
    meta.write_text(meta.read_text().replace("414009", "414010"))
    says = "stages.jsonl holds measurements with other tokens than .* has now; for a new report, na"
    with pytest.raises(UserError, match=f"{says}me another folder: make report RESULTS=FOLDER"):
        reports.make(pieces="ladder,profile")  # nothing of them is measured yet
    assert reports.text == before and not reports.ran
    assert reports.make(pieces="stages", results=reports.data.with_name("other")) == 0


@pytest.mark.parametrize(("corpus", "tokenizer", "told"), [
    ("Middlemarch", "gpt2", ""), ("middlemarch.txt", "gpt2", ""),
    ("Middlemarch", "bytes", "Middlemarch, its tokens bytes"),
    ("standard library of Python 3.11.7", "gpt2", "standard library of Python 3.11.7"),
    ("a\nb\x1b[2J|$x_1$.txt", "gpt2", "a b [2J|$x_1$.txt"), ("x" * 99, "gpt2", "x" * 59 + "…")])
def test_the_text_is_told(reports, no_pictures, capsys, corpus, tokenizer, told):
    """On the page, below each table, in the pictures, and where a measurement begins."""
    start = dict(data=dict(corpus=corpus, tokenizer=tokenizer, tokens=dict(train=414_009)))
    for name, does in reports.children.does.items():
        if isinstance(does, dict):
            reports.children.does[name] = does | dict(start=start)
    (reports.data / "meta.json").write_text(json.dumps(start["data"]))
    processes.tell.cache_clear()
    assert reports.make(pieces="stages,ladder") == 0
    out, text = capsys.readouterr().out, reports.text
    for measured, rows in found_in(reports.results, "ladder"):
        title = ladder.finding(measured, rows)
        assert [line for line in title.splitlines() if line.startswith("text: ")] == (
            [f"text: {told}"] if told else [])
    if not told:
        assert "the book" not in out + text and ", text: " not in text
        return
    line = f"Not the book in GPT-2's tokens: {relative(reports.data)} holds {told}\n"
    assert out.count(line) == 1
    assert f"\nNot trained on the book in GPT-2's tokens: {told}.\n" in text.partition("## ")[0]
    assert f", text: {told}. Matmul" in section_of(text, "The ladder")
    escaped = told.replace("|", r"\|")
    assert f"| {escaped} | 01 optimized, batch 4 | 900 | 9.00 |" in markdown(
        bars_table(read_bars(reports.results), published_bars()))
    assert read_bars(reports.results)[-1].group.title.endswith(f"\ntext: {told}")


@pytest.mark.parametrize("place", ["results", "build"])
def test_folders_that_cannot_be_written(reports, monkeypatch, place):
    """One line, which names the folder and what to do, before anything is measured."""
    (reports.data.parent / "file").touch()
    below = reports.data.parent / "file" / "below"
    if place == "build":
        monkeypatch.setattr("bench.measure.run.BUILD", below)
    with pytest.raises(UserError) as told:
        reports.make(results=below if place == "results" else None)
    advice = {"results": "choose another --results-dir", "build": "measure in a copy of this repos"}
    assert str(told.value).startswith(f"{relative(below)} can't be written (Not a directory): ")
    assert advice[place] in str(told.value) and not reports.children.asked


NAMELESS = dict(machine={key: CPU[key] for key in CPU if key != "name"}, large_loss="") | LOOK


@pytest.mark.parametrize("damaged", ["", "[]", "{}", "[" * 100_000, json.dumps(NAMELESS)])
def test_a_damaged_look_is_asked_for_again(reports, no_pictures, damaged):
    reports.results.mkdir()
    (reports.results / "machine.json").write_text(damaged)
    assert reports.make(pieces="stages") == 0
    assert reports.children.asked.count("look") == 1
    assert look.read_look(reports.results)["large_loss"] == "right"


def test_a_large_loss_that_breaks_is_told(reports, no_pictures, monkeypatch):
    """And a machine without a GPU has no such line."""
    ask = processes.ask_machine

    def asked(question):
        if question == "large_loss":
            raise UserError("illegal memory access")
        return ask(question)

    monkeypatch.setattr(processes, "ask_machine", asked)
    reports.make(pieces="stages")
    assert "2³¹ logits (batch 42 and up at context 1,024): wrong: illegal" in reports.text
    reports.children.answers |= dict(this_machine=CPU, look=dict(machine=CPU) | LOOK)
    shutil.rmtree(reports.results)
    reports.make(pieces="stages")
    assert "2³¹" not in reports.text
    assert "no GPU, so the small model `cpu-demo` is trained" in reports.text


def test_damaged_pieces(reports, capsys):
    """They are told, and the page has all else."""
    pytest.importorskip("matplotlib")
    reports.make(pieces="stages,ladder,profile")
    (reports.results / "profile.json").write_text("[]")
    ladder = reports.results / "ladder.jsonl"
    lines = ladder.read_bytes().splitlines(keepends=True)
    ladder.write_bytes(b"".join([*lines[:2], b'{"event"\n', *lines[3:]]))
    capsys.readouterr()
    page.write_page(all_studies(), reports.results, "make report", {})
    assert "skipped: " in (err := capsys.readouterr().err) and "ladder.jsonl, line 3: " in err
    section = section_of(reports.text, "Where a step")
    assert section.count("What is left of it in the folder is damaged: ") == 1
    assert "in the ladder (" in reports.text and "![ladder]" in reports.text


def test_a_record_without_a_figure(reports, no_pictures):
    """It is damaged, and all else stands."""
    reports.make(pieces="stages,ladder")
    ladder = reports.results / "ladder.jsonl"
    before, _, after = ladder.read_text().rpartition('"reserved_gb"')
    ladder.write_text(f'{before}"gb"{after}')
    page.write_page(all_studies(), reports.results, "make report", {})
    section = section_of(reports.text, "The ladder")
    assert "failed: not a whole record" in section and "| 3 fused adamw | " in section
    assert "01 trains" in reports.text


def test_without_matplotlib(reports, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert reports.make(pieces="stages") == 0
    assert "there are no pictures: " in capsys.readouterr().err
    assert "![" not in reports.text


@pytest.mark.parametrize(("peak", "machine", "epochs"), [
    (312e12, MACHINE, range(1, 15)), (312e13, MACHINE, range(15, 16)), (312e13, CPU, [None])])
def test_epochs_that_fit(reports, no_pictures, peak, machine, epochs):
    """On a GPU the published 15, or as many as the time of the piece holds; kept for a restart."""
    reports.children.answers |= dict(
        this_machine=machine, look=dict(machine=machine) | LOOK | dict(
            matmul_peak=dict(bfloat16=peak)))
    parser = commands.make_parser(all_studies())
    command = ["report", "--data", str(reports.data), "--results-dir", str(reports.results),
               "--minutes", "600", "--pieces", "stages"]
    for _ in range(2):
        assert commands.report(parser.parse_args(command), [], all_studies()) == 0
    (found, _), = found_in(reports.results, "stages")
    assert found.plan.epochs in epochs and len(reports.children.ran) == 3


def test_makefile():
    text = (ROOT / "Makefile").read_text()
    assert ('measure.py report --minutes $(MINUTES) --pieces "$(PIECES)" --results-dir "$(RESULTS)"'
            in text) and "\nRESULTS := results\n" in text  # which errors name
    assert "--nproc_per_node=$$($(NPROC)) $$($(FITS) 02 " in text
    assert "-m bench.measure.machine rank_count\n" in text


# ---- The tables inside the pages


def update(text: str, folder) -> str:
    return readme.update(text, folder, all_studies())


def test_readme_is_what_the_command_writes():
    pages = {page.relative_to(ROOT).as_posix(): page.read_bytes().decode() for page in readme.PAGES}
    for name, place in (("technique-index", "docs/techniques.md"), ("cpus", "docs/results.md"),
                        ("sample@intel-xeon-amx-2-cores", "docs/methodology.md"),
                        ("stages", "docs/results.md"), ("fits", "docs/gpus.md"),
                        ("gpus", "docs/gpus.md"), ("hardware", "docs/gpus.md"),
                        ("variants@intel-xeon-amx-2-cores",
                         "results/reference/intel-xeon-amx-2-cores/README.md")):
        assert pages[place].count(f"<!-- {name}: written by measure.py readme -->\n") == 1
    for text in pages.values():
        assert update(text, readme.SHOWN) == text


def test_techniques_are_those_of_the_headers(tmp_path, monkeypatch):
    """The largest published gain first, with the factors of a GPU's ladder; each name leads to a
    card."""
    monkeypatch.setattr(cards, "REFERENCE", tmp_path)
    for name, own in dict(cpu={}, gpu=dict(device="cuda", gpus=1)).items():
        (tmp_path / name).mkdir()
        write_ladder(tmp_path / name, CPU | dict(name=name) | own, "02-tensor-cores")
    text, patches = cards.index(tmp_path), stack.load()
    rows = rows_of_text(text)
    assert "| gpu: × |" in text.splitlines()[0] and "cpu" not in text.splitlines()[0]
    assert rows[0][:3] == ["[2. TF32 tensor cores](#2-tf32-tensor-cores)", "2.21", "1.00"]
    assert rows[-1][:2] == ["[DistributedDataParallel](#distributeddataparallel)", "2.95"]
    gains = [float(row[1] or 0) for row in rows[:-1]]
    assert gains == sorted(gains, reverse=True) and len(rows) == len(patches)
    assert sum(gain > 0 for gain in gains) == sum(bool(patch.published) for patch in patches[:-1])
    assert all(len(row) == 7 and row[5] and row[6] for row in rows)


def test_every_technique_has_advice():
    """What readers call it, and when to use it: bench/report/names.py."""
    assert list(ADVICE) == [patch.name for patch in stack.load()]


def test_cards_show_the_code():
    """The first lines that a patch changes, folded, and how many are left out."""
    text = cards.cards(readme.SHOWN, "ladder")
    parts = text.split("\n## ")
    assert len(parts) == len(stack.load())
    for part, patch in zip(parts, stack.load(), strict=True):
        code = part.split("```diff\n")[1].split("```")[0].splitlines()
        diff = (ROOT / patch.file).read_text().splitlines()
        shown = [line for line in code if line[0] in "+-"]
        assert len(code) <= 15 and shown and set(shown) <= set(diff), patch.name
        changed = [line for line in patch_lines(diff) if line[1:].strip()]
        left_out = re.search(r"… (\d+) lines more", code[-1])
        assert len(shown) + int(left_out[1] if left_out else 0) == len(changed), patch.name
        assert part.count("<details>") == part.count("</details>") == 1
        assert "use it when: " in part and "; limits: " in part
    assert "<details>" not in cards.cards(readme.SHOWN, "variants")


def patch_lines(diff: list[str]) -> list[str]:
    start = next(k for k, line in enumerate(diff) if line.startswith("@@"))
    return [line for line in diff[start:] if line[:1] in ("+", "-")]


def test_short_name():
    names = {"Intel(R) Xeon(R) Processor": "Intel Xeon", "AMD EPYC": "AMD EPYC",
             "Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz": "Intel Core i7-8700",
             "AMD FX(tm)-8350 Eight-Core Processor": "AMD FX-8350 Eight-Core",
             "AMD EPYC 7763 64-Core Processor": "AMD EPYC 7763 64-Core",
             "NVIDIA H100 80GB HBM3": "H100", "NVIDIA GeForce RTX 4090": "RTX 4090",
             "NVIDIA A100-SXM4-80GB": "A100-SXM4", "NVIDIA A100 80GB PCIe": "A100 PCIe",
             "NVIDIA GeForce GTX 1060 3GB": "GTX 1060 3GB", "Tesla T4": "Tesla T4",
             "A Processor of its own": "A Processor of its own"}
    assert {name: short_name(dict(name=name)) for name in names} == names


def test_cards_have_what_another_folder_alone_measured(tmp_path, monkeypatch):
    """With the intervals of a table with enough rows, and without a memory that isn't known."""
    monkeypatch.setattr(cards, "REFERENCE", tmp_path)
    machine, names = tmp_path / "some-cpu", ["01", "gc-freeze", "init-gpt2"]
    for folder, count, speed in ((machine, 2, 50.0), (machine / "later", 3, 200.0)):
        folder.mkdir()
        plan = plan_of(*names[:count])
        plan.runs = [run.but(script=run.name, compared_to="01" if run.name != "01" else None)
                     for run in plan.runs]
        write_journal(folder, "variants", plan, [
            dict(name=name, speed=(speed if name != "01" else 100.0) + number**place, round=number,
                 reserved_gb=2.0 if count == 2 else None)
            for number in (1, 2, 3) for place, name in enumerate(names[:count])])
    text = cards.cards(machine, "variants") + cards.cards(machine, "variants", unchanged=False)
    factors = re.findall(r"Some CPU: ([\d.]+)×( \([\d.]+–[\d.]+\))? the speed(, 1.00× the memory)?",
                         text)
    assert [(factor, bool(interval), bool(memory)) for factor, interval, memory in factors] == [
        ("0.51", False, True), ("2.03", True, False)]  # gc-freeze of the machine's own folder


def test_results_have_a_line_for_each_machine(tmp_path, monkeypatch):
    """With both ends of its ladder, and the time to a loss, as far as they are measured."""
    monkeypatch.setattr(cards, "REFERENCE", tmp_path)
    machine = tmp_path / "some-cpu"
    machine.mkdir()
    names = ["00_orig", *(patch.name for patch in stack.load())][:-1]
    plan = plan_of(*names)
    plan.runs = [run.but(rung=k) for k, run in enumerate(plan.runs)]
    write_journal(machine, "ladder", plan, [
        dict(name=name, speed=100.0 * (k + 1)) for k, name in enumerate(names)])
    count, ends = len(names), rows_of_text(cards.results(machine))
    assert ends[0][1:] == ["100", f"{100 * count:,}", f"{count}.0×", "–"]
    assert ends[0][0].startswith("Some CPU, 2 cores, `cpu-demo`, one run of each: [findings]"
                                 "(../results/reference/some-cpu/README.md)")
    plan = plan_of("00", "01", kind="variants", targets={"published": 7.75})
    plan.runs[1] = plan.runs[1].but(stage="01", compared_to="00")
    write_journal(machine, "time-to-loss", plan, [
        dict(name=name, speed=speed, loss=7.0) for name, speed in (("00", 100.0), ("01", 200.0))])
    assert rows_of_text(cards.results(machine))[-1][-1] == "to 7.75: 01 at its defaults 1.5×"
    # With a search, at other targets, that alone counts.
    plan = plan_of("00", "01", "best 00", "best 01", "fast", targets={"published": 7.5})
    plan.runs[1] = plan.runs[1].but(stage="01")
    for place, stage in ((2, "00"), (3, "01"), (4, "optimizer-muon")):
        plan.runs[place] = plan.runs[place].but(
            stage=stage, rate=1e-3, compared_to="best 00" if place > 2 else None)
    write_journal(machine, "time-to-loss", plan, [
        dict(name=name, speed=speed, loss=7.0)
        for name, speed in (("00", 100.0), ("01", 200.0), ("best 00", 150.0), ("best 01", 450.0),
                            ("fast", 900.0))])
    assert rows_of_text(cards.results(machine))[-1][-1] == (
        "to 7.50: 01 at its defaults 1.6×; to 7.50: `01` at its best 1.7×; to 7.50:"
        " `optimizer-muon` at its best 2.1×")
    # Of a ladder without its baseline neither end counts, nor what spans a missing row.
    part = tmp_path / "part"
    part.mkdir()
    plan = plan_of(*names)
    plan.runs = [run.but(rung=k, compared_to=k and names[k - 1]) for k, run in enumerate(plan.runs)]
    write_journal(part, "ladder", plan, [dict(name=names[k], speed=100.0 * k) for k in (1, 3, 4)])
    assert [row.run.rung for row in cards.one_step(cards.rows_in(part, "ladder"))
            if row.factor] == [4]
    plan = plan_of("00", "01")
    plan.runs = [run.but(stage=run.name, compared_to="00" if run.name == "01" else None)
                 for run in plan.runs]
    write_journal(part, "stages", plan, [dict(name="00", speed=3.0), dict(name="01", speed=12.0)])
    assert rows_of_text(cards.results(part))[0][1:4] == ["3", "12", "4.0×"]


def write_ladder(folder: Path, machine: dict = CPU, *names: str) -> None:
    names = "00_orig", *names
    plan = plan_of(*names)
    plan.runs = [run.but(rung=k) for k, run in enumerate(plan.runs)]
    write_journal(folder, "ladder", plan, [dict(name=name, speed=123) for name in names], machine)


def marker(name: str, between: str = "", end: str = "<!-- end -->\n") -> str:
    return f"<!-- {name}: written by measure.py readme -->\n{between}{end}"


LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, as code hosts make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in HEADING.findall(text)}


def test_links_lead_somewhere():
    reference = ROOT / "results" / "reference"
    pages = {*readme.PAGES, *ROOT.glob("*.md"), *reference.glob("*.md"), *reference.glob("*/*.md")}
    for path in sorted(pages):
        for link in LINK.findall(path.read_text(encoding="utf-8")):
            place, _, anchor = link.partition("#")
            if "://" in place:
                continue
            target = path.parent / place if place else path
            assert target.exists(), f"{path.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{path.name}: {link}"


def test_pages_stay_short():
    for path in readme.PAGES:
        most = {"README.md": 100, "techniques.md": 500, "options.md": 500,
                "explorer.html": 500}.get(path.name, 200)
        if path.is_relative_to(ROOT / "results"):
            most = 300  # a machine's findings, beside its tables
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= most, f"{path.name}: {lines} lines"


def test_update_writes_every_table(tmp_path):
    """And nothing else; a table that needs a line before it gets one."""
    write_ladder(tmp_path)
    names = "technique-index", "ladder", "points", "predictions"
    text = "a | b\n".join(marker(name, "old\n") for name in names)
    after = update(text, tmp_path)
    parts = re.split("<!-- .+ -->\n", after)
    assert parts[2::2] == [*["a | b\n"] * 3, ""]
    assert parts[1] == cards.index(tmp_path)
    assert rows_of_text(parts[3]) == [
        ["0", "technique 00_orig", "123", "1.25", "8.000"]]
    assert parts[5].startswith("| published |") and parts[7].startswith("| model |")
    assert update(after, tmp_path) == after
    plan = plan_of("00_orig", kind="", targets={"published": 8.5})
    write_journal(tmp_path, "time-to-loss", plan, [dict(name="00_orig")])
    after = update(marker("time-to-loss"), tmp_path)
    assert after.splitlines()[1:3] == [
        "", "Target 8.5000, the lowest validation loss of 00 in its default run:"]
    assert update(after, tmp_path) == after


def test_a_table_of_another_machine(tmp_path):
    """@ names the folder of results/reference that a table is of, on any page."""
    name = f"stages@{readme.SHOWN.name}"
    of_shown = update(marker("stages"), readme.SHOWN)
    assert update(marker(name), tmp_path) == of_shown.replace("stages:", f"{name}:", 1)


@pytest.mark.parametrize(("text", "error"), [
    (marker("other"), "no table other in"), (marker("ladder"), "no table ladder in"),
    (marker("sample@no.where"), "no folder"),
    (marker(f"gpus@{readme.SHOWN.name}"), "the table gpus is of predictions"),
    (marker("machines", "| 1 |\n", ""), "no <!-- end -->"),
    (marker("machines", "", "") + marker("machines"), "no <!-- end -->")])
def test_markers_that_do_not_serve(tmp_path, text, error):
    with pytest.raises(UserError, match=error):
        update(text, tmp_path)


def test_write_readme(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    monkeypatch.setattr(readme, "PAGES", [page])
    monkeypatch.setattr(readme, "SHOWN", tmp_path)
    page.write_text(marker("technique-index"))
    write_ladder(tmp_path)
    assert readme.write_readme(all_studies())
    assert not readme.write_readme(all_studies())
    assert len(rows_of_text(page.read_text(encoding="utf-8"))) == len(stack.load())


def test_a_table_of_what_is_not_predicted(tmp_path, monkeypatch):
    """It is told with the command that predicts it."""
    monkeypatch.setattr(check, "load", lambda *_: None)
    with pytest.raises(UserError, match="lacks 01 --model gpt2: python measure.py predict --all"):
        update(marker("where"), tmp_path)


def test_a_container_has_less_memory(tmp_path):
    """By either version of cgroups; without a limit, or with a larger one, it is the machine's."""
    from bench.measure.machine import ram_gb

    whole = ram_gb(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert ram_gb(tmp_path) == whole
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    assert ram_gb(tmp_path) == 2**20 / 1024**3
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert ram_gb(tmp_path) == whole
