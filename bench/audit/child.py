"""Somebody's training script, run as it is until so many of its steps are over, then ended.

    python bench/audit/child.py '{"mode": "time", "report": "FILE"}' SCRIPT ITS ARGUMENTS

In mode "time" nothing is watched: only the clock is read where a step ends. In mode "watch" every
operator of one step is noted. The report is JSON; bench.audit.signs reads it. Nothing of this
repository is imported here, since the script may have modules of the same names.

A step ends with an optimizer's update; of several optimizers the one that updates most rarely
counts, and without one each backward pass is a step.
"""

import contextlib
import ctypes
import inspect
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter
from watch import Names, Watch, leave_modes, watch_compiled  # type: ignore  # beside this file

WARM_UP = 3  # steps that aren't timed: compilation, first allocations
STEPS, ENOUGH, LONGEST = 5, 20, 30  # timed: at least, at most; seconds after which two do


class Steps:
    """Counts steps, and ends the process when there were enough."""

    def __init__(self, order: dict):
        self.order, self.mode, self.watched = order, order["mode"], order.get("watched", 0)
        self.key, self.first = order.get("key"), time.perf_counter()
        self.ends, self.optimizers = {}, {}  # by the order of their first updates
        self.depth = self.backwards = self.created = 0
        self.waited, self.warm, self.loaders, self.saved = 0.0, None, [], []

    def before(self, optimizer, args, kwargs):
        """A closure in which the script computes its loss is no part of the update."""
        self.depth += 1
        watch.phase.append("optimizer")
        kwargs = {name: noted(value) if name == "closure" else value
                  for name, value in kwargs.items()}
        return (args[0], *map(noted, args[1:2]), *args[2:]), kwargs

    def after(self, optimizer, args, kwargs) -> None:
        self.depth -= 1
        if watch.phase[-1] == "optimizer":
            watch.phase.pop()
        if not self.depth:
            number = len(self.optimizers)
            _, number = self.optimizers.setdefault(id(optimizer), (optimizer, number))
            self.end(str(number))

    def backward(self, real):
        """In place of torch.autograd.backward and .grad."""
        def own(tensors, *args, **kwargs):
            self.backwards += 1
            if watch.on:
                watch.on = False  # for what is done here
                each = [tensors] if isinstance(tensors, torch.Tensor) else tensors
                watch.roots.append([len(watch.ops), [watch.describe(one, True)[0] for one in each]])
                watch.events += [["ddp", model.require_backward_grad_sync] for model in models()]
                watch.on = True
            result = real(tensors, *args, **kwargs)
            if not self.created and not self.depth:
                self.end("backward")
            return result
        return own

    def end(self, key: str) -> None:
        """A step of this optimizer ends."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        ends = self.ends.setdefault(key, [])
        ends.append(now)
        if self.mode == "watch" and key == self.key:
            if len(ends) == self.watched:
                watch.start([each for optimizer, _ in self.optimizers.values()
                             for group in optimizer.param_groups for each in group["params"]])
            elif len(ends) > self.watched:
                watch.on = False
                finish("watched")
        elif self.mode == "time" and key == self.rarest:
            timed = len(ends) - 1 - WARM_UP
            if timed == 0:
                self.warm, self.waited = graphs(), 0.0
            long = now - self.first > self.order.get("longest", LONGEST) and len(ends) > 2
            long |= timed >= STEPS and now - ends[WARM_UP] > 5 and "steps" not in self.order
            if timed >= self.order.get("steps", ENOUGH) or long:
                finish("timed")

    @property
    def rarest(self) -> str | None:
        """The optimizer whose updates end a step; of those that update as often, the last one."""
        return min(self.ends, key=lambda key: (len(self.ends[key]), -[*self.ends].index(key)),
                   default=None)


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


def models() -> list:
    """The models that are wrapped in DistributedDataParallel."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    import gc

    kind = torch.nn.parallel.DistributedDataParallel
    return [each for each in gc.get_objects() if type(each) is kind]


def graphs() -> int:
    """How many graphs torch.compile has made so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["stats"]["unique_graphs"] if utils else 0


def finish(how: str, error: str = "") -> None:
    """Writes the report and ends the process, so that nothing more of the script runs."""
    cuda = torch.cuda.is_initialized()
    facts = dict(
        how=how, error=error, torch=torch.__version__, ends=steps.ends, key=steps.rarest,
        backwards=steps.backwards, waited=steps.waited, loaders=steps.loaders,
        children=resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime,
        saved=sorted({path for path in steps.saved if os.path.exists(path)}),
        optimizers=[optimizer_facts(each) for each, _ in steps.optimizers.values()],
        precision=product_precision(), device="cuda" if cuda else "cpu",
        name=torch.cuda.get_device_name() if cuda else cpu_name(), bfloat16=has_bfloat16(cuda),
        capability=torch.cuda.get_device_capability() if cuda else None, kept=keeps_memory(),
        huge_pages=huge_pages(), threads=torch.get_num_threads(),
        ddp=[dict(unused=each.find_unused_parameters,
                  compiled_first=type(each.module).__name__ == "OptimizedModule")
             for each in models()], new_graphs=graphs() - (steps.warm or 0) if steps.warm else 0)
    if cuda:
        facts |= dict(memory=torch.cuda.max_memory_reserved(),
                      memory_there=torch.cuda.get_device_properties(0).total_memory)
    else:
        facts |= dict(memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                      memory_there=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if utils := sys.modules.get("torch._dynamo.utils"):
        facts["breaks"] = dict(utils.counters["graph_break"])
    if steps.mode == "watch" and watch.ops:
        facts |= watch.told()
    elif how == "timed" or steps.rarest:
        facts["rates"] = {kind: product_rate(kind) for kind in ("float32", "bfloat16")
                          if kind == "float32" or facts["bfloat16"]}
    with open(steps.order["report"], "w", encoding="utf-8") as file:
        json.dump(facts, file)
    sys.stdout.flush()
    sys.stderr.flush()
    distributed = torch.distributed
    if how != "ended" and distributed.is_available() and distributed.is_initialized():
        distributed.barrier()  # a rank that ends at once would break the others' last step
    if os.getpgid(0) == os.getpid():  # what the script started ends, too
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def optimizer_facts(optimizer) -> dict:
    kind = type(optimizer)
    groups = optimizer.param_groups
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


def cpu_name() -> str:
    about = getattr(torch.cpu, "get_capabilities", dict)()
    return about.get("cpu_name") or "CPU"


def has_bfloat16(cuda: bool) -> bool:
    if cuda:
        return torch.cuda.get_device_capability()[0] >= 8
    about = getattr(torch.cpu, "get_capabilities", dict)()
    return any(about.get(unit) for unit in ("amx_bf16", "avx512_bf16", "bf16"))


def keeps_memory() -> bool | None:
    """Whether glibc takes 64 MiB from memory that it keeps, and not from Linux; None: it isn't
    glibc's malloc that serves PyTorch."""
    class Info(ctypes.Structure):  # mallinfo2 of malloc.h
        _fields_ = [(name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost")]

    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype, library.malloc.restype = Info, ctypes.c_void_p
        with open("/proc/self/maps") as maps:
            if any(name in maps.read() for name in ("jemalloc", "tcmalloc", "mimalloc")):
                return None
        before = library.mallinfo2().hblks
        block = library.malloc(ctypes.c_size_t(2**26))
        mapped = library.mallinfo2().hblks > before
        library.free(ctypes.c_void_p(block))
        return not mapped
    except (OSError, AttributeError):
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


def product_rate(kind: str) -> float:
    """Floating-point operations per second of large products, the best of some."""
    cuda, size = torch.cuda.is_initialized(), 4096 if torch.cuda.is_initialized() else 1024
    best = 0.0
    with torch.no_grad():
        one = torch.randn(size, size, device="cuda" if cuda else "cpu",
                          dtype=getattr(torch, kind))
        for _ in range(8):
            start = time.perf_counter()
            one @ one
            if cuda:
                torch.cuda.synchronize()
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def prepare() -> None:
    """Hooks, before the script begins."""
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, steps.backward(getattr(torch.autograd, name)))

    def replace(owner, name: str, before=None, around=None) -> None:
        real = getattr(owner, name)

        def own(*args, **kwargs):
            if before:
                before(*args, **kwargs)
            return around(real, *args, **kwargs) if around else real(*args, **kwargs)

        setattr(owner, name, own)

    def created(*_, **__) -> None:
        steps.created += 1

    def fetch(real, loader):
        began = time.perf_counter()
        try:
            return real(loader)
        finally:
            steps.waited += time.perf_counter() - began

    replace(torch.optim.Optimizer, "__init__", created)
    replace(_BaseDataLoaderIter, "__next__", around=fetch)
    replace(_BaseDataLoaderIter, "__init__", lambda _, loader: steps.loaders.append(
        [loader.num_workers, bool(loader.pin_memory)]))
    replace(torch, "save", lambda obj, f, *_, **__: steps.saved.append(os.path.abspath(f))
            if isinstance(f, str | os.PathLike) else None)
    sys.addaudithook(opened)
    if steps.mode == "watch":
        watch_compiled(watch)
        os.register_at_fork(after_in_child=leave_modes)


def opened(event: str, args) -> None:
    """Files that are written."""
    if event == "open" and isinstance(args[0], str) and isinstance(args[1], str) and (
            set(args[1]) & set("wax+")) and not args[0].startswith(("/dev", "/proc", "/tmp")):
        steps.saved.append(os.path.abspath(args[0]))


def main() -> None:
    """Runs the script; always ends the process."""
    del sys.modules["watch"]  # the script may have one of that name
    is_module, name = sys.argv[2] == "-m", sys.argv[3] if sys.argv[2] == "-m" else sys.argv[2]
    sys.argv = sys.argv[3:] if is_module else sys.argv[2:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(name))
    prepare()
    error = ""
    watching = steps.mode == "watch"
    try:
        with watch if watching else contextlib.nullcontext(), (
                Names(watch) if watching else contextlib.nullcontext()):
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
