"""Notes every operator of a step, in the process that trains: see Watch.note."""

import contextlib
import itertools
import os
import runpy
import sys
import sysconfig
import time
import traceback
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PLACE = "file", "line", "function"
ENGINE = "_engine_run_backward"  # PyTorch's function that starts a backward pass
HERE = os.path.dirname(os.path.abspath(__file__))
SITE = os.path.dirname(os.path.dirname(torch.__file__))
OTHERS = *(os.path.join(each, "") for each in (
    HERE, os.path.join(SITE, "torch"), os.path.join(SITE, "numpy"))), "<"
COMPILER = os.path.join(SITE, "torch", "_dynamo", "eval_frame.py")
PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
count = runpy.run_path(os.path.join(HERE, "..", "predict", "counting.py"))


class Watch(TorchDispatchMode):
    """Notes the operators while it is `on`: see `note`. A tensor is known by the number of its
    storage, which its views share and which no later storage gets."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.on, self.phase = False, ["forward"]
        self.live, self.older, self.count = {}, {}, itertools.count()
        self.ops, self.roots, self.syncs, self.nodes = [], [], [], {}

    def __enter__(self):
        torch.compiler.set_stance("force_eager")
        torch.compiler.is_compiling = is_compiling
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=leave_mode)
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        plain = torch._C._disabled_torch_dispatch_impl
        if any(getattr(each, "__torch_dispatch__", plain) is not plain for each in types):
            return NotImplemented  # a subclass, such as DTensor, tells first what it does
        if not self.on:
            return func(*args, **kwargs)
        began = now()
        result = func(*args, **kwargs)
        self.note(func, args, kwargs, result, now() - began)
        return result

    def note(self, func, args, kwargs, result, seconds: float) -> None:
        """Adds what bench.audit.step.Op has."""
        schema = getattr(func, "_schema", None)
        names = [each.name for each in schema.arguments] if schema else map(str, range(len(args)))
        given = dict(zip(names, args, strict=False)) | kwargs
        inputs = [[*self.describe(each, True), argument] for argument, value in given.items()
                  for each in tensors_in(value)]
        outputs = [self.describe(each) for each in tensors_in(result)]
        others = {argument: value for argument, value in given.items()
                  if isinstance(value, bool | int | float) or isinstance(value, list | tuple)
                  and all(isinstance(each, int) for each in value)}
        flops, kernel = 0, None
        with contextlib.suppress(Exception):  # a formula that doesn't know these arguments
            flops = count["flops_of"](func, args, kwargs, result)
            kernel = count["kernel_of"](func, args, kwargs, result, is_tensor)
        name = str(getattr(func, "_overloadpacket", func)).removeprefix("aten.")
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
        called = [frame.f_code.co_name for frame in frames]
        origin, phase, compiled = None, self.phase[-1], is_compiled(frames)
        place = place_of(frames) or ("", 0, 0)
        if torch._C._current_graph_task_id() == -1:
            self.nodes.setdefault(torch.autograd._get_sequence_nr() - 1, len(self.ops))
        else:
            phase, node = "backward", torch._C._current_autograd_node()
            origin = self.nodes.get(node._sequence_nr()) if node else None
        if origin is not None:  # a recomputation, or a backward pass in Python, has frames
            forward = self.ops[origin]
            compiled |= forward["compiled"]
            inner = called.index(ENGINE) if ENGINE in called else 0
            place = place_of(frames[:inner]) or [forward[each] for each in PLACE]
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if source.device.type != result.device.type:
                others |= dict(source=source.device.type,
                               pinned=source.is_cpu and source.is_pinned())
        devices = [each.device.type for each in tensors_in((args, result))]
        self.ops.append(dict(
            name=name, inputs=inputs, outputs=outputs, phase=phase, origin=origin,
            compiled=compiled, device=devices[0] if devices else "", flops=flops,
            kernel=kernel and kernel[:4], others=others, seconds=seconds,
            call=hash(tuple((frame.f_code, frame.f_lasti) for frame in frames)),
            **dict(zip(PLACE, place, strict=True))))

    def describe(self, tensor, is_input: bool = False) -> list:
        """[number of its storage, shape, type]. Of what is older than the step more is kept."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, or a tensor without storage
            return [-1, [*tensor.shape], type_of(tensor)]
        key = storage._cdata
        if key not in self.live:
            number = next(self.count)
            self.live[key] = number, weakref.ref(storage, lambda _: self.live.pop(key, None))
            if is_input:
                base = tensor if tensor._base is None else tensor._base
                own = base.is_leaf and (
                    base.requires_grad or isinstance(base, torch.nn.Parameter))
                self.older[number] = dict(
                    parameter=own, shape=[*base.shape], type=type_of(tensor),
                    triangle=not own and is_triangle(tensor))
        return [self.live[key][0], [*tensor.shape], type_of(tensor)]

    def start(self, parameters) -> None:
        for parameter in parameters:  # before a tensor that shares its storage is seen
            self.describe(parameter, True)
        self.on = True

    def facts(self) -> dict:
        """Returns what was noted, as JSON takes it."""
        return dict(ops=self.ops, roots=self.roots, older=[*self.older.items()], syncs=self.syncs)


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def tensors_in(value) -> list:
    return [each for each in tree_leaves(value) if is_tensor(each)]


def type_of(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_triangle(tensor) -> bool:
    """Whether it holds one value on one side of the diagonal, and another one on the other."""
    size = tensor.shape[-1] if tensor.dim() >= 2 else 0
    if size < 4 or tensor.shape[-2] != size or tensor.numel() > 2**27 or tensor.is_sparse:
        return False
    with torch.no_grad(), contextlib.suppress(RuntimeError, NotImplementedError):
        matrix = tensor.detach().reshape(-1, size, size)[0]
        above, below = matrix[0, -1], matrix[0, 0]
        triangle = torch.where(torch.ones_like(matrix, dtype=torch.bool).triu(1), above, below)
        return bool(above != below) and torch.equal(matrix, triangle)
    return False


def place_of(frames: list) -> tuple | None:
    """PLACE of the innermost frame that is the script's."""
    return next(((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_firstlineno)
                 for frame in frames if is_own(frame)), None)


def is_own(frame) -> bool:
    """Whether it is neither PyTorch's, NumPy's nor Python's."""
    file = frame.f_code.co_filename
    return not file.startswith(OTHERS) and (
        not file.startswith(LIBRARY) or file.startswith(PACKAGES))


def is_compiled(frames: list) -> bool:
    """Whether torch.compile, which is told to let all run as it is, would compile what runs: its
    wrapper is a frame. That of torch.compiler.disable counts around the script's functions."""
    for inner, frame in itertools.pairwise(frames):
        if frame.f_code.co_filename == COMPILER:
            wrapper = type(frame.f_locals.get("self")).__name__
            if wrapper == "OptimizeContext" or wrapper == "DisableContext" and is_own(inner):
                return wrapper == "OptimizeContext"
    return False


def is_compiling() -> bool:
    """Stands in for torch.compiler.is_compiling(), by which a script may try the compiler: answers
    it as if what torch.compile wraps were compiled."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    return is_own(frames[0]) and is_compiled(frames)


def now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def leave_mode() -> None:
    """In processes of a DataLoader, which inherit the mode."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch._C._pop_torch_dispatch_stack(None)
