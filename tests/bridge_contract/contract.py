"""What processes do with a model of a Megatron-Bridge provider, on stand-ins for Transformer Engine's kernels."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests import families, peft_runs
from tests.te_contract import standin


def provided(directory: str, parallel: Any) -> Any:
    """The model as docs/huggingface.md builds it, with its weights."""
    from megatron.bridge import AutoBridge
    from megatron.core.process_groups_config import ProcessGroupCollection

    from lightning_mcore_lora import load_hf_weights

    provider = AutoBridge.from_hf_pretrained(directory).to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size = parallel.sizes.tensor
    provider.sequence_parallel = parallel.sizes.sequence_parallel
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.use_cpu_initialization = True
    provider.gradient_accumulation_fusion = provider.bias_dropout_fusion = provider.apply_rope_fusion = False
    provider.params_dtype, provider.bf16, provider.pipeline_dtype = torch.float32, False, torch.float32
    # Its padding's logits are in the loss: as many at every TP.
    provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, 128 // parallel.sizes.tensor
    with standin.active():
        provider.finalize()
        model = provider.provide()
    load_hf_weights(model, directory, parallel)
    return model


def train(parallel: Any, directory: str) -> dict[str, Any]:
    """Five steps with adapters; saved, and loaded into a second model."""
    from lightning_mcore_lora import LoRAConfig, apply_lora, load_peft_adapter, merge_lora, save_peft_adapter

    with standin.cpu_kernels():
        model = provided(directory, parallel)
        base = peft_runs.logits_of(model)
        report = apply_lora(model, LoRAConfig(rank=4, alpha=6.0))
        peft_runs.shake(model)
        families.train(model, peft_runs.loss_of, families.STEPS)
        with tempfile.TemporaryDirectory() as folder:
            try:
                save_peft_adapter(model, folder)
            except ValueError as error:
                refusal = str(error)
        out = Path(directory).parent / "adapter"
        save_peft_adapter(model, out, base=directory)
        again = provided(directory, parallel)
        load_peft_adapter(again, out, base=directory)
        logits = peft_runs.logits_of(model.eval())
        loaded = peft_runs.logits_of(again.eval())
        merge_lora(again)
        return {
            "classes": {type(m).__name__ for m in model.modules()},
            "sites": [site.site for site in report.sites],
            "base": base,
            "logits": logits,
            "loaded": loaded,
            "merged": peft_runs.logits_of(again),
            "refusal": refusal,
        }


def fit(parallel: Any, directory: str) -> dict[str, Any]:
    """Three steps of a Trainer with MCoreTP."""
    import lightning.pytorch as pl

    from lightning_mcore_lora import LoRASPCallback, MCoreTP

    class Tune(peft_runs.Tune):
        def configure_model(self) -> None:
            if self.gpt is None:
                self.gpt = provided(directory, self.trainer.strategy.parallel)

    rank, world = str(torch.distributed.get_rank()), str(parallel.sizes.world_size)
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    with standin.cpu_kernels():
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=parallel.sizes.world_size,
            strategy=MCoreTP(tensor_parallel_size=parallel.sizes.tensor),
            callbacks=[LoRASPCallback(rank=4, alpha=6.0, verbose=False)],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        module = Tune(directory)
        trainer.fit(module)
        return {"logits": peft_runs.logits_of(module.gpt.eval())}
