"""A small checkpoint as each Megatron-Core version writes it: ``python -m tests.golden`` writes this version's."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests import kills
from tests.workers import WorkerPool

FOLDER = Path(__file__).parent / "data"
WORLD = 2


def whole() -> dict[str, Tensor]:
    """The whole tensors: every element another number."""
    return {
        "rows": torch.arange(24.0).view(6, 4),
        "columns": 100 + torch.arange(24.0).view(6, 4),
        "gate_up": 200 + torch.arange(32.0).view(8, 4),
        "replicated": 300 + torch.arange(5.0),
    }


class Golden(nn.Module):
    """Parameters that are split in every way."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        marks = {"rows": (0, 1), "columns": (1, 1), "gate_up": (0, 2), "replicated": (-1, 1)}
        for name, tensor in whole().items():
            parameter: Any = nn.Parameter(shard(name, tensor, rank, size).clone())
            parameter.partition_dim, parameter.partition_stride = marks[name]
            parameter.tensor_model_parallel = name != "replicated"
            self.register_parameter(name, parameter)


def shard(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """One rank's part, written out."""
    if name == "rows":
        return tensor.chunk(size)[rank]
    if name == "columns":
        return tensor.chunk(size, 1)[rank]
    if name == "gate_up":
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    return tensor


def _optimizer(module: Golden) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.25)
    for parameter in module.parameters():
        moments = {"exp_avg": parameter.detach() + 1000, "exp_avg_sq": parameter.detach() + 2000}
        optimizer.state[parameter] = moments | {"step": torch.tensor(7.0)}
    return optimizer


def write(out: str) -> None:
    """Save it, on one of two ranks."""
    engine = kills.engine(WORLD, WORLD)
    module = Golden(engine.parallel.tp_rank, WORLD)
    engine.save(out, {"note": "golden"}, engine.tensors(module), [_optimizer(module)], [], 7)
    engine.stop()


def read(path: str, size: int) -> None:
    """Load it and compare, on one of ``size`` ranks."""
    engine = kills.engine(size, size)
    try:
        module = Golden(engine.parallel.tp_rank, size)
        loaded = engine.load(path, engine.tensors(module), [_optimizer(module)])
        (state,) = loaded.optimizer_states
        for i, (name, tensor) in enumerate(whole().items()):
            expected = shard(name, tensor, engine.parallel.tp_rank, size)
            assert torch.equal(loaded.weights[name], expected), name
            assert torch.equal(state["state"][i]["exp_avg"], expected + 1000), name
            assert torch.equal(state["state"][i]["exp_avg_sq"], expected + 2000), name
            assert state["state"][i]["step"] == 7
        assert state["param_groups"][0]["lr"] == 0.25
        assert (loaded.rest, loaded.manifest.step) == ({"note": "golden"}, 7)
    finally:
        engine.stop()


if __name__ == "__main__":
    pool = WorkerPool()
    try:
        pool(WORLD, write, str(FOLDER / f"mcore-{version('megatron-core')}.ckpt"))
    finally:
        pool.close()
