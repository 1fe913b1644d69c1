"""What an audit says: one screen, a page, or JSON."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.audit.gains import gains_of
from bench.audit.notes import notes
from bench.audit.price import Price, prices
from bench.audit.price import text as text_of_prices
from bench.audit.signs import CANT_TELL, LACKS, Verdict, count, verdicts
from bench.audit.step import Step
from bench.common import relative, write_whole
from bench.predict.speed import PEAK_FLOPS
from bench.report.html_page import write_html
from bench.report.tables import Column, Table, markdown
from patches import stack

WARM_UP = 3  # steps that aren't timed, as in bench/audit/child.py


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
    prices: list[Price]  # on GPUs that aren't here
    prices_text: str

    def of(self, state: str) -> list[Finding]:
        """The largest gain first."""
        chosen = [each for each in self.techniques if each.verdict.state == state]
        return sorted(chosen, key=lambda each: -min(each.gain or each.most or 1,
                                                    each.most or math.inf))

    def as_json(self) -> dict:
        return dict(command=self.command, figures=self.figures, notes=self.notes,
                    gains_from=self.gains_from, prices=[
                        each._asdict() for each in self.prices], techniques=[
                        dict(number=each.number, technique=each.technique, gain=each.gain,
                             most=each.most, **each.verdict._asdict())
                        for each in self.techniques])


def findings(command: list[str], timed: dict, watched: dict, results: Path,
             cards: Sequence[str] = ()) -> Findings:
    step = Step(watched)
    gains, gains_from = gains_of(timed, step.device, results)
    known = {patch.name: patch.fields["Technique"] for patch in stack.load()}
    numbers = {name: number for number, name in enumerate(known, 1)}
    techniques = [Finding(numbers[name], known[name], verdict, gains.get(name))
                  for name, verdict in verdicts(step).items()]
    figures = figures_of(step, timed)
    unit = "tok" if figures["tokens"] else "samples"
    priced = prices(step, figures["tokens"] or figures["samples"], cards)
    return Findings(command, head(step, timed, figures), figures, techniques, gains_from,
                    notes(step, timed), priced, text_of_prices(priced, step, unit) * bool(priced))


def figures_of(step: Step, timed: dict) -> dict:
    """Of a step: seconds, tokens or samples, floating-point operations, shares, memory."""
    seconds = seconds_of(timed)
    usual = median(seconds)
    tokens = sum(size(step.ops[each].inputs, "indices") for each in step.lookups)
    batches = max(1, len(step.facts["roots"]))
    first = step.ops[step.products[0]].inputs if step.products else []
    samples = max((each[2][0] for each in first if each[0] in ("input", "mat1", "self")
                   and len(each[2]) > 1), default=0) * batches
    kinds = step.flops(lambda _, op: op.type)
    flops, kind = kinds.total(), kinds.most_common(1)[0][0]
    rates = timed.get("rates", {})
    peak = PEAK_FLOPS.get(timed["name"])
    rate = peak or rates.get(kind) or rates.get("float32")
    return dict(
        seconds=usual, fastest=min(seconds), slowest=max(seconds), steps=len(seconds),
        tokens=tokens, samples=samples, tok_per_sec=tokens / usual, flops=flops, type=kind,
        rate=rate, share_of_rate=rate and flops / usual / rate, mfu=bool(peak),
        memory=timed["memory"], memory_there=timed["memory_there"],
        beside=max(0.0, 1 - usual * len(seconds) / sum(seconds)), shares=shares(step),
        micro_batches=batches, saved=timed["saved"])


def seconds_of(timed: dict) -> list[float]:
    """Of the steps after warm-up."""
    ends = timed["ends"][timed["key"]]
    seconds = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    return seconds[min(WARM_UP, len(seconds) // 2):]


def size(inputs: list, argument: str) -> int:
    product = 1
    for each in next((given[2] for given in inputs if given[0] == argument), [0]):
        product *= each
    return product


def shares(step: Step) -> dict[str, float]:
    """Of the time of the watched step, by kind."""
    names = dict(head="head and loss", loss="head and loss", rest="norms and the rest")
    found: dict[str, float] = {}
    for number, kind in step.kinds.items():
        kind = names.get(kind, kind)
        found[kind] = found.get(kind, 0) + step.ops[number].seconds / step.seconds
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def head(step: Step, timed: dict, figures: dict) -> list[str]:
    """The lines about the step."""
    what = f"{figures['tokens']:,} tokens a step, {figures['tok_per_sec']:,.0f} tok/sec"
    if not figures["tokens"]:
        what = f"{count(figures['samples'], 'sample')} a step," \
               f" {figures['samples'] / figures['seconds']:,.0f} samples/sec"
    updates = ", ".join(each["name"] for each in timed["optimizers"][:3])
    lines = [f"{timed['name']}, PyTorch {timed['torch']}: {figures['seconds']:.3g} s a step"
             f" ({figures['fastest']:.3g}–{figures['slowest']:.3g},"
             f" {count(figures['steps'], 'step')}), {what}"]
    of = "MFU" if figures["mfu"] else "of the rate of its large products"
    lines.append(f"{figures['flops'] / 1e9:,.4g} GFLOP a step in {figures['type']}:"
                 f" {figures['share_of_rate']:.0%} {of}, {figures['rate'] / 1e12:,.3g} TFLOP/s;"
                 f" memory {figures['memory'] / 2**30:.1f} of"
                 f" {figures['memory_there'] / 2**30:.1f} GB; {updates or 'no optimizer'}")
    lines.append("of the watched step's operators: " + ", ".join(
        f"{kind} {share:.0%}" for kind, share in figures["shares"].items()))
    if figures["beside"] > 0.02:
        lines.append(f"beside training (evaluation, logging): {figures['beside']:.0%} of the time")
    if figures["saved"]:
        files = [relative(Path(path)) for path in figures["saved"]]
        lines.append(f"the script wrote {', '.join(files[:4])}" + ", …" * (len(files) > 4))
    return lines


def text(found: Findings) -> str:
    """One screen, in Markdown."""
    rows = [*found.of(LACKS), *found.of(CANT_TELL)]
    table = markdown(Table([
        Column("#", lambda row: str(row.number)),
        Column("technique", lambda row: row.technique, True),
        Column("state", lambda row: row.verdict.state, True),
        Column("seen", lambda row: row.verdict.seen, True),
        Column("where", lambda row: row.verdict.place, True),
        Column("touches", lambda row: f"{row.verdict.share:.0%}" * (row.verdict.share > 0)),
        Column("× at most", lambda row: f"{row.most:.2f}" if row.most else ""),
        Column("× on our ladder", lambda row: f"{row.gain:.2f}" if row.gain else "")],
        rows)) if rows else "It lacks nothing.\n"
    parts = ["\n".join(f"- {line}" for line in found.head) + "\n", table]
    ladder = f"× on our ladder: {found.gains_from}. " if found.gains_from else ""
    parts[-1] += f"\n{ladder}To see the lines of number 3: `python patches/stack.py show 3`\n"
    for state in dict.fromkeys(each.verdict.state for each in found.techniques):
        if state not in (LACKS, CANT_TELL):
            names = [f"{each.number} {each.technique}" for each in found.techniques
                     if each.verdict.state == state]
            parts.append(f"**{state}**: {', '.join(names)}\n")
    if found.notes:
        parts.append("Beside the techniques:\n\n" + "".join(f"- {line}\n" for line in found.notes))
    return "\n".join(filter(None, [*parts, found.prices_text]))


def write_page(found: Findings, name: str, results: Path) -> list[Path]:
    """Writes results/audit-NAME.md, and .html where that can be made. Raises UserError."""
    script = found.command[1] if found.command[0] == "-m" else Path(found.command[0]).stem
    page = results / f"audit-{name or script}.md"
    write_whole(page, f"# Audit of {script}\n\n{text(found)}")
    return [page, *filter(None, [write_html(page)])]
