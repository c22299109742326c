"""The keys that transformers writes into every config, whatever the model.

Versions 4.x write about fifty of them into a nested `text_config` or `vision_config`, most at their defaults; 5.x
writes about ten. A key that no arithmetic of ours depends on passes with any value; one that would change the model
passes at its default only.

Source: `PretrainedConfig.to_dict()` of transformers 4.46.3, 4.51.3, 4.56.2, 5.0.0 and 5.24.0.
"""

from collections.abc import Mapping
from typing import Any

NOT_READ = frozenset(
    """
    model_type architectures auto_map torch_dtype dtype transformers_version _name_or_path _commit_hash
    _attn_implementation _attn_implementation_autoset attn_implementation _experts_implementation
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix tokenizer_class
    use_cache return_dict output_attentions output_hidden_states chunk_size_feed_forward torchscript
    use_bfloat16 tf_legacy_loss use_return_dict gradient_checkpointing
    """.split()  # noqa: SIM905
)
"""What names, describes or stores the model, or says how a program is to run it."""

SAMPLING: Mapping[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_scores": False,
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict_in_generate": False,
    "suppress_tokens": None,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
}
"""How transformers' `generate` draws tokens, and its defaults; the model itself does not depend on them."""

DEFAULT_ONLY: Mapping[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
"""What another value would make a model that cannot be built."""
