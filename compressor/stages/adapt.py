"""adapt: a pretrained encoder + the task's own text -> a masked language model that knows the task's words.

Shape legend: N texts, B batch, S sequence, P masked places of a row, M masked places of a batch, D width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BertForMaskedLM

from compressor import artifact
from compressor.artifact import CHECKPOINT, Artifact
from compressor.checkpoints import (
    CLS,
    check_vocabulary,
    load_masked_lm,
    load_plain_encoder,
    load_tokenizer,
    read_weights,
)
from compressor.config import AdaptConfig, Precision
from compressor.dataset import ENCODED, Encoded, read_examples, texts_of
from compressor.errors import ModelError
from compressor.sources import content_hash, model_folder
from compressor.statistics import wilson
from compressor.texts import Texts, packed_texts, provenance, read_texts
from compressor.training import Tensors, autocast, fit
from compressor.world import World, launch

MASKED, OTHER = 0.8, 0.1  # of the chosen tokens; the rest are left as they are
BEST = (1, 15)  # the right token is counted among so many of the likeliest
TEXTS = ("text", "text_b")  # columns of examples; the second of pairs only
ROWS_AT_ONCE = 1000
HELD_OUT = ("validation", "test")
HELD_OUT_TEXTS = 1000  # of a split
TEXTS_AT_ONCE = 32
BLOCKS_COUNTED = 4096  # for how often each token comes
log = logging.getLogger(__name__)


def adapt(
    config: AdaptConfig,
    examples: Artifact,
    *,
    base: str,
    max_tokens: int,
    seed: int,
    key: str,
    out: Path,
    processes: int = 1,
    device: str = "auto",
) -> Artifact:
    """Train a masked-LM head on the encoder `base`, and lightly the encoder, on the task's training text and more.

    A head that the checkpoint has is gone on with. How often a masked token of texts held out from training is found
    again is measured before and after. The artifact is a BERT that `augment` takes as masked LM. Raises DataError if
    there is too little text, ModelError if the base is no whole BERT or reads no text of such a length.
    """
    section = {**config.model_dump(), "base": base, "max_tokens": max_tokens, "seed": seed}
    with artifact.write(
        out, "masked-lm", key=key, section=section, parents={"corpus": examples}, together=True
    ) as draft:
        arguments = config, examples, base, max_tokens, seed, out.parent / ENCODED, draft.path
        launch(_work, *arguments, processes=processes, device=device)
        draft.take_result()
    return Artifact.open(out, kind="masked-lm")


def _work(
    world: World, config: AdaptConfig, examples: Artifact, base: str, max_tokens: int, seed: int, cache: Path, out: Path
) -> None:
    """What each process does."""
    torch.manual_seed(seed)  # a head that starts from nothing
    folder = model_folder(base, what="finetune.base")
    tokenizer = load_tokenizer(folder)
    model, facts = masked_lm(folder, tokenizer)
    limit = model.config.max_position_embeddings
    if config.block_tokens > limit:
        raise ModelError(
            f"adapt.block_tokens is {config.block_tokens} and the model {folder} reads at most {limit} tokens; make "
            "the blocks shorter"
        )
    texts = _texts(config, examples)
    blocks = packed_texts(texts, tokenizer, config.block_tokens, cache=cache, world=world)
    if facts["fresh_head"]:
        _expect_frequencies(model, blocks.train)
    module = MaskedLanguage(model.to(world.device), tokenizer, config)
    unseen, dropped = held_out_texts(examples, texts)
    held_out = {split: held_out_ids(found, tokenizer, min(max_tokens, limit), seed) for split, found in unseen.items()}

    def measured() -> dict[str, Any]:
        return {
            split: masked_accuracy(model, ids, tokenizer, config.mask_probability, config.precision, seed, world)
            for split, ids in held_out.items()
        }

    metrics: dict[str, Any] = {"source": base, "parameters": model.num_parameters(), **facts, **blocks.facts}
    metrics |= {"provenance": ["the task's training rows", *map(provenance, config.corpus)], "at_start": measured()}
    metrics["held_out_dropped"] = dropped
    metrics["history"] = fit(
        module,
        blocks.train,
        config,
        world=world,
        seed=seed,
        folder=out / CHECKPOINT,
        rates={"model.bert.": config.encoder_learning_rate / config.learning_rate},
    )
    metrics["at_end"] = measured()
    if world.is_leader:
        _say(metrics)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        artifact.write_result(out, metrics)


def masked_lm(folder: Path, tokenizer: Any) -> tuple[BertForMaskedLM, dict[str, Any]]:
    """A checkpoint's encoder with its masked-LM head, or a fresh one; and what was loaded.

    Raises ModelError if it is no whole BERT, or if it does not fit the tokenizer.
    """
    encoder, report = load_plain_encoder(folder)
    check_vocabulary(encoder, tokenizer, folder)
    is_fresh = not any(name.startswith(CLS) for name in read_weights(folder))
    facts = {"loaded": report.as_dict(), "fresh_head": is_fresh}
    if not is_fresh:
        return load_masked_lm(folder), facts
    model = BertForMaskedLM(encoder.config)
    # Without the pooler, which a masked LM does not have.
    model.bert.load_state_dict(encoder.bert.state_dict(), strict=False)
    return model, facts


def _texts(config: AdaptConfig, examples: Artifact) -> Texts:
    """The task's training texts, both of a pair one after the other, then those of the corpora."""

    def read() -> Iterator[str]:
        for batch in read_examples(examples.path / "train.arrow").iter(batch_size=ROWS_AT_ONCE):
            yield from chain.from_iterable(zip(*(batch[name] for name in TEXTS if name in batch), strict=True))
        for number, source in enumerate(config.corpus):
            documents = read_texts(source, config.column, what=f"adapt.corpus.{number}")
            yield from spread(documents, config.corpus_share)

    content = examples.content, *map(content_hash, config.corpus), config.column, str(config.corpus_share)
    return Texts("the task's training text and adapt.corpus", content, read)


def spread(documents: Iterator[str], share: float) -> Iterator[str]:
    """A share of some documents, evenly spread: files are often sorted, by label or date."""
    return (text for number, text in enumerate(documents) if int((number + 1) * share) > int(number * share))


def _expect_frequencies(model: BertForMaskedLM, blocks: Encoded) -> None:
    """Start a fresh head at how often each token comes, so that training need not find out."""
    rows = np.linspace(0, len(blocks) - 1, min(len(blocks), BLOCKS_COUNTED)).astype(np.int64)
    count_V = np.bincount(blocks.batch(rows).inputs.input_ids_BS.ravel(), minlength=model.config.vocab_size) + 0.1
    with torch.no_grad():
        model.cls.predictions.bias.copy_(torch.from_numpy(np.log(count_V / count_V.sum())))


class MaskedLanguage(nn.Module):
    """Cross-entropy of tokens that were chosen at random, given the others, as BERT is pretrained.

    Every row must be a block of `config.block_tokens` tokens. The tokens of a batch are drawn anew each time.
    """

    def __init__(self, model: BertForMaskedLM, tokenizer: Any, config: AdaptConfig) -> None:
        super().__init__()
        self.model = model
        self._mask_id = int(tokenizer.mask_token_id)
        self._frame = [int(token) for token in _frame(tokenizer)]
        self._places = max(1, round(config.mask_probability * (config.block_tokens - 2)))

    def forward(self, batch: Tensors) -> dict[str, Tensor]:
        """The loss term `masked_lm`: the mean over as many tokens of each row."""
        ids_BS = batch.input_ids_BS
        drawn_BS = torch.rand(ids_BS.shape, device=ids_BS.device)
        for token in self._frame:
            drawn_BS = drawn_BS.masked_fill(ids_BS == token, -1.0)
        place_BP = drawn_BS.topk(self._places, dim=1).indices
        target_BP = ids_BS.gather(1, place_BP)
        kind_BP = torch.rand(place_BP.shape, device=ids_BS.device)
        other_BP = torch.randint_like(target_BP, self.model.config.vocab_size)
        shown_BP = torch.where(kind_BP < MASKED + OTHER, other_BP, target_BP)
        shown_BP = torch.where(kind_BP < MASKED, torch.full_like(target_BP, self._mask_id), shown_BP)
        hidden_BSD = self.model.bert(
            input_ids=ids_BS.scatter(1, place_BP, shown_BP), attention_mask=batch.mask_BS
        ).last_hidden_state
        # The vocabulary is scored at the chosen places only.
        width = hidden_BSD.shape[2]
        hidden_BPD = hidden_BSD.gather(1, place_BP[:, :, None].expand(-1, -1, width))
        scores_MV = self.model.cls(hidden_BPD.reshape(-1, width)).float()
        return {"masked_lm": cross_entropy(scores_MV, target_BP.reshape(-1))}


def _frame(tokenizer: Any) -> tuple[int, int, int]:
    """Tokens that stand around texts."""
    return tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id


def held_out_texts(examples: Artifact, trained: Texts) -> tuple[dict[str, list[str]], dict[str, int]]:
    """The different texts of each held-out split that are not trained on, and how many were left out for that.

    Pairs share a text across splits, and a corpus may hold the task's own.
    """
    texts = {
        split: dict.fromkeys(chain.from_iterable(texts_of(read_examples(examples.path / f"{split}.arrow"))))
        for split in HELD_OUT
    }
    known = set(chain.from_iterable(texts.values()))
    seen = {text for text in trained.read() if text in known}
    unseen = {split: [text for text in found if text not in seen] for split, found in texts.items()}
    return unseen, {split: len(texts[split]) - len(found) for split, found in unseen.items()}


def held_out_ids(texts: Sequence[str], tokenizer: Any, max_tokens: int, seed: int) -> list[list[int]]:
    """Token ids of up to HELD_OUT_TEXTS texts, each alone in its frame, as augmentation shows them."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(texts))[:HELD_OUT_TEXTS])
    if not len(chosen):
        return []  # the library stumbles over no texts
    encoded = tokenizer([texts[number] for number in chosen], truncation=True, max_length=max_tokens)["input_ids"]
    return [ids for ids in encoded if len(ids) > 2]


@torch.no_grad()
def masked_accuracy(
    model: BertForMaskedLM,
    texts: Sequence[Sequence[int]],
    tokenizer: Any,
    probability: float,
    precision: Precision,
    seed: int,
    world: World,
) -> dict[str, Any]:
    """How often a masked token of some texts is the likeliest, and among the 15 likeliest, with 95 % intervals.

    Of each text the same share of tokens, at least one, is masked at a time; always the same ones for a seed. Every
    process does its share.
    """
    model.eval()
    draw = np.random.default_rng(seed)
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    found = np.zeros(1 + len(BEST))
    for number, first in enumerate(range(0, len(order), TEXTS_AT_ONCE)):
        group = [np.array(texts[place]) for place in order[first : first + TEXTS_AT_ONCE]]
        ids_BS = np.full((len(group), max(map(len, group))), tokenizer.pad_token_id)
        is_masked_BS = np.zeros(ids_BS.shape, dtype=bool)
        for row, ids in enumerate(group):
            ids_BS[row, : len(ids)] = ids
            inner = np.flatnonzero(~np.isin(ids, tokenizer.all_special_ids))
            count = min(len(inner), max(1, round(probability * len(inner))))
            is_masked_BS[row, draw.permutation(inner)[:count]] = True
        if number % world.size == world.rank:
            found += _found(model, ids_BS, is_masked_BS, tokenizer, precision, world)
    total, *right = world.sum(found)
    facts: dict[str, Any] = {"texts": len(texts), "masked_tokens": int(total)}
    for best, count in zip(BEST, right, strict=True):
        facts[f"top_{best}"] = {"share": count / max(1, total), "interval_95": wilson(int(count), max(1, int(total)))}
    return facts


def _found(
    model: BertForMaskedLM, ids_BS: Any, is_masked_BS: Any, tokenizer: Any, precision: Precision, world: World
) -> Any:
    """Masked tokens, and how many of them are among the likeliest for each of BEST."""
    shown_BS = torch.from_numpy(np.where(is_masked_BS, tokenizer.mask_token_id, ids_BS)).to(world.device)
    mask_BS = torch.from_numpy((ids_BS != tokenizer.pad_token_id).astype(np.int64)).to(world.device)
    target_M1 = torch.from_numpy(ids_BS[is_masked_BS])[:, None]
    with autocast(world, precision):
        hidden_BSD = model.bert(input_ids=shown_BS, attention_mask=mask_BS).last_hidden_state
        scores_MV = model.cls(hidden_BSD[torch.from_numpy(is_masked_BS).to(world.device)])
    best_MK = scores_MV.float().topk(min(max(BEST), scores_MV.shape[1])).indices.cpu()
    is_right_MK = best_MK == target_M1
    return np.array([len(target_M1), *(int(is_right_MK[:, :best].sum()) for best in BEST)], dtype=np.float64)


def _say(metrics: dict[str, Any]) -> None:
    for split in HELD_OUT:
        before, after = metrics["at_start"][split], metrics["at_end"][split]
        parts = [
            f"top {best} {100 * before[f'top_{best}']['share']:.1f} -> {100 * after[f'top_{best}']['share']:.1f} %"
            for best in BEST
        ]
        log.info("masked tokens of %s found again: %s", split, ", ".join(parts))
