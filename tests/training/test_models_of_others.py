"""Models of transformers, timm and torchvision, from configurations, with the first code that a user would write."""

import importlib

import numpy as np
import pytest
import torch

import lockstep


def needs(name):
    """Skips a test where a library is missing, or does not fit this PyTorch."""
    try:
        importlib.import_module(name)
        problem = ""
    except Exception as found:
        problem = f"{name} cannot be imported ({found}); nox -s models installs transformers"
    return pytest.mark.skipif(bool(problem), reason=problem)


pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
SMALL = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(3, 60, (20, 10), generator=DRAW)
MASK = (torch.arange(10) < torch.randint(4, 11, (20, 1), generator=DRAW)).long()
WORDS = {"input_ids": IDS, "attention_mask": MASK}
PADDED = torch.where(MASK == 1, IDS, -100)
CLASSES = torch.arange(20) % 3
IMAGES = torch.randn(20, 3, 32, 32, generator=DRAW)
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
}

# class, configuration, its arguments, labels, inputs
TRANSFORMERS = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 60, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
        PADDED,
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "num_key_value_heads": 2}, PADDED),
    "OPTForCausalLM": (
        "OPTConfig",
        {
            "vocab_size": 60,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "ffn_dim": 32,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 16,
        },
        PADDED,
    ),
    "BertForMaskedLM": ("BertConfig", SMALL, PADDED),
    "BertForSequenceClassification": ("BertConfig", {**SMALL, "num_labels": 3}, CLASSES),
    "RobertaForTokenClassification": (
        "RobertaConfig",
        {**SMALL, "num_labels": 3, "max_position_embeddings": 32},
        torch.where(MASK == 1, IDS % 3, -100),
    ),
    "DistilBertForSequenceClassification": (
        "DistilBertConfig",
        {"vocab_size": 60, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "num_labels": 3},
        CLASSES,
    ),
    "ElectraForSequenceClassification": ("ElectraConfig", {**SMALL, "embedding_size": 16, "num_labels": 3}, CLASSES),
    "T5ForConditionalGeneration": (
        "T5Config",
        {
            "vocab_size": 60,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        PADDED,
    ),
    "ViTForImageClassification": ("ViTConfig", {**VISION, "patch_size": 8, "num_labels": 3}, CLASSES),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 3, "image_size": 32},
        CLASSES,
    ),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3},
        CLASSES,
    ),
}


@needs("transformers")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_model_of_transformers_with_its_own_loss(name):
    import transformers

    config, arguments, labels = TRANSFORMERS[name]
    if "Image" not in name:
        arguments = {**TOKENS, **arguments}

    def make():
        torch.manual_seed(0)
        return getattr(transformers, name)(getattr(transformers, config)(**arguments))

    inputs = {"pixel_values": IMAGES} if "Image" in name else WORDS
    batch = {**inputs, "labels": labels}
    whole = make().eval()
    expected = float(whole(**batch).loss.detach())
    found = set()
    for k in (1, 2, 3):
        with lockstep.Trainer(make(), loss="model", optimizer="adamw", lr=1e-3, devices=k, shards=4) as trainer:
            for _ in range(3):
                out = trainer.step(batch)
            assert np.isfinite(out.loss)
            found.add(trainer.weights_sha256)
    assert len(found) == 1
    with lockstep.Trainer(make(), loss="model", devices=2) as trainer:
        assert trainer.evaluate(batch)["loss"] == pytest.approx(expected, abs=1e-5)


@needs("timm")
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "mobilenetv3_small_050", "convnext_atto"])
def test_a_model_of_timm_with_mixup(name):
    import timm

    size = {"img_size": 32} if name.startswith("vit") else {}
    soft = torch.nn.functional.one_hot(CLASSES, 3).float()
    shares = torch.rand(20, 1, generator=torch.Generator().manual_seed(0))
    X = shares[:, :, None, None] * IMAGES + (1 - shares[:, :, None, None]) * IMAGES.flip(0)
    y = shares * soft + (1 - shares) * soft.flip(0)
    found = set()
    for k in (1, 2, 3):
        torch.manual_seed(0)
        module = timm.create_model(name, num_classes=3, drop_path_rate=0.1, **size)
        with lockstep.Trainer(module, optimizer="adamw", lr=1e-3, devices=k, shards=4) as trainer:
            for _ in range(2):
                trainer.step((X, y))
            found.add(trainer.weights_sha256)
    assert len(found) == 1


@needs("torchvision")
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "squeezenet1_1"])
def test_a_model_of_torchvision(name):
    import torchvision

    found = set()
    for k in (1, 2, 3):
        torch.manual_seed(0)
        module = getattr(torchvision.models, name)(num_classes=3)
        with lockstep.Trainer(module, lr=0.01, devices=k, shards=4) as trainer:
            for _ in range(2):
                trainer.step((IMAGES, CLASSES))
            found.add(trainer.weights_sha256)
    assert len(found) == 1
