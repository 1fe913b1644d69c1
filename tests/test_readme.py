"""Every measured figure of README, computed anew from the lines of the journals.

Nothing here uses bench/: what the tools compute is compared with a second, plain computation.
"""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from statistics import fmean, median

import pytest
from conftest import ROOT

REFERENCE = ROOT / "results" / "reference"
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = {name: text for text, name in re.findall(r"([\d.,–]*\d)<!--([\w-]+)-->", README)}
PREDICTED = {"bench-minutes"}
H100_PEAK = 989.4e12  # dense bfloat16 FLOP/s by the datasheet
STEPS = json.loads((REFERENCE / "nvidia-h100" / "steps.json").read_text())
LOSS_00, LOSS_01 = "00_orig-batch-2-rate-0.0005", "01_opt_single_gpu-batch-8-rate-0.0005"


@dataclass
class Trained:
    """One run of a script: its events."""

    round: int
    config: dict
    logs: list[dict]
    end: dict

    @property
    def tokens_per_step(self) -> int:
        names = ("batch_size", "context_length", "world_size")
        return math.prod(self.config[name] for name in names)

    @property
    def speed(self) -> float:
        """The median of the steps after the first two, tok/sec."""
        if "quartiles_tok_per_sec" in self.end:
            return self.end["quartiles_tok_per_sec"][1]
        seconds = [second for log in self.logs for second in log["seconds"]]
        return median(self.tokens_per_step / second for second in seconds[2:])

    @property
    def gb(self) -> float:
        return self.end["reserved_gb"]

    def seconds_to(self, loss: float, with_first_step: bool) -> float:
        """Between two log lines on a straight line."""
        ends = [*accumulate(sum(log["seconds"]) for log in self.logs)]
        saved = 0.0
        if not with_first_step:
            saved = self.logs[0]["seconds"][0] - self.tokens_per_step / self.speed
        losses = [log["val_loss"] for log in self.logs]
        k = next(k for k, reached in enumerate(losses) if reached <= loss)
        share = (losses[k - 1] - loss) / (losses[k - 1] - losses[k])
        return ends[k - 1] + share * (ends[k] - ends[k - 1]) - saved


@cache
def sessions(journal: str) -> dict[str, dict[str, list[Trained]]]:
    """The complete runs of each session of a journal, by the scripts' names."""
    every: dict[str, dict] = {}
    runs, run, log = {}, {}, []
    for line in (REFERENCE / f"{journal}.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        kind = event["event"]
        if kind == "study":
            runs = every.setdefault(event["id"], defaultdict(dict))
        elif kind == "run":
            runs, run, log = every[event["id"]], event, []
        elif kind == "start":
            config = event["config"]
        elif kind == "log":
            log.append(event)
        elif kind == "end" and event["status"] in ("complete", "target"):
            key = run["round"], run["seed"]  # a second try replaces the first
            runs[run["name"]][key] = Trained(run["round"], config, log, event)
    return {
        session: {name: [*trained.values()] for name, trained in runs.items()}
        for session, runs in every.items()
    }


def runs_of(journal: str) -> dict[str, list[Trained]]:
    """Those of its last session."""
    return [*sessions(journal).values()][-1]


def factor(runs: list[Trained], over: list[Trained], name: str = "speed") -> float:
    """The geometric mean of the ratios of a value in the rounds that both have."""
    one, other = by_round(runs, name), by_round(over, name)
    return math.exp(fmean(one[k] - other[k] for k in one.keys() & other.keys()))


def by_round(runs: list[Trained], name: str) -> dict[int, float]:
    """The logarithm of a value, the mean of runs in the same round."""
    logs = defaultdict(list)
    for run in runs:
        logs[run.round].append(math.log(getattr(run, name)))
    return {number: fmean(values) for number, values in logs.items()}


def ladder(number: int) -> list[Trained]:
    names = runs_of("nvidia-h100/ladder")
    (runs,) = (runs for name, runs in names.items() if name.startswith(f"{number:02}"))
    return runs


def speed(runs: list[Trained]) -> float:
    return median(run.speed for run in runs)


def gb(runs: list[Trained]) -> float:
    return median(run.gb for run in runs)


def gain(number: int, over: int) -> float:
    return factor(ladder(number), ladder(over))


def steps_of(name: str, value: str) -> list[float]:
    """Of single steps in the session in which nanoGPT ran."""
    (session,) = {record["start"] for record in STEPS if record.get("name") == "nanoGPT"}
    return [
        record[value]
        for record in STEPS
        if record.get("name") == name and record["start"] == session and value in record
    ]


def step_ratio(name: str, over: str) -> float:
    one, other = (fmean(map(math.log, steps_of(each, "tok_s"))) for each in (name, over))
    return math.exp(one - other)


def script_gb(name: str) -> float:
    (end,) = (
        record["reserved_gb"]
        for record in STEPS
        if record.get("script") == name and record["event"] == "end"
    )
    return end


def autocast() -> list[Trained]:
    return runs_of("nvidia-h100/variants")["variant-precision-autocast"]


def autocast_factor() -> float:
    return factor(autocast(), runs_of("nvidia-h100/variants")["01_opt_single_gpu"])


def epoch_loss(script: str) -> float:
    (run,) = runs_of("nvidia-h200/stages")[script]
    return run.logs[-1]["val_loss"]


def target() -> float:
    line = (REFERENCE / "nvidia-h200/time-to-loss.jsonl").read_text().partition("\n")[0]
    (loss,) = json.loads(line)["plan"]["targets"].values()
    return loss


def seconds(script: str, with_first_step: bool = False) -> float:
    runs = runs_of("nvidia-h200/time-to-loss")[script]
    return median(run.seconds_to(target(), with_first_step) for run in runs)


def cpu_gains(machine: str) -> list[float]:
    """Of 01, or a ladder's last script, over 00 in each session that has both at their settings."""
    paths = [
        path
        for study in ("ladder", "stages", "time-to-loss")
        for path in (REFERENCE / machine).glob(f"{study}*.jsonl")
    ]
    every = [runs for path in paths for runs in sessions(f"{machine}/{path.stem}").values()]
    return [
        factor(runs[last_of(runs)], runs["00_orig"])
        for runs in every
        if "00_orig" in runs and last_of(runs)
    ]


def last_of(runs: dict) -> str | None:
    """01, or the script with the most techniques: more than the ten that were published."""
    if "01_opt_single_gpu" in runs:
        return "01_opt_single_gpu"
    ladder = [name for name in runs if re.match(r"1[1-5]-[a-z-]+$", name)]
    return max(ladder, default=None)


def between(values: list[float], form: str) -> str:
    return "–".join(dict.fromkeys(format(end, form) for end in (min(values), max(values))))


def speeds_by_session() -> list[float]:
    """The median step of 01 in each session of single steps."""
    speeds = defaultdict(list)
    for record in STEPS:
        if record.get("name") == "01" and "tok_s" in record:
            speeds[record["start"]].append(record["tok_s"])
    return [*map(median, speeds.values())]


def other_day(number: int) -> list[Trained]:
    """A script of the ladder's as it ran on 26 November."""
    (names,) = sessions("nvidia-h100/ladder-2026-11-26").values()
    (runs,) = (runs for name, runs in names.items() if name.startswith(f"{number:02}"))
    return runs


def over_baseline(speeds: list[float]) -> list[float]:
    return [one / speed(ladder(0)) for one in speeds]


def computed() -> dict[str, str]:
    """Every figure of README's sentences that was measured."""
    flops = ladder(14)[0].config["flops_per_token"]
    own = [100 * (ratio - 1) for ratio in (step_ratio("01", "published 01"), gain(14, 10))]
    steps = [*map(max, (steps_of("01", "gb"), steps_of("published 01", "gb")))]
    memory = [steps[0] / steps[1], gb(ladder(14)) / gb(ladder(10))]
    cpus = ("intel-xeon-amx-2-cores", "amd-epyc-2-cores", "amd-epyc-avx2-2-cores")
    xeon, epyc, avx2 = (between(cpu_gains(cpu), ".1f") for cpu in cpus)
    of_cpus = {
        run.config["parameters"] / 1e6
        for cpu in cpus
        for run in runs_of(f"{cpu}/stages")["01_opt_single_gpu"]
    }
    return {
        "parameters-millions": f"{ladder(0)[0].config['parameters'] / 1e6:.0f}",
        "cpu-parameters-millions": between([*of_cpus], ".0f"),
        "xeon-speedup": xeon,
        "epyc-speedup": epyc,
        "avx2-speedup": avx2,
        "h100-technique-8": f"{speed(ladder(8)):,.0f}",
        "h100-optimized": f"{speed(ladder(14)):,.0f}",
        "h100-mfu": f"{100 * speed(ladder(14)) * flops / H100_PEAK:.0f}",
        "h100-speedup": between(over_baseline([speed(ladder(14)), *speeds_by_session()]), ".1f"),
        "h100-at-batch-8": between(over_baseline([speed(ladder(9)), speed(other_day(9))]), ".1f"),
        "h100-after-8": f"{gain(14, 8):.1f}",
        "h100-11-to-15": between(own, ".0f"),
        "h100-memory-over-published": between(memory, ".1f"),
        "h100-gb": f"{script_gb('01'):.1f}",
        "autocast": f"{autocast_factor():.2f}",
        "epoch-loss-00": f"{epoch_loss('00_orig'):.2f}",
        "epoch-loss-01": f"{epoch_loss('01_opt_single_gpu'):.2f}",
        "target": f"{target():.2f}",
        "seconds-00": f"{seconds(LOSS_00):.1f}",
        "seconds-01": f"{seconds(LOSS_01):.1f}",
        "seconds-00-compiling": f"{seconds(LOSS_00, True):.1f}",
        "seconds-01-compiling": f"{seconds(LOSS_01, True):.1f}",
    }


COMPUTED = computed()


@pytest.mark.parametrize("name", sorted(FIGURES.keys() - PREDICTED))
def test_a_figure_is_that_of_the_journals(name):
    assert FIGURES[name] == COMPUTED[name]


def table(name: str) -> list[list[str]]:
    """The cells of the rows that stand between markers."""
    _, _, rest = README.partition(f"<!-- {name}: written by measure.py readme -->\n")
    rows = rest.partition("<!-- end -->")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(
    ("hardware", "first", "last"),
    [
        ("1 × H100", ladder(0), ladder(14)),
        (
            "1 × H200",
            runs_of("nvidia-h200/stages")["00_orig"],
            runs_of("nvidia-h200/stages")["01_opt_single_gpu"],
        ),
    ],
)
def test_a_machine_that_was_measured(hardware, first, last):
    (row,) = (row for row in table("hardware") if row[0] == hardware)
    gained = factor(last, first)
    assert row[1:4] == [f"{speed(first):,.0f}", f"{speed(last):,.0f}", f"**{gained:.1f}×**"]


def test_what_each_technique_contributes():
    """Of those that share a line, the most that one of them gained; 9 and 10 are one."""
    measured = [*range(9), 10, 11, 13, 14]
    lines = {}
    for names, gained, memory, *_ in table("contributions"):
        numbers = tuple(map(int, re.findall(r"\[(\d+)\. ", names)))
        lines[numbers] = gained.removeprefix("≤ "), memory
    assert sorted(number for line in lines for number in line) == [*range(1, 16)]
    for numbers, cells in lines.items():
        pairs = [
            (ladder(number), ladder(before))
            for before, number in pairwise(measured)
            if number in numbers
        ]
        for cell, name in zip(cells, ("speed", "gb"), strict=True):
            factors = [factor(*pair, name) for pair in pairs]
            if factors:
                assert cell == f"{max(factors):.2f}×", (numbers, name)


def test_the_picture_in_words():
    assert f"ends at {gain(14, 0):.1f} times" in README
    assert f"from {gb(ladder(0)):.1f} to {script_gb('01'):.1f} GB" in README
    sources = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(sources) == 2 and all((ROOT / source).is_file() for source in sources)
