"""Makes what the example fine-tunes, without a network: a small Llama that reads bytes, and texts."""

import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if __name__ == "__main__":
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained("model")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), pad_token_id=3, **sizes)).save_pretrained("model")

    # Paragraphs of the standard library's sources, so samples differ in length.
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    texts = [text for module in modules for text in module.read_text(errors="replace").split("\n\n") if len(text) > 40]
    Path("data").mkdir(exist_ok=True)
    Path("data", "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
