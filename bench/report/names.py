"""What the pages and pictures call each technique, when to use it, and its limits."""

from typing import NamedTuple


class Advice(NamedTuple):
    name: str
    use: str  # it when …
    limits: str  # where it gains nothing, or costs something


ADVICE = {  # by the patch's name
    "01-causal-mask": Advice("causal mask made on the fly", "the context is long",
                             "no gain in speed"),
    "02-tensor-cores": Advice("TF32 tensor cores", "training in float32 on a GPU from Ampere on",
                              "no gain in bfloat16, nor on CPUs"),
    "03-fused-adamw": Advice("fused AdamW", "there are many parameters and the batch is small",
                             "little gain with large batches, or small models on a GPU"),
    "04-pinned-memory": Advice("pinned memory", "loading images or sound, or over a slow link",
                               "hardly any gain for token ids, none on CPUs"),
    "05-bfloat16": Advice("bfloat16", "the hardware has bfloat16 units",
                          "small updates are lost; use `precision-autocast` for long"
                          " training at a small learning rate"),
    "06-native-layers": Advice("built-in LayerNorm and GELU", "the model isn't compiled",
                               "little gain in compiled models"),
    "07-flash-attention": Advice("FlashAttention", "training in bfloat16 or float16 from Ampere on",
                                 "little gain at short contexts"),
    "08-torch-compile": Advice("torch.compile", "the run lasts longer than compiling",
                               "in short runs compiling takes longer than it saves"),
    "09-padded-vocabulary": Advice("padded vocabulary", "sizes aren't multiples of 64",
                                   "no gain if they are"),
    "10-batch-size": Advice("larger batch", "there is memory to spare",
                            "no gain in speed once the device is filled; learns less from"
                            " each token"),
    "11-merged-qkv": Advice("fused QKV projection", "on a GPU with small batches",
                            "no gain where each of the three matmuls fills the device"),
    "12-huge-pages": Advice("huge pages", "training on a CPU under Linux",
                            "no effect on a GPU, no clear gain on some CPUs"),
    "13-loss-in-graph": Advice("compiled loss", "the model is compiled",
                               "costs memory without the compiler"),
    "14-chunked-head": Advice("chunked cross-entropy", "the logits are large",
                              "no gain in speed on a GPU"),
    "15-kept-memory": Advice("malloc keeps freed memory",
                             "training on a CPU under Linux with glibc", "no effect on a GPU"),
    "ddp": Advice("DistributedDataParallel", "there are several GPUs",
                  "over a slow network the ranks wait for gradients"),
}


def called(patch: str, otherwise: str) -> str:
    """A technique's name for readers; `otherwise` for one without, or a variant."""
    return ADVICE[patch].name if patch in ADVICE else otherwise


def credited(row, name: str) -> str:
    """What a row's factor is of: the technique with this name, or by their numbers the several
    that lie between the row and the one that it is compared to."""
    numbers = row.techniques
    return name if len(numbers) < 2 else f"techniques {numbers[0]} to {numbers[-1]}"
