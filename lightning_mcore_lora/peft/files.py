"""Names in Hugging Face PEFT's files, and what both directions say."""

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNTIE = "untie the base: tie_word_embeddings=false in its config.json, with an lm_head.weight of its own"
