"""Runs somebody's training script as it is until some of its steps are over, then ends it.

    python gpt_speed/audit/child.py '{"mode": "time", "report": "FILE"}' SCRIPT ITS ARGUMENTS

Mode "time" only reads the clock where a step ends; "watch" notes every operator of a few steps. A
step ends with the update, after a backward pass, of the optimizer that updates least often; without
one, each backward pass ends a step. Only PyTorch and the standard library are imported, from
PyTorch 2.4 and Python 3.10 on, and nothing of this repository: the script may have the same names.
"""

import contextlib
import ctypes
import inspect
import itertools
import json
import os
import runpy
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter
from watch import Watch, caller_of, frames_from, now  # type: ignore  # beside this file

script = runpy.run_path(str(Path(__file__).parents[1] / "script.py"))
marks = runpy.run_path(str(Path(__file__).with_name("marks.py")))
hook = script["hook"]
WARM_UP = 3  # steps that aren't timed: compilation, first allocations
ENOUGH = 20  # timed steps
MOST = WARM_UP + ENOUGH  # steps of a timed run
LONGEST = 20  # seconds since the first step's end, after which two timed steps are enough
SHORTEST = 0.3  # seconds of which the share is told that the script had a core for
LAST_STEP, ENDED = "audit/last step", "audit/ended"  # what ranks tell each other


class Mark(NamedTuple):
    """What was used until the end of a step, in seconds."""

    batches: int  # fetched until then
    process: os.times_result
    thread: float  # of the CPU, by the thread that trains
    machine: float | None  # by all processes: see busy_seconds
    updates: int  # done until then

    @classmethod
    def now(cls, batches: int, updates: int) -> "Mark":
        return cls(batches, os.times(), time.thread_time(), busy_seconds(), updates)


class Steps:
    """Counts steps, and ends the process when there were enough."""

    def __init__(self, order: dict):
        self.order = order
        self.ends = {}  # when steps ended, by key: the index of their optimizer, or "backward"
        self.backwards = 0  # backward passes so far
        self.updates = []  # when those without a backward pass in them began and ended
        self.began = None  # the running update's begin, and `backwards` then
        self.optimizers = {}  # in order of their first updates; `backwards` at each one's last
        self.made_at = {}  # the script's lines that make optimizers, by id
        self.has_optimizer = False  # whether one exists, maybe without an update yet
        self.models = []  # that DistributedDataParallel wraps
        self.waits, self.workers = [], 0  # of the DataLoader: seconds for each batch; processes
        self.graphs = float("inf")  # that were compiled before the timed steps
        self.marks = {}  # as `ends`

    def begin_update(self, _, args: tuple, kwargs: dict) -> None:
        """A hook before an optimizer's update, which may be given a closure."""
        if not watch.updates:
            self.began = moment(), self.backwards
            watch.has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        watch.updates += 1

    def end_update(self, optimizer, *_) -> None:
        """A hook after an optimizer's update, which may end a step."""
        watch.updates -= 1
        if watch.updates:  # within the update of another optimizer, that one's counts
            return
        begin, backwards = self.began
        if backwards == self.backwards:
            self.updates.append((begin, moment()))
        if self.backwards > self.optimizers.get(optimizer, 0):
            self.optimizers[optimizer] = self.backwards
            self.end([*self.optimizers].index(optimizer))

    def begin_backward(self, *args, **kwargs):
        """A hook before torch.autograd.backward and .grad; returns one for after it."""
        self.backwards += 1
        if not is_in_update():  # one that began, and didn't end, has failed
            watch.updates = 0
        if watch.recording:
            watch.begin_backward(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
            watch.recording.syncs += [model.require_backward_grad_sync for model in self.models]
        return None if self.has_optimizer else lambda: self.end("backward")

    def begin_optimizer(self, optimizer, *_, **__) -> None:
        """A hook before an optimizer is made."""
        self.has_optimizer = True
        frames = frames_from(sys._getframe())
        makers = [frame for frame in frames if frame.f_locals.get("self") is not optimizer]
        self.made_at[id(optimizer)], _ = caller_of(makers, "optimizer")

    def begin_model(self, model, *_, **__):
        """A hook before DistributedDataParallel wraps a model; returns one for after it."""

        def end() -> None:
            if hasattr(model, "require_backward_grad_sync"):  # else it has failed
                self.models.append(model)

        return end

    def begin_fetch(self, loader):
        """A hook before a DataLoader gives a batch; returns one for after it."""
        self.workers, began = loader._num_workers, time.perf_counter()
        return lambda: self.waits.append(time.perf_counter() - began)

    def end(self, key: int | str) -> None:
        """Notes that a step ends, if an update of the optimizer with this key ends one."""
        ends = self.ends.setdefault(key, [])
        ends.append(now())
        self.marks.setdefault(key, []).append(Mark.now(len(self.waits), len(self.updates)))
        if self.order["mode"] == "time" and key == self.rarest:
            self.end_timed(ends)
        if self.order["mode"] == "watch" and key == self.order["key"]:
            self.end_watched(len(ends))

    def end_timed(self, ends: list[float]) -> None:
        """Begins to count after the warm-up, and ends the process when the steps are enough."""
        if len(ends) == WARM_UP + 1:
            self.graphs = compiler_counts("stats")["unique_graphs"]
        enough = len(ends) > MOST or len(ends) > 2 and ends[-1] - ends[0] > LONGEST
        if is_last_step(len(ends), enough):
            finish("timed")

    def end_watched(self, count: int) -> None:
        """Watches the `steps` after the first `skipped` ones, and ends the process after them."""
        skipped = self.order["skipped"]
        if count > skipped:
            watch.end_step()
        if count == skipped + self.order["steps"]:
            finish("watched")
        if count >= skipped:
            watch.begin_step(self.optimizers)

    @property
    def rarest(self) -> int | str | None:
        """The optimizer whose updates end a step; of equally frequent ones, the last. One that is
        done with, as that of a probe before the training, doesn't count."""
        running = [key for key in self.ends if not self.is_over(key)]
        return min(reversed(running), key=lambda key: len(self.ends[key]), default=None)

    def is_over(self, key: int | str) -> bool:
        """Tells whether an optimizer seems to be done with: since its last update, another one has
        made as many as a whole timed run has."""
        last = self.ends[key][-1]
        return any(len(ends) > MOST and ends[-MOST - 1] > last for ends in self.ends.values())


def is_in_update() -> bool:
    """Tells whether an optimizer's update has called this function, by its closure or itself."""
    own = torch_optimizer.__file__
    return any(frame.f_code.co_filename == own for frame in frames_from(sys._getframe()))


def compiler_counts(group: str) -> Counter:
    """Returns what torch.compile has counted so far, of one of its groups of counters."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters[group] if utils else Counter()


def store_of_ranks():
    """Returns the store by which the ranks of torch.distributed find each other; None without."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def is_last_step(count: int, enough: bool) -> bool:
    """Tells whether the process ends after `count` steps, which are, or aren't, enough for it. Of
    several ranks, whose clocks differ, the first one decides, and all end after its next step: none
    can be through with that before, as they wait for each other's gradients."""
    store = store_of_ranks()
    if store is None:
        return enough
    if enough and torch.distributed.get_rank() == 0 and not store.check([LAST_STEP]):
        store.set(LAST_STEP, str(count + 1))
    return store.check([LAST_STEP]) and count >= int(store.get(LAST_STEP))


def wait_for_ranks() -> None:
    """Waits until all ranks are through with their last step, which this one's end would break;
    for a minute at most, as one of them may have failed."""
    store, end = store_of_ranks(), time.monotonic() + 60
    if store is not None:
        with contextlib.suppress(RuntimeError):  # the rank that holds the store has ended
            ended = store.add(ENDED, 1)
            while ended < torch.distributed.get_world_size() and time.monotonic() < end:
                time.sleep(0.05)
                ended = store.add(ENDED, 0)


def finish(how: str, error: str = "") -> None:
    """Writes the report and ends the process, so that nothing more of the script runs."""
    facts = dict(
        how=how,
        error=error,
        torch=torch.__version__,
        **timing_facts(),
        **compiler_facts(),
        **(gpu_facts() if torch.cuda.is_initialized() else cpu_facts()),
        optimizers=[optimizer_facts(optimizer) for optimizer in steps.optimizers],
        tf32=uses_tf32(),
        huge_pages=has_huge_pages(),
        **(watched_facts(watch.middle()) if watch.recordings else {}),
    )
    script["write_report"](steps.order["report"], facts)
    if how in ("timed", "watched"):
        wait_for_ranks()
    script["kill"]()


def watched_facts(recording) -> dict:
    """Returns what was noted of a step."""
    return dict(
        ops=recording.with_middle_times(),
        older=[*recording.older.items()],
        storages=[[*vars(storage).values()] for storage in recording.storages],
        syncs=recording.syncs,
        recurrent=recording.is_recurrent,
    )


def timing_facts() -> dict:
    """Returns how long steps took, and what they waited for; the first ones are left out, of a few
    steps half of them."""
    ends, marks = steps.ends.get(steps.rarest, []), steps.marks.get(steps.rarest, [])
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    first = min(WARM_UP, len(seconds) // 2)
    begin = marks[first] if marks else Mark.now(0, 0)
    end = Mark.now(len(steps.waits), len(steps.updates))
    elapsed = max(end.process.elapsed - begin.process.elapsed, 0.01)
    waited = sum(steps.waits[begin.batches :])
    return dict(
        key=steps.rarest,
        steps=len(ends),
        seconds=seconds[first:],
        waited=waited,
        updating=share_of_updates(steps.updates[begin.updates :], sum(seconds[first:])),
        workers=steps.workers,
        # Pages took this share at most.
        system=min(1.0, (end.process.system - begin.process.system) / elapsed),
        children=end.process.children_user,
        others=cores_of_others(begin, end),
        computing=share_of_computing(begin, end, waited),
    )


def moment():
    """Returns the time; on a GPU an event, since what runs now began earlier."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def share_of_updates(updates: list[tuple], elapsed: float) -> float | None:
    """Returns the share of the elapsed seconds that updates took, with what Python does in them,
    by the moments of their begins and ends; None where none is known."""
    if not updates or not elapsed:
        return None
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        seconds = sum(begin.elapsed_time(end) / 1000 for begin, end in updates)
    else:
        seconds = sum(end - begin for begin, end in updates)
    return min(1.0, seconds / elapsed)


def busy_seconds() -> float | None:
    """Returns how long all cores of the machine have worked; only Linux tells."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, *others = map(int, file.readline().split()[1:8])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def cores_of_others(begin: Mark, end: Mark) -> float | None:
    """Returns how many cores other processes used meanwhile; None where that isn't known, as in
    less than a second, or where batches come from processes of the script."""
    elapsed = end.process.elapsed - begin.process.elapsed
    if begin.machine is None or end.machine is None or steps.workers or elapsed < 1:
        return None
    own = sum(end.process[:2]) - sum(begin.process[:2])
    return max(0.0, (end.machine - begin.machine - own) / elapsed)


def share_of_computing(begin: Mark, end: Mark, waited: float) -> float | None:
    """Returns the share of the time, without the waiting for batches, for which the thread that
    trains had a core; PyTorch's threads don't sleep while they wait for each other. None where it
    may well wait: for a GPU, for other ranks; and for a time that is too short."""
    elapsed = end.process.elapsed - begin.process.elapsed - waited
    if torch.cuda.is_initialized() or store_of_ranks() is not None or elapsed < SHORTEST:
        return None
    return min(1.0, (end.thread - begin.thread) / elapsed)


def compiler_facts() -> dict:
    """Returns what torch.compile made of the script."""
    graphs = compiler_counts("stats")["unique_graphs"]
    return dict(
        graphs=graphs,
        new_graphs=max(0, graphs - steps.graphs),
        breaks=compiler_counts("graph_break"),
        budget=memory_budget(),
    )


def memory_budget() -> float:
    """Returns the share of activations that the compiler may keep for the backward pass."""
    config = sys.modules.get("torch._functorch.config")
    return getattr(config, "activation_memory_budget", 1.0)


def gpu_facts() -> dict:
    """Returns how the script uses the GPU's memory."""
    segments = torch.cuda.memory_snapshot()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return dict(
        device="cuda",
        memory=torch.cuda.max_memory_reserved(),
        memory_total=torch.cuda.mem_get_info()[1],
        kept=any(segment.get("is_expandable") for segment in segments),
        shares_memory=bool(getattr(gpu, "is_integrated", False)),
    )


def cpu_facts() -> dict:
    """Returns how the script uses memory on a CPU."""
    return dict(
        device="cpu",
        memory=peak_memory(),
        memory_total=None,
        kept=keeps_memory(),
        shares_memory=False,
    )


def uses_tf32() -> bool:
    """Tells whether float32 matmuls on a GPU are in TF32."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32"
    return matmul.allow_tf32  # before PyTorch 2.9


def peak_memory() -> int | None:
    """Returns the most bytes that this process had in memory; None on Windows."""
    with contextlib.suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    return None


def optimizer_facts(optimizer) -> dict:
    """Returns an optimizer's class, whether it is PyTorch's `own`, `accepts` to be fused, and is,
    whether it may update all tensors at once (`foreach`), how many it updates (those without a
    gradient it skips), and the script's line that made it."""
    optimizer_class, groups = type(optimizer), optimizer.param_groups
    tensors = [tensor for group in groups for tensor in group["params"]]
    updated = [tensor for tensor in tensors if tensor.grad is not None]
    return dict(
        name=optimizer_class.__name__,
        own=optimizer_class.__module__.startswith("torch.optim"),
        accepts="fused" in inspect.signature(optimizer_class.__init__).parameters,
        fused=all(group.get("fused") for group in groups),
        foreach=all(group.get("foreach", False) is not False for group in groups),
        tensors=len(updated or tensors),
        place=steps.made_at.get(id(optimizer), ""),
    )


def keeps_memory() -> bool | None:
    """Tells whether glibc takes large pieces from what it keeps; None for another malloc."""
    with contextlib.suppress(OSError):
        library, maps = ctypes.CDLL("libc.so.6"), Path("/proc/self/maps").read_text()
        library.malloc.restype = ctypes.c_void_p
        is_glibc = not any(name in maps for name in ("jemalloc", "tcmalloc", "mimalloc"))
        # More than lies free between pieces in use.
        if is_glibc and (block := library.malloc(ctypes.c_size_t(2**30))):
            is_mapped = ctypes.c_size_t.from_address(block - 8).value & 2  # a flag of malloc.c
            library.free(ctypes.c_void_p(block))
            return not is_mapped
    return None


def has_huge_pages() -> bool | None:
    """Tells whether the script has them; None where the system doesn't give any."""
    setting = "[never]"
    with contextlib.suppress(OSError):
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if "[never]" in setting:
        return None
    return "[always]" in setting or os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"


def add_hooks() -> None:
    """Lets `steps` see updates, backward passes and batches."""
    begin, end = steps.begin_update, steps.end_update
    if not hasattr(torch.compiler, "set_stance"):  # before 2.6, a compiled update fails with them
        begin, end = map(torch.compiler.disable, (begin, end))
    torch_optimizer.register_optimizer_step_pre_hook(begin)
    torch_optimizer.register_optimizer_step_post_hook(end)
    hook(torch.autograd, "backward", steps.begin_backward)
    hook(torch.autograd, "grad", steps.begin_backward)
    hook(torch.optim.Optimizer, "__init__", steps.begin_optimizer)
    hook(DistributedDataParallel, "__init__", steps.begin_model)
    hook(_BaseDataLoaderIter, "__next__", steps.begin_fetch)


def add_marks() -> None:
    """Lets `watch` mark the operators within functions that are told of in marks.py."""
    functional = torch.nn.functional
    hook(torch.utils.checkpoint, "checkpoint", marking(marks["of_checkpoint"]))
    hook(functional, "scaled_dot_product_attention", marking(marks["of_attention"]))
    marks["keep_scriptable"](
        functional.scaled_dot_product_attention, "aten::scaled_dot_product_attention"
    )
    hook(functional, "rms_norm", marking(marks["of_norm"]))
    marks["keep_scriptable"](functional.rms_norm, "aten::rms_norm")


def marking(marks_of):
    """Returns a hook before a function, which marks operators until it ends."""

    def begin(*args, **kwargs):
        if watch.recording is None:
            return None
        outer, watch.marks = watch.marks, watch.marks | marks_of(*args, **kwargs)
        return lambda: setattr(watch, "marks", outer)

    return begin


def main() -> None:
    """Runs the script; always ends the process."""
    del sys.modules["watch"]  # the script may have one of that name
    add_hooks()
    if steps.order["mode"] == "time":
        torch._logging.set_logs(graph_breaks=True, recompiles=True)  # on stderr, with their lines
    else:
        add_marks()
    with watch if steps.order["mode"] == "watch" else contextlib.nullcontext():
        error = script["run_script"](sys.argv[2:])
    finish("failed" if error else "ended", error)


if __name__ == "__main__":
    watch, steps = Watch(), Steps(json.loads(sys.argv[1]))
    main()
