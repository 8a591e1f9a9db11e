"""Collective operations for training, which do nothing without a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist


def num_workers() -> int:
    """Returns the number of workers in the process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Returns the rank of this worker, starting from 0."""
    return dist.get_rank() if num_workers() > 1 else 0


def wait_for_all() -> None:
    """Blocks until all workers have reached this call."""
    if num_workers() > 1:
        dist.barrier()


def mean(value: torch.Tensor) -> torch.Tensor:
    """Returns the mean of a tensor over all workers. No gradient flows through the result."""
    value = value.detach().clone()
    if num_workers() > 1:
        dist.all_reduce(value)
        value /= num_workers()
    return value


def maximum(number: int, device: torch.device) -> int:
    """Returns the maximum of a number over all workers."""
    if num_workers() == 1:
        return number
    result = torch.tensor(number, device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return int(result)


def gather_rows(tensor: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """Gathers rows from all workers, in the order of their ranks.

    The result is differentiable with respect to the rows of this worker. Its gradient is that of
    the *sum* of the losses of all workers. If gradients are then averaged over the workers, as is
    usual in data-parallel training, the result is the gradient of the mean loss.

    All workers must have the same number of rows. The other axes are padded to the size of the
    largest worker.
    """
    if num_workers() == 1:
        return tensor
    for axis in range(1, tensor.ndim):
        missing = maximum(tensor.shape[axis], tensor.device) - tensor.shape[axis]
        if missing:
            shape = list(tensor.shape)
            shape[axis] = missing
            tensor = torch.cat([tensor, tensor.new_full(shape, fill)], dim=axis)
    if tensor.dtype == torch.bool:
        return _GatherRows.apply(tensor.to(torch.uint8)).bool()
    return _GatherRows.apply(tensor.contiguous())


class _GatherRows(torch.autograd.Function):
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
