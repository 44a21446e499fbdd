"""What an adapter keeps for backward and sends, predicted from its row of the placement table."""

from dataclasses import dataclass

from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.adapters.eligibility import attention_keeps_output, norm_is_recomputed, site_is_recomputed
from lightning_mcore_lora.adapters.layer import LoRAAdapter
from lightning_mcore_lora.adapters.placement import Around, Enter, Factor, Middle, Sees
from lightning_mcore_lora.adapters.sites import Site

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
        sent_per_token: Sent in forward and backward, for each token of a microbatch.
        sent_per_microbatch: Sent beside that in each microbatch: DoRA's norms.
        sent_per_step: Sent once in an optimizer step: the sums of replicated factors' gradients.
    """

    kept_per_token: float = 0.0
    kept_per_microbatch: float = 0.0
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

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def predict(adapter: LoRAAdapter, config: LoRAConfig) -> Cost:
    """The cost of an adapter that trains, for activations in the dtype of the base's weight.

    Gradients of the factors are summed as the strategy does it, in float32, once per step. Experts are taken to get
    equally many tokens.
    """
    trained = [(name, parameter) for name, parameter in adapter.named_parameters() if parameter.requires_grad]
    site, plan, row = adapter.site, adapter.plan, adapter.plan.placement
    n, element = site.group.size(), site.like.element_size()
    single = max(element, 4)  # of what is never in half precision
    share = (n - 1) / n
    z, wide = plan.width * element, site.d_in * element
    kept_input = wide / (1 if row.sees is Sees.ALL else n)
    gathers = row.enter in (Enter.GATHER, Enter.REGATHER) and n > 1
    is_copy = gathers and (row.enter is Enter.GATHER or config.dropout > 0)
    is_shared = plan.known is not None or norm_is_recomputed(site) or attention_keeps_output(site)
    if config.freeze_a or (is_shared and not is_copy):
        kept_input = 0.0
    if site.type.makes_input:  # the linear keeps what it returns; other than that only a copy is kept
        kept_input = wide / (n if row.around is Around.SEQUENCE else 1) + (kept_input if is_copy else 0.0)
    cast_a = adapter.a.numel() * element if row.enter is Enter.REGATHER and adapter.a.dtype != site.like.dtype else 0
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
    keeps, tokens, weights = forwards == 1, _tokens_seen(site), max(site.experts, 1)
    return Cost(
        kept_per_token=keeps * tokens * (kept_input + (z + output) * at_output),
        kept_per_microbatch=keeps * (config.dora * weights * d_out * (element + single) + cast_a),
        sent_per_token=share * (passes(*_MIDDLE_PASSES[row.middle]) * z + enter * wide),
        sent_per_microbatch=forwards * weights * norms,
        sent_per_step=sum(2 * 4 * parameter.numel() * _share(adapter.sum_group(name)) for name, parameter in trained),
    )


def _tokens_seen(site: Site) -> float:
    """Tokens that a linear gets on one rank, for each token of a microbatch."""
    if not site.experts:
        return 1.0
    # An expert-parallel peer has 1/EP of the experts, for the tokens of EP * ETP / TP microbatches.
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return site.config.moe_router_topk * site.group.size() / tensor


def _share(group: ProcessGroup | None) -> float:
    return 0.0 if group is None else (group.size() - 1) / group.size()
