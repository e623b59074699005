"""Steps of architectures that no kernel was measured for and no law was fitted to: few layers of published widths."""

from __future__ import annotations

from typing import Any

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.stream.model.models import depth_of

ARCHITECTURES = "architectures"  # group and suite

# By the name of a published model: what differs from its architecture's defaults in transformers, with fewer layers,
# and the sequences and tokens of a step. Mixtral and DeepSeek-V3 (as wide as V2-Lite) are narrower than published, and
# Qwen3-Next has fewer experts.
_MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "qwen2.5-0.5b": (
        {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 12,
         "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
        4, 1024,
    ),
    "mistral-7b": (
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 2,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000, "sliding_window": 512}, 4, 1024,
    ),
    "gemma-2-2b": (
        {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256_000}, 2, 1024,
    ),
    "gemma-3-1b": (
        {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 6,
         "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512, "vocab_size": 262_144}, 4, 1024,
    ),
    "phi-3-mini": (
        {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 3,
         "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32_064}, 4, 1024,
    ),
    "olmo-2-1b": (
        {"model_type": "olmo2", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 5,
         "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 100_352}, 4, 1024,
    ),
    "pythia-1b": (
        {"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6,
         "num_attention_heads": 8, "vocab_size": 50_304}, 4, 1024,
    ),
    "opt-1.3b": (
        {"model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 6, "num_attention_heads": 32,
         "word_embed_proj_dim": 2048, "vocab_size": 50_272}, 4, 1024,
    ),
    "bloom-560m": (
        {"model_type": "bloom", "hidden_size": 1024, "n_layer": 8, "n_head": 16, "vocab_size": 250_880}, 4, 512,
    ),
    "smollm3-3b": (
        {"model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 4,
         "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128_256}, 4, 1024,
    ),
    "starcoder2-3b": (
        {"model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12_288, "num_hidden_layers": 4,
         "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49_152, "bos_token_id": 0,
         "eos_token_id": 0}, 4, 1024,
    ),
    "command-r7b": (
        {"model_type": "cohere", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 2,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 256_000}, 2, 1024,
    ),
    "falcon-7b": (
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 3, "num_attention_heads": 71,
         "vocab_size": 65_024}, 4, 1024,
    ),
    "lfm2-1.2b": (
        {"model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 12_288, "num_hidden_layers": 4,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65_536,
         "layer_types": ["conv", "conv", "full_attention", "conv"]}, 4, 1024,
    ),
    "mixtral": (
        {"model_type": "mixtral", "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 3,
         "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32_000}, 4, 1024,
    ),
    "olmoe-7b": (
        {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 3,
         "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "vocab_size": 50_304}, 4, 1024,
    ),
    "deepseek-v3": (
        {"model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
         "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
         "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "vocab_size": 102_400}, 4, 1024,
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 2,
         "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "vocab_size": 201_088}, 4, 1024,
    ),
    "qwen3-next": (
        {"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 512,
         "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 64,
         "num_experts_per_tok": 10, "vocab_size": 151_936}, 2, 1024,
    ),
}  # fmt: skip


def architectures() -> list[StepPlan]:
    """A step of each, with fused AdamW: chosen before any was measured."""
    return [
        StepPlan(
            name=f"{name}-d{depth_of(config)}", config=config, batch=batch,
            seq=seq, optimizer="adamw-fused", group=ARCHITECTURES,
        )
        for name, (config, batch, seq) in _MODELS.items()
    ]  # fmt: skip
