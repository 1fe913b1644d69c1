"""What stands in the pages about each machine and each technique: tables and cards."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from bench.analysis.claims import Claims
from bench.analysis.folders import has_gpu
from bench.analysis.gains import Gain, best, technique_gains
from bench.analysis.rows import Row
from bench.analysis.totals import optimized_in
from bench.catalogue import effect_on_loss, published
from bench.common import REFERENCE
from bench.report.notes import SINGLE_RUNS
from bench.report.pictures import place_of
from bench.report.tables import bold, marked, range_text
from gpt_speed.common import listed
from gpt_speed.tables import Column, Table, fmt, num_col, text_col
from patches import stack
from patches.stack import Patch


class Shown(NamedTuple):
    """A machine of whose gains the tables tell: its folder in results/reference, and its name."""

    folder: str
    name: str


GPU, CPU = Shown("nvidia-h100", "H100"), Shown("intel-xeon-amx-2-cores", "Xeon")


def title_of(patch: Patch, number: int) -> str:
    """Returns the heading of a technique's card."""
    title = patch.fields["Technique"]
    if patch.name == "ddp":
        return title
    return f"{number}. {title}"


def link_to(heading: str, page: str = "") -> str:
    """Returns a link to a heading of a page, or of the same one, by the anchor that code hosts make
    of it."""
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return f"[{heading}]({page}#{anchor})"


def machines_table() -> Table:
    """Returns both ends of every machine's ladder, those with a GPU first, for a page in docs/."""
    return Table(
        [
            Column("machine", machine_link, True),
            Column("speedup, median", median_speedup),
            Column("range (sessions)", range_of_sessions),
            num_col("one session: baseline, tok/sec", "baseline.tok_per_sec", ",.0f"),
            num_col("optimized, tok/sec", "tok_per_sec", ",.0f"),
        ],
        sorted(optimized_in(REFERENCE), key=has_gpu, reverse=True),
    )


def machine_link(row: Row) -> str:
    """Returns a link from a page in docs/ to that of a row's machine."""
    folder = row.measured.folder.name
    return f"[{place_of(row.measured)}](../results/reference/{folder}/README.md)"


def speedups_of_machine(row: Row) -> list[float]:
    """Returns the speedup of each session of a row's machine."""
    return Claims(REFERENCE).speedups_on(row.measured.folder.name)


def median_speedup(row: Row) -> str:
    return f"{median(speedups_of_machine(row)):.1f}×"


def range_of_sessions(row: Row) -> str:
    """Returns the range of a machine's speedups, and of how many sessions; of single runs, that
    they are."""
    speedups = speedups_of_machine(row)
    if len(speedups) == row.rounds == 1:
        return SINGLE_RUNS
    return f"{range_text(speedups, '.1f')} ({len(speedups)})"


# ---- Techniques --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Technique:
    """What the pages tell of a technique of the series."""

    patch: Patch
    number: int
    gains: list[Gain]  # those on GPUs first, the published one last

    @property
    def title(self) -> str:
        """The heading of its card."""
        return title_of(self.patch, self.number)

    @property
    def link(self) -> str:
        return link_to(self.title)

    @property
    def loss(self) -> str:
        return effect_on_loss(self.patch)

    @property
    def published_factor(self) -> float | None:
        gain = best(self.gains, prefer=["published"])
        if not gain:
            return None
        return gain.factor

    def on(self, machine: Shown) -> Gain | None:
        """Returns what it gained on a machine; None where it wasn't measured."""
        return next((gain for gain in self.gains if gain.folder == machine.folder), None)


def techniques() -> list[Technique]:
    """Returns every technique, in the order of the series; DDP comes last."""
    gains, result, before = technique_gains(), [], published()["00"]
    for number, patch in enumerate(stack.load(), 1):
        own = gains.get(patch.name, [])
        if patch.published:
            own = [*own, published_gain(patch.published, before)]
            before = patch.published
        result.append(Technique(patch, number, own))
    return result


def published_gain(now: stack.Published, before: stack.Published) -> Gain:
    """Returns the gain between two published figures."""
    gpus = "A100"
    if now.gpus > 1:
        gpus = f"{now.gpus} A100s"
    return Gain(
        f"{gpus} (published)",
        now.tok_per_sec / before.tok_per_sec,
        now.reserved_gb / before.reserved_gb,
        source="published",
    )


def speed_text(gain: Gain | None) -> str:
    """Writes times the speed: bold where that is significant, in italics where it is predicted;
    "" without a gain."""
    if not gain:
        return ""
    text = bold(marked(f"{gain.factor:.2f}", gain.is_wide), gain.significance)
    return in_italics(gain, text)


def memory_text(gain: Gain | None) -> str:
    """Writes times the memory, as speed_text; "" also where it isn't known."""
    if not gain:
        return ""
    return in_italics(gain, fmt(gain.memory, ".2f"))


def others_text(gain: Gain | None) -> str:
    """Returns which other techniques a gain is of, too; "" where it is of one."""
    if not gain or not gain.together_with:
        return ""
    return f" with {listed(map(str, gain.together_with))}"


def in_italics(gain: Gain, text: str) -> str:
    """Returns a figure of a gain in italics where that is predicted."""
    if text and gain.source == "predicted":
        return f"*{text}*"
    return text


def index_table() -> Table:
    """Returns a table for the page with the cards: what each technique gained, the most on a GPU
    first, and what it costs."""
    *lines, ddp = techniques()
    lines.sort(key=gain_on_the_gpu, reverse=True)
    return Table(
        [
            text_col("technique", "link"),
            Column("lines", lines_changed),
            gain_col("× speed", GPU, speed_text),
            gain_col("× memory", GPU, memory_text),
            num_col("A100: × speed", "published_factor", ".2f"),
            gain_col("× speed", CPU, speed_text),
            text_col("loss", "loss"),
            text_col("limits", "patch.fields.Limits"),
        ],
        [*lines, ddp],
    )


def lines_changed(technique: Technique) -> str:
    """Returns how many lines a technique's diff adds and removes, such as "+3 −1"."""
    starts = [line[:1] for line in diff_of(technique.patch).splitlines()]
    headings = 1  # the lines --- and +++ of the only file
    return f"+{starts.count('+') - headings} −{starts.count('-') - headings}"


def gain_on_the_gpu(technique: Technique) -> float:
    """Returns times the speed on the GPU that the table shows; 0 where that isn't known, or too
    uncertain to rank."""
    gain = technique.on(GPU)
    if gain and not gain.is_wide:
        return gain.factor
    return 0.0


def gain_col(heading: str, machine: Shown, text: Callable[[Gain | None], str]) -> Column:
    """Returns a column of what techniques gained on a machine, or with others."""

    def cell(technique: Technique) -> str:
        gain = technique.on(machine)
        return text(gain) + others_text(gain)

    return Column(f"{machine.name}: {heading}", cell)


# ---- Cards -------------------------------------------------------------------------------------


def technique_cards() -> str:
    """Returns a card for each technique: what its header says first, a table, and its code."""
    return "\n".join(map(technique_card, techniques()))


def gain_text(gain: Gain) -> str:
    """Writes times the speed and, where it is known, times the memory."""
    factors = [speed_text(gain), *filter(None, [memory_text(gain)])]
    return f"{gain.machine} {', '.join(f'{factor}×' for factor in factors)}{others_text(gain)}"


def technique_card(technique: Technique) -> str:
    """Returns a heading, what a technique is, its header as a table, and its diff, folded."""
    patch = technique.patch
    cells = {
        "use it when": patch.fields.get("Use", ""),
        "speed, memory": "; ".join(map(gain_text, technique.gains)),
        "loss": patch.fields["Loss"],
        "hardware": f"{patch.fields['Hardware']}. More: {links_of(patch)}",
    }
    heading, *lines = [f"| {name} | {cell} |" for name, cell in cells.items()]
    return "\n".join(
        [
            f"## {technique.title}",
            f"{patch.prose}\n",
            heading,
            "|:--|:--|",
            *lines,
            "\n<details><summary>Show the diff</summary>\n",
            f"```diff\n{diff_of(patch)}```",
            "</details>\n",
        ]
    )


def diff_of(patch: Patch) -> str:
    """Returns a patch's file without its header."""
    return stack.read(stack.ROOT / patch.file)[len(patch.header) :].decode()


def links_of(patch: Patch, count: int | None = None) -> str:
    """Returns links to a patch and to its first sources, or to all."""
    sources = re.findall(r"https?://[^\s,]+", patch.fields["Source"])[:count]
    return ", ".join(
        [f"[patch](../{patch.file})", *(f"[{source_name(link)}]({link})" for link in sources)]
    )


def source_name(link: str) -> str:
    """Returns a paper's number, a repository's name, or else the host."""
    host, *path = link.split("/")[2:]
    if host == "arxiv.org":
        return f"arXiv:{path[-1]}"
    if host == "github.com":
        return path[1]
    return host
