"""Chat templates that ask for calls in each of the known formats: short ones of the tests' own."""

TURNS = """{%- for m in messages %}
{%- if m.tool_calls %}{{ '<|im_start|>assistant\\n' + m.content }}
{%- for c in m.tool_calls %}CALL{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response name=' + m.name + '>' + m.content }}
{{- '</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TOOLS = "{%- if tools %}{{ '<|im_start|>system\\nWrite ' }}HOW{{ '\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"

AS_JSON = "{{ '{\"name\": \"' + c.function.name + '\", \"KEY\": ' + c.function.arguments | tojson + '}' }}"
HERMES = (TOOLS + TURNS).replace("HOW", "<tool_call>{json}</tool_call>").replace(
    "CALL", "<tool_call>" + AS_JSON.replace("KEY", "arguments") + "</tool_call>"
)  # fmt: skip
LLAMA = (TOOLS + TURNS).replace("HOW", '{"name": .., "parameters": ..}, <|python_tag|> for code').replace(
    "CALL", AS_JSON.replace("KEY", "parameters")
)  # fmt: skip
XML = (TOOLS + TURNS).replace("HOW", "<tool_call><function=..><parameter=..>").replace(
    "CALL", "<tool_call><function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function></tool_call>",
)  # fmt: skip
