"""Chat templates of published model families, in the words of this project: the same text for the same messages."""

from __future__ import annotations

_QWEN_HEAD = """
{%- macro tool_help(tools) -%}
{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function '
   ~ 'signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within '
   ~ '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
   ~ '</tool_call>' }}
{%- endmacro -%}
{%- macro results(message, before, after) -%}
{{ '<|im_start|>user' if before != 'tool' }}{{ '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
{{- '<|im_end|>\n' if after != 'tool' }}
{%- endmacro -%}
{%- set system = messages[0].content if messages[0].role == 'system' else default_system -%}
{%- if tools -%}
{{ '<|im_start|>system\n' }}{{ system ~ '\n\n' if system }}{{ tool_help(tools) ~ '<|im_end|>\n' }}
{%- elif system is not none -%}
{{ '<|im_start|>system\n' ~ system ~ '<|im_end|>\n' }}
{%- endif -%}
"""

QWEN25 = (
    "{%- set default_system = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' -%}"
    + _QWEN_HEAD
    + """
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ results(message, loop.previtem.role if loop.previtem, loop.nextitem.role if loop.nextitem) }}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{{ '<|im_start|>assistant' }}{{ '\n' ~ message.content if message.content }}
{%- for call in message.tool_calls -%}
{{ '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- (call.function.arguments | tojson) ~ '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif message.role in ('user', 'assistant') or (message.role == 'system' and not loop.first) -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""
)

QWEN3 = (
    "{%- set default_system = none -%}"
    + _QWEN_HEAD
    + """
{%- set found = namespace(question=messages | length - 1) -%}
{%- for message in messages -%}
{%- set result = message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>') -%}
{%- if message.role == 'user' and not result -%}
{%- set found.question = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ results(message, loop.previtem.role if loop.previtem, loop.nextitem.role if loop.nextitem) }}
{%- elif message.role == 'assistant' -%}
{%- set thought = message.reasoning_content or '' -%}
{%- set content = message.content -%}
{%- if not thought and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > found.question and (loop.last or thought) -%}
{{ '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ content.lstrip('\n') }}
{%- else -%}
{{ content }}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ '\n' if content or not loop.first }}
{{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""
)

QWEN3_THINKING = QWEN3.removesuffix("{{ '<|im_start|>assistant\n' if add_generation_prompt }}") + (
    "{{ '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}"
)

_DEEPSEEK_HEAD = """
{%- set systems = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list -%}
{{ bos_token ~ (systems | join('\n\n')) }}
{%- set seen = namespace(asked=false, results=0) -%}
"""

DEEPSEEK_V31 = (
    _DEEPSEEK_HEAD
    + """
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- set seen.asked = true -%}
{{ '<｜User｜>' ~ message.content }}
{%- elif message.role == 'assistant' -%}
{{ '<｜Assistant｜></think>' if seen.asked }}
{%- set seen.asked = false -%}
{{ message.content.split('</think>', 1)[-1] }}
{%- for call in message.tool_calls or [] -%}
{{ '<｜tool▁calls▁begin｜>' if loop.first }}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last }}
{%- endfor -%}
{{ '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' -%}
{%- set seen.asked = false -%}
{{ '<｜tool▁output▁begin｜>' ~ message.content ~ '<｜tool▁output▁end｜>' }}
{%- endif -%}
{%- endfor -%}
{{ '<｜Assistant｜></think>' if add_generation_prompt and seen.asked }}"""
)

DEEPSEEK_R1 = (
    _DEEPSEEK_HEAD
    + """
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- set seen.results = 0 -%}
{{ '<｜User｜>' ~ message.content }}
{%- elif message.role == 'assistant' -%}
{{ '<｜Assistant｜>' if not seen.results }}{{ message.content.split('</think>')[-1] }}
{%- set seen.results = 0 -%}
{%- for call in message.tool_calls or [] -%}
{{ '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last }}
{%- endfor -%}
{{ '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' -%}
{{ '\n' if seen.results else '<｜tool▁outputs▁begin｜>' }}
{{- '<｜tool▁output▁begin｜>' ~ message.content ~ '<｜tool▁output▁end｜>' }}
{%- set seen.results = seen.results + 1 -%}
{{ '<｜tool▁outputs▁end｜>' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- endif -%}
{%- endfor -%}
{{ '<｜Assistant｜><think>\n' if add_generation_prompt and not seen.results }}"""
)

MISTRAL = """
{%- set system = messages[0].content if messages[0].role == 'system' -%}
{%- set talk = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set questions = talk | selectattr('role', 'equalto', 'user') | list -%}
{%- for message in talk if message.role != 'tool' and not message.tool_calls -%}
{%- if message.role != ('assistant' if loop.index0 % 2 else 'user') -%}
{{ raise_exception('roles must alternate user/assistant/user/assistant after a system message') }}
{%- endif -%}
{%- endfor -%}
{{ bos_token }}
{%- for message in talk -%}
{%- if message.role == 'user' -%}
{%- if tools and message == questions[-1] -%}
{{ '[AVAILABLE_TOOLS][' }}
{%- for tool in tools -%}
{{ '{"type": "function", "function": ' ~ (tool.function | tojson) ~ '}' }}{{ ', ' if not loop.last }}
{%- endfor -%}
{{ '][/AVAILABLE_TOOLS]' }}
{%- endif -%}
{{ '[INST]' }}{{ system ~ '\n\n' if loop.last and system }}{{ message.content ~ '[/INST]' }}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{{ '[TOOL_CALLS][' }}
{%- for call in message.tool_calls -%}
{%- if (call.id or '') | length != 9 -%}{{ raise_exception('a call id has 9 letters and digits') }}{%- endif -%}
{{ (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' }}{{ ', ' if not loop.last }}
{%- endfor -%}
{{ ']' ~ eos_token }}
{%- elif message.role == 'assistant' -%}
{{ message.content ~ eos_token }}
{%- elif message.role == 'tool' -%}
{%- if (message.tool_call_id or '') | length != 9 -%}
{{ raise_exception('a call id has 9 letters and digits') }}
{%- endif -%}
{{ '[TOOL_RESULTS]{"content": ' ~ message.content ~ ', "call_id": "' ~ message.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
{%- else -%}
{{ raise_exception('only user and assistant after a system message') }}
{%- endif -%}
{%- endfor -%}"""

HARMONY = """
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n'
    ~ '\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. '
    ~ 'Channel must be included for every message.' }}
{{- '\nCalls to these tools must go to the commentary channel: \\'functions\\'.' if tools }}
{{- '<|end|>' }}
{%- set leads = messages[0].role in ('system', 'developer') -%}
{%- if leads or tools -%}
{{ '<|start|>developer<|message|>' }}{{ '# Instructions\n\n' ~ messages[0].content ~ '\n\n' if leads }}
{%- if tools -%}
{{ '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
{%- for tool in tools -%}
{{ '// ' ~ tool.function.description ~ '\ntype ' ~ tool.function.name ~ ' = (_: any) => any;\n\n' }}
{%- endfor -%}
{{ '} // namespace functions' }}
{%- endif -%}
{{ '<|end|>' }}
{%- endif -%}
{%- set called = namespace(name='') -%}
{%- for message in (messages[1:] if leads else messages) -%}
{%- if message.role == 'user' -%}
{{ '<|start|>user<|message|>' ~ message.content ~ '<|end|>' }}
{%- elif message.role == 'tool' -%}
{{ '<|start|>functions.' ~ called.name ~ ' to=assistant<|channel|>commentary<|message|>' }}
{{- (message.content | tojson) ~ '<|end|>' }}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{%- set called.name = message.tool_calls[0].function.name -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' if message.thinking }}
{{- '<|start|>assistant to=functions.' ~ called.name ~ '<|channel|>commentary json<|message|>'
    ~ (message.tool_calls[0].function.arguments | tojson) ~ '<|call|>' }}
{%- elif message.role == 'assistant' -%}
{{ '<|start|>assistant<|channel|>final<|message|>' ~ message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{{ '<|start|>assistant' if add_generation_prompt }}"""
