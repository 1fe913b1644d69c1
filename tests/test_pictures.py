"""Pictures: readable in grey, whole at the width at which pages show them, and with a text."""

import re
from itertools import combinations

import pytest

pytest.importorskip("matplotlib")

from conftest import ROOT  # noqa: E402
from made_up import shown  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402

from bench.common import REFERENCE  # noqa: E402
from bench.report import accuracy, pictures, readme, waterfall  # noqa: E402
from bench.report.tables import found_in  # noqa: E402
from bench.studies import all_studies  # noqa: E402

TOGETHER = [  # colours that one picture shows, on white
    [*pictures.COLOURS.values(), "white"],
    [pictures.OWN, pictures.ERROR, pictures.UNSURE, "white"],
    [pictures.OWN, accuracy.OTHER, pictures.NOISE],
]


def luminance(colour: str) -> float:
    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize("colours", TOGETHER)
def test_colours_differ_in_grey(colours):
    for one, other in combinations(colours, 2):
        assert abs(luminance(one) - luminance(other)) > 0.1, (one, other)


def smallest(figure) -> float:
    """The size of the smallest letters, in points: 9 are 11 pixels where a page shows 880."""
    return min(text.get_fontsize() for text in figure.findobj(plt.Text)
               if text.get_text().strip() and text.get_visible())


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["amd-epyc-2-cores", "intel-xeon-amx-2-cores"])
def test_pictures_are_whole(machine):
    folder = REFERENCE / machine
    for study in all_studies().values():
        for name, figure in study.pictures(folder, found_in(folder, study.name)).items():
            shown(figure, [text.get_text() for axes in figure.axes for text in axes.texts])
            assert smallest(figure) >= 9, name
            assert min(map(len, titles(figure))) > 20, name
        plt.close("all")


@pytest.mark.slow
def test_pictures_of_pages_are_whole():
    for page, named in readme.DRAWN.items():
        for name, draw in named.items():
            figure = draw()
            shown(figure)
            assert smallest(figure) >= 9, name
            assert (page.parent / name).is_file()
            plt.close("all")


@pytest.mark.parametrize("draw", [
    waterfall.readme_picture,
    lambda: waterfall.machine_picture("", found_in(REFERENCE / "nvidia-h100", "ladder")[0][1])])
def test_bars_of_a_ladder_say_what_their_labels_do(draw):
    axes = draw().axes[0]
    labels = [float(text.get_text()[1:]) for text in axes.texts if text.get_text()[:1] == "×"]
    gains = axes.patches[1::2]  # each after the bar of what was gained before
    for bar, label in zip(gains[1:], labels, strict=True):
        ratio = 1 + bar.get_width() / bar.get_x()
        assert label == pytest.approx(ratio if label >= 1 else 1 / ratio, abs=0.006)
    plt.close("all")


def titles(figure) -> list[str]:
    return [row.get_suptitle() for row in figure.subfigs]


def test_a_long_title_is_wrapped():
    figure, _ = pictures.rows_of_panels(["A title of words and figures " * 12], [2.0], [1])
    shown(figure)
    assert titles(figure)[0].count("\n") >= 3
    plt.close("all")


def test_every_image_has_a_text():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"),
                 *REFERENCE.glob("*/README.md")]:
        for text in re.findall(r"!\[(.*?)\]\(", page.read_text(encoding="utf-8")):
            assert len(text) > 40, f"{page.name}: {text}"
