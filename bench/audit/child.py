"""Somebody's training script, run as it is until so many of its steps are over, then ended.

    python bench/audit/child.py '{"mode": "time", "report": "FILE"}' SCRIPT ITS ARGUMENTS

In mode "time" nothing is watched: only the clock is read where a step ends. In mode "watch" every
operator of one step is noted. The report is JSON; bench.audit.run reads it. Nothing of this
repository is imported here, since the script may have modules of the same names.

A step ends with an optimizer's update; of several optimizers the one that updates most rarely
counts, and without one each backward pass is a step.
"""

import contextlib
import ctypes
import inspect
import itertools
import json
import os
import runpy
import signal
import sys
import time
import traceback

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter
from watch import Watch, now, tensors_in  # type: ignore  # beside this file

WARM_UP = 3  # steps that aren't timed: compilation, first allocations
ENOUGH, LONGEST = 20, 20  # timed steps; seconds since the first step's end, after which two do


class Steps:
    """Counts steps, and ends the process when there were enough."""

    def __init__(self, order: dict):
        self.order, self.mode, self.key = order, order["mode"], order.get("key")
        self.ends, self.optimizers = {}, {}  # by the order of their first updates; by their ids
        self.created, self.models, self.workers, self.waits = [], [], [], []
        self.backwards, self.graphs = 0, float("inf")

    def before(self, optimizer, args, kwargs):
        """A closure in which the script computes its loss is no part of the update."""
        watch.phase.append("optimizer")
        return (args[0], *map(noted, args[1:])), {
            name: noted(value) for name, value in kwargs.items()}

    def after(self, optimizer, args, kwargs) -> None:
        watch.phase.pop()
        if "optimizer" not in watch.phase:  # else it was updated by another one
            self.optimizers.setdefault(id(optimizer), optimizer)
            self.end(str([*self.optimizers].index(id(optimizer))))

    def backward(self, *args, **kwargs):
        """Before torch.autograd.backward and .grad."""
        self.backwards += 1
        if watch.on:
            roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            watch.on = False  # for what is done here
            watch.roots.append([len(watch.ops), [
                watch.describe(each, True)[0] for each in tensors_in(roots)]])
            watch.on = True
            watch.syncs += [each.require_backward_grad_sync for each in self.models]
        return None if self.created else lambda: self.end("backward")

    def fetch(self, loader):
        """Before a loader gives a batch."""
        began = time.perf_counter()
        return lambda: self.waits.append(time.perf_counter() - began)

    def end(self, key: str) -> None:
        """A step of this optimizer ends."""
        ends = self.ends.setdefault(key, [])
        ends.append(now())
        if self.mode == "watch" and key == self.key:
            if len(ends) == self.order["watched"]:
                watch.start([each for optimizer in self.optimizers.values()
                             for group in optimizer.param_groups for each in group["params"]])
            elif len(ends) > self.order["watched"]:
                watch.on = False
                finish("watched")
        elif self.mode == "time" and key == self.rarest:
            if len(ends) == WARM_UP + 1:
                self.waits, self.graphs = [], graphs()
            if len(ends) > WARM_UP + ENOUGH or len(ends) > 2 and ends[-1] - ends[0] > LONGEST:
                finish("timed")

    @property
    def rarest(self) -> str | None:
        """The optimizer whose updates end a step; of those that update as often, the last one."""
        return min(reversed(self.ends), key=lambda key: len(self.ends[key]), default=None)


def noted(closure):
    if not callable(closure):
        return closure

    def own():
        watch.phase.append("forward")
        try:
            return closure()
        finally:
            watch.phase.pop()

    return own


def compiled(kind: str) -> dict:
    """What torch.compile has counted so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return dict(utils.counters[kind]) if utils else {}


def graphs() -> int:
    return compiled("stats").get("unique_graphs", 0)


def finish(how: str, error: str = "") -> None:
    """Writes the report and ends the process, so that nothing more of the script runs."""
    cuda, key = torch.cuda.is_initialized(), steps.rarest
    ends = steps.ends.get(key, [])
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    facts = dict(
        how=how, error=error, key=key, steps=len(ends), backwards=steps.backwards,
        seconds=seconds[min(WARM_UP, len(seconds) // 2):], waited=sum(steps.waits),
        children=os.times().children_user, workers=steps.workers,
        optimizers=[optimizer_facts(each) for each in steps.optimizers.values()],
        ddp=[dict(unused=each.find_unused_parameters,
                  compiled_first=type(each.module).__name__ == "OptimizedModule")
             for each in steps.models],
        breaks=compiled("graph_break"), new_graphs=max(0, graphs() - steps.graphs),
        precision=product_precision(), kept=keeps_memory(), huge_pages=huge_pages(),
        device="cuda" if cuda else "cpu",
        memory=torch.cuda.max_memory_reserved() if cuda else peak_memory(),
        memory_there=torch.cuda.mem_get_info()[1] if cuda else None)
    if watch.ops:
        facts |= watch.facts()
    with open(steps.order["report"], "w", encoding="utf-8") as file:
        json.dump(facts, file)
    sys.stdout.flush()
    sys.stderr.flush()
    distributed = torch.distributed
    if how != "ended" and distributed.is_available() and distributed.is_initialized():
        distributed.barrier()  # a rank that ends at once would break the others' last step
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():  # what the script started ends, too
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def peak_memory() -> int | None:
    """Bytes that this process had in memory at most; None on Windows, which has no `resource`."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def optimizer_facts(optimizer) -> dict:
    kind, groups = type(optimizer), optimizer.param_groups
    return dict(name=kind.__name__, own=kind.__module__.startswith("torch.optim"),
                accepts="fused" in inspect.signature(kind.__init__).parameters,
                fused=[bool(group.get("fused")) for group in groups],
                foreach=[group.get("foreach") for group in groups],
                tensors=sum(len(group["params"]) for group in groups))


def product_precision() -> str:
    """Of float32 products. PyTorch's old setting can't be read where its new one was used."""
    new = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    try:
        return "tf32" if new == "tf32" else torch.get_float32_matmul_precision()
    except RuntimeError:
        return new


def keeps_memory() -> bool | None:
    """Tells whether glibc takes 64 MiB from memory that it keeps, and not from Linux; None where it
    isn't glibc's malloc that serves PyTorch."""
    class Info(ctypes.Structure):  # mallinfo2 of malloc.h, the fourth number of which is hblks
        _fields_ = [("numbers", ctypes.c_size_t * 10)]

    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype, library.malloc.restype = Info, ctypes.c_void_p
        with open("/proc/self/maps") as file:
            maps = file.read()
        if any(name in maps for name in ("jemalloc", "tcmalloc", "mimalloc")):
            return None
        before = library.mallinfo2().numbers[3]
        block = library.malloc(ctypes.c_size_t(2**26))
        mapped = library.mallinfo2().numbers[3] > before
        library.free(ctypes.c_void_p(block))
        return not mapped
    except (OSError, AttributeError, TypeError):  # Windows has no name for the program itself
        return None


def huge_pages() -> str:
    """"set", "not set", or what the system does in any case: "always", "never"."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            system = file.read().partition("[")[2].partition("]")[0]
    except OSError:
        system = "never"
    own = "set" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "not set"
    return own if system == "madvise" else system


def extend(owner, name: str, before) -> None:
    """Calls `before` before a function, with its arguments, and what that returns after it."""
    real = getattr(owner, name)

    def own(*args, **kwargs):
        after = before(*args, **kwargs)
        result = real(*args, **kwargs)
        if after:
            after()
        return result

    setattr(owner, name, own)


def prepare() -> None:
    """Hooks, before the script begins."""
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)
    extend(torch.autograd, "backward", steps.backward)
    extend(torch.autograd, "grad", steps.backward)
    extend(torch.optim.Optimizer, "__init__", lambda *_, **__: steps.created.append(True))
    extend(DistributedDataParallel, "__init__",
           lambda own, *_, **__: lambda: steps.models.append(own))
    extend(_BaseDataLoaderIter, "__next__", steps.fetch)
    extend(_BaseDataLoaderIter, "__init__",
           lambda _, loader: steps.workers.append(loader.num_workers))


def main() -> None:
    """Runs the script; always ends the process."""
    del sys.modules["watch"]  # the script may have one of that name
    is_module = sys.argv[2] == "-m"
    sys.argv = sys.argv[2 + is_module:]
    name = sys.argv[0]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(name))
    prepare()
    error = ""
    try:
        with watch if steps.mode == "watch" else contextlib.nullcontext():
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
    except SystemExit as stop:
        error = f"it ended with {stop.code}" if stop.code not in (None, 0) else ""
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException as raised:
        trace = traceback.format_exception(raised)
        own = [part for part in trace if __file__ not in part and "<frozen runpy>" not in part]
        print("".join(own), file=sys.stderr)
        error = own[-1].strip().splitlines()[-1]
    finish("failed" if error else "ended", error)


if __name__ == "__main__":
    watch, steps = Watch(), Steps(json.loads(sys.argv[1]))
    main()
