"""Functions that pack codes of 1, 2, 4 or 8 bits into bytes, least significant bits first."""

from __future__ import annotations

import torch


def packed_width(dim: int, num_bits: int) -> int:
    """Returns the number of bytes that `dim` codes of `num_bits` bits occupy.

    >>> packed_width(48, 1), packed_width(9, 4)
    (6, 5)
    """
    return -(-dim * num_bits // 8)


def pack(codes_TD: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Packs codes (T, D) uint8 of `num_bits` bits into bytes (T, packed_width) and pads with zeros.

    >>> pack(torch.tensor([[1, 0, 3, 2, 1]], dtype=torch.uint8), 2).tolist()
    [[177, 1]]
    """
    num_tokens, dim = codes_TD.shape
    codes_per_byte = 8 // num_bits
    width = packed_width(dim, num_bits)
    padded = torch.nn.functional.pad(codes_TD, (0, width * codes_per_byte - dim))
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8, device=codes_TD.device)
    shifted = padded.reshape(num_tokens, width, codes_per_byte) << shifts
    return shifted.sum(dim=2, dtype=torch.uint8)


def look_up(packed: torch.Tensor, values: torch.Tensor, dim: int) -> torch.Tensor:
    """Unpacks codes and maps each to a value, (T, D), using one table look-up per byte.

    `packed` has been returned by `pack`. `values` (2^num_bits,) are on the same device.

    >>> packed = pack(torch.tensor([[1, 0, 3, 2, 1]], dtype=torch.uint8), 2)
    >>> look_up(packed, torch.tensor([0.0, 0.1, 0.2, 0.3]), 5).tolist()[0] == torch.tensor(
    ...     [0.1, 0.0, 0.3, 0.2, 0.1]).tolist()
    True
    """
    num_bits = (len(values) - 1).bit_length()
    byte_values = torch.arange(256, device=packed.device).unsqueeze(1)
    shifts = torch.arange(0, 8, num_bits, device=packed.device)
    table = values[byte_values >> shifts & (len(values) - 1)]  # (256, 8 / num_bits)
    unpacked = table.index_select(0, packed.reshape(-1).int())
    return unpacked.reshape(len(packed), packed.shape[1] * len(shifts))[:, :dim]
