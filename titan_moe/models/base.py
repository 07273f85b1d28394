"""The decoder that all families share."""

import torch
from torch import Tensor, nn

from titan_moe.errors import ConfigError
from titan_moe.models.attention import Attention, ForwardContext, LatentAttention, attention_mask, mask_kind
from titan_moe.models.layers import DecoderLayer, MTPBlock, TokenEmbedding
from titan_moe.models.norm import RMSNorm
from titan_moe.models.spec import ModelConfig


class Decoder(nn.Module):
    """A decoder-only language model.

    Parameters are left uninitialised: see ``titan_moe.models.init``. A part that is None or missing is skipped in the
    forward pass, so that a pipeline stage can hold some of them. Families choose the attention by their config.

    Attributes:
        has_head: False in a pipeline stage that passes its hidden states on.
        depths_before: MTP depths that earlier pipeline stages compute.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.has_head, self.depths_before = True, 0
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.dim)
        # Keyed by name, so that names stay global where only some layers are present.
        self.layers = nn.ModuleDict(
            {
                str(i): DecoderLayer(config, self.attention(i), dense=i < config.num_dense_layers)
                for i in range(config.num_layers)
            }
        )
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        depths = range(config.mtp_depth)
        self.mtp = nn.ModuleDict({str(d): MTPBlock(config, self.attention(config.num_layers + d)) for d in depths})

    def attention(self, layer: int) -> nn.Module:
        """The attention of layer ``layer``; MTP layers count on from ``num_layers``."""
        spec = self.config.attention(layer)
        if spec.latent:
            return LatentAttention(self.config)
        return Attention(
            self.config,
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            qk_norm=spec.qk_norm,
            norm_over_heads=spec.norm_over_heads,
            window=spec.window,
            sinks=spec.sinks,
        )

    def forward(
        self,
        input_ids_BS: Tensor,
        document_ids: Tensor | None = None,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        mtp_input_ids: Tensor | None = None,
    ):
        """Logits of the next token.

        Args:
            input_ids_BS: int64 tokens; in a pipeline stage after the first what the stage before it returned.
            document_ids: ``[B, S]``; positions attend only to earlier ones with an equal id. None: one document.
            valid: ``[B, S]`` bool; padding (False) is left out of losses, counts and capacity of the MoE layers.
            positions: ``[S]`` int64, where these tokens stand in the sequence that ranks share under context
                parallelism; ``document_ids`` are then those of the whole sequence. None: from 0 on.
            mtp_input_ids: ``[B, depths, S]``, what ``tokens_ahead`` makes of the whole sequences: needed where
                ``input_ids_BS`` does not hold them. None: made from it.

        Returns:
            ``logits [B, S, V]``; in training with ``mtp_depth`` D > 0 the tuple ``(logits, mtp_1, ..., mtp_D)``,
            where ``mtp_d[:, t]`` predicts token t + 1 + d. Without a head: the hidden states, in training followed
            by those of the d MTP depths so far, ``[(1 + d) * B, S, D]``.

        Raises:
            ConfigError: when the sequence exceeds ``config.max_seq_len``, or positions and context parallelism do
                not come together.
        """
        x_BSD = input_ids_BS if input_ids_BS.is_floating_point() else self.embed_tokens(input_ids_BS)
        # The main hidden state, then one per MTP depth.
        hidden = list(x_BSD.chunk(1 + self.depths_before)) if self.training and self.depths_before else [x_BSD]
        context = self.context(hidden[0], document_ids, valid, positions)
        for layer in self.layers.values():
            hidden[0] = layer(hidden[0], context)
        if self.norm is not None:
            hidden[0] = self.norm(hidden[0])
        for key, block in self.mtp.items() if self.training else ():
            depth = int(key) + 1
            if block.layer is None:
                continue
            if mtp_input_ids is None:
                mtp_input_ids = tokens_ahead(input_ids_BS, self.config.mtp_depth, document_ids, valid)
            ids_BS = mtp_input_ids[:, depth - 1]
            real_BS = ids_BS >= 0
            ids_BS = torch.where(real_BS, ids_BS, ~ids_BS)
            embedded_BSD = ids_BS if self.config.mtp_own_embeddings else self.embed_tokens(ids_BS)
            # Positions without a real token ahead have no label either, so they are padding to the MoE layer.
            of_depth = real_BS if valid is None else real_BS & valid
            shifted = ForwardContext(context.cos, context.sin, of_depth, context.masks)
            hidden.append(block(hidden[-1], embedded_BSD, shifted))
        if not self.has_head:
            return torch.cat(hidden) if len(hidden) > 1 else hidden[0]
        outputs = [self.logits(hidden[0])]
        for depth, hidden_BSD in enumerate(hidden[1:]):
            head = self.mtp[str(depth)] if self.config.mtp_own_embeddings else self.logits
            outputs.append(head(hidden_BSD))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def context(
        self,
        hidden_BSD: Tensor,
        document_ids: Tensor | None,
        valid: Tensor | None,
        positions: Tensor | None = None,
    ) -> ForwardContext:
        """Rotary tables and masks for one forward pass."""
        blocks = [*self.layers.values(), *(block.layer for block in self.mtp.values() if block.layer)]
        attentions = {mask_kind(block.self_attn): block.self_attn for block in blocks}
        parallel = next((attention.context_parallel for attention in attentions.values()), None)
        if attentions and (parallel is None) != (positions is None):
            raise ConfigError(
                "positions belong to context parallelism: give them, and the tokens, as shard_sequence makes them "
                "where context_parallel_degree is above 1, and leave them out elsewhere."
            )
        seq_len = hidden_BSD.shape[1] * (1 if parallel is None else parallel.size)
        if seq_len > self.config.max_seq_len:
            raise ConfigError(
                f"seq_len = {seq_len} is more than the model's max_seq_len = {self.config.max_seq_len}. "
                f"Shorten training.seq_len or raise model.override.max_seq_len."
            )
        # A pipeline stage without attention does not know the whole.
        if attentions and document_ids is not None and document_ids.shape[1] != seq_len:
            raise ConfigError(
                f"document_ids of {document_ids.shape[1]} positions: they are those of all {seq_len} of the sequence, "
                "also where ranks share it."
            )
        device, dtype = hidden_BSD.device, hidden_BSD.dtype
        at_least_fp32 = torch.promote_types(dtype, torch.float32)
        places = torch.arange(seq_len, device=device) if positions is None else positions
        cos, sin = self.config.rotary().tables(places, dtype=at_least_fp32)
        masks = {
            kind: attention_mask(
                seq_len,
                document_ids,
                attention.window,
                attention.sinks is not None,
                device=device,
                dtype=dtype,
                queries_Q=None if positions is None else attention.context_parallel.queries(positions),
            )
            for kind, attention in attentions.items()
        }
        return ForwardContext(cos, sin, valid, masks)

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """The head, which a tied model shares with its embedding."""
        if self.lm_head is None:
            return self.embed_tokens.as_head(hidden_BSD)
        return self.lm_head(hidden_BSD)


def shift_within_document(x_BS: Tensor, by: int, document_ids: Tensor | None, fill: int = 0) -> tuple[Tensor, Tensor]:
    """``x[:, t + by]`` at t where that lies in the same document, else ``fill``; and where it does, as bool."""
    inside_BS = torch.zeros_like(x_BS, dtype=torch.bool)
    if document_ids is None:
        inside_BS[:, :-by] = True
    else:
        inside_BS[:, :-by] = document_ids[:, :-by] == document_ids[:, by:]
    return x_BS.roll(-by, dims=1).masked_fill(~inside_BS, fill), inside_BS


def tokens_ahead(ids_BS: Tensor, depths: int, document_ids: Tensor | None, valid: Tensor | None = None) -> Tensor:
    """What MTP looks at: the token d positions on in the same document, ``[B, depths, S]``, d = 1, 2, ...

    Where that is padding it is ``~id``, and past the document's end -1, as if padding with id 0: both negative.
    """
    ahead = []
    for depth in range(1, depths + 1):
        shifted_BS, real_BS = shift_within_document(ids_BS, depth, document_ids)
        if valid is not None:
            real_BS, _ = shift_within_document(valid, depth, document_ids)
        ahead.append(torch.where(real_BS, shifted_BS, ~shifted_BS))
    return torch.stack(ahead, dim=1)
