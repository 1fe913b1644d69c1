"""How long a script's steps took, and what they waited for."""

import os
import time
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from gpt_speed.audit.ranks import store_of_ranks

WARM_UP = 3  # steps that aren't timed: compilation, first allocations
SHORTEST = 0.3  # seconds of which the share is told that the script had a core for


class Usage(NamedTuple):
    """What was used until a moment."""

    batches: int  # that were fetched
    updates: int  # that were done
    process: os.times_result  # seconds of this process
    thread: float  # seconds of the CPU, by the thread that trains
    machine: float | None  # seconds of all cores, by all processes: see busy_seconds

    @classmethod
    def now(cls, batches: int, updates: int) -> "Usage":
        return cls(batches, updates, os.times(), time.thread_time(), busy_seconds())


class StepEnd(NamedTuple):
    time: float  # as now() returns it
    usage: Usage


@dataclass(frozen=True)
class Timing:
    """The steps of a run. The first ones are left out, of a few steps half of them."""

    ends: list[StepEnd]
    until: Usage  # when the run ended
    waits: list[float]  # seconds for each batch of a DataLoader
    updates: list[tuple]  # the moments of the begin and the end of each update
    workers: int  # processes of the DataLoader

    def facts(self) -> dict:
        """Returns what the report says of them."""
        return dict(
            steps=len(self.ends),
            seconds=self.seconds,
            waited=self.waited,
            updating=self.share_of_updates(),
            workers=self.workers,
            system=self.share_of_system(),
            children=self.until.process.children_user,
            others=self.cores_of_others(),
            computing=self.share_of_computing(),
        )

    @property
    def skipped(self) -> int:
        """How many steps are left out."""
        return min(WARM_UP, max(0, len(self.ends) - 1) // 2)

    @cached_property
    def since(self) -> Usage:
        """What was used until the first step that counts; all of it where none ended."""
        if not self.ends:
            return self.until
        return self.ends[self.skipped].usage

    @cached_property
    def seconds(self) -> list[float]:
        """How long each step took."""
        return [end.time - begin.time for begin, end in pairwise(self.ends[self.skipped :])]

    @property
    def elapsed(self) -> float:
        """The seconds until the run's end, not 0."""
        return max(self.until.process.elapsed - self.since.process.elapsed, 0.01)

    @property
    def waited(self) -> float:
        """The seconds that the script waited for batches."""
        return sum(self.waits[self.since.batches :])

    def share_of_updates(self) -> float | None:
        """Returns the share of the time that updates took, with what Python does in them; None
        where none is known."""
        updates, elapsed = self.updates[self.since.updates :], sum(self.seconds)
        if not updates or not elapsed:
            return None
        return min(1.0, sum(seconds_of(updates)) / elapsed)

    def share_of_system(self) -> float:
        """Returns the share of the time that the system worked for the process, which is the most
        that it can have taken to make pages."""
        return min(1.0, (self.until.process.system - self.since.process.system) / self.elapsed)

    def cores_of_others(self) -> float | None:
        """Returns how many cores other processes used meanwhile; None where that isn't known, as in
        less than a second, or where batches come from processes of the script."""
        begin, end = self.since, self.until
        if begin.machine is None or end.machine is None or self.workers or self.elapsed < 1:
            return None
        by_this_process = sum(end.process[:2]) - sum(begin.process[:2])
        return max(0.0, (end.machine - begin.machine - by_this_process) / self.elapsed)

    def share_of_computing(self) -> float | None:
        """Returns the share of the time, without the waiting for batches, for which the thread that
        trains had a core; PyTorch's threads don't sleep while they wait for each other. None where
        it may well wait: for a GPU, for other ranks; and for a time that is too short."""
        elapsed = self.elapsed - self.waited
        if torch.cuda.is_initialized() or store_of_ranks() is not None or elapsed < SHORTEST:
            return None
        return min(1.0, (self.until.thread - self.since.thread) / elapsed)


def now() -> float:
    """Returns the time in seconds, when a GPU has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def moment():
    """Returns the time in seconds; on a GPU an event, since it may still do what came before."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_of(spans: list[tuple]) -> list[float]:
    """Returns how long each span took, by the moments of its begin and its end."""
    if not torch.cuda.is_initialized():
        return [end - begin for begin, end in spans]
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1000 for begin, end in spans]


def busy_seconds() -> float | None:
    """Returns how long all cores of the machine have worked; only Linux tells."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, *others = map(int, file.readline().split()[1:8])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")
