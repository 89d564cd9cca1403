"""torch.nn.MultiheadAttention's twin. B batch, T and S lengths, E embedding, H heads, D = E // H."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._arguments import floating, given
from .op import attention
from .spec import without_lowest


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention on `attention`: its arguments, parameters, initial values and state_dict.

    Differences: a row that sees no key gives zeros and zero weights (PyTorch: NaN where weights are asked for);
    masks of bool and floating kinds mix; nested tensors are refused; no fused inference path of its own.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            query: [T, B, E], with batch_first [B, T, E], or one sequence [T, E]. Differentiable.
            key: [S, B, kdim], as query. Differentiable.
            value: [S, B, vdim], as query. Differentiable.
            key_padding_mask: [B, S], or [S] for one sequence: bool, True hides a key, or floating, added to the scores.
            need_weights: return the softmax weights, after dropout. The default, as in PyTorch; it takes the
                materialised formula, which holds B x H x T x S scores. Set it to False for the kernels.
            attn_mask: [T, S] or [B * H, T, S], as key_padding_mask. Differentiable if floating.
            average_attn_weights: average them over heads.
            is_causal: says that attn_mask is the causal mask, which must be given. It is then not read, where T == S,
                no key_padding_mask and no added key is there and no weights are asked for.

        Returns:
            (out as query [.., E], weights [B, T, S'], [B, H, T, S'] unless averaged, or None). S' counts the keys that
            add_bias_kv and add_zero_attn append. No B for one sequence.

        Raises:
            ValueError: shapes or dtypes that do not fit, is_causal without attn_mask, nested tensors, each named.
        """
        self._check(query, key, value, key_padding_mask, attn_mask, is_causal)
        q, k, v = self._project(query, key, value)
        B, T, H, D = q.shape
        S, extra = k.shape[1], (self.bias_k is not None) + self.add_zero_attn
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([t, b.to(t.dtype).view(1, 1, H, D).expand(B, 1, H, D)], 1)
                    for t, b in ((k, self.bias_k), (v, self.bias_v)))  # fmt: skip
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 0, 0, 1)) for t in (k, v))
        causal = is_causal and key_padding_mask is None and not need_weights and not extra and T == S
        bias = None if causal else self._bias(attn_mask, key_padding_mask, (B, H, T, S), extra, q.dtype)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            out, weights = _materialized(q, k, v, bias, p)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = attention(q, k, v, causal=causal, bias=bias, dropout_p=p)  # type: ignore[assignment]
        out = self.out_proj(out.flatten(2))
        if query.dim() == 2:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, H, D], [B, S, H, D] twice. What is read by two projections is read once."""
        E = self.embed_dim
        if not self._qkv_same_embed_dim:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
        else:
            w, b = self.in_proj_weight, self.in_proj_bias
            if query is key and key is value:
                q, k, v = F.linear(query, w, b).chunk(3, -1)
            elif key is value:
                q = F.linear(query, w[:E], None if b is None else b[:E])
                k, v = F.linear(key, w[E:], None if b is None else b[E:]).chunk(2, -1)
            else:
                biases = (None,) * 3 if b is None else b.chunk(3)
                q, k, v = (F.linear(x, y, z) for x, y, z in zip((query, key, value), w.chunk(3), biases))
        if query.dim() == 2:
            q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        elif not self.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        heads = [t.unflatten(-1, (self.num_heads, self.head_dim)) for t in (q, k, v)]
        return heads[0], heads[1], heads[2]

    def _bias(
        self, attn_mask: Tensor | None, padding: Tensor | None, shape: tuple[int, int, int, int], extra: int,
        dtype: torch.dtype,
    ) -> Tensor | None:  # fmt: skip
        """Both masks as a bias of `attention`, [B or 1, H or 1, T or 1, S + extra]: bool (True may see) or floating."""
        B, H, T, S = shape
        masks = []
        if attn_mask is not None:
            masks.append(attn_mask.view(B, H, T, S) if attn_mask.dim() == 3 else attn_mask.view(1, 1, T, S))
        if padding is not None:
            masks.append(padding.view(B, 1, 1, S))
        if not masks:
            return None
        if all(m.dtype == torch.bool for m in masks):
            hidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
            return F.pad(~hidden, (0, extra), value=True) if extra else ~hidden
        added = [torch.zeros_like(m, dtype=dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m
                 for m in masks]  # fmt: skip
        total = added[0] if len(added) == 1 else added[0] + added[1]
        return F.pad(total, (0, extra)) if extra else total

    def _check(self, query, key, value, key_padding_mask, attn_mask, is_causal) -> None:
        name, shapes = "MultiheadAttention", f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(f"{name}: nested tensors are not supported; use nn.Attention with cu_seqlens")
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ValueError(f"{name}: query, key, value must all have 2 or all 3 dimensions; got {shapes}")
        if (query.shape[-1], key.shape[-1], value.shape[-1]) != (self.embed_dim, self.kdim, self.vdim):
            wanted = (self.embed_dim, self.kdim, self.vdim)
            raise ValueError(f"{name}: last dimensions of query, key, value must be {wanted}; got {shapes}")
        batch = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (query.dim() == 3 and query.shape[batch] != key.shape[batch]):
            raise ValueError(f"{name}: batch sizes or lengths of query, key, value differ: {shapes}")
        one = query.dim() == 2
        B = 1 if one else query.shape[batch]
        T, S = (t.shape[0 if one else 1 - batch] for t in (query, key))
        for mask, at, accepted in (
            (key_padding_mask, "key_padding_mask", [[S] if one else [B, S]]),
            (attn_mask, "attn_mask", [[T, S], [B * self.num_heads, T, S]]),
        ):
            if mask is None:
                continue
            if mask.dtype != torch.bool and not floating(mask):
                raise ValueError(f"{name}: {at} must be bool or floating; got {given(mask)}")
            if list(mask.shape) not in accepted:
                fits = " or ".join(map(str, accepted))
                raise ValueError(f"{name}: {at} must be {fits}; got {list(mask.shape)}")
        if is_causal and attn_mask is None:
            raise ValueError(f"{name}: is_causal says that attn_mask is the causal mask; give attn_mask")


def _materialized(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float) -> tuple[Tensor, Tensor]:
    """out [B, T, H, D], weights [B, H, T, S] after dropout: the formula itself, softmax in float32."""
    acc = torch.promote_types(q.dtype, torch.float32)
    s = (q.transpose(1, 2) * q.shape[-1] ** -0.5 @ k.permute(0, 2, 3, 1)).to(acc)
    if bias is not None:
        s = s.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else s + without_lowest(bias)
        live = (s.detach() != -torch.inf).any(-1, keepdim=True)
        weights = s.masked_fill(~live, 0.0).softmax(-1).masked_fill(~live, 0.0)
    else:
        weights = s.softmax(-1)
    weights = F.dropout(weights, dropout_p).to(q.dtype)
    return (weights @ v.transpose(1, 2)).transpose(1, 2), weights
