"""torch.compile on tensors without storage, for bench.predict.trace.

For maintainers, with one version of PyTorch alone: most of what is imported here has no public
name. Whoever reads stored predictions needs none of it.

The compiler plans the graphs of a step, and its own program is run with the kernels left out. It
plans for a CPU, wherever this runs: fusions, and so some temporaries, may differ from a GPU's.
"""

import copy
import gc
from unittest import mock

import sympy
import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import compile_fx
from torch._inductor.codegen.common import InplacedBuffer
from torch._inductor.codegen.cpp import CppKernelProxy, CppScheduling
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.loop_body import MemoryUsageType
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from bench.predict.meta_patches import AS_COMPILED, key_of, real_compile, replaced

PYTORCH = "2.13"  # the version whose compiler and optimizers this knows from within
PLANS: dict[tuple, tuple] = {}  # the blocks of a model have the same graph


def touch(node: SchedulerNode, index_vars) -> None:
    """In place of the code of a part of a kernel: the buffers that it reads and writes."""
    uses, start = node._body.memory_usage, sympy.S.Zero
    with V.kernel.set_current_node(node):
        for each in (*uses[MemoryUsageType.LOAD], *uses[MemoryUsageType.LOAD_SEED]):
            V.ops.load(each.buffer_name, start)
        for each in (*uses[MemoryUsageType.STORE], *uses[MemoryUsageType.STORE_REDUCTION]):
            V.ops.store(each.buffer_name, start, "0", each.mode)


def program(graph, inputs: list, is_backward: bool):
    """The compiler's program of a graph, to be called with a list of tensors without storage. Its
    kernels only count their work; they are never written in C++."""
    kernels = {}

    def define_kernel(scheduling, source, nodes, arguments=None) -> str:
        arguments = arguments or scheduling.kernel_group.args
        updated = {each.inner_name for each in arguments.inplace_buffers.values()
                   if isinstance(each, InplacedBuffer)}  # they come first
        name = f"kernel_{len(kernels)}"
        kernels[name] = lambda *args: _get_current_dispatch_mode().compiled_kernel(
            len(updated), *args)
        return name

    with (V.set_fake_mode(detect_fake_mode(inputs)), V.set_debug_handler(DebugContext()),
          mock.patch.object(CppScheduling, "define_kernel", define_kernel),
          mock.patch.object(SchedulerNode, "codegen", touch),
          mock.patch.object(CppKernelProxy, "codegen_loops", lambda *_: None)):
        compile_fx.view_to_reshape(graph)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
    scope = {"__name__": "compiled", **kernels}
    exec(code.value, scope)
    scope["empty_strided_cpu"] = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="meta")
    scope["assert_size_stride"] = lambda *_: None  # without storage an operator may lay out others
    return scope["call"]


class Planned(Exception):
    """The programs are there; `plan` tells them."""

    def __init__(self, plan: tuple):
        self.plan = plan


def plan(model: nn.Module, inputs: tuple) -> tuple:
    """(the compiler's programs for forward and backward of `model` on inputs of these shapes; which
    of its parameters, buffers and inputs the forward one takes, in which order)."""
    places: dict[int, int] = {}

    def backend(graph, example_inputs):
        (outputs,) = graph.graph.find_nodes(op="output")[0].args
        if len(outputs) > 1:
            raise NotImplementedError("a model with several results can't be traced")
        known = (  # one script is traced in a process: the rest is the same
            *(part.code for part in graph.modules() if isinstance(part, fx.GraphModule)),
            *((each.shape, each.stride(), each.dtype, each.requires_grad)
              for each in example_inputs))

        # It tells the partitioner which inputs stay anyway, such as weights: to keep those for the
        # backward pass costs nothing.
        context = TracingContext.get()

        def planned(*tensors):
            own = [key_of(each) for each in tensors]
            if known not in PLANS:
                with tracing(context):
                    forward, backward, taken = compile_graph(graph, example_inputs, tensors)
                PLANS[known] = forward, backward, [own.index(each) for each in taken]
            *programs, order = PLANS[known]
            raise Planned((*programs, [places[own[i]] for i in order]))

        return planned

    def like(tensor):
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # never touched
        places[key_of(new)] = len(places)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(new, tensor.requires_grad)
        return new.requires_grad_(tensor.requires_grad)

    with (_disable_current_modes(), torch.enable_grad(),
          mock.patch("torch._functorch.config.force_non_lazy_backward_lowering", True),
          # No kernel is used: without vectors they are written sooner.
          mock.patch("torch._inductor.config.cpp.simdlen", 1),
          # Random numbers needn't be the same in what is computed again.
          mock.patch("torch._functorch.partitioners.has_recomputable_rng_ops", lambda _: False),
          replaced(AS_COMPILED)):
        own = copy.deepcopy(model)
        new = {old: like(old) for old in (*own.parameters(), *own.buffers())}
        for part in own.modules():
            for tensors in (part._parameters, part._buffers):
                tensors.update((name, new[old]) for name, old in tensors.items() if old is not None)
        torch._dynamo.reset()
        gc.disable()  # within a compilation it takes a sixth of the time, and finds little
        try:
            real_compile(own, backend=backend, fullgraph=True)(*map(like, inputs))
        except Planned as done:
            return done.plan
        finally:
            gc.enable()
    raise NotImplementedError("a model that isn't one graph can't be traced")


def compile_graph(graph, example_inputs: list, tensors: tuple) -> tuple:
    """(the compiler's programs for forward and backward of a graph, keys of those of `tensors` that
    the forward one takes, in its order)."""
    programs = {}

    def compiler(name: str):
        def compile(graph, example_inputs):
            programs[name] = program(graph, example_inputs, name == "backward")

            def run(tensors: list):
                raise Planned(tuple(map(key_of, tensors)))

            return make_boxed_func(lambda *tensors: run(tensors))

        return compile

    def partition(graph, joint_inputs, **how):
        with V.set_fake_mode(detect_fake_mode(joint_inputs)):
            joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, joint_inputs, compiler="inductor", **how)

    function = aot_module_simplified(
        graph, example_inputs, compiler("forward"), compiler("backward"), partition,
        select_decomp_table())
    try:
        function(*tensors)
    except Planned as done:
        return programs["forward"], programs["backward"], done.plan
    raise NotImplementedError("a graph that isn't one program can't be traced")


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
        for place, each in zip(ctx.order, ctx.backward_program(tensors), strict=True):
            gradients[place] = each
        return None, *gradients


class Compiled:
    """In place of torch.compile(model), and of what model.compile() calls."""

    def __init__(self, model: nn.Module):
        self.model = getattr(model, "module", model)  # without DDP's buckets around it
        self.programs = {}

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.model._call_impl(*inputs)  # without this, if it's a part
        shapes = tuple(each.shape for each in inputs)
        if shapes not in self.programs:
            self.programs[shapes] = plan(self.model, inputs)
        tensors = *self.model.parameters(), *self.model.buffers(), *inputs
        return Step.apply(self.programs[shapes], *tensors)


def compile_only_models(model=None, **how):
    """In place of torch.compile. Functions stay as they are."""
    usual = {"fullgraph": True, "mode": "default", "backend": "inductor"}
    wrong = [f"{name}={value!r}" for name, value in how.items()
             if value not in (None, False, usual.get(name))]
    if wrong:
        raise NotImplementedError(f"torch.compile with {', '.join(wrong)} can't be traced")
    if model is None:
        return compile_only_models
    owner = getattr(model, "__self__", None)
    model = owner if isinstance(owner, nn.Module) else model  # by nn.Module.compile
    return Compiled(model) if isinstance(model, nn.Module) else model
