"""How a script runs until its first update: run.py orders it, and child.py follows."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mend:
    """What may mend a wrong gradient of a compiled program: a variable of the environment, a
    setting of a module of PyTorch, or another backend."""

    words: str  # what to type
    variables: dict[str, str] = field(default_factory=dict)
    module: str = ""
    settings: dict[str, object] = field(default_factory=dict)  # of the module
    backend: str = ""


MENDS = {
    "allow_buffer_reuse": Mend(
        "torch._inductor.config.allow_buffer_reuse = False",
        module="torch._inductor.config",
        settings={"allow_buffer_reuse": False},
    ),
    "mix_order_reduction": Mend(
        "TORCHINDUCTOR_MIX_ORDER_REDUCTION=0 in the environment",
        variables={"TORCHINDUCTOR_MIX_ORDER_REDUCTION": "0"},
    ),
    "memory_budget": Mend(
        "torch._functorch.config.activation_memory_budget = 1",
        module="torch._functorch.config",
        settings={"activation_memory_budget": 1.0},
    ),
    "aot_eager": Mend(
        'torch.compile(..., backend="aot_eager"), which leaves Inductor out', backend="aot_eager"
    ),
}


@dataclass(frozen=True)
class Order:
    """How a script runs, and what is kept of it."""

    report: str = ""  # the file of the facts, as JSON
    keep: str = ""  # the file of the weights and gradients, for other runs to compare theirs to
    compare: str = ""  # such a file of another run, which the gradients are compared to
    compiled: bool = False  # whether torch.compile compiles
    float32: bool = False  # whether autocast is off
    same_masks: bool = True  # whether a compiled program draws random numbers as an uncompiled one
    jitter: float = 0.0  # by how much all weights are changed, relative to them
    mend: str = ""  # the one of MENDS that is tried
    seconds: float = 0.0  # for numeric derivatives; 0: none are made

    @property
    def mending(self) -> Mend:
        """What is tried; nothing without a `mend`."""
        if self.mend:
            return MENDS[self.mend]
        return Mend("")

    @property
    def environment(self) -> dict[str, str]:
        # TF32 would hide what is off; a script may switch it on in several ways.
        variables = dict(PYTHONHASHSEED="0", NVIDIA_TF32_OVERRIDE="0") | self.mending.variables
        if not self.compiled:  # "0" would switch PyTorch 2.4's off, too
            variables["TORCH_COMPILE_DISABLE"] = "1"
        return variables
