"""What an adapter keeps for backward and sends, predicted from its row of the placement table."""

import math
from dataclasses import dataclass, replace

from lightning_mcore_lora.adapters.config import DTYPES, LoRAConfig
from lightning_mcore_lora.adapters.eligibility import (
    attention_keeps_output,
    norm_is_recomputed,
    router_keeps_input,
    site_is_recomputed,
)
from lightning_mcore_lora.adapters.factors import Plan
from lightning_mcore_lora.adapters.placement import Around, Enter, Factor, Middle, Sees
from lightning_mcore_lora.adapters.sites import Site
from lightning_mcore_lora.parallel import ParallelSizes

#: Passes over the tensor in forward and in backward; an all-reduce is a reduce-scatter and an all-gather.
_MIDDLE_PASSES = {
    Middle.AS_IS: (0, 0),
    Middle.GATHER_SEQUENCE: (1, 1),
    Middle.GATHER_RANK: (1, 1),
    Middle.COPY: (0, 2),
    Middle.REDUCE: (2, 0),
    Middle.REDUCE_SCATTER: (1, 1),
}
_ENTER_PASSES = {Enter.AS_IS: (0, 0), Enter.GATHER: (0, 1), Enter.REGATHER: (1, 2), Enter.COPY: (0, 2)}


@dataclass(frozen=True)
class Cost:
    """Bytes on one rank that the adapter adds to the frozen base.

    A collective over n processes of a tensor of N bytes counts ``N (n - 1) / n`` sent in each pass.

    Args:
        kept_per_token: Kept for backward, for each token of a microbatch.
        kept_per_microbatch: Kept beside that: DoRA's norms and ratios, A in the activations' dtype for re-gather.
        gathered_per_token: What of ``kept_per_token`` the mode ``local`` would not keep: the gathered sequence.
        again_per_token: Kept in the same way, but only while Megatron-Core computes the site again.
        sent_per_token: Sent in forward and backward, for each token of a microbatch.
        sent_per_microbatch: Sent beside that in each microbatch: DoRA's norms.
        sent_per_step: Sent once in an optimizer step: the sums of replicated factors' gradients.
    """

    kept_per_token: float = 0.0
    kept_per_microbatch: float = 0.0
    gathered_per_token: float = 0.0
    again_per_token: float = 0.0
    sent_per_token: float = 0.0
    sent_per_microbatch: float = 0.0
    sent_per_step: float = 0.0

    def kept(self, tokens: int) -> int:
        """Bytes kept for backward by a microbatch of so many tokens, the whole sequence's."""
        return round(self.kept_per_token * tokens + self.kept_per_microbatch)

    def sent(self, tokens: int, microbatches: int = 1) -> int:
        """Bytes sent in an optimizer step of so many microbatches of so many tokens."""
        per_microbatch = self.sent_per_token * tokens + self.sent_per_microbatch
        return round(per_microbatch * microbatches + self.sent_per_step)

    def scaled(self, load: float) -> "Cost":
        """The same with so many times the tokens."""
        names = ("kept_per_token", "gathered_per_token", "again_per_token", "sent_per_token")
        return replace(self, **{name: getattr(self, name) * load for name in names})

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def predict(site: Site, plan: Plan, config: LoRAConfig, sizes: ParallelSizes, element: int | None = None) -> Cost:
    """The cost of an adapter that trains.

    Gradients of the factors are summed as the strategy does it, in float32, once per step. Experts are taken to get
    equally many tokens.

    Args:
        site: Where it sits.
        plan: What is to become of it.
        config: Its settings.
        sizes: The layout.
        element: Bytes of an element of activations; ``None`` is what the base's weight has.
    """
    element = site.like.element_size() if element is None else element
    row = plan.placement
    trained = trained_parameters(config)
    n = site.group.size()
    single = max(element, 4)  # of what is never in half precision
    share = (n - 1) / n
    z, wide = plan.width * element, site.d_in * element
    kept_input = wide / (1 if row.sees is Sees.ALL else n)
    gathers = row.enter in (Enter.GATHER, Enter.REGATHER) and n > 1
    is_copy = gathers and (row.enter is Enter.GATHER or config.dropout > 0)
    is_shared = plan.known is not None or any(
        kept(site) for kept in (norm_is_recomputed, attention_keeps_output, router_keeps_input)
    )
    if config.freeze_a or (is_shared and not is_copy):
        kept_input = 0.0
    own = 0.0 if is_shared or site.type.makes_input else wide / n  # what the mode local keeps
    gathered = max(kept_input - own, 0.0) if row.enter is Enter.GATHER and row.around is Around.SEQUENCE else 0.0
    if site.type.makes_input:  # the linear keeps what it returns; other than that only a copy is kept
        kept_input = wide / (n if row.around is Around.SEQUENCE else 1) + (kept_input if is_copy else 0.0)
    casts = row.enter is Enter.REGATHER and DTYPES[config.dtype].itemsize != element
    cast_a = math.prod(plan.shape("a", site)) * element if casts else 0
    at_output = 1 / n if row.splits_output_tokens else 1.0
    d_out = site.d_out // (n if row.b is Factor.OUTPUT else 1)
    output = d_out * element if config.dora else 0
    forwards = 2 if site_is_recomputed(site) else 1

    def passes(forward: int, backward: int) -> int:
        return forwards * forward + backward

    enter = passes(*_ENTER_PASSES[row.enter])
    if row.enter is Enter.GATHER and not site.type.shares_gather:
        enter += forwards
    norms = 0.0
    if config.dora and row.a is Factor.INPUT:
        norms = 2 * d_out * single * share
    elif config.dora and row.a is Factor.RANK:
        norms = plan.width * site.d_in * single * share
    keeps, weights = forwards == 1, max(site.experts, 1)
    seen = _tokens_seen(site, sizes)
    per_token = seen * (kept_input + (z + output) * at_output)
    return Cost(
        kept_per_token=keeps * per_token,
        kept_per_microbatch=keeps * (config.dora * weights * d_out * (element + single) + cast_a),
        gathered_per_token=keeps * seen * gathered,
        again_per_token=(not keeps) * per_token,
        sent_per_token=share * (passes(*_MIDDLE_PASSES[row.middle]) * z + enter * wide),
        sent_per_microbatch=forwards * weights * norms,
        sent_per_step=sum(2 * 4 * math.prod(plan.shape(p, site)) * _sum_share(site, plan, p, sizes) for p in trained),
    )


def trained_parameters(config: LoRAConfig) -> list[str]:
    """Names of an adapter's parameters that train."""
    return [*(() if config.freeze_a else ("a",)), "b", *(("magnitude",) if config.dora else ())]


def _tokens_seen(site: Site, sizes: ParallelSizes) -> float:
    """Tokens that a linear gets on one rank, for each token of a microbatch."""
    if not site.experts:
        return 1.0
    # An expert-parallel peer has 1/EP of the experts, for the tokens of EP * ETP / TP microbatches.
    return site.config.moe_router_topk * site.group.size() / sizes.tensor


def _sum_share(site: Site, plan: Plan, name: str, sizes: ParallelSizes) -> float:
    """Share of a gradient that a rank sends in a pass of its sum, beside that over data-parallel replicas."""
    size = site.group.size() if plan.is_partial(name) else 1
    if site.experts and name not in plan.each:
        size *= sizes.expert
    return (size - 1) / size
