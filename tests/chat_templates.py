"""Chat templates in the styles of model families, written for the tests, and small real tokenizers to read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "what is the capital of France? It is Paris.\nhow much is one plus two? Three, I think. thank you",
    "system user assistant model instruction You are a helpful assistant. 1 2 3 hello there good bye",
] * 20

LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# The system message goes into the first user turn, and the prompt for a generation is nothing.
MISTRAL = """{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{%- if message['role'] == 'user' %}
{%- if loop.first and system is defined %}{{- '[INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}
{%- else %}{{- '[INST] ' + message['content'] + ' [/INST]' }}{%- endif %}
{%- else %}{{- ' ' + message['content'] | trim + eos_token }}{%- endif %}
{%- endfor %}"""

QWEN = """{%- if messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Thinking of earlier turns is dropped; the last turn has a block of it, an empty one where there was none.
THINKING = """{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{%- set content = message['content'] %}{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.last %}
{{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

ZEPHYR = """{% for message in messages %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

PHI = """{% for message in messages %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

# No token ends a turn, and nothing prompts for a generation.
PLAIN = """{% for message in messages %}
{{- {'user': '### Instruction:', 'assistant': '### Response:', 'system': '### System:'}[message['role']] }}
{{- '\\n' + message['content'] + '\\n\\n' }}{% endfor %}"""


def byte_level(template: str, marks: list[str], bos: str | None, eos: str) -> Any:
    """In the manner of Llama 3, Qwen and Phi."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(["<pad>", eos, *([bos] if bos else []), *marks]))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet)
    )
    return _fast(tokenizer, template, marks, bos, eos)


def sentence_piece(template: str, marks: list[str], bos: str | None, eos: str) -> Any:
    """In the manner of Llama 2, Mistral and Gemma: a blank is part of the word behind it, and one is put before all."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = list(dict.fromkeys(["<unk>", "<pad>", eos, *([bos] if bos else []), *marks]))
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=620, special_tokens=[*special, *fallback], max_token_length=8)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return _fast(tokenizer, template, marks, bos, eos, unk_token="<unk>")


def _fast(tokenizer: Tokenizer, template: str, marks: list[str], bos: str | None, eos: str, **more: Any) -> Any:
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in marks])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token="<pad>", **more)
    fast.chat_template = template
    return fast


CHATML = ["<|im_start|>", "<|im_end|>"]
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
FAMILIES: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: byte_level(LLAMA, HEADERS, "<|begin_of_text|>", "<|end_of_text|>"),
    "gemma": lambda: sentence_piece(GEMMA, ["<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>"),
    "mistral": lambda: sentence_piece(MISTRAL, [], "<s>", "</s>"),
    "mistral-tokens": lambda: sentence_piece(MISTRAL, ["[INST]", "[/INST]"], "<s>", "</s>"),
    "qwen": lambda: byte_level(QWEN, CHATML, None, "<|im_end|>"),
    "thinking": lambda: byte_level(THINKING, CHATML, None, "<|im_end|>"),
    "zephyr": lambda: sentence_piece(ZEPHYR, [], "<s>", "</s>"),
    "phi": lambda: byte_level(PHI, [*ROLES, "<|end|>"], None, "<|endoftext|>"),
    "plain": lambda: byte_level(PLAIN, [], None, "<|endoftext|>"),
}
ENDS = {
    "llama": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "mistral-tokens": "</s>",
    "qwen": "<|im_end|>",
    "thinking": "<|im_end|>",
    "zephyr": "</s>",
    "phi": "<|end|>",
    "plain": "",
    "smollm2": "<|im_end|>",
}
