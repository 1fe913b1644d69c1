"""Seconds of training until the validation loss has fallen to a target."""

from bench.pictures import (
    COLOURS,
    OWN,
    PUBLISHED,
    draw_bars,
    key,
    place_of,
    rows_of_panels,
    shorten,
    thousands,
)
from bench.rows import Row, ratio
from bench.study import Study
from bench.tables import found_in, markdown, time_notes, time_tables
from bench.times import (
    MAX_TOKENS_HELP,
    TUNING_ROUNDS,
    default_points,
    limit_of,
    plan_of,
    read_search,
    target_plan,
)


class TimeToLoss(Study):
    """How long 00 and 01 train until their validation loss has fallen to the lowest of 00's default
    run; after a search also at the settings that it has found."""

    title = "The time to a loss"
    schedule = {20: 0}
    rounds = {"cuda": 3, "cpu": 3}
    tokens = seconds = None
    rounds_help = "how many seeds: 123, 124 and so on (default: {})"
    max_tokens_help = MAX_TOKENS_HELP

    def options(self, parser):
        parser.add_argument("--rungs", metavar="0,5-8",
                            help="which rungs of the ladder (default: 00 and 01)")
        parser.add_argument("--names", metavar="A,B", help="variants to measure besides")

    def plans(self, setup):
        # Before anything runs: wrong names are told here.
        scripts, args = setup.scripts, setup.args
        runs = [scripts.stage("00"), scripts.stage("01")]
        if args.rungs:
            runs = scripts.chosen(args.rungs, scripts.rungs()[:-1])
        variants = []
        if args.names:
            variants = scripts.variants(scripts.stage("01"), setup.machine, names=args.names)[1:]
        found = read_search(setup)
        if found:
            targets, tokens, points = found.targets, found.tokens, found.points
        else:
            plan = target_plan(setup, [default_points(setup)["00"].run(setup)])
            plan.rounds = TUNING_ROUNDS
            (row,) = yield plan
            tokens, points = limit_of(row), {}
            targets = {"published": row.lowest_val_loss}
        first, last = runs[0].name, runs[-1].name
        runs = [runs[0].but(compared_to=None), *(run.but(compared_to=first) for run in runs[1:]),
                *(run.but(compared_to=last) for run in variants)]
        for point in points.values():  # 01 at its best is compared to 00 at its best
            runs.append(point.run(setup).but(compared_to=first))
            first = runs[-1].name
        yield plan_of(setup, runs, "variants" if variants else "", tokens=tokens, targets=targets)

    def tables(self, measured, rows):
        return time_tables(rows, measured.plan.targets)

    def notes(self, measured, rows):
        return time_notes(measured, rows)

    def extra(self, folder, found):
        """Without a measurement, what the records of the three stages tell."""
        stages = found_in(folder, "stages")
        if found or not stages:
            return ""
        _, rows = stages[0]
        if not rows[0].record or not rows[0].record.lowest_val_loss:
            return ""
        (table,) = time_tables(rows, {"published": rows[0].record.lowest_val_loss})
        return (f"From the records of the three stages. {markdown(table)}\n"
                "Not reached: not within the length of that run; `measure.py time-to-loss` trains"
                " for longer, and with several seeds.\n")

    def draw(self, measured, rows):
        """Losses over time, with the targets; and the factors in tok/sec and in time to the
        target."""
        from matplotlib import pyplot as plt

        targets = measured.plan.targets
        if not targets:
            return None
        figure, [(subfigure, curves, bars)] = rows_of_panels(
            [f"Time to a loss on {place_of(measured)}"],
            [max(4.2, 1.6 + 0.5 * len(rows))], [1, 1],
        )
        tuned = [row for row in rows if "rate" in row.tags]  # at the best settings
        variants = [row for row in rows if "variant" in row.tags]
        last = rows[len(rows) - len(tuned) - len(variants) - 1]  # of the rungs
        shown = [rows[0], *([last] if last is not rows[0] else []), *variants, *tuned]
        keys = []
        for row in shown:
            plain = row.tags.get("stage") == "00" or row.tags.get("rung") == 0
            colour = COLOURS["00"] if plain else OWN
            if row in variants:
                colour = plt.get_cmap("Dark2").colors[variants.index(row) % 8]
            style = {"color": colour, "linestyle": "--" if tuned and row not in tuned else "-"}
            for record in row.records:
                points = [(point.seconds - record.first_step_excess, point.val_loss)
                          for point in record.curve if point.val_loss is not None]
                curves.plot(*zip(*points, strict=True), linewidth=1.3, **style)
            if row.records:
                keys.append(key(row.label, linewidth=2, **style))
        times = [seconds for row in shown for target in targets.values()
                 for _, seconds in row.times_to(target) if seconds < float("inf")]
        if times:
            curves.set_xlim(0, 1.05 * max(times))
        low = min(targets.values())
        curves.set_ylim(low - 0.3, low + 3)
        for loss, side in zip(sorted(targets.values()), ("top", "bottom"), strict=False):
            curves.axhline(loss, color="0.3", linewidth=1, linestyle=":")
            curves.annotate(f"{loss:.3f}", (1, loss), (4, 0), xycoords=("axes fraction", "data"),
                            textcoords="offset points", va=side, fontsize=9)
        curves.set_xlabel("training time, s")
        curves.set_ylabel("validation loss, nats per token")
        thousands(curves.xaxis)
        loss = next(iter(targets.values()))
        draw_factors(bars, rows, loss)
        bars.set_xlabel(f"factor over {rows[0].label}; the loss is {loss:.3f}")
        keys += [key("tok/sec", color=PUBLISHED, linewidth=8),
                 key("time to the loss", color=OWN, linewidth=8)]
        subfigure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
        return figure


def draw_factors(axes, rows: list[Row], target: float) -> None:
    """A pair of bars for each row, over the first one: how many times as many tok/sec, and how many
    times as fast to the target."""
    names, values = [], []
    for row in rows:
        first = row is rows[0] and row.tok_per_sec
        seconds = row.seconds_to(target)
        names += [shorten(row.label.replace(", ", "\n", 1), 28), ""]
        values += [1 if first else row.factor_baseline, 1 if first and seconds else ratio(
            row.baseline and row.baseline.seconds_to(target), seconds)]
    texts = [f"{value:.2f}×" if value else shorten(rows[place // 2].error or "not reached", 24)
             for place, value in enumerate(values)]
    draw_bars(axes, names, values, texts, [PUBLISHED, OWN] * len(rows), 2.4)
    axes.axvline(1, color="0.5", linewidth=1)
