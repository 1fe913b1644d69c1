"""Runs somebody's training script as it is until some of its steps are over, then ends it.

    python gpt_speed/audit/child.py '{"mode": "time", "report": "FILE"}' SCRIPT ITS ARGUMENTS

The order is an Order, as JSON. A step ends with the update, after a backward pass, of the optimizer
that updates least often; without one, each backward pass ends a step.

The report is JSON, too:

    how          "timed", "watched"; "ended" after too few steps; "failed", with an `error`
    key          the optimizer whose updates end steps, by its number, or "backward"
    optimizers   what optimizer_facts() says of each
    new_graphs   how many graphs were compiled during the timed steps

with what Timing.facts(), process_facts() and, of a watched step, Recording.facts() say.

Only PyTorch, the standard library and modules of gpt_speed are imported, from PyTorch 2.4 and
Python 3.10 on: the script may have modules of all other names.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

sys.path.pop(0)  # this folder, whose modules have names that others may have
import torch
import torch.nn.functional
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gpt_speed import script
from gpt_speed.audit import marks
from gpt_speed.audit.order import Order
from gpt_speed.audit.process import optimizer_facts, process_facts
from gpt_speed.audit.ranks import is_last_step, wait_for_ranks
from gpt_speed.audit.timing import WARM_UP, StepEnd, Timing, Usage, moment, now
from gpt_speed.audit.watch import Watch, caller_of, frames_from
from gpt_speed.pytorch import graph_count
from gpt_speed.script import hook

sys.path.pop(0)  # what is imported from now on, the script's own environment has

ENOUGH = 20  # timed steps
MOST = WARM_UP + ENOUGH  # steps of a timed run
LONGEST = 20  # seconds since the first step's end, after which two timed steps are enough


def main() -> None:
    """Runs the script; always ends the process."""
    order, watch = Order(**json.loads(sys.argv[1])), Watch()
    steps = Steps(order, watch)
    set_hooks(steps)
    watching = nullcontext()
    if order.is_watched:
        mark_calls(watch)
        watching = watch
    else:
        torch._logging.set_logs(graph_breaks=True, recompiles=True)  # on stderr, with their lines
    with watching:
        error = script.run_script(sys.argv[2:])
    steps.finish("failed" if error else "ended", error)


class Steps:
    """Counts steps, and ends the process when there were enough. Hooks call its methods."""

    def __init__(self, order: Order, watch: Watch):
        self.order, self.watch = order, watch
        # The StepEnds of each optimizer, by its index in `optimizers`; of "backward" without one.
        self.ends = {}
        self.backwards = 0  # how many backward passes have begun
        self.updates = []  # the begin and the end of each update that has no backward pass in it
        self.began = None  # the begin of the running update, and `backwards` then
        # The optimizers, in the order of their first updates; `backwards` at the last one of each.
        self.optimizers = {}
        self.made_at = {}  # the script's line that makes an optimizer, by its id
        self.has_optimizer = False  # whether an optimizer exists, maybe without an update yet
        self.models = []  # the models that DistributedDataParallel wraps
        self.waits = []  # the seconds until a DataLoader gave each batch
        self.workers = 0  # the processes of the last DataLoader
        self.graphs = float("inf")  # how many graphs were compiled before the timed steps

    # ---- Hooks

    def begin_update(self, _, args: tuple, kwargs: dict) -> None:
        """Is called before an optimizer's update, which may be given a closure."""
        if not self.watch.updates:
            self.began = moment(), self.backwards
            self.watch.has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        self.watch.updates += 1

    def end_update(self, optimizer, *_) -> None:
        """Is called after an optimizer's update, which may end a step."""
        self.watch.updates -= 1
        if self.watch.updates:  # within the update of another optimizer, that one's counts
            return
        begin, backwards = self.began
        if backwards == self.backwards:
            self.updates.append((begin, moment()))
        if self.backwards > self.optimizers.get(optimizer, 0):
            self.optimizers[optimizer] = self.backwards
            self.end([*self.optimizers].index(optimizer))

    def begin_backward(self, *args, **kwargs) -> Callable[[], None] | None:
        """Is called before torch.autograd.backward and .grad; returns what is called after it."""
        self.backwards += 1
        if not is_in_update():  # one that began, and didn't end, has failed
            self.watch.updates = 0
        if self.watch.recording:
            tensors = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            self.watch.begin_backward(tensors)
            syncs = [model.require_backward_grad_sync for model in self.models]
            self.watch.recording.syncs += syncs
        return None if self.has_optimizer else lambda: self.end("backward")

    def begin_optimizer(self, optimizer, *_, **__) -> None:
        """Is called before an optimizer is made."""
        self.has_optimizer = True
        frames = frames_from(sys._getframe())
        makers = [frame for frame in frames if frame.f_locals.get("self") is not optimizer]
        self.made_at[id(optimizer)], _ = caller_of(makers, "optimizer")

    def begin_model(self, model, *_, **__) -> Callable[[], None]:
        """Is called before DistributedDataParallel wraps a model; returns what is called after
        it."""

        def end() -> None:
            if hasattr(model, "require_backward_grad_sync"):  # else it has failed
                self.models.append(model)

        return end

    def begin_fetch(self, loader) -> Callable[[], None]:
        """Is called before a DataLoader gives a batch; returns what is called after it."""
        self.workers, began = loader._num_workers, time.perf_counter()
        return lambda: self.waits.append(time.perf_counter() - began)

    # ---- The end of a step

    def end(self, key: int | str) -> None:
        """Notes that a step ends, if an update of the optimizer with this key ends one."""
        ends = self.ends.setdefault(key, [])
        ends.append(StepEnd(now(), self.usage()))
        if self.order.is_watched:
            if key == self.order.key:
                self.end_watched(len(ends))
        elif key == self.rarest:
            self.end_timed(ends)

    def end_timed(self, ends: list[StepEnd]) -> None:
        """Begins to count after the warm-up, and ends the process when the steps are enough."""
        if len(ends) == WARM_UP + 1:
            self.graphs = graph_count()
        is_slow = ends[-1].time - ends[0].time > LONGEST
        is_enough = len(ends) > MOST or len(ends) > 2 and is_slow
        if is_last_step(len(ends), is_enough):
            self.finish("timed")

    def end_watched(self, count: int) -> None:
        """Watches the `steps` after the first `skipped` ones, and ends the process after them."""
        skipped = self.order.skipped
        if count > skipped:
            self.watch.end_step()
        if count == skipped + self.order.steps:
            self.finish("watched")
        if count >= skipped:
            self.watch.begin_step(self.optimizers)

    @property
    def rarest(self) -> int | str | None:
        """The optimizer whose updates end a step; of equally frequent ones, the last. One that is
        done with, as that of a probe before the training, doesn't count."""
        running = [key for key in self.ends if not self.is_over(key)]
        return min(reversed(running), key=lambda key: len(self.ends[key]), default=None)

    def is_over(self, key: int | str) -> bool:
        """Tells whether an optimizer seems to be done with: since its last update, another one has
        made as many as a whole timed run has."""
        last = self.ends[key][-1].time
        return any(len(ends) > MOST and ends[-MOST - 1].time > last for ends in self.ends.values())

    # ---- The report

    def finish(self, how: str, error: str = "") -> None:
        """Writes the report and ends the process, so that nothing more of the script runs."""
        script.write_report(self.order.report, dict(how=how, error=error) | self.facts())
        if how in ("timed", "watched"):
            wait_for_ranks()
        script.kill()

    def facts(self) -> dict:
        """Returns what is known of the steps and the process."""
        process = process_facts()
        steps = dict(
            key=self.rarest,
            new_graphs=max(0, process["graphs"] - self.graphs),
            optimizers=[
                optimizer_facts(optimizer, self.made_at.get(id(optimizer), ""))
                for optimizer in self.optimizers
            ],
        )
        facts = process | steps | self.timing().facts()
        if self.watch.recordings:
            facts |= self.watch.middle().facts()
        return facts

    def timing(self) -> Timing:
        ends = self.ends.get(self.rarest, [])
        return Timing(ends, self.usage(), self.waits, self.updates, self.workers)

    def usage(self) -> Usage:
        return Usage.now(len(self.waits), len(self.updates))


def is_in_update() -> bool:
    """Tells whether an optimizer's update has called this function, by its closure or itself."""
    frames = frames_from(sys._getframe())
    return any(frame.f_code.co_filename == torch_optimizer.__file__ for frame in frames)


def set_hooks(steps: Steps) -> None:
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


def mark_calls(watch: Watch) -> None:
    """Lets `watch` mark the operators within functions that marks.py knows."""
    functional = torch.nn.functional
    hook(torch.utils.checkpoint, "checkpoint", marking(watch, marks.of_checkpoint))
    hook(functional, "scaled_dot_product_attention", marking(watch, marks.of_attention))
    marks.keep_scriptable(
        functional.scaled_dot_product_attention, "aten::scaled_dot_product_attention"
    )
    hook(functional, "rms_norm", marking(watch, marks.of_norm))
    marks.keep_scriptable(functional.rms_norm, "aten::rms_norm")


def marking(watch: Watch, marks_of: Callable[..., dict]) -> Callable:
    """Returns a hook before a function, which marks operators until it ends."""

    def begin(*args, **kwargs):
        if watch.recording is None:
            return None
        outer, watch.marks = watch.marks, watch.marks | marks_of(*args, **kwargs)
        return lambda: setattr(watch, "marks", outer)

    return begin


if __name__ == "__main__":
    main()
