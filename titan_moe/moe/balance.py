"""Load balancing: auxiliary losses, counters, and the loss-free expert bias.

T tokens, E experts, K experts per token, B sequences, L MoE layers. With f_e the share of slots that go to expert e
and P_e the sum over real tokens of its normalised score, every balancing loss is
``token_weight x coef x E x sum_e f_e P_e``: linear in this rank's tokens given f, hence summed over micro-batches
and ranks like the main loss. A uniform router gives exactly the coefficient.
"""

from collections.abc import Callable, Iterator
from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.distributed import in_backward
from titan_moe.kernels.router_topk import RouterSums, stable_topk
from titan_moe.moe.capacity import valid_capacity
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.routing import Routing, count_experts

_MICRO_BATCHES = 4096


# A compiled graph cannot ask whether it runs in a backward pass, and must not differ there; this asks as it runs.
_LIBRARY = torch.library.Library("titan_moe", "FRAGMENT")
_LIBRARY.define("add_once(Tensor(a!) total, Tensor amount) -> ()")


def _add_once(total: Tensor, amount: Tensor) -> None:
    if not in_backward():
        total.add_(amount)


_LIBRARY.impl("add_once", _add_once, "CompositeExplicitAutograd")
torch.library.register_fake("titan_moe::add_once", lambda total, amount: None, lib=_LIBRARY)


# The step's history is a list, which no graph holds. Which layer's travels in a tensor: a number would be compiled in.
_LIBRARY.define("global_share(Tensor layer, Tensor counts_E, Tensor probs_E) -> Tensor")
_numbers = count()
_numbered: WeakValueDictionary[int, "Balance"] = WeakValueDictionary()
_LIBRARY.impl(
    "global_share",
    lambda layer, counts_E, probs_E: _numbered[layer.item()].global_share(counts_E, probs_E),
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    "titan_moe::global_share", lambda layer, counts_E, probs_E: torch.empty_like(probs_E), lib=_LIBRARY
)


def add_once(total: Tensor, amount: Tensor) -> None:
    """Add to a counter, but not in a recompute: a forward inside a backward pass."""
    torch.ops.titan_moe.add_once(total, amount.detach())


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, aux: Tensor) -> Tensor:
        ctx.aux_like = aux.dtype, aux.device
        # Compiled code makes a view anew from what it looks at, and the gradient would pass by this node.
        return y.clone() if torch.compiler.is_compiling() else y.view_as(y)

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.aux_like
        return grad_y, torch.ones((), dtype=dtype, device=device)


class Balance(nn.Module):
    """Counters and auxiliary losses of one MoE layer.

    The counters are non-persistent buffers, summed over the micro-batches of a step until ``finish_step``. They move
    in training only and once per micro-batch: a forward inside a backward pass is a recompute. A user who runs a
    layer in training mode without ``finish_step`` sees them grow, and the global loss average over all of it.

    Attributes:
        token_weight: 0-d tensor, loss scale / valid tokens of the global batch; None: 1 / valid tokens of the call.
        reduce_counts: returns its int64 ``[E]`` argument summed over the ranks that share the global aux loss (it
            may work in place). None: this rank alone. Called in the first forward of a micro-batch, never in a
            recompute.
        share_counts: the same over the ranks that hold parts of the same sequences (tp x cp), for any int64 tensor;
            None: sequences are whole. Used by the micro-batch and the sequence loss, whose shares f must be those
            of whole sequences, in recomputes too.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self._take_number()
        self.token_weight: Tensor | None = None
        self.reduce_counts: Callable[[Tensor], Tensor] | None = None
        self.share_counts: Callable[[Tensor], Tensor] | None = None
        # Per micro-batch of this step: what identifies it, and the global f it saw. A recompute needs the same f.
        self._seen: list[tuple[Tensor, Tensor]] = []
        for name in ("counts_E", "global_counts_E"):
            self.register_buffer(name, torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)
        for name, dtype in (("dropped", torch.int64), ("aux_loss", torch.float64), ("z_loss", torch.float64)):
            self.register_buffer(name, torch.zeros((), dtype=dtype), persistent=False)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._take_number()

    def _take_number(self) -> None:
        number = next(_numbers)
        _numbered[number], self._number = self, torch.tensor(number, device="cpu")

    def reset(self) -> None:
        """Zero the counters for a new step."""
        self._seen.clear()
        for counter in self.buffers():
            counter.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Balance":
        def keep(counter: Tensor) -> Tensor:
            # Sums of many terms keep their dtype when the model is cast.
            out = fn(counter)
            return out if out.dtype == counter.dtype else counter.to(out.device)

        return super()._apply(keep, recurse)

    def sums(
        self, logits_TE: Tensor, scores_TE: Tensor, routing: Routing, valid_T: Tensor | None, num_sequences: int
    ) -> RouterSums | None:
        """What ``losses`` needs of the scores, in torch; None in eval or with every coefficient 0.

        Args:
            logits_TE: router logits.
            scores_TE: scores of the score function in use.
            routing: the choice, before any capacity.
            valid_T: bool, False marks padding; None: all tokens are real.
            num_sequences: B, dividing T.
        """
        config = self.config
        if not (self.training and (config.balancing_coefs or config.z_loss_coef)):
            return None
        (T, E), B = scores_TE.shape, num_sequences
        S = T // max(B, 1)
        assert B * S == T, (T, B)
        ids_TK = routing.expert_ids_TK
        if config.reshapes_selection or config.selection != "top_k":
            # Loads are those of the scores alone: what bias and groups did to the choice is not the router's doing.
            ids_TK = stable_topk(scores_TE, config.top_k)
            ids_TK = ids_TK if valid_T is None else torch.where(valid_T[:, None], ids_TK, -1)
        squares = None
        if config.z_loss_coef:
            lse_T = logits_TE.logsumexp(-1)
            lse_T = lse_T if valid_T is None else torch.where(valid_T, lse_T, 0.0)
            squares = lse_T.square().sum()
        if not config.balancing_coefs:
            return RouterSums(None, None, squares)
        probs_TE = scores_TE
        if config.score_function != "softmax":
            probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
        if valid_T is not None:
            probs_TE = torch.where(valid_T[:, None], probs_TE, 0.0)
        offset_B11 = torch.arange(B, device=ids_TK.device)[:, None, None] * E
        ids_BSK = ids_TK.view(B, S, ids_TK.shape[1])
        counts_BE = count_experts(torch.where(ids_BSK < 0, -1, ids_BSK + offset_B11), B * E).view(B, E)
        return RouterSums(probs_TE.view(B, S, E).sum(1), counts_BE, squares)

    def losses(self, routing: Routing, sums: RouterSums | None, valid_T: Tensor | None) -> Tensor | None:
        """Count the routing and return the weighted sum of the enabled losses.

        Args:
            routing: the choice, before any capacity.
            sums: of its scores; with ``share_counts``, over equally many sequences on all ranks of the sum.
            valid_T: bool, False marks padding; None: all tokens are real.

        Returns:
            0-d loss with graph, or None in eval or with every coefficient 0.
        """
        if not self.training:
            return None
        self._count(routing, valid_T)
        if sums is None:
            return None
        config = self.config
        like, token_weight = routing.weights_TK, self.token_weight
        if token_weight is None:
            T = routing.expert_ids_TK.shape[0]
            tokens = T if valid_T is None else valid_T.sum()
            if self.share_counts is not None:
                tokens = self.share_counts(torch.as_tensor(tokens, device=like.device))
            if isinstance(tokens, Tensor):
                tokens = tokens.to(like.dtype)
            token_weight = 1 / (tokens.clamp_min(1) if isinstance(tokens, Tensor) else max(tokens, 1))
        else:
            token_weight = token_weight.to(device=like.device, dtype=like.dtype)

        aux = z = None
        if config.balancing_coefs:
            aux = token_weight * self._balance_loss(sums)
        if config.z_loss_coef:
            z = token_weight * config.z_loss_coef * sums.squares
        for total, loss in ((self.aux_loss, aux), (self.z_loss, z)):
            if loss is not None:
                add_once(total, loss)
        return aux if z is None else z if aux is None else aux + z

    @staticmethod
    def inject(y: Tensor, aux: Tensor) -> Tensor:
        """Return ``y``; its backward also sends a gradient of 1 into ``aux`` (0-d), whatever arrives at ``y``.

        The loss enters the graph where it arises, so it works under every pipeline schedule.
        """
        return _Inject.apply(y, aux)

    @torch.no_grad()
    def _count(self, routing: Routing, valid_T: Tensor | None) -> None:
        config = self.config
        add_once(self.counts_E, routing.counts_E)
        if config.capacity_factor is not None:
            T, E = routing.expert_ids_TK.shape[0], config.num_experts
            limit = valid_capacity(T, valid_T, config.top_k, E, config.capacity_factor)
            add_once(self.dropped, (routing.counts_E - limit).clamp_min(0).sum())

    def _balance_loss(self, sums: RouterSums) -> Tensor:
        """Sum over the enabled kinds of coef x E x sum_e f_e P_e."""
        config, E = self.config, self.config.num_experts
        probs_BE, counts_BE = sums.probs_BE, sums.counts_BE
        probs_E, counts_E = probs_BE.sum(0), counts_BE.sum(0)
        if self.share_counts is not None and (config.aux_loss_coef or config.seq_aux_loss_coef):
            counts_BE = self.share_counts(counts_BE)
        loss = probs_E.new_zeros(())
        if config.aux_loss_coef:
            loss = loss + config.aux_loss_coef * E * (_share(counts_BE.sum(0), probs_E) * probs_E).sum()
        if config.seq_aux_loss_coef:
            loss = loss + config.seq_aux_loss_coef * E * (_share(counts_BE, probs_BE) * probs_BE).sum()
        if config.global_aux_loss_coef:
            known = counts_E, probs_E.detach()
            compiled = torch.compiler.is_compiling()
            f_E = torch.ops.titan_moe.global_share(self._number, *known) if compiled else self.global_share(*known)
            loss = loss + config.global_aux_loss_coef * E * (f_E * probs_E).sum()
        return loss

    @torch.no_grad()
    def global_share(self, counts_E: Tensor, probs_E: Tensor) -> Tensor:
        """f over the step so far and all ranks; in a recompute, the f that this micro-batch saw at first."""
        if not in_backward():
            self.global_counts_E += counts_E
            total_E = self.global_counts_E.clone()
            if self.reduce_counts is not None:
                total_E = self.reduce_counts(total_E)
            f_E = _share(total_E, probs_E)
            self._seen.append((probs_E, f_E))
            del self._seen[:-_MICRO_BATCHES]
            return f_E
        assert self._seen, "recompute of a forward of an earlier step"
        # Schedules recompute in any order, so a micro-batch is known by its scores: the nearest seen ones.
        known_ME = torch.stack([known for known, _ in self._seen])
        nearest = (known_ME - probs_E).abs().sum(-1).argmin(0, keepdim=True)
        return torch.stack([f for _, f in self._seen]).index_select(0, nearest)[0]


def _share(counts: Tensor, like: Tensor) -> Tensor:
    """Counts over their sum along the last dim, 0 where there are none, in the dtype of ``like``."""
    return counts.to(like.dtype) / counts.sum(-1, keepdim=True).clamp_min(1)


def balances(model: nn.Module) -> Iterator[tuple[str, nn.Module, Balance]]:
    """Name of the MoE layer, the layer, and its ``Balance``, in ``named_modules`` order, wrappers left out of names."""
    for name, module in model.named_modules():
        if isinstance(module, Balance):
            path = name.rpartition(".")[0]
            wrappers = ("_checkpoint_wrapped_module", "_orig_mod")
            label = ".".join(part for part in path.split(".") if part not in wrappers)
            yield label, model.get_submodule(path), module


def set_token_weight(model: nn.Module, token_weight: Tensor | None) -> None:
    """Set the weight of one token's auxiliary losses: loss scale / valid tokens of the global batch (0-d tensor)."""
    for _, _, balance in balances(model):
        balance.token_weight = token_weight


@torch.no_grad()
def finish_step(
    model: nn.Module, reduce: Callable[[Tensor], Tensor] | None = None, *, update_bias: bool = True
) -> dict[str, list[str] | Tensor]:
    """Update every expert bias, report the step's counters and reset them. Once per optimizer step, no host sync.

    The bias moves by ``bias_update_speed x sign(mean - count)`` on exact counts, in place.

    Args:
        model: any module; without MoE layers the report is empty.
        reduce: SUM over the ranks that hold these layers and route other tokens (dp x cp x tp of one pipeline
            stage). Called exactly once with one float64 vector, of length 0 without MoE layers; integers up to 2^53
            stay exact. All ranks of the sum must hold the same layers.
        update_bias: False leaves the biases alone, as in a step that is skipped.

    Returns:
        ``names``: layer names; ``counts_LE`` (0 beyond a layer's experts), ``num_experts_L`` (on the CPU),
        ``routed_L`` and ``dropped_L`` slots: int64; ``aux_loss_L`` and ``z_loss_L``: sums of the losses as they were
        weighted, so they carry the loss scale; ``bias_min_L``, ``bias_max_L`` after the update, 0 without a bias:
        float64.
    """
    layers = list(balances(model))
    sizes = [balance.config.num_experts for _, _, balance in layers]
    L, E = len(layers), max(sizes, default=0)
    device = layers[0][2].counts_E.device if layers else next((p.device for p in model.parameters()), None)

    def stack(rows: list[Tensor], *shape: int) -> Tensor:
        return torch.stack(rows) if rows else torch.zeros(shape, dtype=torch.float64, device=device)

    packed = stack(
        [
            torch.cat(
                [F.pad(b.counts_E, (0, E - b.counts_E.shape[0])).double()]
                + [c.double()[None] for c in (b.dropped, b.aux_loss, b.z_loss)]
            )
            for _, _, b in layers
        ],
        0,
        3,
    )
    if reduce is not None:
        packed = reduce(packed.view(-1)).view(L, E + 3)
    counts_LE = packed[:, :E].long()
    ranges = []
    for (_, layer, balance), counts_E in zip(layers, counts_LE, strict=True):
        n, bias_E = balance.config.num_experts, layer.router.expert_bias
        ranges.append(packed.new_zeros(2))
        if bias_E is not None:
            if update_bias:
                step_E = (counts_E.sum() - n * counts_E[:n]).sign()
                bias_E.add_(step_E.to(bias_E.dtype), alpha=balance.config.bias_update_speed)
            ranges[-1] = torch.stack(bias_E.aminmax()).double()
        balance.reset()
    range_L2 = stack(ranges, 0, 2)
    return {
        "names": [name for name, _, _ in layers],
        "counts_LE": counts_LE,
        "num_experts_L": torch.tensor(sizes, dtype=torch.int64),
        "routed_L": counts_LE.sum(1),
        "dropped_L": packed[:, E].long(),
        "aux_loss_L": packed[:, E + 1],
        "z_loss_L": packed[:, E + 2],
        "bias_min_L": range_L2[:, 0],
        "bias_max_L": range_L2[:, 1],
    }
