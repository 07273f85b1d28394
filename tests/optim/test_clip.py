"""The gradient norm against one process's float64 norm, over plain tensors and several meshes at once."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from titan_moe.optim import clip_grad_norm


def gradients(dtype=torch.float64):
    torch.manual_seed(3)
    return [torch.randn(shape, dtype=dtype) for shape in ((5, 3), (7,), (4, 2, 3), (1, 6), ())]


def reference_norm(tensors):
    return torch.cat([tensor.double().flatten() for tensor in tensors]).norm()


def with_grad(value):
    parameter = torch.zeros_like(value).requires_grad_()
    parameter.grad = value
    return parameter


def clip_over_meshes(max_norm):
    """One gradient per kind of placement: sharded unevenly, HSDP, 2-D, sharded with empty ranks, plain."""
    one = init_device_mesh("cpu", (4,))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    values = gradients()
    layouts = [(one, [Shard(0)]), (two, [Replicate(), Shard(0)]), (two, [Shard(0), Shard(1)]), (one, [Shard(0)])]
    grads = [
        distribute_tensor(value.clone(), mesh, placements)
        for value, (mesh, placements) in zip(values[:4], layouts, strict=True)
    ]
    parameters = [with_grad(grad) for grad in (*grads, values[4].clone())]
    norm = clip_grad_norm([*parameters, torch.zeros(2, requires_grad=True)], max_norm)
    clipped = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    return norm, clipped


def partial_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    parameter = with_grad(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    with pytest.raises(AssertionError, match="not reduced"):
        clip_grad_norm([parameter], 1.0)
    return dist.get_rank()


@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0])
def test_norm_over_mixed_meshes_is_exact_on_every_rank(run_ranks, max_norm):
    values = gradients()
    want = reference_norm(values)
    factor = max_norm / (want + 1e-6) if max_norm == 0.5 else 1.0
    answers = run_ranks(4, clip_over_meshes, max_norm)
    for norm, clipped in answers:
        assert norm.dtype == torch.float64 and torch.equal(norm, answers[0][0])
        torch.testing.assert_close(norm, want, rtol=1e-14, atol=0)
        for got, value in zip(clipped, values, strict=True):
            torch.testing.assert_close(got, value * factor, rtol=1e-14, atol=0)


def test_an_unreduced_gradient_is_refused(run_ranks):
    run_ranks(2, partial_is_refused)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_norm_of_plain_tensors_without_a_group(dtype):
    values = [value * 300 for value in gradients(dtype)]
    parameters = [with_grad(value.clone()) for value in values]
    norm = clip_grad_norm(parameters, 2.0)
    # One rounding to fp32 per tensor; squares of float16 would overflow if taken in float16.
    torch.testing.assert_close(norm, reference_norm(values), rtol=1e-6 if dtype != torch.float64 else 1e-14, atol=0)
    assert all(parameter.grad.dtype == dtype for parameter in parameters)
    rounding = torch.finfo(dtype).eps
    for parameter, value in zip(parameters, values, strict=True):
        torch.testing.assert_close(parameter.grad.double(), value.double() * 2.0 / norm, rtol=2 * rounding, atol=1e-6)


def test_mixed_dtypes_share_one_norm():
    values = [torch.full((4,), 3.0, dtype=torch.bfloat16), torch.full((4,), 4.0)]
    assert clip_grad_norm([with_grad(value) for value in values], 0) == 10.0


def test_not_finite_and_no_gradients():
    assert clip_grad_norm([torch.zeros(2, requires_grad=True)], 1.0) == 0
    assert clip_grad_norm([], 1.0) == 0
    assert clip_grad_norm([with_grad(torch.tensor([1.0, float("inf")]))], 1.0).isinf()
    assert clip_grad_norm([with_grad(torch.tensor([1.0, float("nan")]))], 1.0).isnan()
