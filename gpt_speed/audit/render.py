"""What an audit says: one text for the terminal and the page, and JSON."""

from collections import defaultdict
from pathlib import Path

from gpt_speed.audit.checks import CANT_TELL, LACKS, NO_GAIN
from gpt_speed.common import counted, listed, memory_text, script_name
from gpt_speed.gains import technique_names
from gpt_speed.tables import Column, Table, markdown, num_col, text_col

COMPILE, LOSS = "08-torch-compile", "13-loss-in-graph"  # the techniques that compile
OF_PAGES = "12-huge-pages", "15-kept-memory"  # those that save time on new pages of memory

BUSY = 0.3  # cores that others may use
COMPUTING = 0.85  # share of the time for which the script needs a core
WORTHWHILE = 1.005  # times the speed, which is written as 1.01×


def summary(timed: dict, machine: dict, figures: dict) -> list[str]:
    """Returns the lines about the step: its speed, its work and memory, where its time goes."""
    speed = ""
    if figures["tokens"]:
        speed = f", {figures['tokens']:,} tokens a step, {figures['tok_per_sec']:,.0f} tok/sec"
    optimizers = ", ".join(optimizer["name"] for optimizer in timed["optimizers"][:3])
    of = "of the GPU's peak (MFU)" if figures["mfu"] else "of the speed of large matmuls here"
    return [
        *busy_line(timed.get("others"), timed.get("computing")),
        f"{machine['name']}, PyTorch {machine['torch']}: {figures['seconds']:.3g} s a step"
        f" ({figures['fastest']:.3g}–{figures['slowest']:.3g},"
        f" {counted(figures['steps'], 'step')}){speed}",
        f"Work: {figures['flops'] / 1e9:,.4g} GFLOP a step, most in {figures['type']}, at"
        f" {figures['share_of_rate']:.0%} {of}, {figures['rate'] / 1e12:,.3g} TFLOP/s",
        f"Memory in use: {memory_text(figures['memory'], figures['memory_total'])}. Optimizer:"
        f" {optimizers or 'none of torch.optim'}",
        "Where a step's time goes: "
        + ", ".join(f"{kind} {share:.0%}" for kind, share in figures["shares"].items()),
    ]


def busy_line(others: float | None, computing: float | None) -> list[str]:
    """Tells, first of all, whether the timed steps were disturbed: by the cores that other programs
    used, and by the share of the time for which the script had one."""
    is_busy, has_waited = (others or 0) >= BUSY, computing is not None and computing < COMPUTING
    reasons = []
    if has_waited:
        reasons.append(f"the script had a core for only {computing:.0%} of the time")
    if is_busy:
        reasons.append(f"other programs used {others:.1f} of its cores meanwhile")
    if not reasons:
        return []
    head = "The machine was busy" if is_busy else "The machine was busy, or the script waited"
    return [
        f"**{head}**: {listed(reasons)}, so that the figures, the shares, and the order of the rows"
        " may mislead"
    ]


def page_name(command: list[str], name: str) -> str:
    return f"audit-{name or title_of(command)}.md"


def page(audit: dict) -> str:
    return f"# Audit of {title_of(audit['command'])}\n\n{screen(audit)}"


def title_of(command: list[str]) -> str:
    """Returns the name of a module, or of a script without its folder and its suffix."""
    name = script_name(command)
    if command[0] == "-m":
        return name
    return Path(name).stem


def screen(audit: dict) -> str:
    """Writes an audit in Markdown, as one screen."""
    open_rows = sorted(filter(is_open, with_one_compile_row(audit["techniques"])), key=order)
    parts = [bullets(audit["head"])]
    if open_rows:
        parts += [techniques_table(open_rows), bullets(legend(open_rows, audit["gains_from"]))]
    parts.append(next_step(open_rows))
    parts += lists_by_state([row for row in audit["techniques"] if not is_open(row)])
    if audit["notes"]:
        parts.append(f"Also seen in the step:\n\n{bullets(audit['notes'])}")
    if audit["speeds_text"]:
        parts.append(audit["speeds_text"])
    return "\n".join(parts)


def bullets(lines: list[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def is_open(row: dict) -> bool:
    """Tells whether a technique is, or may be, missing."""
    return row["state"] in (LACKS, CANT_TELL)


def order(row: dict) -> tuple[bool, float]:
    """Sorts techniques: first what is missing, then what is uncertain, by the gain."""
    return row["state"] == CANT_TELL, -gain_of(row)


def gain_of(row: dict) -> float:
    """Returns the speedup to expect; where it isn't known, the most that there can be."""
    return row["expected"] or row["upper_bound"] or 1


def legend(rows: list[dict], gains_from: str) -> list[str]:
    """Says what the figures of a table's rows are; `gains_from` is where our own gains were
    measured."""
    lines = ["**share of the step**: the part of its time that the technique changes"]
    first = saves_most_pages(rows)
    if first:
        lines[0] += (
            f". Time on new pages of memory counts once, for #{first['number']}: the other rows"
            " count what it leaves"
        )
    if gains_from:
        lines.append(
            "**expected gain**: the speedup to expect, from what the technique saved in our own"
            f" script ({gains_from}). Below 1.00× it costs time"
        )
    return lines


def next_step(rows: list[dict]) -> str:
    """Says what to try first, by the sorted rows of the table."""
    if not rows:
        return "Nothing is missing.\n"
    first = rows[0]
    if first["state"] == CANT_TELL:
        return "Nothing is surely missing: try what is unknown.\n"
    if gain_of(first) <= WORTHWHILE:
        return "None of the missing techniques is likely to make this script faster here.\n"
    number, *_ = str(first["number"]).split(", ")
    return (
        f"**Next**: try #{first['number']} {first['technique']}, then audit again. What it changes"
        f" and what it costs: `python patches/stack.py show {number}` in a clone of gpt-speed, or"
        f" docs/techniques.md there, section {number}\n"
    )


def saves_most_pages(rows: list[dict]) -> dict | None:
    """Returns the row of the missing technique that is expected to save most time on new pages of
    memory; None where none saves any."""
    saving = [
        row
        for row in rows_of(OF_PAGES, rows)
        if row["state"] == LACKS and row["share"] and (row["expected"] or 1) > 1
    ]
    return max(saving, key=gain_of, default=None)


def rows_of(patches: tuple[str, ...], rows: list[dict]) -> list[dict]:
    """Returns the rows of some techniques, by the names of their patches."""
    numbers = [number for number, patch in enumerate(technique_names(), 1) if patch in patches]
    return [row for row in rows if row["number"] in numbers]


def techniques_table(rows: list[dict]) -> str:
    """Writes a table of techniques."""

    def evidence(row: dict) -> str:
        return "; ".join(filter(None, (row["evidence"], row["needs"])))

    columns = [
        num_col("#", "number"),
        text_col("technique", "technique"),
        text_col("state", "state"),
        Column("share of the step", lambda row: f"{row['share']:.0%}" if row["share"] else ""),
        Column("expected gain", lambda row: f"{row['expected']:.2f}×" if row["expected"] else ""),
        Column("evidence", evidence, left=True),
        text_col("where", "where"),
    ]
    return markdown(Table(columns, rows))


def lists_by_state(rows: list[dict]) -> list[str]:
    """Writes, for each state that techniques have, a line that names them; first and with the
    reasons those that would gain nothing."""
    names = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["state"] != NO_GAIN):
        name = f"#{row['number']} {row['technique']}"
        if row["state"] == NO_GAIN:
            name += f" ({row['evidence']})"
        names[row["state"]].append(name)
    return [f"**{state}**: {'; '.join(names)}\n" for state, names in names.items()]


def with_one_compile_row(techniques: list[dict]) -> list[dict]:
    """Returns the techniques with one row for torch.compile and the compiled loss where nothing is
    compiled, since the loss alone would gain little."""
    pair = rows_of((COMPILE, LOSS), techniques)
    if [row["state"] for row in pair] != [LACKS, LACKS]:
        return techniques
    model, loss = pair
    both = joined(model, loss)
    return [both if row is model else row for row in techniques if row is not loss]


def joined(one: dict, other: dict) -> dict:
    """Returns one row for two techniques, which has the evidence of the first."""
    names = {name: f"{one[name]}, {other[name]}" for name in ("number", "technique")}
    gains = {
        name: one[name] * other[name] for name in ("gain", "expected") if one[name] and other[name]
    }
    return one | names | gains
