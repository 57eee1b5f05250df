"""The classifier as it is exported: the same answers as the trained one, with less work.

Query, key and value are one product; after the last attention only [CLS], which is all that the head reads, is computed
further. The scale of the scores is in the query's weights.
Shape legend: B batch, S sequence, D width, H heads, d width of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

MASKED = -10_000.0  # added to scores of padding: exp() makes it 0, and fp16 still holds it


class ClassifierGraph(nn.Module):
    """A trained classifier, rewritten; shares what it does not rewrite."""

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        self.config = model.config  # as the library's models have it, and `device`: exporters and predictors ask
        *inner, last = model.bert.encoder.layer
        self.embeddings = _Embeddings(model.bert.embeddings)
        self.layers = nn.ModuleList([_Layer(layer) for layer in inner])
        self.last = _LastLayer(last)
        self.head = _Head(model)
        self.eval()

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        device: torch.device = self.head.classifier.weight.device
        return device

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Any:
        """Logits; the arguments, each (B, S), have the names of the graph's inputs."""
        bias_B11S = ((1.0 - attention_mask.to(self.head.classifier.weight.dtype)) * MASKED)[:, None, None, :]
        states_BSD = self.embeddings(input_ids, token_type_ids)
        for layer in self.layers:
            states_BSD = layer(states_BSD, bias_B11S)
        return SequenceClassifierOutput(logits=self.head(self.last(states_BSD, bias_B11S)))


class _Embeddings(nn.Module):
    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.word, self.segment = embeddings.word_embeddings, embeddings.token_type_embeddings
        self.position, self.norm = embeddings.position_embeddings.weight, embeddings.LayerNorm

    def forward(self, ids_BS: Tensor, segment_BS: Tensor) -> Tensor:
        position_SD = self.position[: ids_BS.shape[1]]
        states_BSD: Tensor = self.norm(self.word(ids_BS) + self.segment(segment_BS) + position_SD)
        return states_BSD


class _Layer(nn.Module):
    """A layer for every token."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention, self.feed_forward = _Attention(layer.attention), _FeedForward(layer)

    def forward(self, states_BSD: Tensor, bias_B11S: Tensor) -> Tensor:
        states_BSD = self.attention(states_BSD, bias_B11S)
        found_BSD: Tensor = self.feed_forward(states_BSD)
        return found_BSD


class _LastLayer(nn.Module):
    """A layer whose output is the state of [CLS] alone."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention, self.feed_forward = _FirstTokenAttention(layer.attention), _FeedForward(layer)

    def forward(self, states_BSD: Tensor, bias_B11S: Tensor) -> Tensor:
        found_BD: Tensor = self.feed_forward(self.attention(states_BSD, bias_B11S))
        return found_BD


class _Attention(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads, self.width = attention.self.num_attention_heads, attention.self.attention_head_size
        self.qkv = _joined(_scaled(attention.self.query, self.width), attention.self.key, attention.self.value)
        self.out, self.norm = attention.output.dense, attention.output.LayerNorm

    def forward(self, states_BSD: Tensor, bias_B11S: Tensor) -> Tensor:
        batch, size = states_BSD.shape[:2]
        parts = self.qkv(states_BSD).reshape(batch, size, 3 * self.heads, self.width)
        query_BSHd, key_BSHd, value_BSHd = parts.split(self.heads, 2)
        scores_BHSS = query_BSHd.transpose(1, 2) @ key_BSHd.permute(0, 2, 3, 1) + bias_B11S
        mixed_BHSd = scores_BHSS.softmax(-1) @ value_BSHd.transpose(1, 2)
        mixed_BSD = mixed_BHSd.transpose(1, 2).reshape(batch, size, self.heads * self.width)
        found_BSD: Tensor = self.norm(self.out(mixed_BSD) + states_BSD)
        return found_BSD


class _FirstTokenAttention(nn.Module):
    """Attention of the first token, [CLS], over all."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads, self.width = attention.self.num_attention_heads, attention.self.attention_head_size
        self.query = _scaled(attention.self.query, self.width)
        self.kv = _joined(attention.self.key, attention.self.value)
        self.out, self.norm = attention.output.dense, attention.output.LayerNorm

    def forward(self, states_BSD: Tensor, bias_B11S: Tensor) -> Tensor:
        batch, size = states_BSD.shape[:2]
        first_BD = states_BSD[:, 0]
        query_BH1d = self.query(first_BD).reshape(batch, self.heads, 1, self.width)
        key_BSHd, value_BSHd = self.kv(states_BSD).reshape(batch, size, 2 * self.heads, self.width).split(self.heads, 2)
        scores_BH1S = query_BH1d @ key_BSHd.permute(0, 2, 3, 1) + bias_B11S
        mixed_BD = (scores_BH1S.softmax(-1) @ value_BSHd.transpose(1, 2)).reshape(batch, self.heads * self.width)
        found_BD: Tensor = self.norm(self.out(mixed_BD) + first_BD)
        return found_BD


class _FeedForward(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.up, self.activation = layer.intermediate.dense, layer.intermediate.intermediate_act_fn
        self.down, self.norm = layer.output.dense, layer.output.LayerNorm

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.norm(self.down(self.activation(self.up(states))) + states)
        return found


class _Head(nn.Module):
    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        self.pooler, self.classifier = model.bert.pooler.dense, model.classifier

    def forward(self, first_BD: Tensor) -> Tensor:
        logits_BC: Tensor = self.classifier(self.pooler(first_BD).tanh())
        return logits_BC


def _joined(*parts: nn.Linear) -> nn.Linear:
    """One product in the place of several of the same input."""
    joined = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts))
    with torch.no_grad():
        joined.weight.copy_(torch.cat([part.weight for part in parts]))
        joined.bias.copy_(torch.cat([part.bias for part in parts]))
    return joined


def _scaled(query: nn.Linear, width: int) -> nn.Linear:
    """The query with the scale of the scores in it."""
    scaled = nn.Linear(query.in_features, query.out_features)
    with torch.no_grad():
        scaled.weight.copy_(query.weight / math.sqrt(width))
        scaled.bias.copy_(query.bias / math.sqrt(width))
    return scaled
