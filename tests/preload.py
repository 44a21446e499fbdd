"""Imported once by the server from which the workers are forked."""

import warnings

warnings.simplefilter("ignore")

import lightning.pytorch  # noqa: F401, E402
import megatron.core.dist_checkpointing.strategies.torch  # noqa: E402
import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401, E402
import torch  # noqa: F401, E402

import lightning_mcore_lora  # noqa: F401, E402
