"""What the pages and pictures call each technique, in the field's words, and when to use it."""

from typing import NamedTuple


class Advice(NamedTuple):
    name: str
    use: str  # it when …
    not_for: str  # it doesn't help …


ADVICE = {  # by the patch's name
    "01-causal-mask": Advice("causal mask made on the fly", "the context is long", "the speed"),
    "02-tensor-cores": Advice("TF32 tensor cores", "training in float32 on a GPU from Ampere on",
                              "in bfloat16; on CPUs"),
    "03-fused-adamw": Advice("fused AdamW", "there are many parameters and the batch is small",
                             "large batches, small models"),
    "04-pinned-memory": Advice("pinned memory", "loading images or sound, or over a slow link",
                               "token ids; CPUs"),
    "05-bfloat16": Advice("bfloat16", "the hardware has bfloat16 units",
                          "long training at a small learning rate"),
    "06-native-layers": Advice("built-in LayerNorm and GELU", "the model isn't compiled",
                               "compiled models, where it gains little"),
    "07-flash-attention": Advice("FlashAttention", "training in bfloat16 or float16 from Ampere on",
                                 "short contexts"),
    "08-torch-compile": Advice("torch.compile", "the run lasts longer than compiling",
                               "short runs"),
    "09-padded-vocabulary": Advice("padded vocabulary", "sizes aren't multiples of 64",
                                   "where they are"),
    "10-batch-size": Advice("larger batch", "there is memory to spare",
                            "once the device is filled; the loss per token"),
    "11-merged-qkv": Advice("fused QKV projection", "batches are small and on a GPU",
                            "where three matmuls fill the device"),
    "12-huge-pages": Advice("huge pages", "training on a CPU under Linux", "on a GPU"),
    "13-loss-in-graph": Advice("compiled loss", "the model is compiled",
                               "without the compiler: it costs memory"),
    "14-chunked-head": Advice("chunked cross-entropy", "the logits are large",
                              "the speed on a GPU"),
    "15-kept-memory": Advice("malloc keeps freed memory",
                             "training on a CPU under Linux with glibc", "on a GPU"),
    "ddp": Advice("DistributedDataParallel", "there are several GPUs", "over a slow network"),
}


def called(patch: str, otherwise: str) -> str:
    """A technique's name for readers; `otherwise` for one without, or a variant."""
    return ADVICE[patch].name if patch in ADVICE else otherwise
