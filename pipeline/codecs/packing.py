"""Small numbers packed into bytes: codes of 1, 2, 4 or 8 bits, the first in the lowest bits."""

from __future__ import annotations

import torch


def packed_width(dim: int, num_bits: int) -> int:
    """Bytes of `dim` codes.

    >>> packed_width(48, 1), packed_width(9, 4)
    (6, 5)
    """
    return -(-dim * num_bits // 8)


def pack(codes_TD: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Codes (T, D) uint8 below 2^num_bits -> bytes (T, packed_width); what is left over is 0.

    >>> pack(torch.tensor([[1, 0, 3, 2, 1]], dtype=torch.uint8), 2).tolist()
    [[177, 1]]
    """
    num_tokens, dim = codes_TD.shape
    a_byte = 8 // num_bits
    width = packed_width(dim, num_bits)
    padded = torch.nn.functional.pad(codes_TD, (0, width * a_byte - dim))
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8, device=codes_TD.device)
    shifted = padded.reshape(num_tokens, width, a_byte) << shifts
    return shifted.sum(dim=2, dtype=torch.uint8)


def look_up(packed: torch.Tensor, meanings: torch.Tensor, dim: int) -> torch.Tensor:
    """Decodes packed codes with one table look-up per byte.

    Args:
        packed: (T, W) uint8, as `pack` returns them.
        meanings: (2^num_bits,) value of each code, of any dtype, on the device of `packed`.
        dim: Number of codes per row, D.

    Returns:
        (T, D) values of the codes.

    >>> packed = pack(torch.tensor([[1, 0, 3, 2, 1]], dtype=torch.uint8), 2)
    >>> look_up(packed, torch.tensor([0.0, 0.1, 0.2, 0.3]), 5).tolist()[0] == torch.tensor(
    ...     [0.1, 0.0, 0.3, 0.2, 0.1]).tolist()
    True
    """
    num_bits = (len(meanings) - 1).bit_length()
    every_byte = torch.arange(256, device=packed.device).unsqueeze(1)
    shifts = torch.arange(0, 8, num_bits, device=packed.device)
    table = meanings[every_byte >> shifts & (len(meanings) - 1)]  # (256, 8 / num_bits)
    found = table.index_select(0, packed.reshape(-1).int())
    return found.reshape(len(packed), packed.shape[1] * len(shifts))[:, :dim]
