"""What a script does on a GPU that isn't there: its own training steps, run on tensors without
storage (device "meta").

    python -m bench.predict.child '[{"script": "00_orig.py", "options": [], "batch": 8}, ...]'

prints a line, the list of {"trace": what trace() returns} or {"error": "a line", "is_untraceable":
whether no other start could trace it, either}.
"""

import contextlib
import gc
import io
import json
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bench.catalogue import GPUS
from bench.predict import meta_patches
from bench.predict.compiled import compile_only_models
from bench.predict.meta_patches import aten, is_meta, storage_id
from bench.processes import error_line
from gpt_speed.counting import Kernel, bytes_of, kernel_of
from gpt_speed.memory import WORKSPACE, Event, Timeline, flash_buffers
from gpt_speed.script import load_script
from gpt_speed.speed import Work

STEPS = 3
# What a script does from each time that it looks at its clock to the next. Only the last step is
# like all later ones: in the first one the optimizer makes its states.
LAST_STEP = "last step"
PARTS = (
    "before training",
    "first step",
    "first evaluation",
    "second step",
    LAST_STEP,
    "last evaluation",
    "after training",
)
MOST_TOKENS = 2**22  # of a step: a larger one takes minutes, since its windows are made


def fused_adamw_work(weights, gradients, averages, squares) -> Work:
    """Returns the work of an update by fused AdamW: it reads and writes the weights and both
    averages, and reads the gradients."""
    size = 2 * bytes_of(*weights, *averages, *squares) + bytes_of(*gradients)
    return Work("optimizer", "", True, kernels=1, size=size)


class Recorder(TorchDispatchMode):
    """Records on a `timeline` which storages are made and die; and `work`: what is done in each of
    PARTS, by kind, precision and alignment."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.timeline = Timeline()
        self.living: dict[int, weakref.ref] = {}  # the storages on it, by storage_id()
        self.work: list[dict[tuple, Work]] = [{}]
        self.updates = 0  # optimizers that are updating weights; one may use another

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        stand_in = self.stand_in_for(func, args, kwargs)
        if stand_in:
            return stand_in()
        buffers = []
        if func is aten._scaled_dot_product_flash_attention_backward.default:
            _, query, *_ = args
            buffers = [self.timeline.make(size) for size in flash_buffers(query.shape)]
        result = func(*args, **kwargs)
        for number in buffers:
            self.timeline.release(number)
        for tensor in filter(is_meta, tree_iter(result)):
            self.add_tensor(tensor)
        kernel = kernel_of(func, args, kwargs, result, is_meta)
        if kernel:
            self.add_kernel(func._schema.name.partition("::")[2], kernel)
        return result

    def stand_in_for(self, func, args: tuple, kwargs: dict) -> Callable | None:
        """Returns what is called in place of an operator that doesn't run on tensors without
        storage; None for one that does."""
        if func is aten._local_scalar_dense.default and is_meta(args[0]):  # Tensor.item
            return float  # which returns 0.0
        if func is aten._to_copy.default and str(kwargs.get("device")) == "cpu":
            dtype = kwargs.get("dtype")
            return partial(torch.zeros_like, args[0], device="cpu", dtype=dtype)
        if func is aten._amp_update_scale_.default:
            return partial(itemgetter(0), args)
        if func is aten._fused_adamw_.default:
            return partial(self.add_work, fused_adamw_work(*args[:4]))
        return None

    # ---- Memory

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Records a tensor's storage, if it is new, and later its end."""
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        if key in self.living or not storage.nbytes():
            return
        number = self.timeline.make(storage.nbytes())

        def died(_):
            del self.living[key]
            self.timeline.release(number)

        self.living[key] = weakref.ref(storage, died)

    # ---- Time

    def now(self, _device) -> float:
        """Replaces the script's clock: begins the next of PARTS."""
        self.work.append({})
        return 0.0

    def begin_update(self, *_) -> None:
        """Is called before each step of an optimizer."""
        self.updates += 1

    def end_update(self, *_) -> None:
        """Is called after each step of an optimizer."""
        self.updates -= 1

    @contextlib.contextmanager
    def watching_updates(self) -> Iterator[None]:
        """Records what is done until its end, and when optimizers do it."""
        with (
            self,
            register_optimizer_step_pre_hook(self.begin_update),
            register_optimizer_step_post_hook(self.end_update),
        ):
            yield

    def work_of(self, part: str) -> dict[tuple, Work]:
        """Returns what was done in one of PARTS. Raises NotImplementedError where the script didn't
        look at its clock as often."""
        if len(self.work) != len(PARTS):
            raise NotImplementedError("its loop takes the time in another way than 00's")
        return self.work[PARTS.index(part)]

    def add_kernel(self, name: str, kernel: Kernel) -> None:
        """Counts an operator's kernel, whose matmuls may be rounded to TF32."""
        precision = kernel.precision
        if precision == "float32" and torch.get_float32_matmul_precision() != "highest":
            precision = "TF32"
        kind = self.kind_of(name, kernel.tensors, is_matmul=kernel.flops > 0)
        self.add_work(Work(kind, precision, kernel.is_aligned, 1, kernel.flops, kernel.size))

    def add_compiled_kernel(self, updated: int, *args) -> None:
        """Counts a kernel that the compiler has made: it reads or writes each of its tensors once,
        or both of the first `updated`."""
        tensors = [x for x in args if is_meta(x)]
        size = bytes_of(*tensors, *tensors[:updated])
        kind = self.kind_of("", tensors, is_matmul=False)
        self.add_work(Work(kind, "", True, kernels=1, size=size))

    def add_work(self, work: Work) -> None:
        """Adds to the work of the same kind, precision and alignment in this part."""
        total = self.work[-1].get(work.group, Work(*work.group))
        self.work[-1][work.group] = total._replace(
            kernels=total.kernels + work.kernels,
            flops=total.flops + work.flops,
            size=total.size + work.size,
        )

    def kind_of(self, name: str, tensors: list[torch.Tensor], is_matmul: bool) -> str:
        """Returns the one of speed.KINDS that a kernel belongs to, by its operator's name and the
        shapes of its tensors: "head" is the matmul with the vocabulary, "products" are those of the
        other linear layers."""
        if self.updates:
            return "optimizer"
        if is_matmul and any(map(self.has_vocabulary, tensors)):
            return "head"
        if any(map(self.is_logits, tensors)):
            return "loss"
        if self.is_attention(name, tensors):
            return "attention"
        if is_matmul:
            return "products"
        return "rest"

    def has_vocabulary(self, tensor: torch.Tensor) -> bool:
        return self.config.vocab_size in tensor.shape

    def is_logits(self, tensor: torch.Tensor) -> bool:
        """Returns whether it is (..., V); the embedding's and the head's weights are (V, C)."""
        return tensor.shape[-1:] == (self.config.vocab_size,)

    def is_attention(self, name: str, tensors: list[torch.Tensor]) -> bool:
        return "attention" in name or any(self.is_scores(tensor, name) for tensor in tensors)

    def is_scores(self, tensor: torch.Tensor, name: str) -> bool:
        """Returns whether it is attention's scores, (B, H, T, T), or in bmm (B * H, T, T)."""
        T = self.config.context_length
        return tensor.shape[-2:] == (T, T) and (tensor.dim() == 4 or "bmm" in name)


class TracedRun:
    """Replaces a script's Run: nothing is reported, but the `events` of memory are kept as they are
    at the end of the epoch."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.events: list[Event] = []

    def start(self, model, *_) -> None:
        """Records what no operator makes: the model, which was moved to the device, and cuBLAS's
        workspace."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.recorder.add_tensor(tensor)
        self.recorder.timeline.make(WORKSPACE)

    def log(self, *_) -> None:
        """Reports nothing."""

    def epoch(self, *_) -> None:
        self.events = [*self.recorder.timeline.events]


def configure(module, options: list[str], batch: int):
    """Returns a script's Config for what is traced: STEPS steps, and after the first and the last
    one an evaluation of one batch of each text; where the script may choose its type, in bfloat16.
    Raises ValueError for a step that is too large."""
    given = module.read_options(["--device", "cpu", *options, "--batch-size", str(batch)])
    config = module.configure(given)
    tokens = tokens_of_step(config)
    if tokens > MOST_TOKENS:
        raise ValueError(f"a step of {tokens:,} tokens is too large: at most {MOST_TOKENS:,}")
    config.device = torch.device("meta")
    config.max_steps = STEPS
    config.max_tokens = None
    config.target_loss = -1  # is never reached
    config.eval_freq = 99  # more than STEPS
    config.eval_windows = 8 * getattr(config, "world_size", 1)  # of which each rank has its share
    if getattr(config, "dtype", None) == "auto":
        config.dtype, config.dtype_reason = "bfloat16", "predicted"
    return config


def tokens_of_step(config) -> int:
    """Returns the tokens of a step on one GPU."""
    return config.batch_size * config.context_length


def make_data(module, config):
    """Returns a script's Data: zeros for more steps than are made, which take no memory."""
    tokens = 2 * STEPS * GPUS * tokens_of_step(config)
    windows = module.TokenWindows(np.broadcast_to(np.uint16(0), tokens + 1), config.context_length)
    return module.Data(meta={}, train=windows, val=windows, tokenizer=None)


def no_sample(*_) -> str:
    """Stands in for a script's sample(), which takes less memory than an evaluation."""
    return ""


def trace(module, options: list[str], batch: int) -> dict:
    """Traces training at a batch size, by a script's own train(). Returns the `events` of memory
    and the work of a `step` as Recorder has them, and the `tokens` of a step on one GPU. All layers
    are traced: the compiler takes one of four orders of a whole graph's kernels, by the memory that
    each would take. Raises ValueError for a step that is too large, NotImplementedError."""
    config = configure(module, options, batch)
    with torch.device("meta"):
        model = module.GPTModel(config)
    recorder = Recorder(config)
    module.now = recorder.now
    module.sample = no_sample
    run = TracedRun(recorder)
    with recorder.watching_updates():
        module.train(model, make_data(module, config), config, run)
    return dict(
        events=run.events,
        step=[*recorder.work_of(LAST_STEP).values()],
        tokens=tokens_of_step(config),
        flops_per_token=module.count_parameters_and_flops(model, config)["flops_per_token"],
    )


def answer(script: str, options: list[str], batch: int) -> dict:
    """Returns the `trace` of a file, or why there is none, as refusal()."""
    errors = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())),
            contextlib.redirect_stderr(errors),
            meta_patches.as_on_cuda(compile_only_models),  # before the script imports what it names
        ):
            return dict(trace=trace(load_script(Path(script)), options, batch))
    except SystemExit:  # an option that the script doesn't take
        return refusal(error_line(errors.getvalue()))
    except Exception as error:
        error = getattr(error, "inner_exception", error)  # of the compiler's
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return refusal(lines[0], isinstance(error, NotImplementedError))


def refusal(error: str, is_untraceable: bool = False) -> dict:
    return dict(error=error, is_untraceable=is_untraceable)


def main() -> None:
    """Answers the requests on the command line."""
    meta_patches.begin_ranks()
    warnings.simplefilter("ignore")
    gc.freeze()
    print(json.dumps([answer(**request) for request in json.loads(sys.argv[1])]))
