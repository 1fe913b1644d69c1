"""bench/pictures.py: what the pictures show, and that it can be read."""

import pytest

pytest.importorskip("matplotlib").use("Agg")

import made_up  # noqa: E402
from made_up import CPU, make_plan, make_state  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.text import Text  # noqa: E402
from synthetic import ladder_row, ladder_state, rows_of, write_record  # noqa: E402

from bench import pictures, stages, statistics, tables  # noqa: E402
from patches import stack  # noqa: E402

LONG = "A processor whose name is longer than what a title of a picture has room for @ 2.70GHz"


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def shown(figure, margins: tuple[str, ...] = ()) -> list[str]:
    """Every text of the picture, after a look that none is cut off and no two overlap; `margins`
    are those that stand beside their panel."""
    figure.canvas.draw()
    hidden = set()  # ticks beyond the limits are kept, but not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
        hidden |= {label for place, label in ticks if not low <= place <= high}
    texts = [text for text in figure.findobj(Text)
             if text.get_visible() and text.get_text() and text not in hidden]
    boxes = [text.get_window_extent() for text in texts]
    for i, box in enumerate(boxes):
        inside = figure.bbox.padded(1)
        assert inside.contains(*box.min) and inside.contains(*box.max), texts[i]
        for other, text in zip(boxes[:i], texts[:i], strict=True):
            assert not box.padded(-1).overlaps(other.padded(-1)), (texts[i], text)
    for axes in figure.axes:  # what stands beside a bar stays in its panel
        for text in (text for text in axes.texts if text.get_text() not in margins):
            assert text.get_window_extent().x1 <= axes.bbox.x1 + 1, text
    return [text.get_text() for text in texts]


def runs_of(folder, *machines) -> list[stages.Run]:
    for day, (gpu, speed) in enumerate(machines, 1):
        for factor, stage in enumerate(stages.STAGES, 1):
            write_record(folder, stage, f"2026-01-0{day}T00:00:00Z", speed * factor**4, gpu=gpu)
    return stages.read_runs(folder)


def test_speed(tmp_path):
    runs = runs_of(tmp_path, (None, 1000), (LONG, 100_000))
    published, _ = stages.read_published(stack.load())
    texts = shown(pictures.draw_speed([*runs, *published]))
    for text in ("Test CPU: cpu-demo, context 256", "16,000  (16.00×)", "8,100,000  (81.00×)",
                 "1.25", "02 DDP × 2", "02 DDP × 4", "419,259  (33.47×)", "26.26",
                 "speed, tok/sec (all processes)", "reserved memory, GB (per process)"):
        assert text in texts
    assert f"{LONG[:59]}…: cpu-demo, context 256" in texts


def test_memory_that_is_not_known(tmp_path):
    write_record(tmp_path, "00_orig", "2026-01-01T00:00:00Z", 1000, gpu="$x_1$", reserved_gb=None)
    texts = shown(pictures.draw_speed(stages.read_runs(tmp_path)))
    assert "n/a" in texts and "$x_1$: cpu-demo, context 256" in texts


def test_losses(tmp_path):
    assert pictures.draw_losses([]) is None
    published, _ = stages.read_published(stack.load())
    assert pictures.draw_losses(published) is None
    figure = pictures.draw_losses(runs_of(tmp_path, (None, 1000)))
    texts = shown(figure)
    for text in ("training tokens", "training time, s", "loss, nats per token"):
        assert text in texts
    by_tokens, by_time = figure.axes
    assert list(by_tokens.lines[0].get_xdata()) == [2048, 4096, 6144]
    assert list(by_time.lines[0].get_xdata()) == [0.5, 1.5, 2.5]
    assert list(by_time.lines[0].get_ydata()) == [10.5, 9.5, 8.5]  # validation, then training
    assert list(by_time.lines[1].get_ydata()) == [10, 9, 8]


def test_losses_of_many_groups(tmp_path):
    runs = runs_of(tmp_path, *((f"GPU {i}", 1000) for i in range(4)))
    assert "GPU 3: cpu-demo, context 256 (latest of 4 groups)" in shown(pictures.draw_losses(runs))


def test_ladder():
    ladder = ladder_state()
    ladder["rows"][5]["val_loss"] = 8.15  # off by three times the noise: in its place
    ladder["rows"].append(ladder_row(
        13, name="02_opt_multi_gpu_ddp", label="13 DDP", processes=4, tok_per_sec=1_122_464.0,
        speeds=[1_100_000.0, 1_130_000.0], factor_baseline=43.21, reserved_gb=22.5, val_loss=7.1,
        published_factor_baseline=33.47))
    texts = shown(pictures.draw_ladder(ladder))
    for text in (
        "The ladder on Test $x_1$ CPU", "technique 0 \u20070", "technique 12 12", "DDP × 4 13",
        "105  (2.00 GB)", "117  (1.11×, 1.40 GB)", "1,122,464  (43.21×, 22.50 GB)", "1.00×",
        "33.47×", "failed: out of memory: lower --batch-size"[:39] + "…", "seed noise",
        "tok/sec, median and range of 4 rounds", "factor over the baseline",
        "validation loss, nats",
        "9.01", "7.10",  # far off the seed noise: at the panel's edge
    ):
        assert text in texts
    assert not {"8.01", "8.15"} & set(texts)


def test_ladder_of_one_round_without_its_baseline():
    rows = [ladder_row(k, speeds=[105.0], rounds=1, factor_baseline=None,
                       published_factor_baseline=None) for k in range(5)]
    rows[0] |= dict(speeds=[], rounds=0, tok_per_sec=None, val_loss=None,
                    error="failed: ended by signal 9")
    rows[4] |= dict(error="failed: ended by signal 9")
    texts = shown(pictures.draw_ladder(ladder_state(name=LONG, rows=rows, count=8,
                                                    seed_noise=None)))
    for text in ("tok/sec", "failed: ended by signal 9", "109  (1.80 GB), failed",
                 f"The ladder on {LONG[:69]}…"):
        assert text in texts
    assert "seed noise" not in texts


def variant_row(k: int, **changes) -> dict:
    return ladder_row(k, label=f"some-variant --with-option {k}", factor=1 + k / 50,
                      memory_factor=1 - k % 3 / 10) | changes


def compile_state() -> dict:
    """Without the compiler, and two modes: one pays from step 50 on, one never."""
    common = dict(tokens_per_step=2048, steps_per_epoch=100, train_seconds=1.0, uncompiled=False)
    rows = [
        ladder_row(0, label="none", tok_per_sec=2048.0, first_step_excess=[0.0, 0.2, 0.0]) | common,
        ladder_row(1, label="default", tok_per_sec=4096.0, first_step_excess=[25.0]) | common,
        ladder_row(2, label="eager", tok_per_sec=1024.0, first_step_excess=[1.0]) | common,
        ladder_row(3, label="cudagraphs", error="needs an NVIDIA GPU", tok_per_sec=None,
                   first_step_excess=[], factor=None, reserved_gb=None, val_loss=None) | common,
    ]
    machine = dict(device="cpu", name="Test CPU", torch="2.13")
    return ladder_state(rows=rows, plan=dict(name="compile-modes", options=[], first_seed=123,
                                             machine=machine))


def test_compile_modes():
    figure = pictures.draw_compile_modes(compile_state())
    (axes,) = figure.axes
    assert "default: 25.0 s + 0.500 s per step" in shown(figure)
    assert [line.get_label() for line in axes.get_lines()] == [
        "none: 0.0 s + 1.000 s per step", "default: 25.0 s + 0.500 s per step",
        "eager: 1.0 s + 2.000 s per step"]
    assert axes.get_xlim()[1] >= 50 and axes.get_xlabel() == "steps"


def test_compile_table():
    text = tables.plan_table(compile_state())
    none, default, eager, graphs = rows_of(text)
    assert default[:4] == ["default", "25.0", "0.500", f"{2048 / 111:.3f}–{2048 / 101:.3f}"]
    assert default[4:10] == ["1.01", "275", "1.82", "2.13", "50", ""]
    assert none[4:7] == ["", "500", "1.00"] and none[1:3] == ["0.0", "1.000"] and none[8] == ""
    assert eager[8] == "never" and graphs[4] == "needs an NVIDIA GPU"
    assert "5 epochs are compiling and the seconds of 500 steps" in text
    state = compile_state()
    state["plan"]["epochs"] = 5
    state["rows"][2]["uncompiled"] = True
    text = tables.plan_table(state)
    assert rows_of(text)[1][5] == "1" and "The 5 epochs were run: 500 steps." in text
    assert rows_of(text)[2][4] == "torch.compile doesn't work here"


def test_variants():
    """Many points close together, one of which has no figures."""
    rows = [variant_row(0, label="01", factor=None, memory_factor=None)]
    rows += [variant_row(k) for k in range(1, 22)]
    rows.append(variant_row(30, label="lacking", factor=None, memory_factor=None,
                            error="needs an NVIDIA GPU"))
    names = tuple(row["label"] for row in rows)
    texts = shown(pictures.draw_variants(ladder_state(rows=rows, count=8)), names)
    assert "some-variant --with-option 21" in texts and "lacking" not in texts
    assert "speed, factor over 01" in texts and "memory, factor over 01" in texts


def test_time_to_loss(tmp_path):
    """Two seeds of 00 and 01, and of both at the settings of a search; one never gets there."""
    plan = make_plan(tmp_path, "00_orig", "01_opt_single_gpu", "00_orig-best", "01-best",
                     machine=CPU, whole=True, new_seeds=True, log_tokens=1024,
                     targets=dict(published=7.0, best=6.9))
    for run in plan.runs[2:]:
        run.options = ("--batch-size", "1", "--learning-rate", "0.001")
    results = [made_up.write_record(plan.path.parent, run.name, number, 100.0, seed=122 + number)
               for run in plan.runs[:3] for number in (1, 2)]
    state = make_state(plan, results)
    state["rows"], _ = statistics.make_rows(plan, state, plan.path.parent)
    texts = shown(pictures.draw_time_to_loss(state, plan.path.parent), ("7.000", "6.900"))
    for text in ("Time to a loss on Some CPU", "training time, s", "7.000", "6.900", "1.00×",
                 "not reached", "tok/sec", "time to the loss", "00_orig-best",
                 "factor over 00_orig; the loss is 7.000"):
        assert text in texts


def test_time_to_loss_of_variants(tmp_path):
    """A curve for the first and the last rung, and for each variant."""
    names = "00_orig", "05-bfloat16", "01_opt_single_gpu", "variant-a", "variant-b-x"
    plan = make_plan(tmp_path, *names, machine=CPU, whole=True, new_seeds=True, log_tokens=1024,
                     targets=dict(published=7.0))
    plan.runs[-1].options = ("--x", "1")
    results = [made_up.write_record(plan.path.parent, run.name, number, 100.0, seed=122 + number)
               for run in plan.runs for number in (1, 2)]
    state = make_state(plan, results)
    state["rows"], _ = statistics.make_rows(plan, state, plan.path.parent)
    figure = pictures.draw_time_to_loss(state, plan.path.parent)
    texts = shown(figure, ("7.000",))
    assert texts.count("05-bfloat16") == 1  # beside its bars
    assert all(texts.count(name) == 2 for name in names if name != "05-bfloat16")
    colours = [line.get_color() for line in figure.axes[0].get_lines() if len(line.get_xdata()) > 2]
    assert len(colours) == 8 and len(set(colours)) == 4


@pytest.mark.parametrize("kind, label, panels", [
    ("batch", "batch {}", ["speed, tok/sec", "reserved memory, GB"]),
    ("model", "gpt2-medium{}, batch 4", ["share of the product rate, %", "speed, tok/sec"]),
    ("context", "context {}, batch 64", ["speed, tok/sec"]),  # 7 lengths on a GPU
])
def test_sweeps(kind, label, panels):
    count = dict(batch=9, model=4, context=7)[kind]
    rows = [ladder_row(k, label=label.format(2**k), share_of_peak=0.5) for k in range(count)]
    rows.append(ladder_row(9, label=label.format(512), speeds=[], rounds=0, tok_per_sec=None,
                           error="out of memory"))
    state = ladder_state(rows=rows)
    for stage in ("", "-00"):
        state["plan"]["name"] = f"sweep-{kind}{stage}"
        figure = pictures.PLANS[state["plan"]["name"]](state, None)
        texts = shown(figure)
        assert [axes.get_ylabel() for axes in figure.axes] == panels
        assert any(f"{stage[1:] or '01'} on Test $x_1$ CPU" in text for text in texts)
    assert not any("512" in text for text in texts)  # it has no figures
