"""What a script does on a GPU that isn't there: its own training steps, run on tensors without
storage (device "meta").

    python -m bench.predict.trace '[{"script": "00_orig.py", "options": [], "batch": 8}, ...]'

prints a line, the list of {"trace": what trace() returns} or {"error": "a line"}.
"""

import contextlib
import gc
import io
import json
import sys
import warnings
import weakref
from operator import add
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
from bench.predict.compiled import PYTORCH, compile_only_models
from bench.predict.meta_patches import WORLD_SIZE, aten, is_meta, key_of
from bench.processes import error_line
from gpt_speed.counting import Kernel, bytes_of, kernel_of
from gpt_speed.memory import WORKSPACE
from gpt_speed.speed import Work

STEPS = 3
MOST_TOKENS = 2**22  # of a step: a larger one takes minutes, since its windows are made


def needs_storage(func, args: tuple, kwargs: dict) -> bool:
    """Returns whether an operator doesn't run on tensors without storage."""
    if func is aten._local_scalar_dense.default:  # Tensor.item
        return is_meta(args[0])
    if func is aten._to_copy.default:
        return str(kwargs.get("device")) == "cpu"
    return func in (aten._fused_adamw_.default, aten._amp_update_scale_.default)


def flash_buffers(query: torch.Tensor) -> tuple[int, int]:
    """Returns the bytes of what FlashAttention's backward pass makes and drops, in float32 and in
    whole blocks (csrc/flash_attn/flash_api.cpp)."""
    B, H, T, D = query.shape
    T = round_up(T, 128)
    return 4 * B * H * T, 4 * B * H * T * round_up(D, 32)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class Recorder(TorchDispatchMode):
    """Records `events`: a storage's size in bytes when it is made, -k when the k-th one dies; and
    `work`: what is done from each mark() to the next, by kind, precision and alignment."""

    def __init__(self, config):
        super().__init__()
        self.config, self.events, self.storages, self.live = config, [], 0, {}
        self.work, self.updating = [{}], []  # optimizers that are at it; one may use another

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if needs_storage(func, args, kwargs):
            return self.without_storage(func, args, kwargs)
        buffers = []
        if func is aten._scaled_dot_product_flash_attention_backward.default:
            buffers = [self.add(size) for size in flash_buffers(args[1])]
        result = func(*args, **kwargs)
        self.events += [-number for number in buffers]
        for tensor in filter(is_meta, tree_iter(result)):
            self.record(tensor)
        if kernel := kernel_of(func, args, kwargs, result, is_meta):
            self.add_kernel(func._schema.name.partition("::")[2], kernel)
        return result

    def without_storage(self, func, args, kwargs):
        """Returns what an operator that needs_storage() would, and counts its work if it updates
        weights."""
        if func is aten._fused_adamw_.default:
            size = sum(
                2 * bytes_of(weight, *averages) + bytes_of(gradient)
                for weight, gradient, *averages in zip(*args[:4], strict=True)
            )
            self.add_work("optimizer", "", True, 1, 0, size)
            return None
        if func is aten._amp_update_scale_.default:
            return args[0]
        if func is aten._local_scalar_dense.default:
            return 0.0
        return torch.zeros_like(args[0], device="cpu", dtype=kwargs.get("dtype"))

    def add_kernel(self, name: str, kernel: Kernel) -> None:
        """Counts an operator's kernel, whose matmuls may be rounded to TF32."""
        precision, is_aligned, flops, size, tensors = kernel
        if precision == "float32" and torch.get_float32_matmul_precision() != "highest":
            precision = "TF32"
        self.add_work(self.kind_of(name, tensors, flops), precision, is_aligned, 1, flops, size)

    def compiled_kernel(self, updated: int, *args) -> None:
        """Counts a kernel that the compiler has made: it reads or writes each of its tensors once,
        or both of the first `updated`."""
        tensors = [x for x in args if is_meta(x)]
        size = bytes_of(*tensors, *tensors[:updated])
        self.add_work(self.kind_of("", tensors, 0), "", True, 1, 0, size)

    def kind_of(self, name: str, tensors: list, flops: int) -> str:
        """Returns one of speed.KINDS: products are the matmuls of linear layers, head is the one
        that makes logits."""
        V = self.config.vocab_size
        if self.updating:
            return "optimizer"
        if flops and any(V in x.shape for x in tensors):
            return "head"
        if any(x.shape[-1:] == (V,) for x in tensors):  # logits; the weights are (V, C)
            return "loss"
        if "attention" in name or any(self.is_scores(x, name) for x in tensors):
            return "attention"
        return "products" if flops else "rest"

    def is_scores(self, tensor: torch.Tensor, name: str) -> bool:
        """Returns whether it is attention's scores, (B, H, T, T), or in bmm (B * H, T, T)."""
        T = self.config.context_length
        return tensor.shape[-2:] == (T, T) and (tensor.dim() == 4 or "bmm" in name)

    def add_work(self, *work) -> None:
        group = work[:3]
        before = self.work[-1].get(group, Work(*group))
        self.work[-1][group] = Work(*group, *map(add, before[3:], work[3:]))

    def mark(self) -> float:
        """Begins the next part of `work`; in place of the script's clock."""
        self.work.append({})
        return 0.0

    def add(self, size: int) -> int:
        self.events.append(size)
        self.storages += 1
        return self.storages

    def record(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), key_of(tensor)
        if key in self.live or not storage.nbytes():
            return
        number = self.add(storage.nbytes())

        def died(_):
            del self.live[key]
            self.events.append(-number)

        self.live[key] = weakref.ref(storage, died)


def configure(module, options: list[str], batch: int):
    """Returns a script's Config for STEPS steps with an evaluation of one batch of each text after
    the first and the last step; where the script may choose its type, that is bfloat16."""
    config = module.configure(["--device", "cpu", *options, "--batch-size", str(batch)])
    if getattr(config, "dtype", None) == "auto":
        config.dtype, config.dtype_reason = "bfloat16", "predicted"
    config.max_steps, config.max_tokens, config.eval_freq = STEPS, None, 99
    config.target_loss = -1
    config.eval_windows = 8 * getattr(module, "WORLD_SIZE", 1)  # of which each rank has its share
    config.device = torch.device("meta")
    return config


def trace(module, options: list[str], batch: int) -> dict:
    """Traces training at a batch size, by a script's own train(), without the epoch's sample, which
    takes less memory than an evaluation. Returns the `events` and the work of a `step` as Recorder
    has them, and the `tokens` of a step on one GPU. All layers are traced: the compiler takes one
    of four orders of a whole graph's kernels, by the memory that each would take."""
    config, events = configure(module, options, batch), []
    tokens = config.batch_size * config.context_length
    if tokens > MOST_TOKENS:
        raise ValueError(f"a step of {tokens:,} tokens is too large: at most {MOST_TOKENS:,}")
    module.can_compile = lambda *_: True  # the script would try it on this computer
    with torch.device("meta"):
        model = module.GPTModel(config)
    # Zeros for more steps than are made, which take no memory.
    windows = module.TokenWindows(
        np.broadcast_to(np.uint16(0), 2 * STEPS * WORLD_SIZE * tokens + 1), config.context_length
    )
    data = module.Data(meta={}, train=windows, val=windows, tokenizer=None)

    def start(model, *_):  # it was moved to the device; no operator makes cuBLAS's workspace
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.record(tensor)
        recorder.add(WORKSPACE)

    run = SimpleNamespace(
        start=start, log=lambda *_: None, epoch=lambda *_: events.extend(recorder.events)
    )
    with (
        Recorder(config) as recorder,
        register_optimizer_step_pre_hook(lambda one, *_: recorder.updating.append(one)),
        register_optimizer_step_post_hook(lambda *_: recorder.updating.pop()),
    ):
        module.train(model, data, config, run, lambda _: recorder.mark())
    if len(recorder.work) != STEPS + 4:  # marks are before, after each step, and at log lines
        raise NotImplementedError("its loop takes the time in another way than 00's")
    return dict(
        events=events,
        step=[*recorder.work[-3].values()],
        tokens=tokens,
        flops_per_token=module.count_parameters(model, config)["flops_per_token"],
    )


def answer(script: str, options: list[str], batch: int) -> dict:
    """Returns the `trace` of a file, or the `error` for which there is none."""
    if not torch.__version__.startswith(f"{PYTORCH}."):
        return dict(
            error=f"predictions can be made again with PyTorch {PYTORCH}, not with"
            f" {torch.__version__}; stored ones work with any"
        )
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
