"""The speed that a machine allows: that of a step which only multiplies, and moves what it must."""

from typing import NamedTuple

from bench.analysis.rows import Row, peak_at

BYTES = {"float32": 4, "bfloat16": 2}  # of a number
LOGITS_PASSES = 5  # written and read; their gradient written, and read by two matmuls
UPDATE_PASSES = 7  # AdamW reads weight, gradient and two moments, and writes all but the gradient


class Limit(NamedTuple):
    """What a machine allows, and its rates, of which that follows."""

    tok_per_sec: float
    matmul_rate: float  # floating-point operations per second
    copy_rate: float  # bytes per second


def limit_of(row: Row) -> Limit | None:
    """Returns the limit of a row's step: its matmuls run at this machine's rate, the bytes of its
    logits and of AdamW's update move as fast as in a copy, and all else takes no time. None where
    a rate wasn't measured."""
    if not row.record:
        return None
    config, copy_rate = row.record.config, row.measured.copy_rate
    matmul_rate = peak_at(row.record.precision, row.measured.peak)
    if not matmul_rate or not copy_rate:
        return None
    numbers = LOGITS_PASSES * config["vocab_size"]
    numbers += UPDATE_PASSES * config["parameters"] / row.record.tokens_per_step
    moving = numbers * BYTES[config["dtype"]] / copy_rate
    seconds = config["flops_per_token"] / matmul_rate + moving
    return Limit(1 / seconds, matmul_rate, copy_rate)
