"""Notes every operator of a step, in the process that trains: see Watch.note."""

import contextlib
import importlib
import itertools
import os
import runpy
import sys
import time
import traceback
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SCALARS = "dim", "exponent", "is_causal", "causal", "non_blocking"  # arguments
HERE = os.path.dirname(os.path.abspath(__file__))
TORCH = os.path.dirname(torch.__file__)
LIBRARIES = os.path.join("site-packages", "")
COMPILER = os.path.join(TORCH, "_dynamo", "eval_frame.py")
NOT_OWN = os.path.join(HERE, ""), os.path.join(TORCH, ""), "<"  # where code isn't the script's
counting = runpy.run_path(os.path.join(HERE, "..", "counting.py"))


class Watch(TorchDispatchMode):
    """Notes operators while it is `on`, and knows tensors by the number of their storage."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.on, self.updates = False, 0  # updates that run, one within another
        self.live, self.older, self.count = {}, {}, itertools.count()
        self.ops, self.syncs, self.nodes = [], [], {}

    def __enter__(self):
        if hasattr(torch.compiler, "set_stance"):
            torch.compiler.set_stance("force_eager")
        else:  # before PyTorch 2.6
            importlib.import_module("torch._dynamo.eval_frame").set_eval_frame = lambda _: None
        torch.compiler.is_compiling = is_compiling
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        plain = torch._C._disabled_torch_dispatch_impl
        if any(getattr(type, "__torch_dispatch__", plain) is not plain for type in types):
            return NotImplemented  # a subclass, such as DTensor, first says what it does
        if not self.on:
            return func(*args, **kwargs)
        began = now()
        result = func(*args, **kwargs)
        self.note(func, args, kwargs, result, now() - began)
        return result

    def note(self, func, args, kwargs, result, seconds: float) -> None:
        """Adds the fields of a gpt_speed.audit.step.Op."""
        schema = getattr(func, "_schema", None)
        names = [part.name for part in schema.arguments] if schema else map(str, range(len(args)))
        arguments = dict(zip(names, args, strict=False)) | kwargs
        scalars = {
            name: arguments[name]
            for name in SCALARS
            if name in arguments and not is_tensor(arguments[name])
        }
        flops, kernel = 0, None
        with contextlib.suppress(Exception):  # a formula that doesn't know these arguments
            flops = counting["flops_of"](func, args, kwargs, result)
            kernel = counting["kernel_of"](func, args, kwargs, result, is_tensor)
        name = str(getattr(func, "_overloadpacket", func)).removeprefix("aten.")
        if name == "nll_loss_forward" and arguments.get("reduction") == 1:  # a mean
            scalars["tokens"] = float(result[1])
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if source.device.type != result.device.type:
                scalars |= dict(
                    source=source.device.type, pinned=source.is_cpu and source.is_pinned()
                )
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
        origin, phase, compiled = None, "forward", is_compiled(frames)
        if self.updates and not torch.is_grad_enabled():  # else a closure computes the loss
            phase = "optimizer"
        if torch._C._current_graph_task_id() == -1:
            self.nodes.setdefault(torch.autograd._get_sequence_nr() - 1, len(self.ops))
        else:
            phase, node = "backward", torch._C._current_autograd_node()
            origin = self.nodes.get(node._sequence_nr()) if node else None
            compiled |= origin is not None and self.ops[origin]["compiled"]
        place = function = ""
        own = [frame for frame in frames if is_own(frame)]
        if phase == "optimizer":  # by Accelerate, maybe
            own = [frame for frame in own if LIBRARIES not in frame.f_code.co_filename] or own
        if caller := next(iter(own), None):
            file = caller.f_code.co_filename
            place = f"{os.path.basename(file)}:{caller.f_lineno}"
            function = f"{file}:{caller.f_code.co_firstlineno}"
        devices = [tensor.device.type for tensor in tensors_in((args, result))] or [""]
        self.ops.append(
            dict(
                name=name,
                inputs=self.inputs(arguments),
                outputs=[self.describe(tensor) for tensor in tensors_in(result)],
                phase=phase,
                origin=origin,
                compiled=compiled,
                device=devices[0],
                flops=flops,
                kernel=kernel and kernel[:4],
                scalars=scalars,
                seconds=seconds,
                call=hash(tuple((frame.f_code, frame.f_lasti) for frame in frames)),
                place=place,
                function=function,
            )
        )

    def note_backward(self, tensors) -> None:
        """Adds an Op that stands for the begin of a backward pass from the tensors."""
        self.on = False  # what describing them computes is no part of the step
        inputs = self.inputs(dict(tensors=tensors))
        self.ops.append(dict(name="backward", phase="backward", inputs=inputs))
        self.on = True

    def inputs(self, arguments: dict) -> list[list]:
        return [
            [*self.describe(tensor, True), name]
            for name, value in arguments.items()
            for tensor in tensors_in(value)
        ]

    def describe(self, tensor, is_input: bool = False) -> list:
        """Returns [number of storage, shape, type]; keeps more of inputs from before."""
        shape, type = [*tensor.shape], str(tensor.dtype).removeprefix("torch.")
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, or a tensor without storage
            return [-1, shape, type]
        key = storage._cdata
        if key not in self.live:
            number = next(self.count)
            self.live[key] = number, weakref.ref(storage, lambda _: self.live.pop(key, None))
            if is_input:
                base = tensor if tensor._base is None else tensor._base
                is_parameter = base.is_leaf and (
                    base.requires_grad or isinstance(base, torch.nn.Parameter)
                )
                self.older[number] = dict(
                    parameter=is_parameter,
                    shape=[*base.shape],
                    triangle=not is_parameter and is_triangle(tensor),
                )
        return [self.live[key][0], shape, type]


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def tensors_in(value) -> list:
    return [leaf for leaf in tree_leaves(value) if is_tensor(leaf)]


def is_triangle(tensor) -> bool:
    """Tells whether it holds one value above the diagonal and another one elsewhere."""
    size = tensor.shape[-1] if tensor.dim() >= 2 else 0
    if size < 4 or tensor.shape[-2] != size or tensor.numel() > 2**27:
        return False
    with torch.no_grad(), contextlib.suppress(RuntimeError, NotImplementedError):
        matrix = tensor.detach().reshape(-1, size, size)[0]
        above, below = matrix[0, -1], matrix[0, 0]
        triangle = torch.where(torch.ones_like(matrix, dtype=torch.bool).triu(1), above, below)
        return bool(above != below) and torch.equal(matrix, triangle)
    return False


def is_own(frame) -> bool:
    """Tells whether it is neither PyTorch's nor the audit's."""
    return not frame.f_code.co_filename.startswith(NOT_OWN)


def is_compiled(frames: list) -> bool:
    """Tells whether torch.compile, which only runs functions here, runs the innermost frame."""
    return any(
        frame.f_code.co_filename == COMPILER
        and type(frame.f_locals.get("self")).__name__ == "OptimizeContext"
        for frame in frames
    )


@torch.jit.ignore
def is_compiling() -> bool:
    """Stands in for torch.compiler.is_compiling(), by which scripts may try a compiler."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    return is_own(frames[0]) and is_compiled(frames)


def now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
