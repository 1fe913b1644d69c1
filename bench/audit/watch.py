"""Notes every operator of a step, in the process that trains: see Watch.note."""

import contextlib
import inspect
import os
import runpy
import sys
import sysconfig
import time
import weakref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NATIVE = "rms_norm", "scaled_dot_product_attention"  # functions whose operators may look like ours
TORCH = os.path.dirname(torch.__file__) + os.sep
NUMPY = os.path.join(os.path.dirname(os.path.dirname(TORCH)), "numpy") + os.sep
HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
LIBRARY = sysconfig.get_path("stdlib") + os.sep
count = runpy.run_path(os.path.join(HERE, "..", "predict", "counting.py"))


class Watch(TorchDispatchMode):
    """Notes the operators while it is `on`: see `note`. A tensor is known by the number of its
    storage, which its views share and which no later storage gets."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.on, self.compiled, self.phase, self.within = False, 0, ["forward"], []
        self.numbers, self.references, self.older, self.count = {}, {}, {}, 0
        self.ops, self.roots, self.events, self.nodes = [], [], [], {}
        self.storages = []  # as bench.predict.trace.Notes.events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        plain = torch._C._disabled_torch_dispatch_impl
        if any(getattr(each, "__torch_dispatch__", plain) is not plain for each in types):
            return NotImplemented  # a subclass, such as DTensor, tells first what it does
        if not self.on:
            return func(*args, **kwargs)
        before = self.moment()
        result = func(*args, **kwargs)
        self.note(func, args, kwargs, result, (before, self.moment()))
        return result

    @staticmethod
    def moment():
        """On a GPU an event, so that nothing waits."""
        if not torch.cuda.is_initialized():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, func, args, kwargs, result, moments) -> None:
        """Adds [name, inputs, outputs, phase, operator of the forward pass, place, compiled, FLOPs,
        type of the products, other arguments, moments]; an input is [argument, storage, shape,
        type], an output the same without the argument."""
        schema = getattr(func, "_schema", None)
        names = [each.name for each in schema.arguments] if schema else []
        given = dict(zip(names or map(str, range(len(args))), args, strict=False)) | kwargs
        inputs, others = [], {}
        for name, value in given.items():
            for leaf in tree_leaves(value):
                if is_tensor(leaf):
                    inputs.append([name, *self.describe(leaf, True)])
            if isinstance(value, bool | int | float) or isinstance(value, list | tuple) and all(
                    isinstance(each, int) for each in value):
                others[name] = value
        outputs = [self.describe(each, False) for each in filter(is_tensor, tree_leaves(result))]
        others["device"] = next((str(each.device.type) for each in tree_leaves((args, result))
                                 if is_tensor(each)), "")
        op, flops = getattr(func, "_overloadpacket", func), 0
        with contextlib.suppress(Exception):  # a formula that doesn't know these arguments
            flops = count["flops_of"](func, args, kwargs, result)
            kernel = count["kernel_of"](func, args, kwargs, result, is_tensor)
            others["kernel"] = kernel and kernel[:4]
        frames = self.frames()
        place, name = place_of(frames), str(op).removeprefix("aten.")
        phase, origin, compiled = self.phase[-1], None, self.compiled > 0
        if torch._C._current_graph_task_id() != -1:
            phase, node = "backward", torch._C._current_autograd_node()
            origin = self.nodes.get(node._sequence_nr()) if node else None
            if origin is not None:  # a recomputation, or a backward pass in Python, has frames
                compiled |= self.ops[origin][6]
                inner = [each for each in frames[: index_of_engine(frames)] if not is_torch(each)]
                place = place if inner else self.ops[origin][5]
        else:
            self.nodes.setdefault(torch.autograd._get_sequence_nr() - 1, len(self.ops))
        if name.endswith("zero_") and any(frame[2] == "zero_grad" for frame in frames):
            others["zero_grad"] = True
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if source.device.type != result.device.type:
                others |= dict(source=source.device.type,
                               pinned=source.is_cpu and source.is_pinned())
        if self.within:
            others["within"] = self.within[0]
        self.ops.append([name, inputs, outputs, phase, origin, place, compiled, flops,
                         inputs[0][3] if flops and inputs else "", others, moments])

    def describe(self, tensor, is_input: bool) -> list:
        """[number of its storage, shape, type]. Of what is older than the step more is kept."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, or a tensor without storage
            return [-1, [*tensor.shape], type_of(tensor)]
        key = storage._cdata
        if key not in self.numbers:
            self.numbers[key] = self.count
            self.storages.append(storage.nbytes())

            def died(_, number=self.count):
                self.numbers.pop(key, None)
                self.storages.append(-1 - number)

            self.references[key] = weakref.ref(storage, died)
            if is_input:
                base = tensor if tensor._base is None else tensor._base
                own = base.is_leaf and (
                    base.requires_grad or isinstance(base, torch.nn.Parameter))
                self.older[self.count] = dict(parameter=own, shape=[*base.shape],
                                              triangle=not own and is_triangle(tensor))
            self.count += 1
        return [self.numbers[key], [*tensor.shape], type_of(tensor)]

    @staticmethod
    def frames() -> list[tuple[str, int, str, int]]:
        """(file, line, function, its first line), the innermost first."""
        found, frame = [], sys._getframe(2)
        while frame:
            code = frame.f_code
            found.append((code.co_filename, frame.f_lineno, code.co_name, code.co_firstlineno))
            frame = frame.f_back
        return found

    def start(self, parameters) -> None:
        for each in parameters:
            self.describe(each, True)
            if each.grad is not None:
                self.describe(each.grad, True)
        self.on, self.before = True, time.perf_counter()

    def told(self) -> dict:
        """What was noted, as JSON takes it; moments become seconds."""
        if self.ops and not isinstance(self.ops[-1][10][0], float):
            torch.cuda.synchronize()
        for op in self.ops:
            start, end = op[10]
            op[10] = end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
        return dict(ops=self.ops, roots=self.roots, older=self.older, events=self.events,
                    storages=self.storages, seconds=time.perf_counter() - self.before)


class Names(TorchFunctionMode):
    """Tells which of NATIVE an operator is part of."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name not in NATIVE:
            return func(*args, **(kwargs or {}))
        self.watch.within.append(name)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.watch.within.pop()


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def type_of(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_triangle(tensor) -> bool:
    """Whether it holds one value on one side of the diagonal, and another one on the other."""
    size = tensor.shape[-1] if tensor.dim() >= 2 else 0
    if size < 4 or tensor.shape[-2] != size or tensor.numel() > 2**27 or tensor.is_sparse:
        return False
    with torch.no_grad(), contextlib.suppress(RuntimeError, NotImplementedError):
        matrix = tensor.detach().reshape(-1, size, size)[0]
        above = torch.ones(size, size, dtype=torch.bool, device=matrix.device).triu(1)
        one, other = matrix[above], matrix[~above]
        return bool((one == one[0]).all() and (other == other[0]).all() and one[0] != other[0])
    return False


def is_torch(frame) -> bool:
    return frame[0].startswith((TORCH, NUMPY, HERE, "<")) or (
        frame[0].startswith(LIBRARY) and not frame[0].startswith(PACKAGES))


def index_of_engine(frames) -> int:
    return next((number for number, frame in enumerate(frames)
                 if frame[2] == "_engine_run_backward"), 0)


def place_of(frames) -> list:
    """[file, line, first line of the function] of the innermost frame that is neither PyTorch's,
    NumPy's nor Python's own."""
    return next(([frame[0], frame[1], frame[3]] for frame in frames if not is_torch(frame)),
                ["", 0, 0])


def watch_compiled(watch: Watch) -> None:
    """What torch.compile would compile runs as it is, and is told."""
    from torch._dynamo.eval_frame import _TorchDynamoContext

    def counted(inner, depth: int):
        if not inspect.isroutine(inner):
            return inner

        def own(*args, **kwargs):
            outer, watch.compiled = watch.compiled, depth
            try:
                return inner(*args, **kwargs)
            finally:
                watch.compiled = outer

        own.__dict__.update(inner.__dict__, __wrapped__=inner)
        return own

    def disable(fn=None, *args, **kwargs):
        if fn is None:
            return lambda fn: disable(fn, *args, **kwargs)
        return counted(left_out(fn, *args, **kwargs), 0)

    torch.compiler.set_stance("force_eager")
    compiled, left_out = _TorchDynamoContext.__call__, torch.compiler.disable
    _TorchDynamoContext.__call__ = lambda self, fn=None: counted(compiled(self, fn), 1)
    torch.compiler.disable = disable


def leave_modes() -> None:
    """In processes of a DataLoader, which inherit the modes."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch._C._pop_torch_dispatch_stack(None)
        torch._C._pop_torch_function_stack()
