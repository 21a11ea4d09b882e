"""Small transformers models with random weights, and batches for each, for the ZeRO tests.

Made in one thread and copied by the ranks. Dropout is off: the ranks of a played cluster are
threads, which share torch's generator.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 61
LENGTH = 9


def gpt2(**options):
    """Tied weights, Conv1D (its weight is transposed)."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=36,
        n_layer=2,
        n_head=3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    return GPT2LMHeadModel(config)


def llama():
    """Grouped-query attention, rotary embeddings in buffers."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def bert():
    """A decoder tied to the embedding, a bias tied to another's, a pooler that is not there."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=52,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def t5():
    """One embedding shared by encoder, decoder and head."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=36,
        d_kv=12,
        d_ff=52,
        num_layers=2,
        num_heads=3,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def mixtral():
    """Eight experts, one for each token: most are idle on a rank, and other ones on another."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=1,
        max_position_embeddings=LENGTH,
        router_aux_loss_coef=0.0,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def vit():
    """A convolution, tokens and positions that are bare parameters."""
    config = ViTConfig(
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=52,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=12,
        patch_size=4,
        num_labels=5,
    )
    return ViTForImageClassification(config)


def gpt2_lora():
    """A frozen base with adapters at Conv1D layers, and a trained norm."""
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
    )
    return get_peft_model(gpt2(), lora)


def llama_lora():
    """A frozen base with adapters, and a head that is trained whole beside its frozen original."""
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj", "down_proj"],
        modules_to_save=["lm_head"],
    )
    return get_peft_model(llama(), lora)


class Experts(nn.Module):
    """A residual mixture of experts that are modules; one without tokens is not called."""

    def __init__(self, width, num_experts):
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
            for _ in range(num_experts)
        )

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            here = chosen == index
            part = self.experts[index](x[here]) * weight[here].unsqueeze(-1)
            y[here] = part.to(y.dtype)  # autocast
        return x + y


class Mixture(nn.Module):
    """A language model of layers of experts."""

    def __init__(self, width=33, num_experts=8):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Experts(width, num_experts) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x).flatten(0, 1).float()
        return {"loss": functional.cross_entropy(logits, labels.flatten())}


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
    "vit": vit,
    "gpt2-lora": gpt2_lora,
    "llama-lora": llama_lora,
    "experts": Mixture,
}


def batch_of(name, rank, step, size=1):
    """Return the keyword arguments of a rank's forward in one step, labels included."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if name == "vit":
        labels = torch.randint(0, 5, (size,), generator=generator)
        noise = torch.randn(size, 3, 12, 12, generator=generator)
        return {"pixel_values": noise + labels.view(-1, 1, 1, 1) - 2, "labels": labels}
    first = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
    tokens = (first + torch.arange(LENGTH) * 2) % VOCABULARY
    labels = (tokens + 1) % VOCABULARY if name == "experts" else tokens
    return {"input_ids": tokens, "labels": labels}
