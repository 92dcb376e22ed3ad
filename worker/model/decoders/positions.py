"""The tables of a model's positions; layers with the same positions share a table."""

import torch
from torch import Tensor

from worker.model.decoders.rope_table import rope_table
from worker.model.spec import Attention


class PositionTables:
    """Tables for the positions below ``num_positions``, on a device."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        self._num_positions = num_positions
        self._device = device
        self._tables: dict[str, Tensor] = {}

    def angles(self, spec: Attention) -> Tensor:
        """See `rope_table`. Raises `StartupError`."""
        key = f"{spec.rope} {spec.rotated_dim}"
        if key not in self._tables:
            table = rope_table(spec.rope, spec.rotated_dim, self._num_positions)
            self._tables[key] = table.to(self._device)
        return self._tables[key]

    def slopes(self, spec: Attention) -> Tensor | None:
        """[num_heads] float32; None if scores do not fall with the distance."""
        if spec.slopes is None:
            return None
        key = str(spec.slopes)
        if key not in self._tables:
            self._tables[key] = torch.tensor(spec.slopes, dtype=torch.float32, device=self._device)
        return self._tables[key]

    def temperatures(self, spec: Attention) -> Tensor | None:
        """The factor of the queries at each position, [num_positions] float32; None if all are
        1."""
        temperature = spec.temperature
        if temperature is None:
            return None
        key = str(temperature)
        if key not in self._tables:
            positions = torch.arange(self._num_positions, dtype=torch.float64)
            steps = torch.floor((positions + temperature.shift) / temperature.length)
            factors = 1 + temperature.scale * torch.log1p(steps)
            self._tables[key] = factors.float().to(self._device)
        return self._tables[key]
