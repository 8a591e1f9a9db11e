"""What workers tell each other in training: everything works for one as for many."""

from __future__ import annotations

import torch
import torch.distributed as dist


def num_workers() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if num_workers() > 1 else 0


def wait_for_all() -> None:
    """Returns when all workers have called it."""
    if num_workers() > 1:
        dist.barrier()


def mean(value: torch.Tensor) -> torch.Tensor:
    """The mean over workers of a tensor that needs no gradient."""
    value = value.detach().clone()
    if num_workers() > 1:
        dist.all_reduce(value)
        value /= num_workers()
    return value


def largest(number: int, device: torch.device) -> int:
    """The largest of the workers' numbers."""
    if num_workers() == 1:
        return number
    held = torch.tensor(number, device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held)


def gathered(tensor: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """The rows of all workers, in their order, with gradients for each worker's own.

    Workers have the same number of rows; where their other axes differ in length, those are padded.
    Whoever computes a loss on the result has the gradient of the *sum* of the workers' losses with
    respect to its own rows, so that the mean over workers that follows is that of the mean loss.

    Args:
        fill: of the padding.
    """
    if num_workers() == 1:
        return tensor
    for axis in range(1, tensor.ndim):
        missing = largest(tensor.shape[axis], tensor.device) - tensor.shape[axis]
        if missing:
            shape = list(tensor.shape)
            shape[axis] = missing
            tensor = torch.cat([tensor, tensor.new_full(shape, fill)], dim=axis)
    if tensor.dtype == torch.bool:
        return _Gathered.apply(tensor.to(torch.uint8)).bool()
    return _Gathered.apply(tensor.contiguous())


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        parts = [torch.empty_like(tensor) for _ in range(num_workers())]
        dist.all_gather(parts, tensor)
        ctx.num_rows = len(tensor)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[rank() * ctx.num_rows : (rank() + 1) * ctx.num_rows]
