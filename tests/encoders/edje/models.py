"""Tiny random language models and EDJE models built on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    ElectraConfig,
    ElectraForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from pipeline import config
from pipeline.encoders.edje.adapter import Adapter
from pipeline.encoders.edje.joint import JointEncoder
from pipeline.encoders.edje.model import Edje
from pipeline.registry import ENCODERS
from pipeline.search.rerankers import Reranker, load_rerankers
from tests.tiny.checkpoints import tokenizer

#: Configuration class, model class and extra settings of each checkpoint.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (BertConfig, BertForMaskedLM, {}),
    "bert_without_head": (BertConfig, BertModel, {}),
    "roberta": (RobertaConfig, RobertaForMaskedLM, {"type_vocab_size": 1}),
    "electra": (ElectraConfig, ElectraForMaskedLM, {"embedding_size": 16}),
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,  # so that equal batches have equal losses
    "attention_probs_dropout_prob": 0.0,
}


def language_model(folder: Path, family: str = "bert", seed: int = 0) -> str:
    """Writes a tiny checkpoint with a tokenizer and returns its folder."""
    config_class, model_class, extra = FAMILIES[family]
    words = tokenizer(
        "[CLS]", "[MASK]", pad="[PAD]", eos="[SEP]", sep_token="[SEP]", cls_token="[CLS]"
    )
    words.mask_token = "[MASK]"
    ids = [(name, words.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, ids
    )
    settings = config_class(
        vocab_size=len(words), pad_token_id=words.pad_token_id, **SMALL, **extra
    )
    torch.manual_seed(seed)
    model = model_class(settings)
    with torch.no_grad():
        for weights in model.parameters():  # also biases, which are initialised to zero
            weights.add_(torch.randn_like(weights) * 0.2)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def joint_encoder(folder: Path, family: str = "bert", text_dim: int = 6, **spec: Any):
    """Returns a joint encoder with random heads, in evaluation mode."""
    model = language_model(folder, family)
    fields = {"max_text_tokens": 24, **spec}
    return JointEncoder(JointEncoder.Spec(model=model, **fields), text_dim).eval()


def edje(folder: Path, width: int = 16, **adapter: Any) -> Edje:
    """Returns an EDJE model with a tiny BERT."""
    joint = joint_encoder(folder / "language")
    spec = Adapter.Spec(**{"num_tokens": 3, "hidden": 12, "heads": 2, **adapter})
    vision = {"spec": {}, "fingerprint": "vision"}
    return Edje(Adapter(spec, width, joint.dim), joint, vision).eval()


def reranker_of(folder: str, top: int = 10, add_first_stage: bool = False) -> Reranker[Any]:
    """Loads a reranker with an EDJE."""
    options = {"model": folder, "top": top, "add_first_stage": add_first_stage}
    return load_rerankers({"name": "edje", **options})[0]


def edje_of(folder: Path, dual: dict[str, Any], max_text_tokens: int = 24, seed: int = 0) -> str:
    """Writes an EDJE model whose scores vary between pairs and returns its folder."""
    joint = joint_encoder(folder / "language", max_text_tokens=max_text_tokens)
    torch.manual_seed(seed)
    adapter = Adapter(Adapter.Spec(num_tokens=3, hidden=12, heads=2), 32, joint.dim)
    encoder = ENCODERS.build(ENCODERS.resolve(dual))
    vision = {"spec": config.dump(encoder.spec), "fingerprint": encoder.fingerprint}
    with torch.no_grad():
        for weights in (*adapter.parameters(), *joint.match.parameters()):
            weights.normal_(std=0.5)
    Edje(adapter, joint, vision).save(folder / "model")
    return str(folder / "model")
