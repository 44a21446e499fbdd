"""The same fine-tune from a YAML file, by LightningCLI.

python examples/finetune_cli.py fit --config examples/finetune.yaml
python examples/finetune_cli.py fit --config examples/finetune.yaml --trainer.max_steps 2
"""

import warnings

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")

from chat_data import ChatDataModule  # noqa: E402
from lightning.pytorch.cli import LightningCLI  # noqa: E402
from sft import SFTModule  # noqa: E402

import lightning_mcore_lora  # noqa: E402, F401 (registers the strategy)

if __name__ == "__main__":
    LightningCLI(SFTModule, ChatDataModule, save_config_kwargs={"overwrite": True})
