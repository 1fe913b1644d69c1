"""What an audit says: one text for the terminal and the page, and JSON."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from gpt_speed.audit.checks import CANT_TELL, LACKS, check
from gpt_speed.audit.price import prices, prices_text
from gpt_speed.audit.step import Op, Step, walk
from gpt_speed.cards import PEAK_FLOPS
from gpt_speed.common import counted as count
from gpt_speed.common import memory_text
from gpt_speed.gains import expected
from gpt_speed.tables import Column, Table, markdown, num_col, text_col

KINDS = dict(
    products="matmuls", head="head and loss", loss="head and loss", rest="norms and the rest"
)


def audit_of(
    command: list[str],
    step: Step,
    timed: dict,
    machine: dict,
    names: dict[str, str],
    gains: dict[str, float],
    gains_from: str,
    cards: Sequence[str] = (),
) -> dict:
    """Returns what --json prints, from what gpt_speed.audit.run reports, the techniques' `names`
    and what they gained on our model, both by their patches, and where in words they did."""
    figures = figures_of(step, timed, machine)
    findings, techniques = check(step), []
    for number, (patch, name) in enumerate(names.items(), 1):
        if finding := findings.get(patch):
            share, gain = finding.share, gains.get(patch)
            techniques.append(
                dict(
                    number=number,
                    technique=name,
                    **finding._asdict(),
                    gain=gain,
                    expected=gain if step.device == "cuda" else expected(patch, share, gain),
                    # The speedup if that share took no time, unless it is nearly the whole step.
                    upper_bound=1 / (1 - share) if 0 < share < 0.95 else None,
                )
            )
    priced = prices(step, figures["tokens"] or 1, cards)
    unit = "tok" if figures["tokens"] else "steps"
    return dict(
        command=command,
        head=head(timed, machine, figures),
        figures=figures,
        techniques=techniques,
        gains_from=gains_from,
        notes=[*notes(step, timed)],
        prices=priced,
        prices_text=prices_text(priced, step, unit) if priced else "",
    )


def figures_of(step: Step, timed: dict, machine: dict) -> dict:
    """Returns the step's seconds, tokens, FLOPs and shares, and the memory in bytes."""
    times, seconds = timed["seconds"], median(timed["seconds"])
    tokens = sum(
        math.prod(tensor.shape)
        for op in step.lookups
        for tensor in op.inputs
        if tensor.argument == "indices"
    )
    flops, rates = step.flops.total(), machine.get("rates", {})
    peak = PEAK_FLOPS.get(machine["name"])
    rate = peak or rates.get(step.precision(step.type)) or rates.get("float32")
    shares: dict[str, float] = defaultdict(float)
    for op, kind in step.kinds.items():
        shares[KINDS.get(kind, kind)] += op.seconds / step.seconds
    return dict(
        seconds=seconds,
        fastest=min(times),
        slowest=max(times),
        steps=len(times),
        tokens=tokens,
        tok_per_sec=tokens / seconds,
        flops=flops,
        type=step.type,
        rate=rate,
        share_of_rate=rate and flops / seconds / rate,
        mfu=bool(peak),
        memory=timed["memory"],
        memory_total=machine["memory_total"],
        shares=dict(sorted(shares.items(), key=lambda item: -item[1])),
    )


def head(timed: dict, machine: dict, figures: dict) -> list[str]:
    """Returns the lines about the step."""
    speed = ""
    if figures["tokens"]:
        speed = f", {figures['tokens']:,} tokens a step, {figures['tok_per_sec']:,.0f} tok/sec"
    optimizers = ", ".join(optimizer["name"] for optimizer in timed["optimizers"][:3])
    rate = f"{figures['rate'] / 1e12:,.3g} TFLOP/s"
    of = f"MFU (of {rate})" if figures["mfu"] else f"of the {rate} that large matmuls reach here"
    return [
        f"{machine['name']}, PyTorch {machine['torch']}: {figures['seconds']:.3g} s a step"
        f" ({figures['fastest']:.3g}–{figures['slowest']:.3g},"
        f" {count(figures['steps'], 'step')}){speed}",
        f"{figures['flops'] / 1e9:,.4g} GFLOP a step in {figures['type']}:"
        f" {figures['share_of_rate']:.0%} {of};"
        f" memory {memory_text(figures['memory'], figures['memory_total'])};"
        f" {optimizers or 'no optimizer'}",
        "of the watched step's operators: "
        + ", ".join(f"{kind} {share:.0%}" for kind, share in figures["shares"].items()),
    ]


def notes(step: Step, timed: dict) -> Iterator[str]:
    """Yields a line for each cost that isn't one of the techniques."""
    reads = [
        op
        for op in step.ops
        if op.name == "_local_scalar_dense"
        and op.phase == "forward"
        and op.device == step.device
        and is_computed(op)
    ]
    if reads:
        lines = Counter(op.place for op in reads if op.place).most_common(3)
        yield (
            f"{count(len(reads), 'value')} read back from tensors in a step,"
            f" {', '.join(line for line, _ in lines)}: on a GPU the program waits for each"
        )
    syncs = step.facts["syncs"]
    if len(syncs) > 1 and all(syncs):
        yield (
            f"gradients are reduced in each of {len(syncs)} backward passes of a step: put all"
            " but the last into no_sync()"
        )
    if sizes := uneven_means(step):
        yield (
            f"the loss is a mean over each of {len(sizes)} micro-batches of unequal size"
            f" ({min(sizes):,.0f} to {max(sizes):,.0f} tokens): a token of a small one counts"
            " more. Divide sums by the tokens of all"
        )
    if (fitting := fitting_micro_batches(step)) > 1:
        yield (
            f"a step accumulates {step.backwards} micro-batches of one size, of which {fitting}"
            " fit the GPU at once: fewer, larger ones leave the loss as it is"
        )
    if breaks := timed["breaks"]:
        number = count(len(timed["breaks_at"]) or sum(breaks.values()), "graph break")
        yield (
            f"{', '.join([number, *timed['breaks_at'][:5]])}: what lies between them isn't"
            f" compiled ({next(iter(breaks)).splitlines()[0][:90]}). tlparse explains each"
        )
    if timed["new_graphs"]:
        times = f"compiled {timed['new_graphs']} times after the warm-up"
        yield f"{', '.join([times, *timed['recompiled_at'][:5]])}: a shape or a value changes"
    waited = timed["waited"] / sum(timed["seconds"])
    if waited >= 0.05:
        yield f"{waited:.0%} of the time waits for the DataLoader, num_workers={timed['workers']}"


def is_computed(op: Op) -> bool:
    """Tells whether parameters went into what an operator reads. Other values, such as places to
    cut a batch from, may be on the CPU anyway."""
    return any(tensor.is_parameter for maker in [op, *walk(op.inputs)] for tensor in maker.inputs)


def uneven_means(step: Step) -> list[float]:
    """Returns the numbers of tokens of a step's micro-batches if they differ and each one's loss
    is their mean, which nothing but constants weights before its backward pass."""
    sizes = []
    for begin in (op for op in step.ops if op.name == "backward"):
        chain = [*walk(begin.inputs, lambda op: op.name == "nll_loss_forward")]
        if chain and all(len(op.inputs) == 1 for op in chain[:-1]):
            sizes += [chain[-1].scalars.get("tokens")]
    return sizes if None not in sizes and len({*sizes}) > 1 else []


def fitting_micro_batches(step: Step) -> int:
    """Returns how many micro-batches of a step fit a GPU at once, if all are alike. None takes more
    memory than the whole process did; where memory is tight, 1."""
    shapes = {tuple(head.outputs[0].shape) for head in step.heads}
    alike = len(shapes) == 1 and len(step.heads) == len(step.lookups) == step.backwards
    if step.device != "cuda" or not alike:
        return 1
    return min(step.backwards, int(0.95 * step.facts["memory_total"] / step.facts["memory"]))


def text(audit: dict) -> str:
    """Writes an audit in Markdown, as one screen."""

    def order(row: dict) -> tuple:  # what is missing first, then the largest expected gain
        bound = row["upper_bound"]
        return row["state"] == CANT_TELL, -min(row["expected"] or bound or 1, bound or math.inf)

    def speedup_col(heading: str, name: str) -> Column:
        return Column(heading, lambda row: f"{row[name]:.2f}×" if row[name] else "")

    rows = sorted(
        (
            row
            for row in with_one_compile_row(audit["techniques"])
            if row["state"] in (LACKS, CANT_TELL)
        ),
        key=order,
    )
    table = markdown(
        Table(
            [
                num_col("#", "number"),
                text_col("technique", "technique"),
                text_col("state", "state"),
                Column(
                    "share of the step", lambda row: f"{row['share']:.0%}" if row["share"] else ""
                ),
                speedup_col("upper bound", "upper_bound"),
                speedup_col("gain on our model", "gain"),
                text_col("evidence", "evidence"),
                text_col("where", "where"),
            ],
            rows,
        )
    )
    source = f"Gain on our model: {audit['gains_from']}. " if audit["gains_from"] else ""
    parts = [
        "".join(f"- {line}\n" for line in audit["head"]),
        table if rows else "It lacks nothing.\n",
        f"{source}Technique 3 line by line: `python patches/stack.py show 3`\n",
    ]
    for state in dict.fromkeys(
        row["state"] for row in audit["techniques"] if row["state"] not in (LACKS, CANT_TELL)
    ):
        names = [
            f"#{row['number']} {row['technique']}"
            for row in audit["techniques"]
            if row["state"] == state
        ]
        parts.append(f"**{state}**: {'; '.join(names)}\n")
    if audit["notes"]:
        parts.append(
            "Beside the techniques:\n\n" + "".join(f"- {line}\n" for line in audit["notes"])
        )
    return "\n".join(filter(None, [*parts, audit["prices_text"]]))


def with_one_compile_row(techniques: list[dict]) -> list[dict]:
    """Returns the techniques with one row for torch.compile and the compiled loss where nothing is
    compiled, since the loss alone would gain little."""
    rows = {row["number"]: row for row in techniques}
    model, loss = rows[8], rows[13]
    if not model["state"] == loss["state"] == LACKS:
        return techniques
    both = model | dict(number="8, 13", technique=f"{model['technique']}, {loss['technique']}")
    for name in "gain", "expected":
        both[name] = model[name] and model[name] * (loss[name] or 1)
    return [both if row is model else row for row in techniques if row is not loss]
