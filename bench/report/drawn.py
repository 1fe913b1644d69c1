"""The pictures of README and docs/, which `measure.py readme` draws with the pages."""

from bench.common import ROOT
from bench.report import check, waterfall
from bench.report.pictures import NOISE, OWN, key, lay_rows, rows_of_panels

OTHER = "0.6"


def predictions():
    """Predicted over measured tok/sec, for what others have measured, with the range."""
    found = check.summary_of_others().split(" (")[0]
    figure, [(subfigure, axes)] = rows_of_panels(
        [f"Predicted over measured speed: {found}"], [1.6 + 0.2 * len(check.others())], [1])
    rows = sorted(check.others(), key=lambda row: (row["card"], row["tok_per_sec"]))
    axes.axvspan(1 / (1 + check.RANGE), 1 / (1 - check.RANGE), color=NOISE, zorder=0)
    axes.axvline(1, color="0.5", linewidth=1)
    lay_rows(axes, len(rows))
    for place, row in enumerate(rows):
        axes.plot(1 + row["error"], place, "o",
                  color=OWN if row["source"] == check.ONE_PROGRAM else OTHER)
    axes.set_yticks(range(len(rows)), [
        f"{row['card']}, batch {row['batch']}: {row['tok_per_sec']:,} tok/sec" for row in rows],
        fontsize=9)
    axes.set_xlabel("tok/sec, predicted over measured; in the band the printed range is right")
    subfigure.legend(handles=[
        key("one program, PyTorch 2.8", color=OWN, marker="o", linestyle=""),
        key("other programs", color=OTHER, marker="o", linestyle="")],
        loc="outside lower center", ncols=2, frameon=False)
    return figure


DRAWN = {  # by the page that shows them
    ROOT / "README.md": {"docs/speedup.png": waterfall.readme_picture},
    ROOT / "docs" / "predictions.md": {"predictions.png": predictions},
}
