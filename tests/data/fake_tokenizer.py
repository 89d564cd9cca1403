"""A character-level tokenizer with chat templates of the four common shapes, rendered by Jinja as transformers does."""

import re

import jinja2.sandbox

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
END = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>"}
SPECIAL = re.compile(r"<\|\w+\|>|</?s>|<bos>|<\w+_of_turn>|\[/?INST\]|.", re.DOTALL)


class FakeTokenizer:
    """Each special token and each character is one token."""

    def __init__(self, template: str = CHATML):
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.globals["raise_exception"] = self._raise
        self.template = env.from_string(template)
        self.vocabulary: list[str] = ["</s>"]
        self.bos_id, self.eos_id = None, 0

    def _raise(self, why):
        raise ValueError(f"the chat template refuses these messages: {why}")

    def render_chat(self, messages, *, add_generation_prompt=False, **options):
        return self.template.render(messages=messages, add_generation_prompt=add_generation_prompt, **options)

    def _id(self, token):
        if token not in self.vocabulary:
            self.vocabulary.append(token)
        return self.vocabulary.index(token)

    def encode(self, text, *, add_special_tokens=False):
        return [self._id(t) for t in SPECIAL.findall(text)]

    def encode_with_offsets(self, text):
        found = list(SPECIAL.finditer(text))
        return [self._id(m.group()) for m in found], [m.span() for m in found]

    def decode(self, ids):
        return "".join(self.vocabulary[i] for i in ids)
