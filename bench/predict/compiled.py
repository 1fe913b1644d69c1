"""torch.compile on tensors without storage, for bench.predict.trace.

For maintainers, with one version of PyTorch alone: most of what is imported here has no public
name. Whoever reads stored predictions needs none of it. The compiler plans the graphs of a step,
and its own program is run with the kernels left out. It plans for a CPU, wherever this runs:
fusions, and so some temporaries, may differ from a GPU's.
"""

import copy
from functools import partial

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

from bench.predict.meta_patches import key_of, real_compile, replaced

PYTORCH = "2.13"  # the version whose compiler and optimizers this knows from within
PLANNING = {
    "torch._functorch.config.force_non_lazy_backward_lowering": True,
    # No kernel is used: without vectors they are written sooner.
    "torch._inductor.config.cpp.simdlen": 1,
    # Random numbers needn't be the same in what is computed again.
    "torch._functorch.partitioners.has_recomputable_rng_ops": lambda _: False,
}


def touch(node: SchedulerNode, index_vars) -> None:
    """Replaces the code of a kernel's part: names the buffers it reads and writes."""
    uses, start = node._body.memory_usage, sympy.S.Zero
    with V.kernel.set_current_node(node):
        for use in (*uses[MemoryUsageType.LOAD], *uses[MemoryUsageType.LOAD_SEED]):
            V.ops.load(use.buffer_name, start)
        for use in (*uses[MemoryUsageType.STORE], *uses[MemoryUsageType.STORE_REDUCTION]):
            V.ops.store(use.buffer_name, start, "0", use.mode)


def program(graph, inputs: list, is_backward: bool):
    """Returns the compiler's program of a graph, to be called with a list of tensors without
    storage. Its kernels only count their work; they are never written in C++."""
    kernels = {}

    def define_kernel(scheduling, source, nodes, arguments=None) -> str:
        arguments = arguments or scheduling.kernel_group.args
        updated = {
            buffer.inner_name
            for buffer in arguments.inplace_buffers.values()
            if isinstance(buffer, InplacedBuffer)
        }  # they come first
        name = f"kernel_{len(kernels)}"
        kernels[name] = lambda *args: _get_current_dispatch_mode().compiled_kernel(
            len(updated), *args
        )
        return name

    with (
        V.set_fake_mode(detect_fake_mode(inputs)),
        V.set_debug_handler(DebugContext()),
        replaced(
            {
                "torch._inductor.codegen.cpp.CppScheduling.define_kernel": define_kernel,
                "torch._inductor.codegen.cpp.CppKernelProxy.codegen_loops": lambda *_: None,
                "torch._inductor.scheduler.SchedulerNode.codegen": touch,
            }
        ),
    ):
        compile_fx.view_to_reshape(graph)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
    scope = {"__name__": "compiled", **kernels}
    exec(code.value, scope)
    scope["empty_strided_cpu"] = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="meta"
    )
    scope["assert_size_stride"] = lambda *_: None  # operators may lay out others
    return scope["call"]


class Planned(Exception):
    """Ends a call of a compiled model; its `args` are the tensors that the forward program takes,
    which isn't run."""


def plan(model: nn.Module, tensors: tuple, inputs: tuple) -> tuple:
    """Returns the compiler's programs for the forward and the backward pass of `model`, and which
    of `tensors`, its parameters, buffers and inputs, the forward one takes, in which order."""
    programs = {}
    # Tensors on a CPU for the compiler, whose memory is never touched.
    own = [
        torch.Tensor._make_subclass(
            type(x), torch.empty(x.shape, dtype=x.dtype, device="cpu"), x.requires_grad
        )
        for x in tensors
    ]

    def compile(is_backward: bool, graph, example_inputs):
        programs[is_backward] = program(graph, example_inputs, is_backward)
        return make_boxed_func(stop)

    def stop(*tensors):
        raise Planned(*tensors)

    def partition(graph, joint_inputs, **options):
        with V.set_fake_mode(detect_fake_mode(joint_inputs)):
            joint_graph_passes(graph)
        return min_cut_rematerialization_partition(
            graph, joint_inputs, compiler="inductor", **options
        )

    def backend(graph, example_inputs):
        (outputs,) = graph.graph.find_nodes(op="output")[0].args
        if len(outputs) > 1:
            raise NotImplementedError("a model with several results can't be traced")
        return aot_module_simplified(
            graph,
            example_inputs,
            partial(compile, False),
            partial(compile, True),
            partition,
            select_decomp_table(),
        )

    with _disable_current_modes(), torch.enable_grad(), replaced(PLANNING):
        copied = copy.deepcopy(model, dict(zip(map(id, tensors), own, strict=True)))
        torch._dynamo.reset()
        try:
            real_compile(copied, backend=backend, fullgraph=True)(*own[-len(inputs) :])
        except Planned as planned:
            keys = [key_of(x) for x in own]
            return programs[False], programs[True], [keys.index(key_of(x)) for x in planned.args]
    raise NotImplementedError("a model that isn't one graph can't be traced")


class Step(torch.autograd.Function):
    """What a compiled model, or part of one, does in a training step."""

    @staticmethod
    def forward(ctx, programs, *tensors):
        forward, ctx.backward_program, ctx.order = programs
        ctx.count = len(tensors)
        output, *ctx.kept = forward([tensors[place] for place in ctx.order])
        return output

    @staticmethod
    def backward(ctx, gradient):
        tensors, ctx.kept = [*ctx.kept, gradient], None  # the program releases them as it goes
        gradients = [None] * ctx.count
        for place, gradient in zip(ctx.order, ctx.backward_program(tensors), strict=True):
            gradients[place] = gradient
        return None, *gradients


class Compiled:
    """Replaces what torch.compile(model) returns, and what model.compile() calls."""

    def __init__(self, model: nn.Module):
        self.model = getattr(model, "module", model)  # without DDP's buckets around it
        self.programs = {}

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.model._call_impl(*inputs)  # without this, if it's a part
        shapes = tuple(x.shape for x in inputs)
        tensors = *self.model.parameters(), *self.model.buffers(), *inputs
        if shapes not in self.programs:
            self.programs[shapes] = plan(self.model, tensors, inputs)
        return Step.apply(self.programs[shapes], *tensors)


def compile_only_models(model, mode="default", backend="inductor", options=None, **_):
    """Replaces torch.compile. Functions stay as they are."""
    if mode not in (None, "default") or backend != "inductor" or options:
        raise NotImplementedError("torch.compile with a mode, a backend or options can't be traced")
    owner = getattr(model, "__self__", None)
    model = owner if isinstance(owner, nn.Module) else model  # by nn.Module.compile
    return Compiled(model) if isinstance(model, nn.Module) else model
