"""Embedding, head and loss with the vocabulary shared over tp, against torch's own in one process."""

import pytest
import torch
import torch.nn.functional as F
from pool import RankFailure
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from titan_moe.config.job import Parallelism
from titan_moe.models.loss import cross_entropy_sum, token_losses
from titan_moe.parallelize import VocabParallel, build_meshes
from titan_moe.parallelize.styles import ApplyContext


def _context(tp, sequence_parallel=True):
    return ApplyContext(nn.Module(), build_meshes(Parallelism(tensor_parallel_degree=tp)), sequence_parallel)


def _share(logits, mesh):
    """The DTensor of ``logits`` over the vocabulary, cut by hand."""
    size = -(-logits.shape[-1] // mesh.size())
    start = mesh.get_local_rank() * size
    local = logits.detach()[..., start : start + size].clone().requires_grad_()
    stride = torch.empty(logits.shape, device="meta").stride()
    placements = [Shard(logits.ndim - 1)]
    return local, DTensor.from_local(local, mesh, placements, shape=logits.shape, stride=stride)


def _logits(vocab, dtype=torch.float64, tokens=(2, 3)):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(*tokens, vocab, generator=generator, dtype=torch.float64) * 4
    labels = torch.randint(vocab, tokens, generator=generator)
    labels[0, 0] = -100
    return logits.to(dtype), labels


def loss_errors(vocab, tp, dtype):
    logits, labels = _logits(vocab, dtype)
    wide = logits.double().requires_grad_()
    want = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    (want * 0.5).backward()
    mesh = _context(tp).tp
    local, shared = _share(logits, mesh)
    got = cross_entropy_sum(shared, labels)
    (got * 0.5).backward()
    start = mesh.get_local_rank() * -(-vocab // tp)
    part = wide.grad[..., start : start + local.shape[-1]]
    error = (local.grad.double() - part).abs().max().item() if part.numel() else 0.0
    return got.dtype, local.grad.dtype, (got.double() - want).abs().item(), error


@pytest.mark.parametrize("vocab, tp", [(12, 2), (13, 2), (13, 4), (5, 4), (3, 4)])
def test_the_loss_is_torchs_also_where_a_rank_has_less_vocabulary_or_none(run_ranks, vocab, tp):
    for dtype, _, loss_error, gradient_error in run_ranks(tp, loss_errors, vocab, tp, torch.float64):
        assert dtype == torch.float64
        assert loss_error < 1e-13 and gradient_error < 1e-14


def test_half_precision_logits_give_an_fp32_loss(run_ranks):
    for dtype, gradient_dtype, loss_error, gradient_error in run_ranks(2, loss_errors, 13, 2, torch.bfloat16):
        assert dtype == torch.float32 and gradient_dtype == torch.bfloat16
        # fp32 sums of six losses near 10; gradients at most 0.5, rounded once to 8 bits.
        assert loss_error < 1e-5 and gradient_error < 0.5 * 2**-8


def extreme_logits():
    """Values whose exponentials overflow, an infinite logit on an ignored token, and all tokens ignored."""
    logits, labels = _logits(8)
    logits = logits * 1e4
    logits[0, 0, 5] = torch.inf
    wide = logits.clone().requires_grad_()
    kept = labels != -100
    want = F.cross_entropy(wide[kept], labels[kept], reduction="sum")
    want.backward()
    mesh = _context(2).tp
    local, shared = _share(logits, mesh)
    got = cross_entropy_sum(shared, labels)
    got.backward()
    part = wide.grad.chunk(2, -1)[mesh.get_local_rank()]
    none = cross_entropy_sum(_share(logits, mesh)[1], torch.full_like(labels, -100))
    return (got - want).abs().item() / want.abs().item(), (local.grad - part).abs().max().item(), none.item()


def test_extreme_logits_and_ignored_tokens(run_ranks):
    for loss_error, gradient_error, none in run_ranks(2, extreme_logits):
        assert loss_error < 1e-14 and gradient_error < 1e-14 and none == 0.0


def mtp_losses():
    logits, labels = _logits(11, tokens=(2, 6))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, 6)
    deeper = logits.flip(0).contiguous()
    want = token_losses((logits, deeper), labels, documents, 0.3)
    mesh = _context(2).tp
    got = token_losses((_share(logits, mesh)[1], _share(deeper, mesh)[1]), labels, documents, 0.3)
    return [(a - b).abs().item() for a, b in zip(got, want, strict=True)]


def test_mtp_heads(run_ranks):
    for errors in run_ranks(2, mtp_losses):
        assert len(errors) == 3 and max(errors) < 1e-12


def a_label_beyond_the_vocabulary():
    logits, labels = _logits(8)
    labels[1, 1] = 8
    cross_entropy_sum(_share(logits, _context(2).tp)[1], labels)


def test_a_label_beyond_the_vocabulary_fails_on_every_rank(run_ranks):
    with pytest.raises(RankFailure, match="out of bounds"):
        run_ranks(2, a_label_beyond_the_vocabulary)


def embedding_errors(vocab, tp, sequence_parallel):
    torch.manual_seed(0)
    plain = nn.Embedding(vocab, 4, padding_idx=1, dtype=torch.float64)
    shared = nn.Embedding(vocab, 4, padding_idx=1, dtype=torch.float64)
    shared.load_state_dict(plain.state_dict())
    context = _context(tp, sequence_parallel)
    VocabParallel().apply("embed", shared, context)
    ids = torch.arange(2 * 5).view(2, 5) % vocab
    scale = torch.randn(2, 5, 4, dtype=torch.float64)
    want = plain(ids)
    (want * scale).sum().backward()
    got = shared(ids)
    assert isinstance(got, DTensor) and got.placements == (context.stream(3),)
    local_rows = shared.weight.to_local().shape[0]
    assert local_rows == max(0, min(-(-vocab // tp), vocab - context.tp.get_local_rank() * -(-vocab // tp)))
    error = (got.full_tensor() - want).abs().max().item()
    # Each rank's own loss is that of its part of the stream, so the gradients add up to the whole one's.
    local = got.to_local()
    part = scale.split((3, 2), dim=1)[context.tp.get_local_rank()] if sequence_parallel else scale
    (local * part).sum().backward()
    return error, (shared.weight.grad.full_tensor() - plain.weight.grad).abs().max().item()


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("vocab", [8, 9])
def test_embedding(run_ranks, vocab, sequence_parallel):
    for error, gradient_error in run_ranks(2, embedding_errors, vocab, 2, sequence_parallel):
        assert error == 0.0 and gradient_error < 1e-14


def an_id_beyond_the_vocabulary(token):
    module = nn.Embedding(8, 4)
    VocabParallel().apply("embed", module, _context(2))
    module(torch.tensor([[0, token]]))


@pytest.mark.parametrize("token", [8, -1])
def test_an_id_beyond_the_vocabulary_fails(run_ranks, token):
    with pytest.raises(RankFailure, match="index out of range"):
        run_ranks(2, an_id_beyond_the_vocabulary, token)


def largest_logits():
    head = nn.Linear(4, 64, bias=True)
    plain = nn.Linear(4, 64, bias=True)
    plain.load_state_dict(head.state_dict())
    VocabParallel().apply("head", head, _context(4))
    x = torch.randn(1, 3, 4)
    out = head(x)
    return tuple(out.shape), tuple(out.to_local().shape), (out.full_tensor() - plain(x)).abs().max().item()


def test_no_rank_holds_all_logits(run_ranks):
    for shape, local_shape, error in run_ranks(4, largest_logits):
        assert shape == (1, 3, 64) and local_shape == (1, 3, 16)
        assert error < 1e-6  # fp32, other shapes of the same product
