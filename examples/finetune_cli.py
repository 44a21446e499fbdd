"""The same fine-tune from a YAML file, by LightningCLI.

python examples/finetune_cli.py fit --config examples/finetune.yaml
python examples/finetune_cli.py fit --config examples/finetune.yaml --trainer.max_steps 2
"""

from chat_data import ChatDataModule
from lightning.pytorch.cli import LightningCLI
from sft import SFTModule

import lightning_mcore_lora  # noqa: F401 (registers the strategy)

if __name__ == "__main__":
    LightningCLI(SFTModule, ChatDataModule, save_config_kwargs={"overwrite": True})
