"""What stands in the pages about each machine and each technique: tables and cards."""

import re
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from bench.analysis.claims import ALLOCATOR, Claims
from bench.analysis.folders import has_gpu
from bench.analysis.gains import Gain, best, technique_gains
from bench.analysis.rows import Row
from bench.analysis.totals import optimized_in, totals_in
from bench.catalogue import effect_on_loss, published, without_effect_on_gpus
from bench.common import REFERENCE
from bench.report.notes import SINGLE_RUNS
from bench.report.pictures import place_of
from bench.report.tables import bold, marked, range_text
from gpt_speed.common import listed
from gpt_speed.tables import Column, Table, fmt, num_col, text_col
from patches import stack
from patches.stack import Patch


class Shown(NamedTuple):
    """A machine of whose gains a table tells: its folder in results/reference, and its name."""

    folder: str
    name: str


GPU = Shown("nvidia-h100", "H100")
# When ALLOCATOR was measured there, which isn't in its ladder.
ALLOCATOR_DAY = f"{GPU.name} (28 November 2026, together with fast math, unverified)"
EFFECTS = {  # on the loss, in plainer words than a patch's header
    "05-bfloat16": "small updates are lost",
    "09-padded-vocabulary": "other initial weights",
    "10-batch-size": "fewer, larger steps",
}
LONG = 100  # lines of a diff to which a card only links


def title_of(patch: Patch, number: int) -> str:
    """Returns the heading of a technique's card."""
    title = patch.fields["Technique"]
    if patch.name == "ddp":
        return title
    return f"{number}. {title}"


def effect_in_words(patch: Patch) -> str:
    """Returns what a technique does to the loss, in the word of its header where EFFECTS has no
    plainer ones."""
    return EFFECTS.get(patch.name, effect_on_loss(patch))


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
    """Returns the range of a machine's speedups, and of how many sessions; first that of those
    which ran both scripts, where others are unverified. Of single runs it says that they are."""
    speedups, of_both = speedups_of_machine(row), totals_in(row.measured.folder)
    if len(speedups) == row.rounds == 1:
        return SINGLE_RUNS
    text = f"{range_text(speedups, '.1f')} ({len(speedups)})"
    if len(of_both) == len(speedups):
        return text
    return f"{range_text(of_both, '.1f')} ({len(of_both)}); {text} with unverified ones"


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
        return effect_in_words(self.patch)

    @property
    def still_gains(self) -> str:
        """Whether it helps a compiled bfloat16 script; "" where its header doesn't say."""
        return self.patch.fields.get("Compiled", "")

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
    gains, result, before = gains_by_patch(), [], published()["00"]
    for number, patch in enumerate(stack.load(), 1):
        own = gains.get(patch.name, [])
        if patch.published:
            own = [*own, published_gain(patch.published, before)]
            before = patch.published
        result.append(Technique(patch, number, own))
    return result


def gains_by_patch() -> dict[str, list[Gain]]:
    """Returns what techniques gained, by the names of their patches: in the ladders, and ALLOCATOR
    on GPU also outside."""
    gains = technique_gains()
    own = gains.get(ALLOCATOR, [])
    if not any(gain.folder == GPU.folder for gain in own):
        gains[ALLOCATOR] = [*allocator_gains(), *own]
    return gains


def allocator_gains() -> list[Gain]:
    """Returns what ALLOCATOR gained on GPU; nothing where that isn't known."""
    bound = Claims(REFERENCE).allocator_settings()
    if bound.speed is None:
        return []
    gain = Gain(ALLOCATOR_DAY, bound.speed, bound.memory, folder=GPU.folder, source="step")
    return [replace(gain, at_most=True)]


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
    if gain.at_most:
        text = f"≤ {text}"
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
    first, whether that helps a script with the usual techniques, and what it costs."""
    *lines, ddp = techniques()
    lines.sort(key=gain_on_the_gpu, reverse=True)
    return Table(
        [
            text_col("technique", "link"),
            Column(f"{GPU.name}: × speed", speed_cell),
            Column(f"{GPU.name}: × memory", memory_cell),
            num_col("A100: × speed", "published_factor", ".2f"),
            text_col("still gains in a compiled bfloat16 script?", "still_gains"),
            text_col("loss", "loss"),
            Column("lines", lines_changed),
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


def speed_cell(technique: Technique) -> str:
    """Returns what a technique gained on GPU, or that it is for CPUs. A gain of several techniques
    stands at the first of them."""
    gain = technique.on(GPU)
    if not gain and technique.number in without_effect_on_gpus():
        return "CPUs only"
    if gain and gain.together_with and technique.number > min(gain.together_with):
        return f"with {min(gain.together_with)}"
    return speed_text(gain) + others_text(gain)


def memory_cell(technique: Technique) -> str:
    return memory_text(technique.on(GPU))


# ---- Cards -------------------------------------------------------------------------------------


def technique_cards() -> str:
    """Returns a card for each technique: what its header says first, a table, and its code."""
    return "\n".join(map(technique_card, techniques()))


def gain_text(gain: Gain) -> str:
    """Writes times the speed and, where it is known, times the memory."""
    factors = [f"{speed_text(gain)}×{others_text(gain)}"]
    memory = memory_text(gain)
    if memory:
        factors.append(f"{memory}×")
    return f"{gain.machine} {', '.join(factors)}"


def technique_card(technique: Technique) -> str:
    """Returns a heading, what a technique is, its header as a table, and its diff."""
    patch = technique.patch
    cells = {
        "use it when": patch.fields.get("Use", ""),
        "in your script": patch.fields.get("Code", ""),
        "speed, memory": "; ".join(map(gain_text, technique.gains)),
        "in a compiled bfloat16 script": technique.still_gains,
        "limits": patch.fields.get("Limits", ""),
        "loss": patch.fields["Loss"],
        "hardware": patch.fields["Hardware"],
        "source": links_of(patch),
    }
    heading, *lines = [f"| {name} | {cell} |" for name, cell in cells.items() if cell]
    return "\n".join(
        [
            f"## {technique.title}",
            f"{patch.prose}\n",
            heading,
            "|:--|:--|",
            *lines,
            f"\n{diff_text(patch)}\n",
        ]
    )


def diff_text(patch: Patch) -> str:
    """Returns a patch's diff, folded, or a link to a long one."""
    diff = diff_of(patch)
    length = len(diff.splitlines())
    if length > LONG:
        return f"[Its diff](../{patch.file}) has {length} lines."
    return f"<details><summary>Show the diff</summary>\n\n```diff\n{diff}```\n</details>"


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
