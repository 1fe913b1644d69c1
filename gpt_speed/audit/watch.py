"""Notes every operator of a step, in the process that trains: Watch makes a Recording of a step,
with a WatchedOp of each operator."""

import contextlib
import functools
import importlib
import os
import sys
import traceback
import weakref
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_speed import counting
from gpt_speed.audit.timing import now
from gpt_speed.counting import leaves
from gpt_speed.pytorch import living, type_name

SCALARS = (
    "dim",
    "exponent",
    "is_causal",
    "causal",
    "dropout_p",
    "non_blocking",
)  # arguments that checks read
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TORCH = os.path.dirname(torch.__file__)
LIBRARIES = os.path.join("site-packages", "")
COMPILER = os.path.join(TORCH, "_dynamo", "eval_frame.py")
NOT_OWN = os.path.join(PACKAGE, ""), os.path.join(TORCH, ""), "<"  # where code isn't the script's
MEAN = 1  # of a loss's `reduction`


@dataclass
class WatchedOp:
    """One call of an operator. gpt_speed.audit.graph.Op has the same fields and says what they
    are; here an `origin` is an index, and a tensor a tuple, as Recording.describe returns it."""

    name: str
    inputs: list[tuple]
    outputs: list[tuple] = field(default_factory=list)
    phase: str = "forward"
    origin: int | None = None
    place: str = ""
    function: str = ""
    call: int = 0
    compiled: bool = False
    device: str = ""
    flops: int = 0
    kernel: tuple | None = None
    scalars: dict = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class WatchedStorage:
    """The life of a storage; gpt_speed.audit.storages.Storage has the same fields."""

    size: int  # bytes
    device: str
    role: str  # "model"; "optimizer", for its state; "" for all else
    born: int | None  # the index of the operator that made it; None where it is older than the step
    died: int | None = None  # the index of the next operator after its end; None where it lives on


class Recording:
    """What is noted of one step. It knows tensors by the number of their storage."""

    def __init__(self):
        self.live = {}  # number and weak reference of each storage that is alive, by its address
        self.storages = []  # a WatchedStorage for each number
        self.older = {}  # what describe_older says of storages from before the step, by number
        self.ops = []  # a WatchedOp for each call
        self.times = []  # the seconds of each of them, a list for each step with equal operators
        self.nodes = {}  # by autograd's sequence numbers, the indices in `ops` of what made nodes
        self.is_recurrent = False  # whether the script has a module of that kind
        self.syncs = []  # whether each backward pass reduces gradients over ranks

    def add(self, call: "OperatorCall", caller: "Caller", phase: str) -> None:
        """Adds the WatchedOp of a call. Its gradient's operators get its index as their origin."""
        origin = self.origin_in(phase)
        flops, kernel = call.work()
        op = WatchedOp(
            call.name,
            inputs=self.inputs(call.arguments),
            outputs=[self.describe(tensor) for tensor in call.made],
            phase=phase,
            origin=origin,
            place=caller.place,
            function=caller.function,
            call=caller.call,
            compiled=caller.is_compiled or origin is not None and self.ops[origin].compiled,
            device=call.device,
            flops=flops,
            kernel=kernel,
            scalars=call.scalars(),
        )
        self.ops.append(op)

    def origin_in(self, phase: str) -> int | None:
        """Returns the origin of the operator that is added next. Where that runs in a forward pass,
        it may make a node of autograd's, and is noted as its maker."""
        if phase == "backward":
            return self.current_origin()
        self.nodes.setdefault(torch.autograd._get_sequence_nr() - 1, len(self.ops))
        return None

    def add_backward(self, tensors) -> None:
        """Adds a WatchedOp that stands for the begin of a backward pass from the tensors."""
        self.ops.append(WatchedOp("backward", self.inputs(dict(tensors=tensors)), phase="backward"))

    def current_origin(self) -> int | None:
        """Returns, in a backward pass, the index of the forward operator whose gradient is being
        computed; None where autograd has no node for it."""
        node = torch._C._current_autograd_node()
        return self.nodes.get(node._sequence_nr()) if node else None

    def inputs(self, arguments: dict) -> list[tuple]:
        """Describes the tensors in arguments; each description ends with the argument's name."""
        return [
            (*self.describe(tensor, is_input=True), name)
            for name, value in arguments.items()
            for tensor in tensors_in(value)
        ]

    def describe(self, tensor, is_input: bool = False) -> tuple:
        """Returns (number of storage, shape, type). Of an input whose storage is older than the
        step, `older` gets a description."""
        shape, type = tuple(tensor.shape), type_name(tensor.dtype)
        born = None
        if not is_input:
            born = len(self.ops)
        number = self.number_of(tensor, born)
        if number < 0:
            return number, shape, type
        if is_input and number not in self.older and self.storages[number].born is None:
            self.older[number] = describe_older(tensor)
        return number, shape, type

    def number_of(self, tensor, born: int | None, role: str = "") -> int:
        """Returns the number of a tensor's storage. Where it is new to this class, its life begins
        with the operator of index `born`, or before the step; it isn't kept alive."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, or a tensor without storage
            return -1
        key = storage._cdata
        if key not in self.live:
            number = len(self.storages)
            life = WatchedStorage(storage.nbytes(), storage.device.type, role, born)
            self.storages.append(life)

            def end(_) -> None:
                self.live.pop(key, None)
                life.died = len(self.ops)

            self.live[key] = number, weakref.ref(storage, end)
        return self.live[key][0]

    def add_older(self, tensors, role: str = "") -> None:
        """Begins the lives of tensors' storages before the step, if they are new to this class."""
        for tensor in tensors_in(tensors):
            self.number_of(tensor, None, role)

    def end(self) -> None:
        """Forgets what only counts during the step, and moves the operators' times aside."""
        self.times = [[op.seconds for op in self.ops]]
        self.live, self.nodes = {}, {}

    def is_like(self, other: "Recording") -> bool:
        """Tells whether another step has the same operators, by name and place, in this order."""
        return [(op.name, op.place) for op in self.ops] == [(op.name, op.place) for op in other.ops]

    def facts(self) -> dict:
        """Returns what the report says of the step: the fields of its WatchedOps and
        WatchedStorages, the tensors from before it, its backward passes over ranks, its modules."""
        return dict(
            ops=self.with_middle_times(),
            older=[*self.older.items()],
            storages=[[*vars(storage).values()] for storage in self.storages],
            syncs=self.syncs,
            recurrent=self.is_recurrent,
        )

    def with_middle_times(self) -> list[dict]:
        """Returns its operators with the median of each one's times."""
        middle = map(median, zip(*self.times, strict=True))
        return [
            vars(op) | dict(seconds=seconds) for op, seconds in zip(self.ops, middle, strict=True)
        ]


class Watch(TorchDispatchMode):
    """Notes the operators of steps, between begin_step and end_step."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.updates = 0  # that run now, one within another
        self.has_closure = False  # given to them, which computes the loss
        self.marks = {}  # scalars for the operators of the functions that run now: see marks.py
        self.recording = None  # of the step that is being watched
        self.recordings = []  # of steps that are over; of equal ones the first
        self.callers = Callers()

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
        if self.recording is None:
            return func(*args, **kwargs)
        began = now()
        result = func(*args, **kwargs)
        seconds = now() - began
        phase = self.current_phase()
        caller = self.callers.of(sys._getframe(), phase)
        self.recording.add(OperatorCall(func, args, kwargs, result), caller, phase)
        self.recording.ops[-1].seconds = seconds
        self.recording.ops[-1].scalars |= self.marks
        return result

    def begin_step(self, optimizers) -> None:
        """Begins to watch; the optimizers' tensors come before others with their storages."""
        recording = Recording()
        tensors, modules = living(torch.Tensor), living(torch.nn.Module)
        recording.is_recurrent = any(isinstance(module, torch.nn.RNNBase) for module in modules)
        recording.add_older([optimizer.param_groups for optimizer in optimizers], "model")
        recording.add_older(
            [[*module.parameters(), *module.buffers()] for module in modules], "model"
        )
        recording.add_older([optimizer.state for optimizer in optimizers], "optimizer")
        leaves_of_graphs = [tensor for tensor in tensors if tensor.is_leaf]
        recording.add_older([tensor.grad for tensor in leaves_of_graphs], "gradient")
        recording.add_older(tensors)
        recording.inputs(dict(groups=[optimizer.param_groups for optimizer in optimizers]))
        self.recording = recording

    def begin_backward(self, tensors) -> None:
        """Notes that a backward pass from the tensors begins."""
        recording, self.recording = self.recording, None  # to describe them is no part of the step
        recording.add_backward(tensors)
        self.recording = recording

    def end_step(self) -> None:
        """Keeps what was noted; of a step with the same operators as another one only the times,
        since a description takes memory."""
        recording, self.recording = self.recording, None
        recording.end()
        for other in self.recordings:
            if recording.is_like(other):
                other.times += recording.times
                return
        self.recordings.append(recording)

    def middle(self) -> Recording:
        """Returns the recording of the step that took, of all, the middle time."""
        totals = [
            (sum(seconds), index)
            for index, recording in enumerate(self.recordings)
            for seconds in recording.times
        ]
        _, index = median_low(totals)
        return self.recordings[index]

    def current_phase(self) -> str:
        """Returns the phase that the running operator belongs to."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        # Updates of the script's own may forget no_grad.
        if self.updates and not (self.has_closure and torch.is_grad_enabled()):
            return "optimizer"
        return "forward"


class OperatorCall:
    """A call of an operator: its `name`, as "mm"; its `arguments` by their names in its schema;
    what it `made`."""

    def __init__(self, func, args: tuple, kwargs: dict, result):
        self.func, self.args, self.kwargs, self.result = func, args, kwargs, result
        self.name, names = signature(func)
        if names is None:
            names = map(str, range(len(args)))
        self.arguments = dict(zip(names, args, strict=False)) | kwargs
        self.made = tensors_in(result)

    @property
    def device(self) -> str:
        """The type of the device that it runs on; "" without tensors."""
        return next((tensor.device.type for tensor in tensors_in(self.args) or self.made), "")

    def work(self) -> tuple[int, tuple | None]:
        """Returns its FLOPs and the first four fields of its gpt_speed.counting.Kernel; 0 and None
        where counting knows no formula for its arguments."""
        call = self.func, self.args, self.kwargs, self.result
        flops, kernel = 0, None
        with contextlib.suppress(Exception):  # PyTorch's formulas raise any, and the script goes on
            flops = counting.flops_of(*call)
            kernel = counting.kernel_of(*call, is_tensor)
        return flops, kernel and kernel[:4]

    def scalars(self) -> dict:
        """Returns the arguments of SCALARS, the `tokens` of a loss that is their mean, and what is
        known of a copy to another device."""
        scalars = {
            name: self.arguments[name]
            for name in SCALARS
            if name in self.arguments and not is_tensor(self.arguments[name])
        }
        if self.name == "nll_loss_forward" and self.arguments.get("reduction") == MEAN:
            scalars["tokens"] = float(self.result[1])
        return scalars | self.transfer()

    def transfer(self) -> dict:
        """Returns the `source` of a copy from one device to another, and whether its memory is
        `pinned`; {} for all else."""
        if self.name not in ("_to_copy", "copy_"):
            return {}
        source = self.arguments["src" if self.name == "copy_" else "self"]
        if source.device.type == self.result.device.type:
            return {}
        return dict(source=source.device.type, pinned=source.is_cpu and source.is_pinned())


@functools.cache
def signature(func) -> tuple[str, list[str] | None]:
    """Returns an operator's name, and its arguments' names; operators of higher order have no
    schema that tells those."""
    name = str(getattr(func, "_overloadpacket", func)).removeprefix("aten.")
    schema = getattr(func, "_schema", None)
    return name, [argument.name for argument in schema.arguments] if schema else None


class Caller(NamedTuple):
    """What a stack of functions says of the operator that was called from it."""

    place: str  # as caller_of returns it
    function: str
    call: int  # equal for equal stacks
    is_compiled: bool


class Callers:
    """Finds callers. Most stacks of a step come again in the next one, and are looked up."""

    def __init__(self):
        self.known = {}  # by stack and phase
        self.codes = set()  # kept alive, so that no other code gets the address of one

    def of(self, frame, phase: str) -> Caller:
        """Returns the caller of an operator of a phase, by the innermost frame."""
        positions, top = [], frame
        while frame is not None:
            positions += id(frame.f_code), frame.f_lasti
            if frame.f_code.co_filename == COMPILER:
                positions.append(is_compiler(frame))
            frame = frame.f_back
        stack = phase, *positions
        if stack not in self.known:
            frames = frames_from(top)
            self.codes |= {frame.f_code for frame in frames}
            place, function = caller_of(frames, phase)
            self.known[stack] = Caller(place, function, hash(stack), is_compiled(frames))
        return self.known[stack]


def frames_from(frame) -> list:
    """Returns a frame and those that called it, the innermost first."""
    return [frame for frame, _ in traceback.walk_stack(frame)]


def caller_of(frames: list, phase: str) -> tuple[str, str]:
    """Returns the script's line that called an operator, as "model.py:63", and the function around
    it, by its file and first line; "" for both where autograd called it."""
    callers = [frame for frame in frames if is_own(frame)]
    if phase == "optimizer":  # by Accelerate, maybe
        outside = [frame for frame in callers if LIBRARIES not in frame.f_code.co_filename]
        callers = outside or callers
    if not callers:
        return "", ""
    caller, *_ = callers
    file = caller.f_code.co_filename
    place = f"{os.path.basename(file)}:{caller.f_lineno}"
    return place, f"{file}:{caller.f_code.co_firstlineno}"


def describe_older(tensor) -> dict:
    """Describes a tensor of a storage older than the step."""
    base = tensor if tensor._base is None else tensor._base
    is_parameter = base.is_leaf and (base.requires_grad or isinstance(base, torch.nn.Parameter))
    return dict(
        parameter=is_parameter,
        shape=[*base.shape],
        triangle=not is_parameter and is_triangle(tensor),
    )


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def tensors_in(value) -> list:
    return [leaf for leaf in leaves(value) if is_tensor(leaf)]


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
    return any(frame.f_code.co_filename == COMPILER and is_compiler(frame) for frame in frames)


def is_compiler(frame) -> bool:
    """Tells whether a frame of COMPILER is there for torch.compile, not for a function that it is
    told to leave alone."""
    return type(frame.f_locals.get("self")).__name__ == "OptimizeContext"


@torch.jit.ignore
def is_compiling() -> bool:
    """Stands in for torch.compiler.is_compiling(), by which scripts may try a compiler."""
    frames = frames_from(sys._getframe(1))
    return is_own(frames[0]) and is_compiled(frames)
