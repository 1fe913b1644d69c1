"""Predictions of other people's programs: the work of one of our scripts, with what differs counted
instead. Bytes are those of GPT-2 124M with 1,024 tokens, of each kernel that reads or writes a
number of a matrix; nothing here is fitted to a speed."""

from collections.abc import Callable

from bench.predict.speed import Work
from bench.predict.store import Prediction

SCORES = 12 * 12 * 1024  # of attention by hand, for each token: layers, heads, tokens
HIDDEN = 25 * 768  # numbers for each token that dropout passes over: the embedding's, 2 of a layer
TIED = 124.5 / 163.0  # weights with one matrix for embedding and head, of those with two

Step = list[Work]
Rule = Callable[..., Step]  # of a step, its tokens, its batch


def composed(known: Prediction, names: list[str], by_hand: Prediction | None = None) -> Prediction:
    """With what `names` tell, one after the other. `by_hand` is rung 6, for "attention by hand"."""
    for name in names:
        if name == "attention by hand":
            assert by_hand
            known = rewritten(known, lambda step, tokens, batch: [
                each for each in step if each.kind != "attention"] + [
                each for each in by_hand.works[batch]["step"]
                if each.kind == "attention" and each.precision] + [
                Work("attention", "", True, 24, 0, tokens * SCORES * 10)])
        else:
            known = rewritten(known, RULES[name])
    return known


def rewritten(known: Prediction, rule: Rule) -> Prediction:
    return known._replace(works={
        batch: parts | dict(step=rule(parts["step"], batch * known.context_length, batch))
        for batch, parts in known.works.items()})


def scaled(kind: str, size: float, kernels: float = 1) -> Rule:
    """Bytes, and kernels, of the kernels of a kind that aren't products."""
    def rule(step: Step, *_) -> Step:
        return [each._replace(size=each.size * size, kernels=each.kernels * kernels)
                if each.kind == kind and not each.flops else each for each in step]

    return rule


def without_dropout(step: Step, tokens: int, _) -> Step:
    """Of rung 6, in bfloat16: attention by hand passes over its scores with 36 bytes each, 10 of
    them for dropout (read, write, and the mask, forward and backward); theirs copies them before
    it fills in the mask, and its gradients, too: 8 more."""
    step = scaled("attention", 34 / 36)(step)
    return [each._replace(size=each.size - tokens * HIDDEN * 10, kernels=each.kernels - 50)
            if each.kind == "rest" else each for each in step]


def in_precision(precision: str) -> Rule:
    """What is in bfloat16, in four bytes a number."""
    def rule(step: Step, *_) -> Step:
        return [each._replace(size=2 * each.size,
                              precision=each.precision and precision) for each in step]

    return rule


def autocast(step: Step, *_) -> Step:
    """Of rung 6 without dropout: LayerNorm, softmax, the loss and the sums of the residual stream
    are in float32, and numbers are cast between. For each score 68 bytes, not 34; for each logit
    36, not 12; for each number of a layer's width 227, not 143, and 8 more casts."""
    for kind, size, kernels in (("attention", 68 / 34, 12 / 8), ("loss", 3, 1.5),
                                ("rest", 227 / 143, 1.5), ("optimizer", 2, 1)):
        step = scaled(kind, size, kernels)(step)
    return step


RULES: dict[str, Rule] = {
    "unaligned head": lambda step, *_: [  # of a vocabulary that isn't padded
        each._replace(is_aligned=each.is_aligned and each.kind != "head") for each in step],
    "no dropout": without_dropout, "float32": in_precision("float32"),
    "TF32": in_precision("TF32"), "autocast": autocast,
    "foreach": scaled("optimizer", 3, 4),  # as rung 0's of rung 3's
    "tied head": scaled("optimizer", TIED),
}
