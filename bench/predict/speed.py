"""NVIDIA's cards, and how long a step would take on one that isn't there, by the work of its
kernels (bench.predict.trace).

Each kernel takes three times, one after the other: to be launched, to move its bytes, and to do its
floating-point operations. That the last two are added, and not only the longer one counted, is what
makes products of a small inner size slow: of 8,192 × 768 by 768 × 3,072 an A100 does 0.7 of what it
does of large ones, as measured. So the time of a step follows from sums over its kernels.
"""

from typing import NamedTuple

GB, TERA = 10**9, 10**12


class Card(NamedTuple):
    mib: int  # of memory in all, as nvidia-smi tells it
    capability: float  # NVIDIA's compute capability
    bandwidth: int  # GB (10⁹ bytes) per second
    # TFLOP/s (10¹² floating-point operations per second) of matrix products: in float32 measured,
    # by large ones; on the tensor cores by the datasheet, dense, with sums in float32. None where
    # it has no such units.
    float32: float
    tf32: float | None
    bfloat16: float | None
    float16: float
    reached: float  # of bfloat16, or else of float16: measured, by large products
    attention: float | None  # by causal FlashAttention-2: measured; None where that isn't known
    names: tuple[str, ...]  # PyTorch's

    @property
    def range(self) -> float:
        """Either way of a prediction, as a share of it."""
        return RANGE if self.bfloat16 else RANGE_BEFORE_8

    def rate(self, precision: str, aligned: bool = True) -> float | None:
        """Floating-point operations per second that large products reach; None where it has no
        units for them. Tensor cores want matrices `aligned` to 16 bytes."""
        if precision == "float32" or precision == "TF32" and not self.tf32:
            return self.float32 * TERA
        peak = dict(TF32=self.tf32, bfloat16=self.bfloat16, float16=self.float16)[precision]
        share = self.reached / (self.bfloat16 or self.float16)
        return peak and peak * TERA * share * (1 if aligned else UNALIGNED)


# Datasheets; for GeForce cards NVIDIA's architecture whitepapers, with the rows "FP32 accumulate".
# What is measured: `reached` of A100, H100, H200, B200 by
# https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md, all else by
# https://github.com/zzc0721/torch-performance-test-data, but RTX 3060 and A10 by
# https://github.com/chsasank/device-benchmarks. `attention`: forward and backward, head size 64,
# 1,024 tokens, by https://github.com/Dao-AILab/flash-attention (the pictures in assets/); B200 by
# its issue 1589, without causality, times 119/153, as on an A100.
CARDS = {
    "T4": Card(15_360, 7.5, 320, 4.3, None, None, 65, 42, None, ("Tesla T4",)),
    "V100": Card(16_384, 7.0, 900, 14.1, None, None, 125, 95, None, ("Tesla V100-SXM2-16GB",)),
    "RTX 3060": Card(12_288, 8.6, 360, 7.4, 12.7, 25.5, 25.5, 26, None,
                     ("NVIDIA GeForce RTX 3060",)),
    "RTX 4060 Ti": Card(8_188, 8.9, 288, 11.5, 22.1, 44.1, 44.1, 43, None,
                        ("NVIDIA GeForce RTX 4060 Ti",)),
    "RTX 3090": Card(24_576, 8.6, 936, 24.6, 35.6, 71, 71, 76, None,
                     ("NVIDIA GeForce RTX 3090",)),
    "RTX 4090": Card(24_564, 8.9, 1_008, 54, 82.6, 165.2, 165.2, 167, None,
                     ("NVIDIA GeForce RTX 4090",)),
    "RTX 5090": Card(32_607, 12.0, 1_792, 67, 104.8, 209.5, 209.5, 232, None,
                     ("NVIDIA GeForce RTX 5090",)),
    "A10": Card(23_028, 8.6, 600, 14, 62.5, 125, 125, 56, None, ("NVIDIA A10",)),
    "L4": Card(23_034, 8.9, 300, 15.4, 60.5, 121, 121, 71, None, ("NVIDIA L4",)),
    "L40S": Card(46_068, 8.9, 864, 46.9, 183, 362, 362, 269, None, ("NVIDIA L40S",)),
    "RTX A6000": Card(49_140, 8.6, 768, 23.9, 77.4, 154.8, 154.8, 123, None,
                      ("NVIDIA RTX A6000",)),
    "A100 40 GB": Card(40_960, 8.0, 1_555, 19.2, 156, 312, 312, 271, 119,
                       ("NVIDIA A100-SXM4-40GB",)),
    "A100 80 GB": Card(81_920, 8.0, 2_039, 19.2, 156, 312, 312, 271, 119,
                       ("NVIDIA A100-SXM4-80GB",)),
    "H100": Card(81_559, 9.0, 3_350, 52, 494.5, 989, 989, 794, 192, ("NVIDIA H100 80GB HBM3",)),
    "H200": Card(143_771, 9.0, 4_800, 51.3, 494.5, 989, 989, 790, 192, ("NVIDIA H200",)),
    "B200": Card(183_359, 10.0, 8_000, 66.2, 1_125, 2_250, 2_250, 1_745, 233, ("NVIDIA B200",)),
}
# Dense floating-point operations per second in bfloat16, or where a GPU hasn't got that in float16,
# by PyTorch's name of it.
PEAK_FLOPS = {name: (card.bfloat16 or card.float16) * TERA
              for card in CARDS.values() for name in card.names}
PEAK_FLOPS |= {
    "NVIDIA A100-PCIE-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA A10G": 70e12,
    "NVIDIA H100 NVL": 835e12, "NVIDIA H100 PCIe": 756e12,
}
A100_FLOPS = PEAK_FLOPS["NVIDIA A100-SXM4-80GB"]  # the GPU of the published figures


def card_of(name: str) -> str | None:
    """The card by PyTorch's name of it; None for one that isn't known."""
    return next((card for card, each in CARDS.items() if name in each.names), None)


# ---- Time ----------------------------------------------------------------------------------------

KINDS = "products", "head", "attention", "loss", "optimizer", "rest", "host"  # of work
# Where each of these comes from, docs/predictions.md tells.
LAUNCH = 3e-6  # seconds of the GPU for each kernel
HOST = 30e-6  # seconds of the host for each kernel, with views and autograd
BANDWIDTH = 0.85  # that is reached, of the datasheet's
ATTENTION = 0.44  # FlashAttention's rate, of that of products, where it wasn't measured
# That of the memory-efficient kernel, which GPUs before 8.0 have in its place, with buffers of the
# same sizes.
EFFICIENT = 0.22
UNALIGNED = 0.5  # of the rate of aligned products
RANGE = 0.15  # either way of a prediction
RANGE_BEFORE_8 = 0.35  # on cards before 8.0, of which no training speed is known to check it by


def seconds(work: dict[str, list], card: Card) -> dict[str, float] | None:
    """The seconds of each kind of work, and those for which the GPU waits for the host; None where
    the card lacks what the work needs."""
    times = dict.fromkeys(KINDS, 0)
    for name, (kernels, flops, size) in work.items():
        kind, precision, unaligned = (name + "  ").split(" ")[:3]
        time = kernels * LAUNCH + size / (BANDWIDTH * card.bandwidth * GB)
        if flops:
            rate = card.rate(precision, not unaligned)
            if not rate:
                return None
            if kind == "attention" and precision in ("bfloat16", "float16"):
                share = ATTENTION if card.bfloat16 else EFFICIENT
                rate = card.attention * TERA if card.attention else share * rate
            time += flops / rate
        times[kind] += time
    kernels = sum(count for count, *_ in work.values())
    return times | dict(host=max(0, kernels * HOST - sum(times.values())))


def work_at(batch: int, works: dict[int, dict]) -> dict:
    """The work at a batch size, from those at two others: each figure is a + b times the batch."""
    (first, one), (second, other) = works.items()

    def between(a: float, b: float) -> float:
        return a + (b - a) * (batch - first) / (second - first)

    nothing = 0, 0, 0
    return {name: [between(a, b) for a, b in zip(one.get(name, nothing), other.get(name, nothing),
                                                 strict=True)]
            for name in {**one, **other}}
