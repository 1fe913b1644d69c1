"""What a script does on a GPU that isn't there: its own training steps, run on tensors without
storage (device "meta").

    python -m bench.predict.trace '[{"script": "00_orig.py", "options": [], "batch": 8}, ...]'

prints a line, the list of {"trace": what trace() returns} or {"error": "a line"}. Each storage is
noted when it is made and when it dies, and of each kernel how many floating-point operations it
does and how many bytes it reads and writes. No trace sees the workspace of cuBLAS; it is added. In
place of torch.compile stands bench.predict.compiled.
"""

import contextlib
import gc
import io
import json
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bench.common import load_script
from bench.predict import meta_patches
from bench.predict.allocator import WORKSPACE
from bench.predict.compiled import PYTORCH, compile_only_models
from bench.predict.counting import bytes_of, kernel_of
from bench.predict.meta_patches import WORLD_SIZE, aten, is_meta
from bench.predict.speed import Work
from bench.processes import error_line

STEPS = 3


class Notes(TorchDispatchMode):
    """`events`: a storage's size in bytes when it is made, -k when the k-th one dies.

    `work`: what was done from each mark() to the next, as {Work.group: Work}: kind is products (of
    linear layers), head (of the one that makes logits), attention, loss, optimizer or rest.
    """

    def __init__(self, config):
        super().__init__()
        self.config, self.events, self.made, self.live = config, [], 0, {}
        self.work, self.updating = [{}], 0  # optimizers that are at it; one may use another

    def __enter__(self):
        self.hooks = [register_optimizer_step_pre_hook(lambda *_: self.update(1)),
                      register_optimizer_step_post_hook(lambda *_: self.update(-1))]
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)

    def update(self, change: int) -> None:
        self.updating += change

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._fused_adamw_.default:  # in place, and not there for such tensors
            for weight, gradient, *averages in zip(*args[:4], strict=True):
                size = 2 * bytes_of(weight, *averages) + bytes_of(gradient)
                self.add_work(Work("optimizer", "", True, 0, 0, size))
            self.add_work(Work("optimizer", "", True, 1, 0, 0))
            return None
        if func is aten._amp_update_scale_.default:  # nor is this one
            return args[0]
        if func is aten._scaled_dot_product_flash_attention_backward.default:
            q_BHTD = args[1]
            B, H, T, D = q_BHTD.shape
            T = -(-T // 128) * 128  # csrc/flash_attn/flash_api.cpp: float32 in whole blocks
            buffers = [self.add(4 * B * H * T), self.add(4 * B * H * T * -(-D // 32) * 32)]
            result = func(*args, **(kwargs or {}))
            self.events += [-number for number in buffers]
        else:
            result = func(*args, **(kwargs or {}))
        for value in filter(is_meta, tree_iter(result)):
            self.note(value)
        self.count(func, args, kwargs or {}, result)
        return result

    def mark(self) -> float:
        self.work.append({})
        return 0.0

    def add_work(self, more: Work) -> None:
        kernels, flops, size = self.work[-1].get(more.group, Work(*more.group))[3:]
        self.work[-1][more.group] = more._replace(
            kernels=kernels + more.kernels, flops=flops + more.flops, size=size + more.size)

    def count(self, func, args: tuple, kwargs: dict, result) -> None:
        """The work of an operator."""
        kernel = kernel_of(func, args, kwargs, result, is_meta)
        if kernel:
            precision, aligned, flops, size, tensors = kernel
            if precision == "float32" and torch.get_float32_matmul_precision() != "highest":
                precision = "TF32"
            kind = self.kind(func._schema.name.partition("::")[2], tensors, flops)
            self.add_work(Work(kind, precision, aligned, 1, flops, size))

    def kind(self, name: str, tensors: list, flops: int) -> str:
        T, V = self.config.context_length, self.config.vocab_size
        if self.updating:
            return "optimizer"
        if flops and any(V in x.shape for x in tensors):
            return "head"
        if any(x.shape[-1:] == (V,) for x in tensors):  # logits; the weights are (V, C)
            return "loss"
        if "attention" in name or any(
                x.shape[-2:] == (T, T) and (x.dim() == 4 or "bmm" in name) for x in tensors):
            return "attention"
        return "products" if flops else "rest"

    def compiled_kernel(self, updated: int, *args) -> None:
        """One that the compiler has made: it reads or writes each of its tensors once, or both of
        the first `updated`."""
        tensors = [each for each in args if is_meta(each)]
        size = bytes_of(*tensors, *tensors[:updated])
        self.add_work(Work(self.kind("", tensors, 0), "", True, 1, 0, size))

    def begin(self, model: torch.nn.Module) -> None:
        """Notes what lies on the device when training starts."""
        for tensor in [*model.parameters(), *model.buffers()]:
            self.note(tensor)
        self.add(WORKSPACE)

    def add(self, size: int) -> int:
        self.events.append(size)
        self.made += 1
        return self.made

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or not storage.nbytes():
            return

        number = self.add(storage.nbytes())

        def died(_):
            del self.live[key]
            self.events.append(-number)

        self.live[key] = weakref.ref(storage, died)


def settle(config) -> None:
    """Makes a script's Config one of STEPS steps with an evaluation after the first and the last
    one; where it may choose its type, that is bfloat16, whatever this computer has."""
    if getattr(config, "dtype", None) == "auto":
        config.dtype, config.dtype_reason = "bfloat16", "predicted"
    config.max_steps, config.max_tokens, config.eval_freq = STEPS, None, 99
    config.target_loss = -1


def data_of_zeros(module, config):
    """Returns a script's Data, of more steps than are made, which takes no memory."""
    tokens = 2 * STEPS * WORLD_SIZE * config.batch_size * config.context_length + 1
    windows = module.TokenWindows(np.broadcast_to(np.uint16(0), tokens), config.context_length)
    return module.Data(meta={}, train=windows, val=windows, tokenizer=None)


def run_of(start, epoch) -> SimpleNamespace:
    """Stands in for a script's Run: calls `start` when training starts, after the model was moved,
    and `epoch` at the end of the first epoch."""
    return SimpleNamespace(start=lambda model, *_: start(model), log=lambda *_: None,
                           epoch=lambda *_: epoch())


def trace(module, options: list[str], batch: int) -> dict:
    """Traces training at a batch size, by a script's own train(): a step, an evaluation of one
    batch of each text, further steps, an evaluation. The epoch's sample is left out: it takes less
    memory than an evaluation.

    `events` and the work of a `step` are those of Notes; `tokens` are those of a step on one GPU. A
    model of few layers can't stand for one of many: the compiler takes one of four orders of a
    whole graph's kernels, by the memory that each would take.
    """
    config = module.configure(["--device", "cpu", *options, "--batch-size", str(batch)])
    settle(config)
    module.can_compile = lambda *_: True  # the script would try it on this computer
    config.device = torch.device("meta")
    config.eval_windows = 8 * getattr(module, "WORLD_SIZE", 1)  # of which each rank has its share
    with torch.device("meta"):
        model = module.GPTModel(config)
    data, events = data_of_zeros(module, config), []
    with Notes(config) as notes:
        run = run_of(notes.begin, lambda: events.extend(notes.events))
        module.train(model, data, config, run, lambda _: notes.mark())
    if len(notes.work) != STEPS + 4:  # now() is asked before, after each step, and at log lines
        raise NotImplementedError("its loop takes the time in another way than 00's")
    return dict(
        events=events, step=[*notes.work[-3].values()],
        tokens=config.batch_size * config.context_length,
        flops_per_token=module.count_parameters(model, config)["flops_per_token"])


def answer(script: str, options: list[str], batch: int) -> dict:
    """Returns the `trace` of a file, or the `error` for which there is none."""
    here = ".".join(torch.__version__.split(".")[:2])
    if here != PYTORCH:
        return dict(error=f"predictions can be made again with PyTorch {PYTORCH}, not with"
                          f" {here}; stored ones work with any")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            with meta_patches.as_on_cuda(compile_only_models):  # before it imports names from there
                return dict(trace=trace(load_script(Path(script)), options, batch))
    except SystemExit:  # an option that the script doesn't take
        return dict(error=error_line(printed.getvalue()))
    except Exception as error:
        error = getattr(error, "inner_exception", error)  # of the compiler's
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return dict(error=lines[0])


def main() -> None:
    meta_patches.begin_ranks()
    warnings.simplefilter("ignore")
    gc.freeze()
    print(json.dumps([answer(**request) for request in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
