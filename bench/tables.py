"""Markdown tables, all of them: the one place that knows how a cell is written."""

import math
import shlex
from collections.abc import Callable, Collection

from bench.plans import SEED
from bench.scaling import GPUS, efficiency_of, predict, predictions, published_points
from bench.statistics import difference, median, ratio

TARGETS = {  # what the targets of bench.time_to_loss are
    "published": "the lowest validation loss of 00 in its default run",
    "best": "the lowest validation loss of 00 at its best learning rate",
}


# Total seconds of 5 epochs with Adafactor, in a study of the compiler's modes on one GPU.
STUDY_SECONDS = {"none": 1059.0, "default": 497.9, "reduce-overhead": 497.6, "max-autotune": 769.1}
STUDY_EPOCHS = 5
CHECKPOINT_DISTANCES = 10, 50, 200  # steps from one to the next


def show(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def blank(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def markdown(
    columns: dict[str, Callable[[dict], str]], rows: list[dict], text_columns: Collection[str] = ()
) -> str:
    """A table. `columns`: what a row has under each heading; text columns are set to the left."""
    lines = [list(columns), [":--" if heading in text_columns else "--:" for heading in columns]]
    lines += [[cell(row) for cell in columns.values()] for row in rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines
    )


def plan_table(state: dict) -> str:
    """The rows of a plan's state as a table, with notes below it.

    A column that has no figure on this machine is left out.
    """
    if state["plan"].get("log_tokens"):
        return loss_tables(state)
    own = {
        "sweep": lambda: sweep_table(state["rows"]) + paragraphs(sweep_notes(state)),
        "scaling": lambda: scaling_table(state["rows"]) + paragraphs(scaling_notes(state)),
        "checkpoints": lambda: checkpoint_table(state["rows"])
        + paragraphs(checkpoint_notes(state)),
        "compile": lambda: compile_table(state) + paragraphs(compile_notes(state)),
    }.get(state["plan"].get("name", "").partition("-")[0])
    if own:
        return own()
    rows, others = by_model(state)
    techniques = any("factor_technique" in row for row in rows)
    published = " (A100)" if any(row["published_factor_baseline"] for row in rows) else ""

    def number(name: str, form: str):
        return lambda row: show(row.get(name), form)

    def factor(suffix: str):
        def cell(row: dict) -> str:
            ours, theirs = row[f"factor{suffix}"], row[f"published_factor{suffix}"]
            return show(ours, ".2f") + ("" if theirs is None else f" ({theirs:.2f})")

        return cell

    def technique(row: dict) -> str:
        return row["technique"] + r" \*" * row["uncompiled"] + " †" * row["speed_is_average"]

    def outcome(row: dict) -> str:
        return row["error"] or row["verdict"] or ("baseline" if row is rows[0] else "n/a")

    columns = {
        "run": lambda row: row["label"],
        "technique": technique,
        "tok/sec": number("tok_per_sec", ",.0f"),
        "range": lambda row: spread_of(row["speeds"]) or "n/a",
        "technique's factor": number("factor_technique", ".2f"),
        f"factor{published}": factor(""),
        f"over the baseline{published}": factor("_baseline"),
        "reserved GB": number("reserved_gb", ".2f"),
        "× GB": number("memory_factor", ".2f"),
        "first step s": number("first_step_seconds", ".1f"),
        "val loss": number("val_loss", ".4f"),
        "Δ loss": number("loss_difference", "+.4f"),
        "Δ loss, baseline": number("loss_difference_baseline", "+.4f"),
        "within seed noise":
            lambda row: {None: "n/a", True: "yes", False: "no"}[row["within_seed_noise"]],
        "loss by the patch": lambda row: row["loss"] or "n/a",
        "of matmul peak": number("share_of_peak", ".1%"),
        "MFU": number("mfu", ".1%"),
        "attention": lambda row: row["attention_backend"] or "n/a",
        "verdict": outcome,
        "memory": lambda row: row.get("memory_verdict") or "n/a",
    }
    if techniques:  # whose factor is the inverse of the other
        del columns[f"factor{published}"]
    if one_reference(rows):
        del columns[f"over the baseline{published}"], columns["Δ loss, baseline"]
    if techniques or not one_reference(rows):
        del columns["memory"]  # of an alternative only
    columns = {heading: cell for heading, cell in columns.items()
               if any(cell(row) != "n/a" for row in rows)}
    texts = {"run", "technique", "loss by the patch", "attention", "verdict", "memory"}
    text = markdown(columns, rows, texts) + paragraphs(notes_of(state, columns))
    return text + "\n" + model_table([rows[0], *others]) if others else text


def by_model(state: dict) -> tuple[list[dict], list[dict]]:
    """(the rows that train the model of the first one, those that train another), of variants."""
    rows = state["rows"]
    if state["plan"].get("name") != "variants":
        return rows, []
    own, others = [], []
    for row in rows:
        counts = row.get("parameters"), rows[0].get("parameters")
        same = None in counts or counts[0] == counts[1]
        (own if same else others).append(row)
    return own, others


def sweep_table(rows: list[dict]) -> str:
    """Speed and memory of each size, up to the first that isn't tried."""
    shown = []
    for row in rows:
        untried = (row["error"] or "").startswith("not tried")
        if not untried or not shown or not shown[-1]["error"]:
            shown.append(row)

    columns = {
        "run": lambda row: row["label"],
        "tok/sec": lambda row: row["error"] or show(row["tok_per_sec"], ",.0f"),
        "range": lambda row: spread_of(row["speeds"]),
        "reserved GB": lambda row: blank(row["reserved_gb"], ".2f"),
        "MFU": lambda row: blank(row["mfu"], ".1%"),
        "of matmul peak": lambda row: blank(row["share_of_peak"], ".1%"),
    }
    columns = {heading: cell for heading, cell in columns.items() if any(map(cell, shown))}
    return markdown(columns, shown, {"run"})


def scaling_table(rows: list[dict]) -> str:
    """Speed of all processes and of each, over that of one alone; and what the model says."""
    columns = {
        "run": lambda row: row["label"],
        "tok/sec": lambda row: row["error"] or show(row["tok_per_sec"], ",.0f"),
        "range": lambda row: spread_of(row["speeds"]),
        "of each": lambda row: blank(ratio(row["tok_per_sec"], row["processes"]), ",.0f"),
        "efficiency": lambda row: blank(efficiency_of(row, rows[0]), ".1%"),
        "by the model": lambda row: blank(predict(row, rows), ".1%"),
        "GB of each": lambda row: blank(row["reserved_gb"], ".2f"),
        "val loss": lambda row: blank(row["val_loss"], ".4f"),
    }
    columns = {heading: cell for heading, cell in columns.items() if any(map(cell, rows))}
    return markdown(columns, rows, {"run"})


def scaling_notes(state: dict) -> list[str]:
    machine, measured = state["plan"]["machine"], [row for row in state["rows"] if row["rounds"]]
    cores = machine["threads"] // max((row["processes"] for row in measured), default=1)
    shares = "" if machine["gpus"] else (
        f" Each process has {cores} of the {machine['threads']} cores at every size.")
    notes = [machine_note(state) + shares,
             "Weak scaling: each process has the same batch. Efficiency is the speed of each"
             " process over that of 01."]
    if any(row["mbit"] for row in measured):
        notes.append("Two hosts are network namespaces of this machine. By the model: what it"
                     " leaves for the link's cost, times the efficiency of as many processes"
                     " without it (bench/scaling.py).")
    return notes


def predictions_table() -> str:
    """The efficiency that the model of scaling predicts for H100s, by size and number of them."""
    return markdown({
        "model": lambda row: row["model"],
        "step, ms": lambda row: f"{1000 * row['step']:,.0f}",
        "gradients, MB": lambda row: f"{row['megabytes']:,.0f}",
        **{f"{gpus} GPUs": lambda row, gpus=gpus: f"{row['efficiency'][gpus]:.1%}"
           for gpus in GPUS},
    }, predictions(), {"model"})


def points_table() -> str:
    """Published efficiencies beside those of the model. Raises StackError, UserError."""
    return markdown({
        "published": lambda row: row["label"],
        "efficiency": lambda row: f"{row['measured']:.1%}",
        "by the model": lambda row: f"{row['predicted']:.1%}",
    }, published_points(), {"published"})


def checkpoint_cost(row: dict, rows: list[dict]) -> tuple[float, float, float] | None:
    """(seconds that training waits for a save, seconds that the steps up to the next one take
    longer, seconds of a step without checkpoints) of a row that saves."""
    base = next((other for other in rows if other["label"] == row["compared_to"]), None)
    if not base or not row["save_seconds"] or not base["average"]:
        return None
    every = int(row["options"][row["options"].index("--checkpoint-every") + 1])
    # By the average, since few of the steps may be slower.
    step, alone = (each["tokens_per_step"] / each["average"] for each in (row, base))
    return median(row["save_seconds"]), every * (step - alone), alone


def checkpoint_table(rows: list[dict]) -> str:
    """What a save costs, and its share of the wall time at several distances."""

    def share(every: int):
        def cell(row: dict) -> str:
            cost = checkpoint_cost(row, rows)
            if not cost:
                return ""
            waiting, slower, step = cost
            price = waiting + max(0, slower)
            return f"{price / (price + every * step):.1%}"

        return cell

    def part(place: int):
        return lambda row: blank((checkpoint_cost(row, rows) or [None] * 3)[place], ".2f")

    return markdown({
        "run": lambda row: row["label"],
        "checkpoints": lambda row: row["technique"],
        "tok/sec": lambda row: row["error"] or show(row["tok_per_sec"], ",.0f"),
        "range": lambda row: spread_of(row["speeds"]),
        "s per save": part(0),
        "slower steps, s": part(1),
        **{f"share, every {every}": share(every) for every in CHECKPOINT_DISTANCES},
        "GB": lambda row: blank(row["reserved_gb"], ".2f"),
        "val loss": lambda row: blank(row["val_loss"], ".4f"),
    }, rows, {"run", "checkpoints"})


def checkpoint_notes(state: dict) -> list[str]:
    distances = ", ".join(map(str, CHECKPOINT_DISTANCES[:-1]))
    return [machine_note(state),
            "s per save is how long training waits for one, which tok/sec doesn't count; slower"
            " steps is how much longer than without checkpoints the steps from one to the next"
            " take. The shares are of wall time, by both, with a save every"
            f" {distances} or {CHECKPOINT_DISTANCES[-1]} steps."]


def spread_of(speeds: list[float]) -> str:
    return f"{min(speeds):,.0f}–{max(speeds):,.0f}" if len(speeds) > 1 else ""


def model_table(rows: list[dict]) -> str:
    """Another model beside that of the first row, at as much compute for each token."""

    def shares(row: dict) -> str:
        each = [share for layer in row["expert_shares"] or [] for share in layer]
        return f"{min(each):.0%}–{max(each):.0%}" if each else ""

    return markdown({
        "another model": lambda row: f"`{row['label']}`",
        "parameters": lambda row: blank(row["parameters"], ","),
        "tok/sec": lambda row: blank(row["tok_per_sec"], ",.0f"),
        "× speed": lambda row: row["error"] or blank(row["factor"], ".2f"),
        "GB": lambda row: blank(row["reserved_gb"], ".2f"),
        "× memory": lambda row: blank(row["memory_factor"], ".2f"),
        "val loss": lambda row: blank(row["val_loss"], ".4f"),
        "Δ loss": lambda row: blank(row["loss_difference"], "+.4f"),
        "experts' shares of the tokens": shares,
    }, rows, {"another model"})


def paragraphs(notes: list[str]) -> str:
    return "".join(f"\n{note}\n" for note in notes)


def one_reference(rows: list[dict]) -> bool:
    """Whether every row is compared to the first one."""
    return all(row["factor"] == row["factor_baseline"] for row in rows)


def compile_cost(row: dict) -> tuple[float, float] | None:
    """(seconds that the first step takes more than a median one, seconds of a step)."""
    if not row["first_step_excess"] or not row["tok_per_sec"]:
        return None
    return median(row["first_step_excess"]), row["tokens_per_step"] / row["tok_per_sec"]


def pays_from(cost: tuple[float, float] | None, other: tuple[float, float] | None) -> float | None:
    """The step from which on a run with the one cost is ahead of one with the other; infinite
    where it never is, None where that isn't known."""
    if not cost or not other:
        return None
    (once, step), (other_once, other_step) = cost, other
    if step >= other_step:
        return 0 if once < other_once and step == other_step else math.inf
    return max(0, math.ceil((once - other_once) / (other_step - step)))


def total_seconds(row: dict, measured: bool) -> float | None:
    """Of STUDY_EPOCHS epochs, with compilation; where they weren't `measured`, by the steps."""
    if measured:
        return row["train_seconds"]
    cost, steps = compile_cost(row), row["steps_per_epoch"]
    return cost[0] + STUDY_EPOCHS * steps * cost[1] if cost and steps else None


def compile_table(state: dict) -> str:
    """What each mode of the compiler costs at first and for each step, and when it pays."""
    rows, measured = state["rows"], state["plan"].get("epochs") == STUDY_EPOCHS
    none, default = (next((compile_cost(row) for row in rows if row["label"] == label), None)
                     for label in ("none", "default"))

    def part(place: int, form: str):
        return lambda row: format(compile_cost(row)[place], form) if compile_cost(row) else ""

    def from_step(other):
        def cell(row: dict) -> str:
            step = pays_from(compile_cost(row), other)
            if step is None or compile_cost(row) == other:
                return ""
            return "never" if step == math.inf else f"{step:,}"

        return cell

    def spread(row: dict) -> str:
        if len(row["speeds"]) < 2:
            return ""
        return "–".join(f"{row['tokens_per_step'] / speed:.3f}"
                        for speed in (max(row["speeds"]), min(row["speeds"])))

    def study(row: dict) -> str:
        seconds = STUDY_SECONDS.get(row["label"])
        return "" if seconds is None else f"{STUDY_SECONDS['none'] / seconds:.2f}"

    def outcome(row: dict) -> str:
        if row["uncompiled"] and row is not rows[0]:
            return "torch.compile doesn't work here"
        return row["error"] or blank(row["factor"], ".2f")

    total = total_seconds(rows[0], measured)
    columns = {
        "mode or backend": lambda row: row["label"],
        "compiling, s": part(0, ".1f"),
        "s/step": part(1, ".3f"),
        "range": spread,
        "× speed": outcome,
        f"{STUDY_EPOCHS} epochs, s": lambda row: blank(total_seconds(row, measured), ",.0f"),
        "× none": lambda row: blank(ratio(total, total_seconds(row, measured)), ".2f"),
        "study": study,
        "ahead of none from step": from_step(none),
        "of default from step": from_step(default),
        "GB": lambda row: blank(row["reserved_gb"], ".2f"),
        "val loss": lambda row: blank(row["val_loss"], ".4f"),
    }
    return markdown(columns, rows, {"mode or backend"})


def compile_notes(state: dict) -> list[str]:
    steps = next((row["steps_per_epoch"] for row in state["rows"] if row["steps_per_epoch"]), None)
    return [
        machine_note(state),
        "Compiling is what the first step takes more than a median one, with an empty cache;"
        " medians over the rounds. (CUDA graphs are recorded in the second step, which is in no"
        " column but the sum, where that was measured.)",
        (f"The {STUDY_EPOCHS} epochs were run: {show(steps and STUDY_EPOCHS * steps, ',')} steps."
         if state["plan"].get("epochs") == STUDY_EPOCHS else
         f"{STUDY_EPOCHS} epochs are compiling and the seconds of"
         f" {show(steps and STUDY_EPOCHS * steps, ',')} steps.")
        + ' "× none" is over the run without the compiler; "study" is the same of a published'
        " study, on a GPU and with Adafactor.",
    ]


def sweep_notes(state: dict) -> list[str]:
    return [f"{machine_note(state)} {peak_note(state)}",
            "tok/sec is the median over the rounds of each run's median step."]


def loss_tables(state: dict) -> str:
    """The lowest validation loss of each run, or how long it took to each target."""
    plan, rows = state["plan"], state["rows"]
    if not plan["targets"]:
        columns = {
            "run": lambda row: row["label"],
            "lowest val loss": lambda row: row["error"] or show(row["lowest_val_loss"], ".4f"),
            "tok/sec": lambda row: show(row["tok_per_sec"], ",.0f"),
        }
        note = "Medians over the seeds. What is compared to the lowest of them is its time to it."
        return markdown(columns, rows, {"run"}) + paragraphs([machine_note(state), note])
    notes = [
        machine_note(state),
        "Seconds of training until the validation loss has fallen to the target, by a straight line"
        " between log lines; medians over the seeds, with their range. The first step counts as"
        " long as a median one; the rest of it, compilation with an empty cache above all, is"
        ' "first step, s" and is in "× time in all".',
        '"× tok/sec" and "× time" are over the row named in "compared to". A run that has trained'
        f" on {plan['tokens']:,} tokens without coming to the target hasn't reached it.",
    ]
    return time_tables(rows, plan["targets"]) + paragraphs(notes)


def time_tables(rows: list[dict], targets: dict[str, float]) -> str:
    """How long each run took to each target."""
    return "\n".join(f"Target {loss:.4f}, {TARGETS[name]}:\n\n{time_table(rows, name)}"
                     for name, loss in targets.items())


def time_table(rows: list[dict], target: str) -> str:
    """How long each run took to a target."""

    def seconds(row: dict) -> str:
        time = row["time_to"][target]
        if row["error"] or time["seconds"] is None:
            return row["error"] or "not reached"
        return f"{time['seconds']:,.1f}"

    def spread(row: dict) -> str:
        runs = row["time_to"][target]["all_seconds"]
        known = [run for run in runs if run is not None]
        if len(runs) < 2 or not known:
            return ""
        high = f"{max(known):,.1f}" if len(known) == len(runs) else "not reached"
        return f"{min(known):,.1f}–{high}"

    def number(name: str, form: str):
        return lambda row: blank(row["time_to"][target].get(name), form)

    def first_step(row: dict) -> str:
        time = row["time_to"][target]
        return blank(difference(time["with_first_step"], time["seconds"]), ".1f")

    columns = {
        "run": lambda row: row["label"],
        "tok/sec": lambda row: blank(row["tok_per_sec"], ",.0f"),
        "× tok/sec": lambda row: blank(row["factor"], ".2f"),
        "tokens": number("tokens", ",.0f"),
        "seconds": seconds,
        "range": spread,
        "× time": number("factor_seconds", ".2f"),
        "first step, s": first_step,
        "× time in all": number("factor_with_first_step", ".2f"),
        "compared to": lambda row: row.get("compared_to") or "",
    }
    return markdown(columns, rows, {"run", "compared to"})


def machine_note(state: dict) -> str:
    """What was measured on, with which seeds and options."""
    plan = state["plan"]
    rounds = max((row["rounds"] for row in state["rows"]), default=0)
    first = plan["first_seed"]
    seeds = f"seeds {first} to {first + rounds - 1}" if rounds > 1 else f"seed {first}"
    if not plan.get("new_seeds"):
        seeds = f"seed {first}, {rounds} round{'s' * (rounds != 1)}"
    options = f", options `{shlex.join(plan['options'])}`" if plan["options"] else ""
    return f"{plan['machine']['name']}, PyTorch {plan['machine']['torch']}; {seeds}{options}."


def peak_note(state: dict) -> str:
    peaks = ", ".join(f"{name} {flops / 1e12:,.2f}" for name, flops in state["matmul_peak"].items())
    return f"Matrix products (matmul peak): {peaks} TFLOP/s."


def notes_of(state: dict, columns: Collection[str]) -> list[str]:
    plan, rows = state["plan"], state["rows"]
    length = f"{plan['tokens']:,} tokens per run" if plan["tokens"] else "the scripts' own length"
    if plan["epochs"]:
        length = f"{plan['epochs']} epochs per run"
    if plan["seconds"]:
        length += f" or about {plan['seconds']:g} s of training, whichever is longer"
    options = f", options `{shlex.join(plan['options'])}`" if plan["options"] else ""
    rounds = max((row["rounds"] for row in rows), default=0)
    notes = [
        f"{plan['machine']['name']}, PyTorch {plan['machine']['torch']}. {length},"
        f" {rounds} round{'s' * (rounds != 1)}, seed {SEED}{options}."
        f" {peak_note(state)}",
        "tok/sec is the median over the rounds of each run's median step; the range is from the"
        ' slowest round to the fastest. "faster" and "slower" need 4 rounds whose ranges don\'t'
        " overlap.",
        f"val loss is the validation loss after {plan['tokens']:,} training tokens."
        if plan["tokens"] else "val loss is the validation loss at the end of the run.",
    ]
    if "technique's factor" in columns:
        notes += ["The technique's factor is the speed with it over the speed without it;"
                  ' "faster" means that the script is faster with it.']
    elif any(row["factor"] for row in rows):
        published = any(row["published_factor"] for row in rows)
        first = one_reference(rows) and len(rows) > 2
        notes += [("The factor is over the first row." if first else
                   "The factor is over the row above, or the nearest one above that has figures;"
                   " the baseline is the first row.")
                  + " The published factors, from an A100, are in brackets." * published]
    if state["seed_noise"] is not None:
        notes += [f"Seed noise is the range of the first row's losses over"
                  f" {len(rows[0]['losses'])} seeds, {state['seed_noise']:.4f}."]
    if any(row["processes"] > 1 for row in rows):
        notes += ["02 trains as many tokens on each GPU; its loss is the one after them, and its"
                  " memory that of rank 0."]
    if any(row["uncompiled"] for row in rows):
        notes += [r"\* without torch.compile: it found no compiler, or was told not to use it."]
    if any(row["speed_is_average"] for row in rows):
        notes += ["† too few steps for a median: the average of the run."]
    return notes
