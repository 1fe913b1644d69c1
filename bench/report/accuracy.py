"""How far off predictions of speed are, by kind of card and script: apart for the program by which
constants were chosen and for the others, and with constants fitted anew without one program."""

from math import log
from statistics import correlation, mean, median
from unittest.mock import patch

from bench.predict import speed
from bench.predict.store import Prediction
from bench.report.check import others, others_predictions
from bench.report.pictures import NOISE, OWN, key, lay_rows, rows_of_panels
from bench.report.tables import Table, number, words

ONE_PROGRAM = "twenty cards"  # of the sources: by its figures shares and ranges were chosen
OTHER = "0.6"  # the colour of the others
GRID = {  # of constants of bench.predict.speed: what they may be
    "BANDWIDTH": (0.75, 0.8, 0.85, 0.9, 0.95), "ATTENTION": (0.35, 0.4, 0.44, 0.5, 0.6),
    "UNALIGNED": (0.4, 0.5, 0.6, 0.7, 0.8), "LAUNCH": (1e-6, 2e-6, 3e-6, 4e-6, 6e-6),
    "HOST": (20e-6, 30e-6, 35e-6, 40e-6, 45e-6), "OVERLAP": (0.0, 0.1, 0.2, 0.3, 0.5)}


def judged(known: dict[str, Prediction] | None = None) -> list[dict]:
    """Others' figures, but those of which the card, the precision or the batch isn't known. Raises
    UserError."""
    return [row for row in others(known) if "unsure" not in row]


def apart(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Those of ONE_PROGRAM, and the others."""
    return ([row for row in rows if row["source"] == ONE_PROGRAM],
            [row for row in rows if row["source"] != ONE_PROGRAM])


def figures_of(rows: list[dict]) -> dict:
    """How many, how far off, and the shares within 20 % of what was measured and in the range."""
    if not rows:
        return {}
    errors = [abs(row["error"]) for row in rows]
    inside = [abs(row["measured"] / row["predicted"] - 1) <= row["range"] for row in rows]
    return dict(count=len(rows), median=median(errors), inside=mean(inside),
                near=mean(each <= 0.2 for each in errors))


def accuracy_table() -> Table:
    """A row for each class of figures, and one for all."""
    rows, lines = judged(), []
    classes = {(kind, how): [row for row in rows if row["kind"] == kind
                               and row["is_compiled"] == (how == "compiled")]
               for kind in speed.RANGES for how in ("compiled", "not")}
    for (kind, script), own in (classes | {("all", ""): rows}).items():
        ranges = sorted({row["range"] for row in own})
        one, rest = apart(own)
        if own:
            lines.append(dict(
                kind=kind, script=script,
                range=" or ".join(f"{each:.0%}" for each in ranges) * bool(script),
                one=figures_of(one), rest=figures_of(rest)))
    return Table([words("GPUs", "kind"), words("script", "script"), words("range ±", "range"), *(
        number(f"{title}{heading}", f"{prefix}.{name}", form)
        for title, prefix in (("twenty cards: ", "one"), ("others: ", "rest"))
        for heading, name, form in (("figures", "count", "d"), ("median error", "median", ".0%"),
                                    ("within 20 %", "near", ".0%"),
                                    ("in the range", "inside", ".0%")))], lines)


def summary() -> str:
    """How far off the predictions were, and whether that goes with the size of the cache."""
    everything, rows = others(), judged()

    def told(some: list[dict]) -> str:
        known = figures_of(some)
        return (f"{known['count']} figures, median error {known['median']:.0%},"
                f" {known['near']:.0%} within 20 %, {known['inside']:.0%} in the printed range")

    one, rest = apart(rows)
    cached = [(row["error"], log(size)) for row in one if (size := speed.CARDS[row["card"]].l2)]
    return (f"*Twenty cards*, to which shares and ranges were fitted: {told(one)}.\n"
            f"The {len({row['program'] for row in rest})} other programs: {told(rest)}."
            f" All: {told(rows)}. With the {len(everything) - len(rows)} that the last table"
            f" doesn't judge: {told(everything)}.\n"
            f"For the {len(cached)} figures of *twenty cards* on GPUs of known L2 cache size, the"
            " error and the logarithm of that size have a correlation of"
            f" {correlation(*zip(*cached, strict=True)):.2f}.")


def others_table() -> Table:
    """A row for each program and kind of card: its figures by card, each with the prediction's
    error; those that aren't judged apart, by the reason."""
    lines: dict[tuple, dict] = {}
    for row in others():
        key = row["program"], row["kind"], row.get("unsure", "")
        line = lines.setdefault(key, dict(program=row["program"], kind=row["kind"],
                                          unsure=row.get("unsure"), figures={}))
        step = row["source"].partition(", ")[2]
        line["figures"].setdefault(row["card"], []).append(
            f"{step + ' ' * bool(step)}{row['batch']}: {row['measured']:,.0f}"
            f" ({row['error']:+.0%})")
    for line in lines.values():
        line["all"] = "; ".join(f"**{card}** {', '.join(found)}"
                                for card, found in line["figures"].items())
    return Table([words("measured by", "program"), words("kind of GPU", "kind"),
                  words("GPU, batch: tok/sec (error of the prediction)", "all"),
                  words("why it isn't judged", "unsure")], list(lines.values()))


def picture():
    """Predicted over measured tok/sec, for what others have measured, each with its range."""
    rows = sorted(judged(), key=lambda row: row["tok_per_sec"])
    figure, [(subfigure, axes)] = rows_of_panels(
        [f"{figures_of(rows)['near']:.0%} of predicted speeds are within 20 % of what others"
         " measured"], [1.6 + 0.18 * len(rows)], [1])
    axes.axvline(1, color="0.5", linewidth=1)
    lay_rows(axes, len(rows))
    for place, row in enumerate(rows):
        share = 1 + row["error"]
        axes.plot([share * (1 - row["range"]), share * (1 + row["range"])], [place, place],
                  color=NOISE, linewidth=5, solid_capstyle="butt", zorder=0)
        axes.plot(share, place, "o", markersize=5,
                  color=OWN if row["source"] == ONE_PROGRAM else OTHER)
    axes.set_yticks(range(len(rows)), [
        f"{row['card']}, batch {row['batch']}: {row['tok_per_sec']:,}" for row in rows], fontsize=9)
    axes.set_xlabel("predicted tok/sec divided by measured; bars: the printed range")
    subfigure.legend(handles=[
        key("one program, PyTorch 2.8", color=OWN, marker="o", linestyle=""),
        key("other programs", color=OTHER, marker="o", linestyle="")],
        loc="outside lower center", ncols=2, frameon=False)
    return figure


# ---- Constants, fitted anew without one program --------------------------------------------------


def left_out_table() -> Table:
    """Each constant alone, fitted to all programs but one and judged on that one, in turn: would
    fitting it bring anything?"""
    lines, known = [], others_predictions()
    for name, values in GRID.items():
        errors = {}  # by value: (program, error) of each figure
        for value in values:
            with patch.object(speed, name, value):
                errors[value] = [(row["program"], abs(row["error"])) for row in judged(known)]

        def best(without: str, errors=errors) -> float:
            return min((mean(error for program, error in found if program != without), value)
                       for value, found in errors.items())[1]

        programs = dict.fromkeys(program for program, _ in errors[values[0]])
        chosen = {program: best(program) for program in programs}
        out = [error for program in programs
               for other, error in errors[chosen[program]] if other == program]
        now = [error for _, error in errors[getattr(speed, name)]]
        unit = 1e6 if max(values) < 0.01 else 1
        lines.append(dict(
            name=name + ", µs" * (unit > 1), now=f"{unit * getattr(speed, name):g}",
            fitted=f"{unit * best(''):g}", chosen="–".join(f"{unit * each:g}" for each in sorted(
                {min(chosen.values()), max(chosen.values())})),
            before=median(now), after=median(out), near=mean(each <= 0.2 for each in now),
            near_after=mean(each <= 0.2 for each in out)))
    return Table([
        words("constant", "name"), number("value used", "now"), number("fitted to all", "fitted"),
        number("fitted without one program", "chosen"),
        number("median error, value used", "before", ".1%"),
        number("median error, left-out fit", "after", ".1%"),
        number("within 20 %, value used", "near", ".0%"),
        number("within 20 %, left-out fit", "near_after", ".0%")], lines)
