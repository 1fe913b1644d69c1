"""What an audit says: one text for the terminal and the page, and JSON."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.audit.checks import CANT_TELL, LACKS, check, count, memory_text
from bench.audit.notes import notes
from bench.audit.price import gains_of, prices, prices_text
from bench.audit.step import Step
from bench.cards import PEAK_FLOPS
from bench.common import write_whole
from bench.report.html_page import write_html
from bench.report.tables import Column, Table, markdown, num_col, technique_names, text_col

KINDS = dict(products="matmuls", head="head and loss", loss="head and loss",
             rest="norms and the rest")


class Audit(NamedTuple):
    """What an audit found; its fields are the keys of its JSON."""

    command: list[str]
    head: list[str]  # lines about the step
    figures: dict
    techniques: list[dict]
    gains_from: str  # which machine
    notes: list[str]
    prices: list[dict]  # on GPUs that aren't here
    prices_text: str


def audit_of(command: list[str], timed: dict, watched: dict, machine: dict, results: Path,
             cards: Sequence[str] = ()) -> Audit:
    """Audits a script by what bench.audit.run reports of both runs and of the machine."""
    step = Step(watched | machine)
    figures = figures_of(step, timed, machine)
    gains, gains_from = gains_of(machine, step.device, results)
    findings, techniques = check(step), []
    for number, (patch, technique) in enumerate(technique_names().items(), 1):
        if finding := findings.get(patch):
            share = finding.share
            techniques.append(dict(
                number=number, technique=technique, **finding._asdict(), gain=gains.get(patch),
                # The speedup if that share took no time; of nearly the whole step it says nothing.
                upper_bound=1 / (1 - share) if 0 < share < 0.95 else None))
    priced = prices(step, figures["tokens"] or figures["samples"], cards)
    unit = "tok" if figures["tokens"] else "samples"
    return Audit(command, head(timed, machine, figures), figures, techniques, gains_from,
                 [*notes(step, timed)], priced, prices_text(priced, step, unit) if priced else "")


def figures_of(step: Step, timed: dict, machine: dict) -> dict:
    """Returns the step's seconds, tokens or samples, FLOPs, shares, and memory in bytes."""
    times, seconds = timed["seconds"], median(timed["seconds"])
    tokens = sum(math.prod(tensor.shape) for op in step.lookups for tensor in op.inputs
                 if tensor.argument == "indices")
    samples = max(1, step.backwards) * next(
        (tensor.shape[0] for op in step.matmuls for tensor in op.inputs if len(tensor.shape) > 1), 0)
    flops, rates = step.flops.total(), machine.get("rates", {})
    peak = PEAK_FLOPS.get(machine["name"])
    rate = peak or rates.get(step.precision(step.type)) or rates.get("float32")
    shares: dict[str, float] = defaultdict(float)
    for op, kind in step.kinds.items():
        shares[KINDS.get(kind, kind)] += op.seconds / step.seconds
    return dict(
        seconds=seconds, fastest=min(times), slowest=max(times), steps=len(times),
        tokens=tokens, samples=samples, tok_per_sec=tokens / seconds, flops=flops, type=step.type,
        rate=rate, share_of_rate=rate and flops / seconds / rate, mfu=bool(peak),
        memory=timed["memory"], memory_total=machine["memory_total"],
        outside=max(0.0, 1 - seconds * len(times) / sum(times)),
        shares=dict(sorted(shares.items(), key=lambda item: -item[1])))


def head(timed: dict, machine: dict, figures: dict) -> list[str]:
    """Returns the lines about the step."""
    speed = f"{figures['tokens']:,} tokens a step, {figures['tok_per_sec']:,.0f} tok/sec"
    if not figures["tokens"]:
        speed = f"{count(figures['samples'], 'sample')} a step," \
                f" {figures['samples'] / figures['seconds']:,.0f} samples/sec"
    optimizers = ", ".join(optimizer["name"] for optimizer in timed["optimizers"][:3])
    rate = f"{figures['rate'] / 1e12:,.3g} TFLOP/s"
    of = f"MFU (of {rate})" if figures["mfu"] else f"of the {rate} that large matmuls reach here"
    lines = [f"{machine['name']}, PyTorch {machine['torch']}: {figures['seconds']:.3g} s a step"
             f" ({figures['fastest']:.3g}–{figures['slowest']:.3g},"
             f" {count(figures['steps'], 'step')}), {speed}",
             f"{figures['flops'] / 1e9:,.4g} GFLOP a step in {figures['type']}:"
             f" {figures['share_of_rate']:.0%} {of};"
             f" memory {memory_text(figures['memory'], figures['memory_total'])};"
             f" {optimizers or 'no optimizer'}",
             "of the watched step's operators: " + ", ".join(
                 f"{kind} {share:.0%}" for kind, share in figures["shares"].items())]
    if figures["outside"] > 0.02:
        lines.append(f"beside training (evaluation, logging): {figures['outside']:.0%} of the time")
    return lines


def text(audit: Audit) -> str:
    """Writes an audit in Markdown, as one screen."""
    def speedup_col(heading: str, name: str) -> Column:
        return Column(heading, lambda row: f"{row[name]:.2f}×" if row[name] else "")

    def order(row: dict) -> tuple:
        """Puts what lacks first, and the largest expected gain."""
        bound = row["upper_bound"]
        return row["state"] == CANT_TELL, -min(row["gain"] or bound or 1, bound or math.inf)

    rows = sorted((row for row in audit.techniques if row["state"] in (LACKS, CANT_TELL)), key=order)
    table = markdown(Table([
        num_col("#", "number"), text_col("technique", "technique"), text_col("state", "state"),
        Column("share of step", lambda row: f"{row['share']:.0%}" if row["share"] else ""),
        speedup_col("upper bound", "upper_bound"), speedup_col("gain on our model", "gain"),
        text_col("evidence", "evidence"), text_col("where", "where")], rows))
    source = f"Gain on our model: {audit.gains_from}. " if audit.gains_from else ""
    parts = ["".join(f"- {line}\n" for line in audit.head),
             (table if rows else "It lacks nothing.\n") + f"\n{source}To see the lines of technique"
             " 3: `python patches/stack.py show 3`\n"]
    for state in dict.fromkeys(row["state"] for row in audit.techniques if row not in rows):
        names = [f"#{row['number']} {row['technique']}" for row in audit.techniques
                 if row["state"] == state]
        parts.append(f"**{state}**: {'; '.join(names)}\n")
    if audit.notes:
        parts.append("Beside the techniques:\n\n" + "".join(f"- {line}\n" for line in audit.notes))
    return "\n".join(filter(None, [*parts, audit.prices_text]))


def write_page(audit: Audit, name: str, results: Path) -> list[Path]:
    """Writes results/audit-NAME.md, and .html where that can be made. Raises UserError."""
    script = audit.command[1] if audit.command[0] == "-m" else Path(audit.command[0]).stem
    page = results / f"audit-{name or script}.md"
    write_whole(page, f"# Audit of {script}\n\n{text(audit)}")
    return [page, *filter(None, [write_html(page)])]
