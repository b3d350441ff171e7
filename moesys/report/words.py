"""What each quantity is called, and what it means in a sentence or two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Words:
    """Title and meaning of a quantity, for a reader who does not know it."""

    title: str
    meaning: str


QUANTITIES = {
    "ce_loss": Words(
        title="Loss",
        meaning="Mean cross-entropy of the next token in nats, penalties not included; lower is better. "
        "Training loss is that of the step's own batch; held-out loss is measured on text the model never "
        "trains on.",
    ),
    "eval_bits_per_byte": Words(
        title="Held-out bits per byte",
        meaning="Bits the model needs for one byte of held-out text; lower is better, and values compare "
        "across tokenizers. The dashed line is what the compressor xz -9 needs for the same text.",
    ),
    "lr": Words(title="Learning rate", meaning="Step size of the optimiser, as the schedule sets it."),
    "grad_norm": Words(
        title="Gradient norm",
        meaning="Length of the gradient over all parameters together, before clipping. Spikes mark steps on "
        "which training was unsteady; a norm above the dashed line is scaled down to it.",
    ),
    "tokens_per_second": Words(
        title="Tokens per second",
        meaning="Training tokens divided by the time of the step; higher is better.",
    ),
    "peak_memory_bytes": Words(
        title="Peak memory", meaning="Most memory that the run has held up to that step."
    ),
    "load_balance_loss": Words(
        title="Load-balance loss",
        meaning="How unevenly the routers spread tokens over experts, mean over layers: 1.0 is even, more is "
        "less even. Shown before it is multiplied by its coefficient.",
    ),
    "z_loss": Words(
        title="Router z-loss",
        meaning="Mean squared log-sum-exp of the router logits, mean over layers: it grows as the logits "
        "drift to large values, where routing gets brittle. Shown before its coefficient.",
    ),
    "mtp_loss": Words(
        title="Multi-token-prediction loss",
        meaning="Cross-entropy in nats of the tokens after the next one, which extra modules predict during "
        "training. Shown before its weight.",
    ),
    "share": Words(
        title="Expert load",
        meaning="Each map is one MoE layer, each row one expert, each column a moment of training. Colour is "
        "the expert's share of the routed tokens times the number of experts: 1 (pale) is an even share, 2 "
        "(red) is twice that, 0 (dark blue) is an expert that no token reaches.",
    ),
    "max_violation": Words(
        title="Maximal violation",
        meaning="Load of the busiest expert over the mean load, minus 1: 0 is an even load; at 1 the busiest "
        "expert gets twice its share. With experts on different devices the busiest sets the pace.",
    ),
    "entropy": Words(
        title="Relative entropy of the load",
        meaning="Entropy of the experts' shares over its largest possible value, ln(number of experts): 1 is "
        "an even load, 0 sends everything to one expert.",
    ),
    "dead": Words(
        title="Dead experts",
        meaning="Experts that got no token at all in the step. Experts that stay dead learn nothing and "
        "waste their parameters.",
    ),
    "dropped_share": Words(
        title="Dropped",
        meaning="Share of the token-to-expert choices that no expert processed because the expert was full. "
        "Without a capacity limit it is 0.",
    ),
}


def words(name: str) -> Words:
    """Words for a quantity; one without an entry, such as a further auxiliary loss, goes by its own name."""
    plain = name.replace("_", " ")
    return QUANTITIES.get(name) or Words(
        title=plain[:1].upper() + plain[1:], meaning=f"The quantity {name} of metrics.jsonl."
    )
