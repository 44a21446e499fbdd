"""What vLLM reads of an adapter: linears by their last names, one rank and alpha, no DoRA, nothing trained in full."""

from lightning_mcore_lora.peft.adapter import Adapter
from lightning_mcore_lora.peft.names import Names

#: The largest ``--max-lora-rank`` that vLLM takes.
MAX_RANK = 512


def check_for_vllm(adapter: Adapter, names: Names) -> None:
    """Check an adapter against vLLM's rules.

    Raises:
        ValueError: If vLLM would refuse it, or misread it, with the way out.
    """
    merge = "merge it instead, with `lightning-mcore-lora merge`"
    if adapter.dora:
        raise ValueError(f"vLLM reads no DoRA: {merge}")
    if adapter.modules:
        raise ValueError(f"vLLM reads no modules trained in full ({sorted(adapter.modules)[:3]}): {merge}")
    routers = [name for name in adapter.updates if names.by_parameter[name].site.endswith(".router")]
    if routers:
        raise ValueError(f"vLLM adapts no routers ({routers[0]}): {merge}, or train without 'router'")
    rank = max(update.rank for update in adapter.updates.values())
    if rank > MAX_RANK:
        raise ValueError(f"rank={rank} is over vLLM's limit, --max-lora-rank={MAX_RANK}: {merge}")
