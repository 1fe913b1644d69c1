"""Two machines, or two dates of one, side by side."""

from pathlib import Path
from typing import NamedTuple

from bench.common import REFERENCE, UserError, relative, trained_in, write_whole
from bench.judge.noise import significant, verdict
from bench.judge.rows import Row, speed_of
from bench.report.pictures import (
    COLOURS,
    PUBLISHED,
    key,
    lay_rows,
    picture_bytes,
    rows_of_panels,
    shorten,
)
from bench.report.tables import INTERVAL, Column, Table, cell, found_in, markdown
from bench.studies import Study


class Pair(NamedTuple):
    """The same rung of both ladders."""

    one: Row
    other: Row
    difference: str = ""  # whether the technique brings more here or there

    @property
    def comparable(self) -> bool:
        """Whether both have factors, over the same rung."""
        return bool(self.one.factor and self.other.factor
                    and self.one.versus.run.name == self.other.versus.run.name)


def judged(pairs: list[Pair]) -> list[Pair]:
    """With their differences, by the rule of all verdicts."""
    found, told = {}, {}
    for pair in pairs:
        ours, theirs = (row.rows.differences(speed_of).get(row.run.name)
                        for row in (pair.one, pair.other))
        if pair.comparable:
            told[pair.one.run.name] = "no verdict"
            if ours and theirs:
                found[pair.one.run.name] = ours.minus(theirs)
    level = min(row.rows.level for pair in pairs for row in (pair.one, pair.other))
    sure = significant(found, level)
    for name, each in found.items():
        told[name] = {"faster": "more in A", "slower": "more in B"}.get(
            verdict(each, name in sure), "not measurable")
    return [pair._replace(difference=told.get(pair.one.run.name, "")) for pair in pairs]


class Compare(Study):
    """Two folders of results side by side: what each technique brings in the one and in the other,
    whether the two differ measurably, and what differs between the machines."""

    runs_scripts = of_this_machine = False
    in_report = ()
    arguments = "A B"

    def options(self, parser):
        for name in "AB":
            parser.add_argument(name, help="a folder of results with a ladder, or the name of one"
                                           " in results/reference")

    def answer(self, setup):
        names = setup.args.A, setup.args.B
        (one, rows), (other, others) = map(ladder_in, names)
        if one.options != other.options:
            ours, theirs = (" ".join(each.options) or "none" for each in (one, other))
            raise UserError(f"measured with different options: {ours}; {theirs}")
        there = {row.run.name: row for row in others}
        pairs = judged([Pair(row, there[row.run.name]) for row in rows if row.run.name in there])
        if not any(pair.comparable for pair in pairs):
            raise UserError("the two ladders have no technique in common")
        picture = setup.results / "compare.png"
        write_whole(picture, picture_bytes(draw(pairs, setup.args), "png"))
        return "\n".join([
            markdown(Table([
                Column("", lambda line: line[0], True), Column("A", lambda line: str(line[1])),
                Column("B", lambda line: str(line[2]))], differences(one, other, pairs, setup))),
            markdown(Table([
                Column("technique", lambda pair: pair.one.label, True),
                Column("published", lambda pair: cell(pair.one.published_factor, ".2f")),
                Column("A: ×", lambda pair: cell(pair.one.factor, ".2f")),
                Column("95 %", lambda pair: INTERVAL.cell(pair.one)),
                Column("B: ×", lambda pair: cell(pair.other.factor, ".2f")),
                Column("95 %", lambda pair: INTERVAL.cell(pair.other)),
                Column("difference", lambda pair: pair.difference, True)],
                pairs, "What each technique brings over the one before it:")),
            "The published figures (an A100) have no intervals, and so no verdict.\n"
            + relative(picture)])


def ladder_in(name: str) -> tuple:
    """(measurement, rows) of the ladder in a folder. Raises UserError."""
    folder = Path(name) if Path(name).is_dir() else REFERENCE / name
    found = found_in(folder, "ladder") if folder.is_dir() else []
    if not found:
        known = ", ".join(path.name for path in sorted(REFERENCE.glob("*/")))
        raise UserError(f"{name}: no ladder there; results/reference has {known}", 2)
    return found[-1]


def differences(one, other, pairs: list[Pair], setup) -> list[tuple]:
    """Lines of (what, A, B), of all in which the two measurements differ."""
    lines = [("folder", setup.args.A, setup.args.B)]
    ours, theirs = trained_in(one.machine), trained_in(other.machine)
    lines += [("techniques from 5 on train in", ours, theirs)] * (ours != theirs)
    lines += [(name, one.machine.get(name), other.machine.get(name))
              for name in one.machine | other.machine
              if not name.startswith("dtype") and one.machine.get(name) != other.machine.get(name)]
    rates = [{name: f"{rate / 1e12:.2f}" for name, rate in each.peak.items()}
             for each in (one, other)]
    lines += [(f"products in {name}, TFLOP/s", rates[0].get(name, ""), rates[1].get(name, ""))
              for name in rates[0] | rates[1]]
    changed = [pair.one.label for pair in pairs if one.of_another_version(other, pair.one.run.name)]
    if changed:
        lines.append(("another version of", ", ".join(changed), ""))
    if one.data != other.data:
        same = "another one", ""  # of the same name
        lines.append(("text", *(same if one.text == other.text else
                                (each.text or "the book" for each in (one, other)))))
    if one.plan.tokens != other.plan.tokens:
        lines.append(("tokens per run", one.plan.tokens, other.plan.tokens))
    first = pairs[0]
    lines.append(("rounds", first.one.rounds, first.other.rounds))
    lines.append((f"{first.one.label}, tok/sec", cell(first.one.tok_per_sec, ",.0f"),
                  cell(first.other.tok_per_sec, ",.0f")))
    return lines


def draw(pairs: list[Pair], args):
    """A dumbbell for each technique: its factor in A, in B and as published."""
    pairs = [pair for pair in pairs if pair.comparable]
    names = [shorten(Path(name).resolve().name if Path(name).is_dir() else name, 30)
             for name in (args.A, args.B)]
    sure = sum(pair.difference.startswith("more") for pair in pairs)
    finding = (f"{sure} of {len(pairs)} techniques differ measurably" if all(
        pair.difference != "no verdict" for pair in pairs) else "What each technique brings")
    figure, [(subfigure, axes)] = rows_of_panels(
        [f"{finding}: {' and '.join(names)}"], [1.4 + 0.34 * len(pairs)], [1])
    lay_rows(axes, len(pairs))
    axes.axvline(1, color="0.5", linewidth=1)
    for place, pair in enumerate(pairs):
        ends = [pair.one.factor, pair.other.factor]
        axes.plot(ends, [place] * 2, color="0.8", linewidth=3)
        if pair.one.published_factor:
            axes.plot(pair.one.published_factor, place, "d", color=PUBLISHED, markersize=7)
        for row, stage, shift in ((pair.one, "00", -0.15), (pair.other, "01", 0.15)):
            axes.plot(row.interval() or (), [place + shift] * 2 * bool(row.interval()),
                      color=COLOURS[stage], linewidth=1)
            axes.plot(row.factor, place, "o", color=COLOURS[stage])
    axes.set_yticks(range(len(pairs)), [pair.one.label for pair in pairs])
    axes.set_xlabel("factor in tok/sec over the technique before; lines: 95 % intervals")
    subfigure.legend(handles=[
        key(f"A: {names[0]}", color=COLOURS["00"], marker="o", linestyle=""),
        key(f"B: {names[1]}", color=COLOURS["01"], marker="o", linestyle=""),
        key("published, A100", color=PUBLISHED, marker="d", linestyle="")],
        loc="outside lower center", ncols=3, frameon=False)
    return figure
