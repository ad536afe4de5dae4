"""A model whose encoder takes no tokens, foreseen: its tokens are the decoder's, and a note says so."""

import pytest

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
TRAINING = """
import deepspeed
import torch
from transformers import T5Config, T5ForConditionalGeneration, WhisperConfig, WhisperForConditionalGeneration

small = dict(vocab_size=64, d_model=32, pad_token_id=0, decoder_start_token_id=2)
whisper = WhisperConfig(
    **small, num_mel_bins=8, max_source_positions=16, max_target_positions=16, encoder_layers=1, decoder_layers=1,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, bos_token_id=1,
    eos_token_id=1,
)
model = {model}
engine, *_ = deepspeed.initialize(config="ds_config.json", model=model, model_parameters=model.parameters())
while True:
    labels = torch.ones(2, 6, dtype=torch.long, device=engine.device)
    engine.backward(engine({heard}, labels=labels).loss)
    engine.step()
"""
SPEECH = ("WhisperForConditionalGeneration(whisper)", "input_features=torch.ones(2, 8, 32, device=engine.device)")
TEXT = ("T5ForConditionalGeneration(T5Config(**small, d_kv=8, d_ff=64, num_layers=1, num_heads=4))", "labels")


@pytest.mark.parametrize(("program", "says_so"), [(SPEECH, True), pytest.param(TEXT, False, marks=pytest.mark.long)])
def test_tokens_of_speech_are_those_of_the_decoder_alone(foresee_text, program, says_so):
    model, heard = program
    run = foresee_text(TRAINING.replace("{model}", model).replace("{heard}", heard), CONFIG)
    assert (run.stopped, run.tokens) == ("", 6)
    assert ("Tokens are those of the decoder alone. What the encoder takes are no tokens." in run.notes) == says_so
