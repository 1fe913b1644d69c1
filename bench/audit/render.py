"""What an audit says: one screen, a page, or JSON."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.audit.checks import CANT_TELL, LACKS, Verdict, count, of_memory, verdicts
from bench.audit.notes import notes
from bench.audit.price import gains_of, prices
from bench.audit.price import text as text_of_prices
from bench.audit.step import Step
from bench.cards import PEAK_FLOPS
from bench.common import write_whole
from bench.report.html_page import write_html
from bench.report.tables import Column, Table, markdown, num_col, text_col
from patches import stack

KINDS = dict(head="head and loss", loss="head and loss", rest="norms and the rest")


class Finding(NamedTuple):
    """One technique."""

    number: int
    technique: str
    verdict: Verdict
    gain: float | None  # times the speed, on our ladder

    @property
    def most(self) -> float | None:
        """Times the speed if what it touches took no time; None where that says nothing."""
        share = self.verdict.share
        return 1 / (1 - share) if 0 < share < 0.95 else None


class Findings(NamedTuple):
    command: list[str]
    head: list[str]  # lines about the step
    figures: dict
    techniques: list[Finding]
    gains_from: str  # which machine's ladder
    notes: list[str]
    prices: list[dict]  # on GPUs that aren't here
    prices_text: str

    def of(self, state: str) -> list[Finding]:
        """The largest gain first."""
        chosen = [each for each in self.techniques if each.verdict.state == state]
        return sorted(chosen, key=lambda each: -min(each.gain or each.most or 1,
                                                    each.most or math.inf))

    def as_json(self) -> dict:
        return self._asdict() | dict(techniques=[
            dict(number=row.number, technique=row.technique, gain=row.gain, most=row.most,
                 **row.verdict._asdict()) for row in self.techniques])


def findings(command: list[str], timed: dict, watched: dict, machine: dict, results: Path,
             cards: Sequence[str] = ()) -> Findings:
    """Of what bench.audit.run tells of both runs and of the machine."""
    step = Step(watched | machine)
    gains, gains_from = gains_of(machine, step.device, results)
    known = {patch.name: patch.fields["Technique"] for patch in stack.load()}
    numbers = {name: number for number, name in enumerate(known, 1)}
    techniques = [Finding(numbers[name], known[name], verdict, gains.get(name))
                  for name, verdict in verdicts(step).items()]
    figures = figures_of(step, timed, machine)
    unit = "tok" if figures["tokens"] else "samples"
    priced = prices(step, figures["tokens"] or figures["samples"], cards)
    return Findings(command, head(timed, machine, figures), figures, techniques, gains_from,
                    notes(step, timed), priced,
                    text_of_prices(priced, step, unit) if priced else "")


def figures_of(step: Step, timed: dict, machine: dict) -> dict:
    """Of a step: seconds, tokens or samples, floating-point operations, shares, memory."""
    seconds, usual = timed["seconds"], median(timed["seconds"])
    tokens = sum(math.prod(each.shape) for op in step.lookups for each in op.inputs
                 if each.argument == "indices")
    batches = max(1, len(step.facts["roots"]))
    samples = batches * max((each.shape[0] for op in step.products[:1] for each in op.inputs
                             if each.argument in ("input", "mat1", "self") and len(each.shape) > 1),
                            default=0)
    kinds, rates = step.flops(), machine.get("rates", {})
    flops, kind = kinds.total(), kinds.most_common(1)[0][0]
    peak = PEAK_FLOPS.get(machine["name"])
    rate = peak or rates.get(step.precision(kind)) or rates.get("float32")
    shares: dict[str, float] = defaultdict(float)
    for op, name in step.kinds.items():
        shares[KINDS.get(name, name)] += op.seconds / step.seconds
    return dict(
        seconds=usual, fastest=min(seconds), slowest=max(seconds), steps=len(seconds),
        tokens=tokens, samples=samples, tok_per_sec=tokens / usual, flops=flops, type=kind,
        rate=rate, share_of_rate=rate and flops / usual / rate, mfu=bool(peak),
        memory=timed["memory"], memory_there=machine["memory_there"],
        beside=max(0.0, 1 - usual * len(seconds) / sum(seconds)),
        shares=dict(sorted(shares.items(), key=lambda item: -item[1])))


def head(timed: dict, machine: dict, figures: dict) -> list[str]:
    """The lines about the step."""
    what = f"{figures['tokens']:,} tokens a step, {figures['tok_per_sec']:,.0f} tok/sec"
    if not figures["tokens"]:
        what = f"{count(figures['samples'], 'sample')} a step," \
               f" {figures['samples'] / figures['seconds']:,.0f} samples/sec"
    updates = ", ".join(each["name"] for each in timed["optimizers"][:3])
    rate = f"{figures['rate'] / 1e12:,.3g} TFLOP/s"
    of = f"MFU (of {rate})" if figures["mfu"] else f"of the {rate} that large matmuls reach here"
    lines = [f"{machine['name']}, PyTorch {machine['torch']}: {figures['seconds']:.3g} s a step"
             f" ({figures['fastest']:.3g}–{figures['slowest']:.3g},"
             f" {count(figures['steps'], 'step')}), {what}",
             f"{figures['flops'] / 1e9:,.4g} GFLOP a step in {figures['type']}:"
             f" {figures['share_of_rate']:.0%} {of};"
             f" memory {of_memory(figures['memory'], figures['memory_there'])};"
             f" {updates or 'no optimizer'}",
             "of the watched step's operators: " + ", ".join(
                 f"{kind} {share:.0%}" for kind, share in figures["shares"].items())]
    if figures["beside"] > 0.02:
        lines.append(f"beside training (evaluation, logging): {figures['beside']:.0%} of the time")
    return lines


def text(found: Findings) -> str:
    """One screen, in Markdown."""
    rows = [*found.of(LACKS), *found.of(CANT_TELL)]
    table = markdown(Table([
        num_col("#", "number"), text_col("technique", "technique"),
        text_col("state", "verdict.state"), text_col("seen", "verdict.seen"),
        text_col("where", "verdict.place"),
        Column("touches", lambda row: f"{row.verdict.share:.0%}" if row.verdict.share else ""),
        num_col("× at most", "most", ".2f"), num_col("× on our ladder", "gain", ".2f")], rows))
    ladder = f"× on our ladder: {found.gains_from}. " if found.gains_from else ""
    parts = ["".join(f"- {line}\n" for line in found.head),
             (table if rows else "It lacks nothing.\n") + f"\n{ladder}To see the lines of number 3:"
             " `python patches/stack.py show 3`\n"]
    for state in dict.fromkeys(each.verdict.state for each in found.techniques):
        if state not in (LACKS, CANT_TELL):
            names = [f"#{each.number} {each.technique}" for each in found.techniques
                     if each.verdict.state == state]
            parts.append(f"**{state}**: {'; '.join(names)}\n")
    if found.notes:
        parts.append("Beside the techniques:\n\n" + "".join(f"- {line}\n" for line in found.notes))
    return "\n".join(filter(None, [*parts, found.prices_text]))


def write_page(found: Findings, name: str, results: Path) -> list[Path]:
    """Writes results/audit-NAME.md, and .html where that can be made. Raises UserError."""
    script = found.command[1] if found.command[0] == "-m" else Path(found.command[0]).stem
    page = results / f"audit-{name or script}.md"
    write_whole(page, f"# Audit of {script}\n\n{text(found)}")
    return [page, *filter(None, [write_html(page)])]
