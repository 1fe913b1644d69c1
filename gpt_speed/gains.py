"""What to expect of a technique in another script than the one that it was measured on."""

# The share of the step that each technique changes on our model before it is applied, as an audit
# of the ladder's scripts (cpu-demo) shows it on two cores of an AMD EPYC with bfloat16.
OUR_SHARES = {
    "01-causal-mask": 0.006,
    "03-fused-adamw": 0.109,
    "06-native-layers": 0.094,
    "07-flash-attention": 0.077,
    "09-padded-vocabulary": 0.644,
    "11-merged-qkv": 0.024,
    "12-huge-pages": 0.661,
    "13-loss-in-graph": 0.802,
    "14-chunked-head": 0.9,
    "15-kept-memory": 0.215,
}


def expected(technique: str, share: float, gain: float | None) -> float | None:
    """Returns the speedup to expect where a technique changes another share of the step than on
    our model, and saves the same part of it. What changes the whole step gains as on our model."""
    if not gain or not share or technique not in OUR_SHARES:
        return gain
    saved = (1 - 1 / gain) / OUR_SHARES[technique]  # of what it changes
    saved = max(-1.0, min(1.0, saved))
    return 1 / max(0.05, 1 - share * saved)
