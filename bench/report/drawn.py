"""The pictures of README and docs/, which `measure.py readme` draws with the pages."""

from bench.common import ROOT
from bench.report import accuracy, waterfall
from bench.report.pictures import NOISE, OWN, key, lay_rows, rows_of_panels

OTHER = "0.6"


def predictions():
    """Predicted over measured tok/sec, for what others have measured, each with its range."""
    rows = sorted(accuracy.judged(), key=lambda row: row["tok_per_sec"])
    near = accuracy.figures_of(rows, "all")["all.near"]
    figure, [(subfigure, axes)] = rows_of_panels(
        [f"{near:.0%} of predicted speeds are within 20 % of what others measured"],
        [1.6 + 0.18 * len(rows)], [1])
    axes.axvline(1, color="0.5", linewidth=1)
    lay_rows(axes, len(rows))
    for place, row in enumerate(rows):
        share = 1 + row["error"]
        axes.plot([share * (1 - row["range"]), share * (1 + row["range"])], [place, place],
                  color=NOISE, linewidth=5, solid_capstyle="butt", zorder=0)
        axes.plot(share, place, "o", markersize=5,
                  color=OWN if row["source"] == accuracy.ONE_PROGRAM else OTHER)
    axes.set_yticks(range(len(rows)), [
        f"{row['card']}, batch {row['batch']}: {row['tok_per_sec']:,}" for row in rows], fontsize=9)
    axes.set_xlabel("predicted tok/sec divided by measured; bars: the printed range")
    subfigure.legend(handles=[
        key("one program, PyTorch 2.8", color=OWN, marker="o", linestyle=""),
        key("other programs", color=OTHER, marker="o", linestyle="")],
        loc="outside lower center", ncols=2, frameon=False)
    return figure


DRAWN = {  # by the page that shows them
    ROOT / "README.md": {"docs/speedup.png": waterfall.readme_picture},
    ROOT / "docs" / "predictions.md": {"predictions.png": predictions},
}
