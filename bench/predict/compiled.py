"""torch.compile on tensors without storage, for bench.predict.trace.

For maintainers, with one version of PyTorch alone (bench.predict.child): most of what is imported
here has no public name. Whoever reads stored predictions needs none of it. The compiler plans the
graphs of a step, and its own program is run with the kernels left out. It plans for a CPU, wherever
this runs: fusions, and so some temporaries, may differ from a GPU's.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import NamedTuple

import sympy
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.codegen.common import InplacedBuffer
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.loop_body import MemoryUsageType
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from bench.predict.meta_patches import real_compile, replaced, storage_id


def no_rng_is_recomputable(_) -> bool:
    """Random numbers needn't be the same in what is computed again."""
    return False


PLANNING = {
    "torch._functorch.config.force_non_lazy_backward_lowering": True,
    # No kernel is used: without vectors they are written sooner.
    "torch._inductor.config.cpp.simdlen": 1,
    "torch._functorch.partitioners.has_recomputable_rng_ops": no_rng_is_recomputable,
}


# ---- A graph's program, whose kernels are left out


def touch(node: SchedulerNode, index_vars) -> None:
    """Replaces the code of a kernel's part: names the buffers it reads and writes."""
    uses, start = node._body.memory_usage, sympy.S.Zero
    with V.kernel.set_current_node(node):
        for use in (*uses[MemoryUsageType.LOAD], *uses[MemoryUsageType.LOAD_SEED]):
            V.ops.load(use.buffer_name, start)
        for use in (*uses[MemoryUsageType.STORE], *uses[MemoryUsageType.STORE_REDUCTION]):
            V.ops.store(use.buffer_name, start, "0", use.mode)


def no_loops(*_) -> None:
    """Replaces what writes a kernel in C++."""


def count_kernel(updated: int, *args) -> None:
    """Is called in place of a kernel, which would change the first `updated` of its tensors."""
    _get_current_dispatch_mode().add_compiled_kernel(updated, *args)


def definition_into(kernels: dict[str, Callable]) -> Callable:
    """Returns what replaces the compiler's own definition of a kernel: one that only counts its
    work is added to `kernels`."""

    def define_kernel(scheduling, source, nodes, arguments=None) -> str:
        name = f"kernel_{len(kernels)}"
        updated = updated_buffers(arguments or scheduling.kernel_group.args)
        kernels[name] = partial(count_kernel, len(updated))
        return name

    return define_kernel


def updated_buffers(arguments) -> set[str]:
    """Returns the names of the buffers that a kernel changes, which are its first arguments."""
    buffers = arguments.inplace_buffers.values()  # by each name that one has in the graph
    return {buffer.inner_name for buffer in buffers if isinstance(buffer, InplacedBuffer)}


def compiled_source(graph, inputs: list, is_backward: bool) -> str:
    """Returns the text of the compiler's program of a graph."""
    with V.set_fake_mode(detect_fake_mode(inputs)), V.set_debug_handler(DebugContext()):
        compile_fx.view_to_reshape(graph)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
    return code.value


def empty_on_meta(size, stride, dtype) -> torch.Tensor:
    """Replaces the program's own function, which would take memory of the CPU."""
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def any_layout(*_) -> None:
    """Replaces the check of strides: without storage, operators may lay out others."""


def program(graph, inputs: list, is_backward: bool) -> Callable:
    """Returns the compiler's program of a graph, to be called with a list of tensors without
    storage. Its kernels only count their work; they are never written in C++."""
    kernels: dict[str, Callable] = {}  # which the compiler fills while it makes the source
    without_code = {
        "torch._inductor.codegen.cpp.CppScheduling.define_kernel": definition_into(kernels),
        "torch._inductor.codegen.cpp.CppKernelProxy.codegen_loops": no_loops,
        "torch._inductor.scheduler.SchedulerNode.codegen": touch,
    }
    with replaced(without_code):
        source = compiled_source(graph, inputs, is_backward)
    return call_in(source, kernels)


def call_in(source: str, kernels: dict[str, Callable]) -> Callable:
    """Returns the function `call` of the text of a program, which calls these kernels."""
    module = ModuleType("compiled")
    vars(module).update(kernels)
    exec(source, vars(module))
    # What the program has imported by these names.
    module.empty_strided_cpu = empty_on_meta
    module.assert_size_stride = any_layout
    return module.call


# ---- The two graphs of a model


class Programs(NamedTuple):
    """A compiled model's forward and backward pass."""

    forward: Callable
    backward: Callable
    order: list[int]  # the places of what `forward` takes, among the model's tensors and inputs


class Planned(Exception):
    """Ends a call of a compiled model, whose programs aren't run."""


class Planner:
    """A backend of torch.compile that keeps the two programs of a model, and runs neither."""

    def __init__(self) -> None:
        self.forward: Callable | None = None
        self.backward: Callable | None = None
        self.taken: list[int] = []  # the storages of what `forward` takes, once it is called

    def backend(self, graph, inputs) -> Callable:
        (outputs,) = graph.graph.find_nodes(op="output")[0].args
        if len(outputs) > 1:
            raise NotImplementedError("a model with several results can't be traced")
        return aot_module_simplified(
            graph,
            inputs,
            self.compile_forward,
            self.compile_backward,
            self.partition,
            select_decomp_table(),
        )

    def compile_forward(self, graph, inputs) -> Callable:
        self.forward = program(graph, inputs, is_backward=False)
        return make_boxed_func(self.stop)

    def compile_backward(self, graph, inputs) -> Callable:
        self.backward = program(graph, inputs, is_backward=True)
        return make_boxed_func(self.stop)

    def stop(self, *tensors: torch.Tensor) -> None:
        """Is called in place of a program, with what it takes. Raises Planned."""
        self.taken = [*map(storage_id, tensors)]
        raise Planned

    def programs(self, tensors: list[torch.Tensor]) -> Programs:
        """Returns the two programs, of a model with these tensors and inputs. Raises
        NotImplementedError where it isn't one graph, and neither was called."""
        if not self.taken:
            raise NotImplementedError("a model that isn't one graph can't be traced")
        storages = [*map(storage_id, tensors)]
        return Programs(self.forward, self.backward, [*map(storages.index, self.taken)])

    @staticmethod
    def partition(graph, inputs, **options) -> tuple:
        """Divides the graph of both passes, as the compiler does."""
        with V.set_fake_mode(detect_fake_mode(inputs)):
            joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like it on the CPU, for which the compiler plans; its memory is never
    touched."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return torch.Tensor._make_subclass(type(tensor), empty, tensor.requires_grad)


def plan(model: nn.Module, inputs: tuple) -> Programs:
    """Returns the compiler's programs of a model without storage. Raises NotImplementedError where
    it isn't one graph."""
    planner = Planner()
    tensors = tensors_of(model)
    copies, copied_inputs = [*map(on_cpu, tensors)], [*map(on_cpu, inputs)]
    copy_by_id = {id(tensor): copied for tensor, copied in zip(tensors, copies, strict=True)}
    with _disable_current_modes(), torch.enable_grad(), replaced(PLANNING), suppress(Planned):
        torch._dynamo.reset()
        copied_model = copy.deepcopy(model, copy_by_id)
        real_compile(copied_model, backend=planner.backend, fullgraph=True)(*copied_inputs)
    return planner.programs([*copies, *copied_inputs])


def tensors_of(model: nn.Module) -> tuple[torch.Tensor, ...]:
    return *model.parameters(), *model.buffers()


# ---- In place of torch.compile


class Step(torch.autograd.Function):
    """What a compiled model, or part of one, does in a training step."""

    @staticmethod
    def forward(ctx, programs: Programs, *tensors):
        ctx.programs, ctx.count = programs, len(tensors)
        output, *ctx.kept = programs.forward([tensors[place] for place in programs.order])
        return output

    @staticmethod
    def backward(ctx, gradient):
        tensors, ctx.kept = [*ctx.kept, gradient], None  # the program releases them as it goes
        gradients = [None] * ctx.count
        results = ctx.programs.backward(tensors)
        for place, result in zip(ctx.programs.order, results, strict=True):
            gradients[place] = result
        return None, *gradients


class Compiled:
    """Replaces what torch.compile(model) returns, and what model.compile() calls."""

    def __init__(self, model: nn.Module):
        self.model = getattr(model, "module", model)  # without DDP's buckets around it
        self.programs: dict[tuple, Programs] = {}  # by the shapes of the inputs
        self.hooks: list[Callable] = []

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def register_forward_pre_hook(self, hook: Callable) -> None:
        """Keeps a hook that runs before each call, and isn't compiled."""
        self.hooks.append(hook)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        for hook in self.hooks:
            hook(self, inputs)
        if not torch.is_grad_enabled():
            return self.model._call_impl(*inputs)  # without this, if it's a part
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.programs:
            self.programs[shapes] = plan(self.model, inputs)
        return Step.apply(self.programs[shapes], *tensors_of(self.model), *inputs)


def compile_only_models(model, mode="default", backend="inductor", options=None, **_):
    """Replaces torch.compile. Functions stay as they are."""
    if mode not in (None, "default") or backend != "inductor" or options:
        raise NotImplementedError("torch.compile with a mode, a backend or options can't be traced")
    owner = getattr(model, "__self__", None)
    if isinstance(owner, nn.Module):  # whose method nn.Module.compile passes
        return Compiled(owner)
    if isinstance(model, nn.Module):
        return Compiled(model)
    return model
