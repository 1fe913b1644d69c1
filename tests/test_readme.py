"""bench/readme.py: README.md says what the patches and the reference say."""

import pytest
from synthetic import ladder_row, ladder_state, rows_of, without_state, write_record, write_state

from bench import readme, states
from patches import stack


def test_readme_is_what_the_command_writes():
    text = readme.README.read_bytes().decode()
    for name in ("techniques", "ladder", "stages"):
        assert text.count(f"<!-- {name}: written by measure.py readme -->\n") == 1
    assert readme.update(text) == text


def test_techniques_are_those_of_the_headers():
    rows = rows_of(readme.techniques_table())
    patches = stack.load()
    assert rows[0] == ["0", "baseline, [`00_orig.py`](00_orig.py)", "", "12,525", "26.26"]
    assert rows[2] == [
        "2", "[tensor cores (TF32 matrix products)](patches/02-tensor-cores.patch)", "rounding",
        "27,648", "26.24",
    ]
    assert rows[-1][0] == "" and rows[-1][1].endswith("(patches/ddp.patch), on 4 GPUs")
    assert rows[-1][2:] == ["changes", "419,259", "22.80"]
    assert len(rows) == len(patches) + 1
    for row, patch in zip(rows[1:], patches, strict=True):
        assert f"[{patch.fields['Technique']}](patches/{patch.name}.patch)" in row[1]
        assert bool(patch.published) == bool(row[3])


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The folder of a reference machine."""
    monkeypatch.setattr(states, "REFERENCE", tmp_path)
    folder = tmp_path / "some-cpu"
    write_state(folder, ladder_state())
    write_record(folder / "stages", "00_orig", "2026-01-01T00:00:00Z", 1000)
    write_record(folder / "stages", "01_opt_single_gpu", "2026-01-01T00:00:00Z", 4000)
    return folder


def test_ladder_table(machine):
    rows = rows_of(readme.ladder_table(machine))
    assert "in 01" not in readme.ladder_table(machine)  # no leave-one-out there
    assert {len(row) for row in rows} == {9}
    write_state(machine, without_state(), "leave-one-out")
    rows = rows_of(readme.ladder_table(machine))
    assert rows[0] == [
        "0", "technique number 0", "105 (100–110)", "", "", "", "", "2.00", "8.000", ""]
    assert rows[3] == ["3", "technique number 3", "108 (103–113)", "1.01", "1.50", "1.03",
                       "**1.25**", "1.85", "8.003", "**faster**"]
    assert rows[7] == ["7", "technique number 7", "", "", "1.50", "", "", "", "",
                       "failed: out of memory: lower --batch-size"]
    assert [row[6] for row in rows[:6]] == ["", "conflict", "failed", "**1.25**", "1.01", ""]


def test_update_writes_every_table(machine):
    marker = "<!-- {}: written by measure.py readme -->\n"
    names = "ladder", "stages", "techniques"
    before = "".join(f"{name}:\n{marker.format(name)}old\n<!-- end -->\nafter\n" for name in names)
    after = readme.update(before)
    tables = (readme.ladder_table(machine), readme.stages_table(machine),
              readme.techniques_table())
    assert after == "".join(f"{name}:\n{marker.format(name)}{table}<!-- end -->\nafter\n"
                            for name, table in zip(names, tables, strict=True))
    assert readme.update(after) == after
    assert rows_of(tables[1])[1][:5] == [
        "Test CPU", "cpu-demo / 256", "01 optimized", "4,000", "4.00"]


@pytest.mark.parametrize("text", [
    "<!-- other: written by measure.py readme -->\n<!-- end -->\n",
    "<!-- techniques: written by measure.py readme -->\n| 1 |\n",
    "<!-- techniques: written by measure.py readme -->\n"
    "<!-- techniques: written by measure.py readme -->\n<!-- end -->\n",
])
def test_markers_that_do_not_serve(text):
    with pytest.raises(ValueError, match="no such table"):
        readme.update(text)


def test_write_readme(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    readme.README.write_text("<!-- techniques: written by measure.py readme -->\n<!-- end -->\n")
    assert readme.write_readme()
    assert len(rows_of(readme.README.read_text(encoding="utf-8"))) == len(stack.load()) + 1
    assert not readme.write_readme()


def write_variants(machine) -> None:
    base = ladder_row(0, name="01_opt_single_gpu", label="01", reserved_gb=4.0)
    extra = dict(memory_factor=0.5, memory_verdict="less", reserved_gb=2.0, loss_difference=0.01,
                 first_step_seconds=3.0)
    rows = [
        base | extra | dict(memory_factor=None, memory_verdict=None, loss_difference=None,
                            reserved_gb=4.0),
        ladder_row(1, label="step-accumulation --micro-batches 4", factor=0.9) | extra
        | dict(verdict="slower"),
        ladder_row(2, label="optimizer-adamw-8bit", error="needs the package x") | extra
        | dict(factor=None, memory_factor=None, memory_verdict=None),
    ]
    write_state(machine, ladder_state(rows=rows), "variants")


def test_variants_table(machine):
    write_variants(machine)
    rows = rows_of(readme.alternatives_table(machine, "variants"))
    assert rows[1] == ["`step-accumulation --micro-batches 4`", "106", "**0.90**", "2.00",
                       "**0.50**", "3.0", "+0.010", "unchanged"]
    assert rows[2][2:5] == ["needs the package x", "2.00", ""]


def test_guide_table(machine):
    """What the guide claims, with the factors of the variants and of the ladder's rungs."""
    write_variants(machine)
    ladder = ladder_state()
    for row, name in ((10, "10-batch-size"), (8, "08-torch-compile"), (5, "05-bfloat16")):
        ladder["rows"][row] |= dict(name=name, label=name[1:] if name[0] == "0" else name)
    write_state(machine, ladder)
    rows = rows_of(readme.guide_table(machine))
    assert rows[0][:4] == ["batch size", "yes", "yes", "`10-batch-size`"]
    assert rows[0][5] == f"{(2 - 10 / 20) / (2 - 9 / 20):.2f}"  # GB of rung 10 over those of rung 9
    sizes = [ladder_row(0, label="batch 1", tok_per_sec=100.0, reserved_gb=1.0),
             ladder_row(1, label="batch 2", tok_per_sec=150.0, reserved_gb=1.5),
             ladder_row(2, label="batch 4", tok_per_sec=None, reserved_gb=None)]
    write_state(machine, ladder_state(rows=sizes), "sweep-batch")
    assert rows_of(readme.guide_table(machine))[0] == [
        "batch size", "yes", "yes", "`batch 2 over batch 1`", "1.50", "1.50"]
    assert ["gradient accumulation", "no", "yes", "`step-accumulation --micro-batches 4`", "0.90",
            "0.50"] in rows
    assert ["choice of the optimizer", "yes", "yes", "`optimizer-adamw-8bit`",
            "needs the package x", "0.50"] in rows
    assert "ZeRO" not in [row[0] for row in rows]  # not measured there
    sharded = [ladder_row(0, label="02, 2 ranks", reserved_gb=4.0),
               ladder_row(1, label="parallel-sharded --zero 3", factor=0.75, reserved_gb=3.0)]
    write_state(machine, ladder_state(rows=sharded), "sharded-gpt2-medium")
    assert ["ZeRO", "no", "yes", "`parallel-sharded --zero 3`", "0.75", "0.75"] in rows_of(
        readme.guide_table(machine))


def test_another_model_stands_apart(machine):
    base = ladder_row(0, name="01", label="01", parameters=100, memory_factor=None)
    same = ladder_row(1, label="same", parameters=100, memory_factor=1.0)
    other = ladder_row(2, label="model-mixture", parameters=200, memory_factor=1.5,
                       expert_shares=[[0.2, 0.3, 0.25, 0.25], [0.1, 0.4, 0.25, 0.25]])
    extra = dict(memory_verdict=None, first_step_seconds=1.0, loss_difference=0.5)
    rows = [row | dict(expert_shares=None) | row | extra for row in (base, same, other)]
    state = ladder_state(rows=rows)
    state["plan"]["name"] = "variants"
    write_state(machine, state, "variants")
    own = rows_of(readme.alternatives_table(machine, "variants"))
    assert [row[0] for row in own] == ["`01`", "`same`"]
    base, other = rows_of(readme.models_table(machine))
    assert other == ["`model-mixture`", "200", "107", "1.01", "1.90", "1.50", "8.0020", "+0.5000",
                     "10%–40%"]
